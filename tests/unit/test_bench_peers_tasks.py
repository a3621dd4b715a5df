"""Programs against other libraries: the tasks in both forms, the protocol of a peer's process, the report and its page.

Libraries are not installed here: a driver over our own engine stands for one. It asks for the same as the programs do,
so that both forms have to give the same answers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import sgl
from sgl.bench import program_peers
from sgl.bench.harness import PairPlan
from sgl.bench.load import Snapshot
from sgl.bench.pairs import Interval, Ratio, Result
from sgl.bench.program_drivers import DRIVERS, PACKAGES, answer
from sgl.bench.program_page import peer_page
from sgl.bench.program_peers import LibraryPeer, PeerReport, TaskComparison, compare_peer
from sgl.bench.program_tasks import TASKS, Driver
from sgl.errors import BenchError, ConfigError
from sgl.runtime.engine import Engine


class EngineDriver(Driver):
    """Our engine, called as a library is: no state between calls."""

    settings: ClassVar[dict[str, str]] = {"engine": "ours"}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _each(self, prompts: Sequence[str], expression: Any) -> list[str]:
        @sgl.function
        def one(s: Any, prompt: str) -> None:
            s += prompt + expression

        return [str(state["x"]) for state in one.run_batch([[prompt] for prompt in prompts], backend=self._engine)]

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: str) -> list[str]:
        return self._each(prompts, sgl.gen("x", max_tokens=max_tokens, stop=stop, temperature=0))

    def choose(self, prompts: Sequence[str], options: Sequence[str]) -> list[str]:
        return self._each(prompts, sgl.select("x", options))

    def fill(self, prompts: Sequence[str], schema: str, max_tokens: int) -> list[str]:
        return self._each(prompts, sgl.gen("x", json_schema=schema, max_tokens=max_tokens, temperature=0))


@pytest.mark.parametrize("name", TASKS)
def test_both_forms_of_a_task_ask_for_the_same(name: str, smollm2: Engine) -> None:
    task = TASKS[name]
    answers = task.by_programs(smollm2)
    assert answers == task.by_calls(EngineDriver(smollm2))
    assert answers == task.by_programs(program_peers.PlainBackend(smollm2))


class Quiet:
    """Counters of cores on which nobody else does anything."""

    cores = 1

    def __init__(self) -> None:
        self.now = 0.0

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        self.now += 1.0
        return Snapshot(at_s=self.now, busy_s=self.now, own_s=self.now, sides_s=tuple(0.0 for _ in sides))


def test_the_report(smollm2: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(Engine):
        """The engine of the suite, which a comparison must not end."""

        def __new__(cls, **_: Any) -> Any:
            return _Held(smollm2)

    class _Held:
        def __init__(self, engine: Engine) -> None:
            self.engine = engine

        def __enter__(self) -> Engine:
            return self.engine

        def __exit__(self, *_: object) -> None:
            return

    monkeypatch.setattr(program_peers, "Engine", Shared)
    plan = PairPlan(pairs=2, attempts=2, quiet_s=0.0, turn_s=1e-6)
    report = compare_peer("plain", ["classify"], plan=plan, fields={}, sampler=Quiet())
    [task] = report.tasks
    assert (task.equal, task.num_answers) == (8, 8)
    assert task.result is not None
    assert task.result.clean == 2
    assert report.measured == 1
    assert report.geometric_mean == pytest.approx(task.result.ratio.median)
    page = peer_page(report)
    assert page.count("<circle") == 2
    assert "<script" not in page
    assert "&quot;peer&quot;: &quot;plain&quot;" in page


def test_unknown_names_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no peer 'vlm'.*plain"):
        compare_peer("vlm", plan=PairPlan(), fields={})
    with pytest.raises(ConfigError, match=r"no task 'sums'.*classify"):
        compare_peer("plain", ["sums"], plan=PairPlan(), fields={})


def test_every_library_has_a_driver_and_packages() -> None:
    assert set(DRIVERS) == set(PACKAGES)
    assert set(program_peers.PEERS) == {"plain", *DRIVERS}


def test_a_peer_that_fails_quotes_itself(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"peer outlines ended.*outlines"):
        LibraryPeer("outlines", [0], str(tmp_path), "float32", sys.executable)


def test_an_error_of_a_library_is_an_answer() -> None:
    class Broken(EngineDriver):
        def choose(self, prompts: Sequence[str], options: Sequence[str]) -> list[str]:
            raise RuntimeError("no memory left")

    assert answer(Broken(None), {"task": "classify"}) == {"error": "RuntimeError: no memory left"}


def test_a_page_without_a_figure() -> None:
    result = Result(metric="wall", clean=0, attempted=3, needed=5, ratio=None, dirty={"foreign load": 3})
    measured = Ratio(1.0, 2.0, 2.0, Interval(1.9, 2.1, 0.9))
    tasks = (
        TaskComparison(task="extract", about="JSON", why="the peer has no fill"),
        TaskComparison(task="judge", about="a <b>", result=result),
        TaskComparison(task="tree", about="", result=Result(**{**_fields(result), "ratio": measured})),
    )
    report = PeerReport(
        peer="transformers",
        peer_settings={},
        peer_versions={"transformers": "5"},
        model="m",
        dtype="float32",
        engine={},
        provenance=program_peers.provenance([0], {}, ()),
        tasks=tasks,
        geometric_mean=2.0,
        measured=1,
    )
    page = peer_page(report)
    assert "the peer has no fill" in page
    assert "not measured: 0 clean pairs of 3, 5 needed" in page
    assert "a &lt;b&gt;" in page
    assert "transformers 5" in page


def _fields(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__struct_fields__}
