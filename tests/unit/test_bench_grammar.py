"""`sgl bench grammar`: what is run, counted and printed. Times are not looked at."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path

import pytest

from sgl.bench import grammar
from sgl.bench.harness import PairPlan
from sgl.bench.load import Snapshot
from sgl.cli import main
from sgl.errors import ConfigError
from sgl.runtime.text.tokenizer import Tokenizer


class Quiet:
    """Counters of a machine on which nobody else computes."""

    cores = 2

    def __init__(self) -> None:
        self.at = 0.0

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        self.at += 1.0
        return Snapshot(at_s=self.at, busy_s=self.at, own_s=self.at, sides_s=())


def test_both_sides_of_each_pair_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "BATCH", 3)
    monkeypatch.setattr(grammar, "_NAMES", ("Harry Potter",))
    report = grammar.run(
        {"model_path": "dummy", "num_threads": 1},
        plan=PairPlan(pairs=1, quiet_s=0.0, turn_s=0.0),
        parts=("throughput", "forced", "neighbours"),
        new_tokens=4,
        rounds=1,
        round_s=0.5,
        sampler=Quiet(),
    )
    throughput, forced = report.comparisons
    assert throughput.result.ratio is not None
    assert throughput.counts == {"batch": 3, "new_tokens": 4}
    assert forced.counts["forwards with"] < forced.counts["forwards without"] / 2
    assert forced.counts["forced share"] > 0.5
    assert report.neighbours is not None
    assert report.neighbours.compiled > 3, "each arrival of a new schema is a compilation"
    assert report.masks == ()


def test_masks_of_a_backend() -> None:
    (figures,) = grammar.measure_masks(Tokenizer.toy(), "llguidance", num_compiled=7)
    assert figures.compiled == 7
    assert figures.fills > 50
    assert 0 < figures.fill_p50_us <= figures.fill_p99_us


def test_a_backend_that_is_not_installed_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.grammars.xgrammar_backend.is_installed", lambda: False)
    assert grammar.measure_masks(Tokenizer.toy(), "xgrammar") == []


def test_parts_are_known_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "BACKENDS", ("llguidance",))
    monkeypatch.setattr(grammar, "measure_masks", partial(grammar.measure_masks, num_compiled=7))
    with pytest.raises(ConfigError, match="part 'speed' is unknown"):
        grammar.run({"model_path": "dummy"}, plan=PairPlan(), parts=("speed",))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "grammar", "dummy", "--part", "masks", "--save", str(tmp_path / "r.json")])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "llguidance" in printed
    assert json.loads((tmp_path / "r.json").read_text())["masks"][0]["backend"] == "llguidance"
