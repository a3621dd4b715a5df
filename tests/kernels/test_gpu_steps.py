"""Steps as a GPU takes them, in Triton's interpreter: logits are those of torch's path, and only what is new is sent.

Recorded steps run as they are here; everything else (what is filled in, what follows what, page tables that stay on the
device) is what runs on a GPU.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sgl.lang.graph import Sampling
from sgl.runtime import gpu_steps
from sgl.runtime.config import EngineConfig
from sgl.runtime.decode_graphs import INTEGERS_PER_ROW, VerifiedSize
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.page_table import PageTable
from sgl.runtime.plan import UNKNOWN, Chunk, SampleSpec, StepPlan
from sgl.runtime.resolution import resolve

if torch.cuda.is_available():
    pytest.skip("on a GPU the engine itself is compared (tests/e2e/test_gpu.py)", allow_module_level=True)

SAMPLE = SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[])

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.usual: list[bool] = []

    def begin(self, *, is_usual: bool = True) -> None:
        self.usual.append(is_usual)

    def mark(self) -> None: ...


class Recorded(gpu_steps._DecodeGraph):
    """A step that is computed again in place of being replayed."""

    def capture(self, pool: Any) -> Any:
        return pool

    def replay(self, num_rows: int) -> torch.Tensor:
        return self._compute()[:num_rows]


class Verified(gpu_steps.VerifyGraph):
    """The same for one that verifies."""

    def capture(self, pool: Any) -> Any:
        return pool

    def _replay(self) -> None:
        self._compute()


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 4])
def runners(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, ModelRunner]:
    """The same weights as on a GPU, and on torch's path."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_steps, "_DecodeGraph", Recorded)
    monkeypatch.setattr(gpu_steps, "VerifyGraph", Verified)
    for where in ("sgl.runtime.gpu_steps", "sgl.kernels.triton.attention"):
        monkeypatch.setattr(f"{where}.num_splits", lambda rows, heads: 2)  # enough of them for an interpreter
    checkpoint = open_checkpoint(locate("dummy"), msgspec.json.encode(SHAPE).decode())
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        kernels="torch",
        max_total_tokens=512,
        page_size=request.param,
        speculative_algorithm="NGRAM",
    )
    resolved = resolve(config, checkpoint.facts())
    on_gpu = msgspec.structs.replace(resolved, kernels="triton", cuda_graph_max_bs_decode=4)
    build: Any = checkpoint.build_model
    return (
        ModelRunner(build("float32", kernels="triton"), checkpoint.config, on_gpu, Clock()),  # type: ignore[arg-type]
        ModelRunner(build("float32"), checkpoint.config, resolved),
    )


