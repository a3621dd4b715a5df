"""A fuzzer against a server: several connections, each case judged by what comes back.

A case is wrong when the server fails (any 5xx but a 503 of overload that says when to come again), when a whole request
has no whole answer, when an error has no shape or tells of the inside, or when nothing comes for `HANG_S` seconds in
which this process could run. What was sent is then kept as a file, which `replayed` sends again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support.fuzz_cases import Case, Fuzzer
from support.http_line import Answer, Line
from support.pace import Pace

HANG_S = 60.0
INTERNALS = re.compile(r'0x[0-9a-f]{6,}|Traceback|File "|site-packages|\.py\b|object at ')
"""What no answer to the outside may have."""
OURS = {"internal_error", "engine_dead", "invalid_logits", "model_error", "error"}
"""Codes of errors that are the server's doing."""
MOST_KEPT = 20


@dataclass
class Report:
    """What came of a run: answers by status, and what was wrong."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = ", ".join(f"{status}: {number}" for status, number in sorted(self.statuses.items()))
        return f"{sum(self.statuses.values())} requests ({shown}); {len(self.wrong)} wrong"


def judge(case: Case, answer: Answer) -> str | None:
    """What is wrong with an answer, or None."""
    if answer.status == 0:
        return "no answer" if case.is_framed else None
    if not answer.whole:
        return "the answer is cut off" if case.is_framed else None
    if answer.status >= 500 and not (answer.status == 503 and "retry-after" in answer.headers):
        return f"status {answer.status}: {answer.body[:300]!r}"
    if answer.is_stream:
        return _judge_stream(answer)
    if not case.has_body or not answer.headers.get("content-type", "").startswith("application/json"):
        return None
    try:
        value = answer.json()
    except ValueError as error:
        return f"no JSON in an answer of {answer.status}: {error}"
    if answer.status < 400:
        return None
    if INTERNALS.search(answer.body.decode(errors="replace")):
        return f"internals in an error: {answer.body[:300]!r}"
    found = value.get("error") if isinstance(value, dict) else None
    if not (isinstance(found, str) and found) and not (isinstance(found, dict) and found.get("message")):
        return f"an error of {answer.status} without a message: {answer.body[:300]!r}"
    return None


def _judge_stream(answer: Answer) -> str | None:
    events = answer.events()
    if not events:
        return "a stream without events"
    if events[-1] == "[DONE]":
        return None
    try:
        last = json.loads(events[-1])
    except ValueError:
        return f"a stream ends with {events[-1][:200]!r}"
    error = last.get("error") if isinstance(last, dict) else None
    if isinstance(error, dict) and error.get("code") in OURS:
        return f"a stream ends with {events[-1][:300]!r}"
    return None


async def tried(line: Line, case: Case) -> Answer:
    """Send a case and read what comes."""
    try:
        for piece in case.pieces:
            await line.send(piece)
            await asyncio.sleep(0)
    except OSError:  # it was refused before all of it was sent; the answer may still be there
        if case.leaves:
            return Answer(0)
    if case.leaves:
        return Answer(0)
    return await line.answer(case.has_body)


async def fuzz(port: int, fuzzer: Fuzzer, number: int, folder: Path, connections: int = 32) -> Report:
    """Send `number` cases; those that go wrong are kept in `folder`."""
    report = Report()
    pace = Pace()
    ticking = asyncio.create_task(pace.tick())
    numbers = iter(range(number))
    under_way: dict[asyncio.Task[None], tuple[Case, float]] = {}

    async def one_after_the_other() -> None:
        line = Line(port)
        task = asyncio.current_task()
        assert task is not None
        try:
            for index in numbers:
                case = fuzzer.case(index)
                under_way[task] = (case, pace.now)
                answer = await tried(line, case)
                report.statuses["left" if case.leaves else str(answer.status or "closed")] += 1
                if (wrong := judge(case, answer)) is not None:
                    keep(report, case, wrong, folder)
                if case.leaves or not case.is_framed or not answer.kept:
                    line.close(abruptly=index % 2 == 0)
        finally:
            line.close()
            under_way.pop(task, None)

    tasks = [asyncio.create_task(one_after_the_other()) for _ in range(connections)]
    try:
        while any(not task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.5)
            for task, (case, since) in list(under_way.items()):
                if pace.now - since > HANG_S:
                    keep(report, case, f"no answer in {HANG_S:g} s", folder)
                    task.cancel()
        for task in tasks:
            if not task.cancelled():
                task.result()
    finally:
        for task in (*tasks, ticking):
            task.cancel()
        await asyncio.gather(*tasks, ticking, return_exceptions=True)
    return report


def keep(report: Report, case: Case, wrong: str, folder: Path) -> None:
    """Note what was wrong, and write what was sent to a file."""
    file = folder / f"{case.name.replace(':', '-').replace(' ', '-')}.http"
    if len(report.wrong) < MOST_KEPT:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(case.pieces))
    report.wrong.append(f"{case.name}: {wrong} (kept as {file})")


async def replayed(port: int, file: Path) -> str | None:
    """Send a kept case again; what is wrong with its answer."""
    line = Line(port)
    case = Case(file.name, (file.read_bytes(),))
    try:
        return judge(case, await asyncio.wait_for(tried(line, case), HANG_S))
    finally:
        line.close()
