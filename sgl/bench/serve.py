"""`sgl bench serve`: load on a server, as clients see it.

Owns the load (closed: so many clients, each with its next request when the last is answered; open: requests at a rate,
whatever became of those before), what is noted of each request, and the comparison of HTTP with the same requests to
the same kind of engine in process. The server is a process of its own (`sgl serve`), or one that runs already: any that
speaks OpenAI's completions. Prompts are token ids and lengths are forced, so that every run asks for the same work.

Traffic is bounded by the number of requests. A request that fails is counted, never repeated.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx2
import msgspec

from sgl.bench.client import Answer, Client
from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import ProcSampler, Sampler, least_busy
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.prompts import Prompts
from sgl.bench.provenance import Provenance, provenance, side_variables
from sgl.environment import inherited, variable_of
from sgl.errors import BenchError
from sgl.runtime.config import EngineConfig, config_from_mapping
from sgl.runtime.engine import Engine
from sgl.runtime.loading.facts import cpu_count
from sgl.server.config import ServerConfig

START_S = 300.0
"""Longest wait for a server that starts: it may have to load a large model."""
_READY = re.compile(r"sgl is ready: (?P<model>.*) on (?P<url>http://\S+)")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a server.

    Args:
        requests: how many in all.
        clients: at a time, for a closed loop.
        rate: requests per second on average, for an open loop in place of `clients`.
        burstiness: of their arrival: the gaps are drawn from a gamma distribution of this shape. 1 is Poisson's, less
            comes in bursts, more is even.
        prompt_tokens, new_tokens: of each request; `shared_tokens` of the prompt are those of its group.
        groups: of requests that share the beginning of their prompts.
        stream: read answers as they come, which gives the times of tokens.
    """

    requests: int = 64
    clients: int = 8
    rate: float | None = None
    burstiness: float = 1.0
    prompt_tokens: int = 128
    new_tokens: int = 32
    shared_tokens: int = 0
    groups: int = 1
    stream: bool = True
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The prompt of each request."""
        source = Prompts(vocab_size, self.seed)
        shared = source.take(self.groups, self.shared_tokens)
        own = source.take(self.requests, max(self.prompt_tokens - self.shared_tokens, 1))
        return [[*shared[index % self.groups], *ids] for index, ids in enumerate(own)]

    def arrivals(self) -> list[float]:
        """When each request is sent, in seconds from the start; all at once for a closed loop."""
        if self.rate is None:
            return [0.0] * self.requests
        gaps = random.Random(self.seed)
        now, times = 0.0, []
        for _ in range(self.requests):
            times.append(now)
            now += gaps.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
        return times


class Percentiles(msgspec.Struct, frozen=True):
    """Of seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Percentiles | None:
        """None of nothing.

        Example:
            >>> Percentiles.of([1.0, 2.0, 3.0]).p50
            2.0
        """
        if not values:
            return None
        at = [percentile(values, share) for share in (0.9, 0.95, 0.99)]
        return Percentiles(statistics.fmean(values), statistics.median(values), *at)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of them do not exceed.

    Example:
        >>> percentile([3.0, 1.0, 2.0], 0.99), percentile(range(1, 101), 0.99)
        (3.0, 99)
    """
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `sgl bench serve` prints.

    Attributes:
        good: requests that kept the objectives; without any, all that succeeded.
        token_s: of each request the mean time between two tokens (TPOT); `piece_s` are the single times between two
            pieces of any request (ITL), of which a stall is one.
        errors: how often each was met; `first_error` is the first one with what the server said of it.
    """

    url: str
    model: str
    load: Load
    seconds: float
    succeeded: int
    good: int
    errors: dict[str, int]
    first_error: str
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    good_requests_per_s: float
    ttft_s: Percentiles | None
    token_s: Percentiles | None
    piece_s: Percentiles | None
    whole_s: Percentiles | None


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """What a good request keeps, in seconds; `None` is not asked for."""

    ttft_s: float | None = None
    token_s: float | None = None
    whole_s: float | None = None

    def keeps(self, answer: Answer) -> bool:
        """Whether an answer that succeeded is good."""
        first = answer.pieces_s[0] if answer.pieces_s else answer.end_s
        bounds = ((self.ttft_s, first), (self.token_s, _per_token(answer)), (self.whole_s, answer.end_s))
        return all(bound is None or seconds is None or seconds <= bound for bound, seconds in bounds)


class OfflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP against the same requests in process; the ratio is in-process time over HTTP's time (1 is as fast)."""

    model: str
    load: Load
    engine: dict[str, Any]
    provenance: Provenance
    result: Result
    pairs: tuple[Pair, ...]


# --- load -----------------------------------------------------------------------------------------------------------


def measure(
    url: str,
    load: Load,
    *,
    vocab_size: int,
    model: str | None = None,
    api_key: str | None = None,
    objectives: Objectives = Objectives(),
    progress: Callable[[int], None] = lambda done: None,
) -> ServeReport:
    """Put a load on a server and report what its clients saw.

    Args:
        objectives: what makes a request good.
        progress: is told how many requests are answered.

    Raises:
        BenchError: the server cannot be asked which model it has.
    """
    name = model or served_model(url, api_key)
    start = time.perf_counter()
    answers = asyncio.run(run_load(url, load, load.prompts(vocab_size), name, api_key, progress))
    return report_of(url, name, load, answers, time.perf_counter() - start, objectives)


def served_model(url: str, api_key: str | None = None) -> str:
    """The model that a server has.

    Raises:
        BenchError: it wants another key, or does not answer as OpenAI's API does.
    """
    try:
        found = httpx2.get(f"{url}/v1/models", headers=_headers(api_key), timeout=30, trust_env=False)
        if found.status_code in (401, 403):
            raise BenchError(
                f"{url} wants an API key" if api_key is None else f"{url} refuses this API key",
                hint="give its own with --api-key, or in SGL_API_KEY",
            )
        return str(found.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"{url} does not answer as OpenAI's API does ({type(error).__name__})",
            hint="check the URL and the key",
        ) from None