class Row:
    """A sequence on pages of its own."""

    def __init__(self, id: int, num_tokens: int, page_size: int) -> None:
        rng = np.random.default_rng(id)
        self.id = id
        self.page_size = page_size
        self.ids = rng.integers(0, 256, num_tokens).tolist()
        self.start = 0
        self._free = rng.permutation(128 // page_size) + id * (128 // page_size)
        self.pages = PageTable()

    def chunk(self, follows: int | None = None) -> Chunk:
        """Everything that is not computed yet."""
        needed = -(-len(self.ids) // self.page_size)
        self.pages.extend(self._free[len(self.pages) : needed])
        token_ids = [UNKNOWN] if follows is not None else self.ids[self.start :]
        made = Chunk(
            sequence=self.id,
            token_ids=token_ids,
            start=self.start,
            page_table=self.pages.view,
            sample=SAMPLE,
            follows=follows,
        )
        self.start = len(self.ids)
        return made

    def move(self) -> None:
        """To other pages, as a row that was put back and computes again."""
        self._free = self._free[::-1].copy()
        self.pages = PageTable()
        self.start = 0


def test_logits_are_those_of_torch_and_tables_stay_on_the_device(runners: tuple[ModelRunner, ModelRunner]) -> None:
    ours, expected = runners
    steps = ours._gpu_steps
    assert steps is not None
    rows = [Row(0, 9, ours.page_size), Row(1, 1, ours.page_size), Row(2, 5, ours.page_size)]
    sent = []

    def step(*chunks: Chunk, drawn: list[int] | None = None, known: list[Chunk] | None = None) -> None:
        before = steps.num_sent
        given = None if drawn is None else torch.tensor(drawn)
        logits = ours.forward(StepPlan(chunks=chunks), given).clone()
        sent.append(steps.num_sent - before)
        torch.testing.assert_close(
            logits, expected.forward(StepPlan(chunks=tuple(known or chunks))), atol=1e-4, rtol=1e-4
        )

    step(*(row.chunk() for row in rows))
    for _ in range(2):
        for row in rows:
            row.ids.append(row.id + 7)
        step(*(row.chunk() for row in rows))
    # A step of three rows is filled up to four; each row has room for one new page.
    assert sent[-1] == 4 * INTEGERS_PER_ROW
    rows[1].move()
    rows[1].ids.append(50)
    rows[0].ids.append(51)
    step(rows[0].chunk(), rows[1].chunk())  # one decodes beside one that computes again
    for row in rows:
        row.ids.append(60 + row.id)
    rows[2].move()
    rows[2].ids = rows[2].ids[:1]
    step(rows[2].chunk(), rows[0].chunk(), rows[1].chunk())  # another order, and another table
    for row in rows[:2]:
        row.ids.append(90 + row.id)
    known = [msgspec.structs.replace(row.chunk(), follows=None) for row in rows[:2]]
    unknown = [msgspec.structs.replace(c, token_ids=[UNKNOWN], follows=1 - i) for i, c in enumerate(known)]
    step(*unknown, drawn=[91, 90], known=known)
    assert sent[-1] == 2 * INTEGERS_PER_ROW


def test_more_new_pages_than_rows_and_tables_without_room(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, expected = runners
    steps = ours._gpu_steps
    assert steps is not None
    row = Row(1, 12, ours.page_size)
    for runner in runners:
        row.start = 0
        runner.forward(StepPlan(chunks=(row.chunk(),)))
    row.ids.append(3)
    chunk = row.chunk()
    steps._placing.forget()
    decoded = expected.forward(StepPlan(chunks=(chunk,)))
    torch.testing.assert_close(ours.forward(StepPlan(chunks=(chunk,))), decoded, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(steps._placing, "_size", 8)
    steps._placing.forget()
    torch.testing.assert_close(ours.forward(StepPlan(chunks=(chunk,))), decoded, atol=1e-4, rtol=1e-4)


def test_a_step_that_fails_sent_nothing_that_counts(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, expected = runners
    steps = ours._gpu_steps
    assert steps is not None
    row = Row(1, 12, ours.page_size)
    chunk = row.chunk()
    with monkeypatch.context() as patch:
        patch.setattr(steps._staging, "put", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours.forward(StepPlan(chunks=(chunk,)))
    logits = ours.forward(StepPlan(chunks=(chunk,)))
    torch.testing.assert_close(logits, expected.forward(StepPlan(chunks=(chunk,))), atol=1e-4, rtol=1e-4)


def test_verifications_are_recorded_when_they_come_again(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees beside rows that only decode, and rows with scores, of sizes between those that are recorded."""
    ours, expected = runners
    steps = ours._gpu_steps
    assert steps is not None
    monkeypatch.setattr(gpu_steps, "_EAGER_VERIFICATIONS", 1)
    rows = [Row(i, 5 + 3 * i, ours.page_size) for i in range(3)]
    for runner in runners:
        for row in rows:
            row.start = 0
        runner.forward(StepPlan(chunks=tuple(row.chunk() for row in rows)))
    trees = [(), (-1, 0, 0, 1, -1), (-1, 0, -1)]
    lengths = []
    for step in range(3):
        chunks = []
        for row, parents in zip(rows, trees, strict=True):
            row.ids.append(100 + step)
            known = row.chunk()
            drafts = [7 * step + i for i in range(len(parents))]
            needed = -(-(known.end + len(drafts)) // row.page_size)
            row.pages.extend(row._free[len(row.pages) : needed])
            chunks.append(
                msgspec.structs.replace(
                    known,
                    token_ids=[*known.token_ids, *drafts],
                    page_table=row.pages.view,
                    num_drafts=len(drafts),
                    checks=(SAMPLE,) * len(drafts),
                    parents=parents if step % 2 else (),
                )
            )
        logits = ours.forward(StepPlan(chunks=tuple(chunks))).clone()
        torch.testing.assert_close(logits, expected.forward(StepPlan(chunks=tuple(chunks))), atol=1e-4, rtol=1e-4)
        lengths.append(len(steps._verify_graphs))
    assert lengths == [0, 1, 1]
    assert steps._clock.usual[-3:] == [False, False, True], "launched one by one for now, recorded, replayed"  # type: ignore[attr-defined]
    (size,) = steps._verify_graphs
    assert size == (4, 16, 16)
    rows[1].ids += [1, 2]
    plan = StepPlan(chunks=(rows[1].chunk(), msgspec.structs.replace(chunks[2], num_drafts=0, checks=(), parents=())))
    for _ in range(2):
        found = ours.forward(plan)
    assert len(found) == 2
    assert len(steps._verify_graphs) == 1, "the larger one serves"
    torch.testing.assert_close(found, expected.forward(plan), atol=1e-4, rtol=1e-4)


def test_a_larger_recorded_step_serves_until_a_size_comes_often(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded at start holds every step of as many rows; none is launched kernel by kernel."""
    ours, expected = runners
    steps = ours._gpu_steps
    assert steps is not None
    monkeypatch.setattr(gpu_steps, "_PADDED_VERIFICATIONS", 2)
    steps._verify_captured(VerifiedSize(4, 16, 64))
    rows = [Row(i, 6 + i, ours.page_size) for i in range(3)]
    for runner in runners:
        for row in rows:
            row.start = 0
        runner.forward(StepPlan(chunks=tuple(row.chunk() for row in rows)))
    steps._clock.usual.clear()  # type: ignore[attr-defined]
    recorded = []
    for _ in range(3):
        for row in rows:
            row.ids += [11, 12]
        plan = StepPlan(chunks=tuple(row.chunk() for row in rows))
        found = ours.forward(plan).clone()
        torch.testing.assert_close(found, expected.forward(plan), atol=1e-4, rtol=1e-4)
        recorded.append(sorted(steps._verify_graphs))
    assert recorded[0] == recorded[1] == [(4, 16, 64)]
    assert recorded[2] == [(4, 4, 8), (4, 16, 64)]
    assert steps._clock.usual == [True, True, False]  # type: ignore[attr-defined]
    assert ours.num_recorded >= 2
