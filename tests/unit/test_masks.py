"""Masks off the critical path: where they are filled, what a broken one costs, how they are applied."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.scripted import Rig

from sgl.errors import ConfigError, SglError
from sgl.grammars.llguidance_backend import Backend, LLGuidanceMatcher
from sgl.grammars.matcher import Bitmask, bitmask_to_bool
from sgl.grammars.spec import JsonSchema
from sgl.kernels import registry
from sgl.kernels.registry import OpFacts
from sgl.lang.graph import FailedEvent, Fork, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, ValueEvent
from sgl.runtime.config import EngineConfig, Facts
from sgl.runtime.masks import MaskJob, MaskRun
from sgl.runtime.plan import StepPlan
from sgl.runtime.resolution import resolve

SCHEMA = JsonSchema(json.dumps({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}))
ENDLESS = JsonSchema(json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 200}))


def start(rig: Rig, program: int, *, constrained: bool) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    node = Gen(id=1, name="x", constraint=SCHEMA if constrained else None, sampling=sampling)
    rig.core.open(program, ProgramOptions(name=f"p{program}"))
    rig.core.submit(program, Graph(nodes=(Text(id=0, segments=(LiteralText("q:"),)), node)), finish=True)


def values(rig: Rig, programs: int) -> list[str]:
    return [event.value for program in range(programs) for event in rig.of(program, ValueEvent)]


def counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Rows of each call of the engine that computes masks, by whether they were computed together or alone."""
    calls: dict[str, list[int]] = {"together": [], "alone": []}
    together, alone = Backend.compute_rows, LLGuidanceMatcher._compute_row

    def compute_rows(self: Backend, matchers: list, rows: Bitmask, num_threads: int) -> None:
        calls["together"].append(len(matchers))
        together(self, matchers, rows, num_threads)

    def compute_row(self: LLGuidanceMatcher) -> Bitmask:
        calls["alone"].append(1)
        return alone(self)

    monkeypatch.setattr(Backend, "compute_rows", compute_rows)
    monkeypatch.setattr(LLGuidanceMatcher, "_compute_row", compute_row)
    return calls


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_asks_the_engine_once_for_all_its_rows(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(disable_overlap_schedule=not overlaps, disable_forced_tokens=True)
    rig.core.compiler.compile(SCHEMA)
    calls = counted(rig, monkeypatch)
    endless = Gen(id=1, name="x", constraint=ENDLESS, sampling=Sampling(max_new_tokens=9, temperature=0.0))
    for program in range(3):
        rig.core.open(program, ProgramOptions(name=f"p{program}"))
        rig.core.submit(program, Graph(nodes=(Text(id=0, segments=(LiteralText("q:"),)), endless)), finish=True)
    calls["alone"].clear()  # what the budget's care looks at, once
    rig.run()
    assert calls == {"together": [3] * 9, "alone": []}


def test_masks_are_begun_before_programs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(disable_overlap_schedule=False, disable_forced_tokens=True)
    noted: list[str] = []
    begin, emit = rig.core.scheduler._masks.start, rig.core._emit
    monkeypatch.setattr(rig.core.scheduler._masks, "start", lambda chunks: (noted.append("begin"), begin(chunks))[1])
    monkeypatch.setattr(rig.core, "_emit", lambda program, event: (noted.append("tell"), emit(program, event))[1])
    node = Gen(id=1, name="x", constraint=ENDLESS, sampling=Sampling(max_new_tokens=6, temperature=0.0))
    rig.core.open(0, ProgramOptions(name="p", stream=True))
    rig.core.submit(0, Graph(nodes=(Text(id=0, segments=(LiteralText("q:"),)), node)), finish=True)
    noted.clear()
    rig.run()
    assert noted[:10] == ["begin"] + ["begin", "tell"] * 4 + ["begin"]


def test_rows_that_programs_end_meanwhile_move_no_mask() -> None:
    """A program of two branches fails by what it is told of one, while the mask of the other is filled."""
    faults = {"before_emit": {"action": "raise", "at": 2, "program": "p0"}}
    rig, alone = Rig(disable_overlap_schedule=False, faults=faults), Rig(disable_overlap_schedule=True)
    short, long = (
        Gen(id=1 + i, branch=i, name=f"x{i}", constraint=ENDLESS, sampling=Sampling(max_new_tokens=n, temperature=0.0))
        for i, n in ((1, 3), (2, 9))
    )
    for each in (rig, alone):
        for program in range(3):
            each.core.open(program, ProgramOptions(name=f"p{program}", stream=program == 0))
            text = Text(id=0, segments=(LiteralText("q" * (program + 1)),))
            each.core.submit(program, Graph(nodes=(text, Fork(id=1, children=(1, 2)), short, long)), finish=True)
        each.run()
    assert len(rig.of(0, FailedEvent)) == 1
    assert rig.core.snapshot().pages_held == 0
    for program in (1, 2):
        ours, others = ([event.value for event in each.of(program, ValueEvent)] for each in (rig, alone))
        assert ours == others
        assert len(ours) == 2


class Plain:
    """A matcher that allows what its number says, and notes the thread that asks."""

    def __init__(self, word: int, threads: set[int] | None = None, *, breaks: bool = False) -> None:
        self.word, self.breaks = word, breaks
        self.threads = threads if threads is not None else set()

    def fill(self, bitmask: Bitmask, row: int) -> None:
        self.threads.add(threading.get_ident())
        if self.breaks:
            raise RuntimeError(f"fault in row {row}")
        bitmask[row] = self.word


def test_they_are_ready_while_the_forward_runs_and_hold_the_constrained_rows_only() -> None:
    seen: list[tuple[int, int]] = []

    def forward(plan: StepPlan) -> None:
        if plan.masks is not None:
            for task in plan.masks._tasks:
                task.result(30)  # done before anything was computed, by threads of its own
            seen.append((len(plan.masks.wait().words), sum(c.sample is not None for c in plan.chunks)))

    rig, alone = Rig(forward, num_mask_threads=1), Rig()
    for one in (rig, alone):
        start(one, 0, constrained=True)
        start(one, 1, constrained=False)
        start(one, 2, constrained=True)
        one.run()
    assert values(rig, 3) == values(alone, 3)
    assert len(values(rig, 3)) == 3
    assert (2, 3) in seen
    rig.core.scheduler._masks.close()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_one_that_breaks_fails_its_row_alone(num_threads: int, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(num_mask_threads=num_threads)
    start(rig, 0, constrained=True)
    start(rig, 1, constrained=True)
    (request, _) = [*rig.core.scheduler.waiting, *rig.core.scheduler.running]
    matcher = request.generation.matcher
    matcher.fill = Plain(0, breaks=True).fill  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, logger="sgl"):
        rig.run()
    (event,) = rig.of(0, FailedEvent)
    error = SglError.from_info(event.error)
    assert error.code == "internal_error"
    assert "a constraint's mask" in error.message
    assert "fault in row" in caplog.text
    assert len(values(rig, 2)) == 1
    assert rig.core.snapshot().pages_held == 0
    rig.core.scheduler._masks.close()


def test_without_threads_the_step_fills_them_itself() -> None:
    threads: set[int] = set()
    job = MaskJob([MaskRun(Plain(row, threads)) for row in range(9)], 32, None)
    assert not threads
    words, failures = job.wait()
    assert (words[:, 0].tolist(), failures, threads) == (list(range(9)), {}, {threading.get_ident()})
    assert job.wait().words is words


class Together(Plain):
    """One that is to be computed with others, which breaks."""

    @staticmethod
    def prepare(matchers: list[Together], num_threads: int, bitmask: Bitmask, rows: list[int]) -> None:
        raise RuntimeError("the engine broke")


@pytest.mark.parametrize("pool", [None, ThreadPoolExecutor(1)])
def test_rows_that_cannot_be_computed_together_are_filled_one_by_one(
    pool: ThreadPoolExecutor | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "sgl.failures"):
        runs = [MaskRun(matcher) for matcher in (Plain(1), Together(2), Together(3, breaks=True))]
        words, failures = MaskJob(runs, 32, pool).wait()
    assert (words[:, 0].tolist(), [*failures]) == ([1, 2, 0], [2])
    if pool is not None:
        pool.shutdown()


def test_rows_of_a_job_by_place() -> None:
    job = MaskJob([MaskRun(m) for m in (Plain(5), Plain(6, breaks=True), Plain(7))], 32, None)
    assert job.rows([2, None, 1, 0])[:, 0].tolist() == [7, -1, 0, 5]


@pytest.mark.parametrize("name", ["torch", "cpu"])
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 500])
def test_applying_words(name: str, vocab_size: int) -> None:
    apply = registry.get("apply_bitmask", OpFacts(), name)
    random = np.random.default_rng(vocab_size)
    words = random.integers(-(2**31), 2**31, size=(3, (vocab_size + 31) // 32)).astype(np.int32)
    before = torch.from_numpy(random.normal(size=(5, vocab_size)).astype(np.float32))
    before[4] = torch.nan
    before[1, 0] = torch.inf
    logits = before.clone()
    apply(logits, torch.from_numpy(words), torch.tensor([3, 0, 1]))
    for i, row in enumerate([3, 0, 1]):
        expected = np.where(bitmask_to_bool(words, vocab_size)[i], before[row], -np.inf)
        np.testing.assert_array_equal(logits[row], expected)
    assert torch.equal(logits[2], before[2])
    assert bool(logits[4].isnan().all())


def facts(cores: int, *, cuda: bool = False) -> Facts:
    return Facts(
        cpu_count=cores, available_bytes=2**36, cuda_bytes=2**36 if cuda else 0, model_context_len=256, num_layers=2,
        num_kv_heads=2, head_dim=16, num_parameters=10**5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [
        (2, {}, (2, 0)),
        (4, {}, (4, 0)),
        (16, {}, (15, 1)),
        (16, {"num_threads": 10}, (10, 6)),
        (16, {"num_threads": 4}, (4, 8)),
        (16, {"num_threads": 16}, (16, 0)),
        (2, {"num_threads": 3}, (3, 0)),
        (2, {"num_mask_threads": 1}, (1, 1)),
        (2, {"num_mask_threads": 0}, (2, 0)),
    ],
)
def test_threads_for_masks_and_for_the_model_share_the_cores(
    cores: int, given: dict[str, int], expected: tuple[int, int]
) -> None:
    resolved = resolve(EngineConfig(**given), facts(cores))
    assert (resolved.num_threads, resolved.num_mask_threads) == expected
    told = {reason.field for reason in resolved.reasons}
    assert {"num_threads", "num_mask_threads"} - given.keys() <= told


def test_beside_a_gpu_half_of_the_cores_may_fill() -> None:
    resolved = resolve(EngineConfig(), facts(12, cuda=True))
    assert (resolved.num_threads, resolved.num_mask_threads) == (6, 6)


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 mask threads and 1 of the model are more than the 2 cores") as raised:
        resolve(EngineConfig(num_mask_threads=2), facts(2))
    assert raised.value.param == "num_mask_threads"
