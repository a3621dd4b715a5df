"""`sgl bench speculation`: what is run, counted and printed. Times are not looked at."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from sgl.bench import speculation
from sgl.bench.harness import PairPlan
from sgl.bench.load import Snapshot
from sgl.errors import ConfigError
from sgl.lang.graph import Gen


class Quiet:
    """Counters of a machine on which nobody else computes."""

    cores = 2

    def __init__(self) -> None:
        self.at = 0.0

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        self.at += 1.0
        return Snapshot(at_s=self.at, busy_s=self.at, own_s=self.at, sides_s=())


def test_both_sides_decode_the_same_documents() -> None:
    report = speculation.run(
        {"model_path": "dummy", "num_threads": 1, "speculative_adaptive": False},
        plan=PairPlan(pairs=1, quiet_s=0.0, turn_s=0.0),
        tasks=("copy", "random"),
        batches=(2,),
        new_tokens=24,
        sampler=Quiet(),
    )
    copy, sampled = report.figures
    assert (copy.task, copy.batch, sampled.task) == ("copy", 2, "random")
    assert copy.result.ratio is not None
    assert copy.forwards < copy.forwards_off, "the toy model repeats itself"
    assert copy.accept_len > 1
    assert 0 < copy.verified <= 1
    assert copy.recorded == 0, "a CPU records nothing"
    assert copy.equal == sampled.equal == 1.0


def test_a_form_is_a_chain_of_generations() -> None:
    nodes = speculation.task_nodes("chain", random.Random(1), 9)
    assert sum(isinstance(node, Gen) for node in nodes) == 13


@pytest.mark.parametrize("fields", [{"speculative_algorithm": "NONE"}, {}])
def test_what_cannot_be_measured_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        speculation.run({"model_path": "dummy", **fields}, plan=PairPlan(), tasks=() if fields else ("sing",))