async def run_load(
    url: str,
    load: Load,
    prompts: Sequence[list[int]],
    model: str,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """Every request of a load, each once; its answers, in the order of `prompts`."""
    slots = asyncio.Semaphore(load.clients if load.rate is None else load.requests)
    done = 0

    async def one(prompt: list[int], at_s: float) -> Answer:
        nonlocal done
        await asyncio.sleep(max(at_s - (time.perf_counter() - start), 0))
        async with slots:
            answer = await client.complete("/v1/completions", _body(load, prompt, model))
        done += 1
        progress(done)
        return answer

    async with Client(url, _headers(api_key)) as client:
        start = time.perf_counter()
        return list(await asyncio.gather(*map(one, prompts, load.arrivals())))


def _body(load: Load, prompt: list[int], model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.new_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": load.stream,
        **({"stream_options": {"include_usage": True}} if load.stream else {}),
    }


def report_of(
    url: str,
    model: str,
    load: Load,
    answers: Sequence[Answer],
    seconds: float,
    objectives: Objectives = Objectives(),
) -> ServeReport:
    """What follows from the answers.

    Example:
        >>> load = Load(requests=2, new_tokens=3)
        >>> answers = [Answer((0.1, 0.2, 0.3), 0.3, 3), Answer((), 0.1, 0, "status 429")]
        >>> report = report_of("", "m", load, answers, 1.0, Objectives(ttft_s=0.2))
        >>> report.succeeded, report.good, report.errors, round(report.token_s.p50, 3)
        (1, 1, {'status 429': 1}, 0.1)
    """
    right = [answer for answer in answers if not answer.error]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    good = sum(map(objectives.keeps, right))
    return ServeReport(
        url=url,
        model=model,
        load=load,
        seconds=seconds,
        succeeded=len(right),
        good=good,
        errors=errors,
        first_error=next((": ".join(filter(None, (each.error, each.said))) for each in answers if each.error), ""),
        requests_per_s=len(right) / seconds,
        input_tokens_per_s=len(right) * load.prompt_tokens / seconds,
        output_tokens_per_s=sum(answer.tokens for answer in right) / seconds,
        good_requests_per_s=good / seconds,
        ttft_s=Percentiles.of([answer.pieces_s[0] for answer in right if answer.pieces_s]),
        token_s=Percentiles.of([per for answer in right if (per := _per_token(answer)) is not None]),
        piece_s=Percentiles.of([gap for answer in right for gap in _gaps(answer)]),
        whole_s=Percentiles.of([answer.end_s for answer in right]),
    )


def _per_token(answer: Answer) -> float | None:
    """Mean seconds between two tokens: pieces may hold several."""
    if len(answer.pieces_s) < 2 or answer.tokens < 2:
        return None
    return (answer.pieces_s[-1] - answer.pieces_s[0]) / (answer.tokens - 1)


def _gaps(answer: Answer) -> Iterator[float]:
    return (later - sooner for sooner, later in pairwise(answer.pieces_s))


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


# --- a server of our own --------------------------------------------------------------------------------------------


def own_environment() -> dict[str, str]:
    """This process's variables, without those that are about a server: one of our own has no keys and a port."""
    return inherited(without=[variable_of(field) for field in ServerConfig.__struct_fields__])


@contextmanager
def own_server(fields: Mapping[str, Any]) -> Iterator[str]:
    """`sgl serve` with these engine fields on a free port, and no keys; its URL.

    Raises:
        BenchError: it does not start.
    """
    flags = [flag for name, value in fields.items() for flag in _flags(name, value)]
    command = [sys.executable, "-P", "-m", "sgl.cli", "serve", "--port", "0", "--no-log-requests", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own_environment()
    ) as server:
        said: list[str] = []
        try:
            yield _url_of(server, said)
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def _url_of(server: subprocess.Popen[str], said: list[str]) -> str:
    with ThreadPoolExecutor(1) as reader:
        end = time.monotonic() + START_S
        while server.stdout is not None and time.monotonic() < end:
            line = reader.submit(server.stdout.readline).result()
            if not line:
                break
            said.append(line)
            if found := _READY.search(line):
                return found["url"]
    raise BenchError("sgl serve does not start: " + "".join(said[-3:]).strip(), hint="run it by hand to see why")


def _flags(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in (flag, str(each))]
    return [flag, str(value)]


# --- HTTP against in process ----------------------------------------------------------------------------------------


def compare_offline(
    fields: Mapping[str, Any],
    load: Load,
    plan: PairPlan,
    *,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> OfflineReport:
    """The same requests over HTTP and to an engine in this process, in paired runs on the same cores.

    Both sides have at most `load.clients` requests under way, and start each run with an empty cache.
    """
    config = config_from_mapping(fields)
    threads = config.num_threads or (1 if config.model_path == "dummy" else cpu_count())
    cores = least_busy(os.sched_getaffinity(0), threads)
    given = {**fields, "num_threads": threads}
    with Engine(**given) as engine, own_server(given) as url:
        model = served_model(url)
        prompts = load.prompts(int(engine.server_info()["vocab_size"]))

        def over_http(number: int) -> dict[str, float]:
            httpx2.post(f"{url}/flush_cache?timeout=10", timeout=30, trust_env=False)
            start = time.perf_counter()
            answers = asyncio.run(run_load(url, load, prompts, model))
            seconds = time.perf_counter() - start
            if wrong := [answer.error for answer in answers if answer.error]:
                raise BenchError(f"{len(wrong)} of {len(answers)} requests failed: {wrong[0]}")
            return {"wall": seconds}

        def in_process(number: int) -> dict[str, float]:
            engine.flush_cache(wait_s=10)
            start = time.perf_counter()
            asyncio.run(_offline(engine, load, prompts))
            return {"wall": time.perf_counter() - start}

        run = measure_pairs(
            over_http, in_process, ProcSampler(cores) if sampler is None else sampler, plan, progress=progress
        )
    return OfflineReport(
        model=model,
        load=load,
        engine=given,
        provenance=provenance(cores, side_variables(threads), ()),
        result=summarise(run.pairs, "wall", plan.pairs),
        pairs=run.pairs,
    )


async def _offline(engine: Engine, load: Load, prompts: Sequence[list[int]]) -> None:
    slots = asyncio.Semaphore(load.clients)
    params = {"max_new_tokens": load.new_tokens, "ignore_eos": True, "temperature": 0.0}

    async def one(prompt: list[int]) -> None:
        async with slots:
            if not load.stream:
                await engine.async_generate(input_ids=prompt, sampling_params=params)
                return
            stream = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
            async for _ in stream:
                continue

    await asyncio.gather(*map(one, prompts))


def default_vocab(fields: Mapping[str, Any]) -> int:
    """Ids that prompts may have, for a model of ours: asked of an engine's facts without weights."""
    from sgl.runtime.rendering import model_renderer

    return model_renderer(EngineConfig(**fields)).tokenizer.vocab_size
