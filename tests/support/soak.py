"""A server under a full pool for a long time, with clients that leave: what was answered, and what it costs to go on.

Owns the load (closed loop, more sequences than the pool holds), the clients that hang up or run into their own
deadline, and the lines through the memory of the server and its worker.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support.fuzz_cases import Case
from support.fuzz_run import judge
from support.http_line import Answer, Line
from support.pace import Pace
from support.server_process import ServerProcess

CANCELLED = 0.1
"""Share of requests whose client hangs up."""
PATIENCE_S = 120.0
WARM_SHARE = 0.3
"""Of the time, after which memory is looked at: caches, pools and the allocator's arenas have filled up by then."""


@dataclass
class Soak:
    """What came of it.

    Attributes:
        good, bad: requests that were answered as they should, and others; cancelled ones are neither.
        samples: (requests so far, bytes of the server, bytes of the worker).
        usages: shares of the pool that were held, as seen in between.
    """

    good: int = 0
    cancelled: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    usages: list[float] = field(default_factory=list)

    @property
    def availability(self) -> float:
        """Share of the requests that nobody cancelled which were answered as they should."""
        return self.good / max(self.good + len(self.bad), 1)

    def slope(self, which: int) -> tuple[float, float]:
        """Bytes for each request, of the server (1) or the worker (2), and twice the standard error of that."""
        after = self.samples[int(len(self.samples) * WARM_SHARE) :]
        return fitted([(sample[0], sample[which]) for sample in after])

    def __str__(self) -> str:
        mean = sum(self.usages) / max(len(self.usages), 1)
        lines = [
            f"{self.good} good, {len(self.bad)} bad, {self.cancelled} cancelled; availability {self.availability:.6f}",
            f"pool held: {mean:.2f} on average, {max(self.usages, default=0):.2f} at most",
            f"kinds: {dict(sorted(self.kinds.items()))}",
        ]
        for name, which in (("server", 1), ("worker", 2)):
            slope, error = self.slope(which)
            held = [sample[which] / 2**20 for sample in self.samples] or [0.0]
            lines.append(
                f"{name}: {held[0]:.1f} MiB at first, {held[-1]:.1f} at last; "
                f"{slope:+.1f} bytes a request (+- {error:.1f})"
            )
        return "\n".join(lines)


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the line of least squares, and twice its standard error.

    Example:
        >>> fitted([(0, 1), (1, 3), (2, 5)])
        (2.0, 0.0)
    """
    num = len(points)
    if num < 3:
        return 0.0, math.inf
    mean_x, mean_y = sum(x for x, _ in points) / num, sum(y for _, y in points) / num
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return 0.0, math.inf
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, 2 * math.sqrt(rest / (num - 2) / spread)


def request(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """A kind of request, its route and its body: prompts begin alike, outputs are of any length."""
    prompt = f"Group {rng.randrange(6)}: " + "shared words " * rng.randrange(1, 6) + f"{rng.randrange(10**6)} "
    tokens = rng.choice((4, 30, 60, 90))
    common = {"max_tokens": tokens, "ignore_eos": True, "temperature": rng.choice((0, 0.9))}
    match rng.randrange(7):
        case 0:
            return "chat", "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": prompt}]}
        case 1 | 2:
            return "stream", "/v1/completions", {**common, "prompt": prompt, "stream": True}
        case 3:
            return "samples", "/v1/completions", {**common, "prompt": prompt, "n": 3, "logprobs": 2}
        case 4:
            regex = rng.choice(("[a-z]{5,20}", "(yes|no|maybe)", f"[0-9]{{{rng.randrange(2, 9)}}}"))
            return "constraint", "/v1/completions", {"prompt": prompt, "max_tokens": 40, "regex": regex}
        case 5:
            gen = {"type": "gen", "id": 1, "name": "x", "sampling": {"max_new_tokens": tokens, "ignore_eos": True}}
            select = {"type": "select", "id": 2, "name": "y", "choices": ["yes", "no", "perhaps"]}
            text = {"type": "text", "id": 0, "segments": [{"type": "literal", "text": prompt}]}
            graph = {"protocol": 1, "nodes": [text, gen, select]}
            return "program", "/v1/programs", {"graph": graph, "stream": rng.random() < 0.5}
        case _:
            return "deadline", "/v1/completions", {**common, "prompt": prompt, "max_tokens": 90, "deadline_s": 0.05}


async def soak(process: ServerProcess, seconds: float, clients: int, seed: int) -> Soak:
    """Load a server for so many seconds in which this process could run."""
    found = Soak()
    pace = Pace()
    ticking = asyncio.create_task(pace.tick())

    async def client(number: int) -> None:
        rng = random.Random(f"{seed}:{number}")
        line = Line(process.port)
        while pace.now < seconds:
            kind, path, body = request(rng)
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
            await line.send(head.encode() + data)
            if rng.random() < CANCELLED:
                await asyncio.sleep(rng.random() * 0.2)
                line.close(abruptly=rng.random() < 0.5)
                found.cancelled += 1
                continue
            answer = await _patiently(line, pace)
            found.kinds[kind] += 1
            if (wrong := _wrong(kind, answer)) is None:
                found.good += 1
            else:
                found.bad.append(f"{kind}: {wrong}")
            if not answer.kept:
                line.close()
        line.close()

    async def watch() -> None:
        every = max(seconds / 200, 0.1)
        while pace.now < seconds:
            await asyncio.sleep(every)
            held = process.memory()
            found.samples.append((found.good + found.cancelled + len(found.bad), held["server"], held["worker"]))
            found.usages.append(await _usage(process.port))

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            for number in range(clients):
                group.create_task(client(number))
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
    return found


async def _patiently(line: Line, pace: Pace) -> Answer:
    reading = asyncio.create_task(line.answer())
    start = pace.now
    while not reading.done() and pace.now - start < PATIENCE_S:
        await asyncio.wait({reading}, timeout=1.0)
    if not reading.done():
        reading.cancel()
        line.close()
        return Answer(0)
    return reading.result()


def _wrong(kind: str, answer: Answer) -> str | None:
    """What is wrong with the answer to a good request, or None."""
    if (wrong := judge(Case(kind, ()), answer)) is not None:
        return wrong
    if kind == "deadline" and answer.status != 200:
        code = answer.json()["error"]["code"]
        return None if code == "deadline_exceeded" else f"code {code}"
    if answer.status != 200:
        return f"status {answer.status}: {answer.body[:200]!r}"
    if kind == "stream" and answer.events()[-1] != "[DONE]":
        return f"a stream ends with {answer.events()[-1][:200]}"
    return None


async def _usage(port: int) -> float:
    """The share of the pool's pages that are held or cached."""
    line = Line(port)
    try:
        await line.send(b"GET /server_info HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        stats = (await line.answer()).json()["stats"]
    finally:
        line.close()
    return float(stats["pages_held"] / stats["pages_total"])
