"""Every program of the language suite on a server: `RemoteEngine` gives and counts what an engine in the process does,
and each submission is one request.

The programs are those of `tests/programs`, run by the tests that have them, and the suite that explaining is tested
with. Both ways run on one engine, each from an empty cache. On the toy model wherever the program runs to its end on
it: what the test asserts of a model's words then fails, in both ways alike.
"""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from programs import test_peer_programs, test_sglang_programs
from support.serving import Served, serving
from support.suite import SUITE

import sgl
from sgl.errors import SglError
from sgl.lang.backend import Backend, EventSink, Session
from sgl.lang.graph import Event, FailedEvent, Graph, ProgramOptions, StateText, Usage, ValueEvent
from sgl.runtime.engine import Engine

ELSEWHERE = {
    12: "images: on the mock, since no model here sees; the engine's refusal is here",
    16: "API speculation: it is about endpoints that take no programs",
    18: "methods of choice: known scores, without an engine",
    19: "tracing: nothing runs",
    25: "errors in streams: a fault of the mock",
    31: "without a model: on the mock",
    34: "wrong combinations: refused where the program is written, nothing runs",
    36: "errors of providers: it is about endpoints that take no programs",
    45: "faults in the middle, a row: faults of the mock; those of an engine are here",
}
"""Programs that have no run, or one less, on an engine."""
SPOKEN = ("1", "24", "28_recursive", "38", "40")
"""Programs that need a model that speaks to run to their end."""
COUNTED = (
    "prompt_tokens",
    "cached_tokens",
    "prefill_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "scored_tokens",
    "forced_tokens",
    "healed_tokens",
    "rerendered_tokens",
    "joined_tokens",
)


class Tape:
    """A backend, and what went through it.

    Args:
        backend: that runs the programs.
        engine: for what is not of the language: a test's own oracle.
    """

    def __init__(self, backend: Backend, engine: Engine) -> None:
        self._backend = backend
        self._engine = engine
        self.reels: list[_Reel] = []
        self.num_opened = self.num_submitted = self.num_read = 0

    def open(self, sink: EventSink, options: ProgramOptions) -> Session:
        self.num_opened += 1
        reel = _Reel(self, sink)
        self.reels.append(reel)
        reel.session = self._backend.open(reel.take, options)
        return reel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name, None) or getattr(self._engine, name)

    def shown(self) -> tuple[list[str], dict[str, int]]:
        """The values in an order of their own (rows and branches end when they like), and what they cost together."""
        usage = sum((reel.usage for reel in self.reels), Usage())
        return sorted(value for reel in self.reels for value in reel.values), {
            name: getattr(usage, name) for name in COUNTED
        }


class _Reel:
    """A session of a tape, and what came of it. Of a program that fails that is the error: how far its branches come
    until then is chance."""

    session: Session

    def __init__(self, tape: Tape, sink: EventSink) -> None:
        self._tape = tape
        self._sink = sink
        self.values: list[str] = []
        self.usage = Usage()

    def take(self, event: Event) -> None:
        match event:
            case ValueEvent():
                self.usage += event.usage
                self.values.append(json.dumps([
                    event.node, event.branch, event.name, event.value, event.token_ids, event.finish, event.matched,
                    event.forced, event.truncated_at, [choice.choice for choice in event.choices],
                ]))  # fmt: skip
            case FailedEvent(error=error) if error.code != "cancelled":
                self.values, self.usage = [error.code], Usage()
        self._sink(event)

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        self._tape.num_submitted += 1
        self.session.submit(graph, finish=finish)

    def read_state(self, branch: int) -> Future[StateText]:
        self._tape.num_read += 1
        return self.session.read_state(branch)

    def cancel(self) -> None:
        self.session.cancel()


class Program(NamedTuple):
    """A test that runs programs on an engine, with its parameters."""

    name: str
    test: Callable[..., None]
    engines: tuple[str, ...]
    given: Mapping[str, Any]

    def outcome(self, tape: Tape) -> str:
        """How the test ends on it."""
        try:
            self.test(**dict.fromkeys(self.engines, tape), **self.given)
        except (AssertionError, LookupError, ValueError, SglError) as error:
            return type(error).__name__
        return "passed"


def programs(module: ModuleType) -> Iterator[Program]:
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        engines = tuple(each for each in inspect.signature(test).parameters if each in ("smollm2", "dummy_engine"))
        if not engines:
            continue
        sets: list[dict[str, Any]] = [{}]
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == "parametrize":
                names, rows = mark.args
                sets = [dict(zip(names, row, strict=True)) for row in rows]
        for number, given in enumerate(sets):
            yield Program(name.removeprefix("test_") + f"[{number}]" * bool(given), test, engines, given)


PROGRAMS = [*programs(test_sglang_programs), *programs(test_peer_programs)]


def is_spoken(name: str) -> bool:
    return any(name.startswith(f"{number}_") for number in SPOKEN)


def test_each_of_the_46_is_here_or_says_why_not() -> None:
    numbers = {int(number) for each in PROGRAMS for number in re.findall(r"(\d+)_", each.name)}
    assert numbers | set(ELSEWHERE) == set(range(1, 47))


@pytest.fixture(scope="module")
def toy(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine) as served:
        start_threads(served)
        yield served


def start_threads(served: Served) -> None:
    """Let the server have all the threads that it may have: a program here counts those of this process."""
    release = threading.Event()

    def take_all() -> None:
        for _ in range(64):
            served.loop.run_in_executor(None, release.wait)
        release.set()

    served.loop.call_soon_threadsafe(take_all)
    assert release.wait(10)


@pytest.fixture(scope="module")
def speaking(smollm2: Engine) -> Iterator[Served]:
    with serving(smollm2) as served:
        yield served


def requests_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests by route, from now on."""
    seen: Counter[str] = Counter()
    monkeypatch.setattr(served.server.metrics, "answered", lambda path, status: seen.update([path]))
    return seen


def both(engine: Engine, served: Served, run: Callable[[Tape], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run something both ways: it has to come to the same, with one request for each submission."""
    here = Tape(engine, engine)
    engine.flush_cache(wait_s=5)
    expected = run(here)
    engine.flush_cache(wait_s=5)
    with sgl.RemoteEngine(served.url) as remote:
        remote.sampling_defaults()
        seen = requests_of(served, monkeypatch)
        there = Tape(remote, engine)
        assert run(there) == expected
    assert there.shown() == here.shown()
    assert any(reel.values for reel in here.reels)
    assert (there.num_opened, there.num_submitted) == (here.num_opened, here.num_submitted)
    assert seen["/v1/programs"] == there.num_opened
    assert seen["/v1/programs/{id}/fragments"] == there.num_submitted - there.num_opened
    assert seen["/v1/programs/{id}/branches/{branch}"] == there.num_read


@pytest.mark.parametrize("program", [each for each in PROGRAMS if not is_spoken(each.name)], ids=lambda each: each.name)
def test_a_program_of_the_language(
    program: Program, dummy_engine: Engine, toy: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(dummy_engine, toy, program.outcome, monkeypatch)


@pytest.mark.parametrize("program", [each for each in PROGRAMS if is_spoken(each.name)], ids=lambda each: each.name)
def test_a_program_of_the_language_that_speaks(
    program: Program, smollm2: Engine, speaking: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(tape: Tape) -> None:
        assert program.outcome(tape) == "passed"

    both(smollm2, speaking, run, monkeypatch)


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_a_program_of_the_suite(case: Any, dummy_engine: Engine, toy: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tape: Tape) -> list[str]:
        texts = [case.program.run(**row, backend=tape, seed=1).text() for row in case.rows]
        if case.assume is None:
            before = tape.num_submitted
            case.program.compile().run(**case.rows[0], backend=tape, seed=1)
            assert tape.num_submitted == before + 1
        return texts

    both(dummy_engine, toy, run, monkeypatch)
