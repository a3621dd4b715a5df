"""`sgl bench quality` and `throughput`: figures from invented scores and times, and both on the toy model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl.bench.harness import PairPlan
from sgl.bench.load import Snapshot
from sgl.bench.paths import PATHS, REFERENCE, chosen_paths
from sgl.bench.quality import run as read_quality
from sgl.bench.throughput import take
from sgl.cli import main
from sgl.errors import ConfigError, InvalidParameter

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `sgl ARGS` in this process: status, output, errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(args)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


class Machine:
    """Counters of two cores on which others use `foreign[i]` CPU seconds between reads; a read is a second later."""

    cores = 2

    def __init__(self, foreign: list[float]) -> None:
        self._foreign: Iterator[float] = iter(foreign)
        self._at_s = self._busy_s = 0.0

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        del sides
        self._at_s += 1.0
        self._busy_s += next(self._foreign, 0.0)
        return Snapshot(at_s=self._at_s, busy_s=self._busy_s)


def test_paths_are_found_by_name() -> None:
    assert chosen_paths([]) == list(PATHS.values())
    assert chosen_paths(["native-gguf"])[0].applied({"dtype": "float16", "offline": True}) == {
        **{"dtype": "bfloat16", "quantization": "gguf", "kernels": "native"},
        "offline": True,
    }
    with pytest.raises(InvalidParameter, match="did you mean 'native-int8'"):
        chosen_paths(["native-int9"])


def test_disturbed_samples_are_marked() -> None:
    # reads: two around the warm-up; then for each sample two while it is quiet, and two around it
    machine = Machine([0, 0, 0, 0, 0, 0, 0, 0, 0, 0.5])
    samples = take(lambda: 0.25, machine, PairPlan(pairs=3, patience_s=0.0, quiet_s=0.0))
    assert [sample.step_s for sample in samples] == [0.25] * 3
    assert [[fault.what for fault in sample.dirty] for sample in samples] == [[], ["foreign load"], []]


def test_the_toy_model_is_read_and_a_path_that_cannot_be_says_why(command: Command, tmp_path: Path) -> None:
    file, saved = tmp_path / "text", tmp_path / "report"
    file.write_text("The quick brown fox jumps over the lazy dog.")
    asked = ("--path", "torch-bfloat16", "--path", "native-gguf", "--text", str(file), "--window", "20")
    status, out, _ = command("bench", "quality", "dummy", *asked, "--num-threads", "1", "--save", str(saved))
    assert status == 0
    report = json.loads(saved.read_bytes())
    exact, rounded, absent = report["paths"]
    assert (exact["path"], exact["agreement"], exact["difference"]) == (REFERENCE.name, 1.0, 0.0)
    assert report["tokens"] == 44 - 3, "the first token of each window is predicted by nothing"
    assert math.isclose(exact["perplexity"], rounded["perplexity"], rel_tol=0.05)
    assert 0 < rounded["difference"] < 0.1
    assert absent["perplexity"] is None
    assert "weights are dummy" in absent["unavailable"]
    assert "weights are dummy" in out


def test_the_text_that_comes_with_sgl_is_long_enough() -> None:
    from sgl.bench.quality import _text

    assert len(_text(None).split()) > 1200


@pytest.mark.parametrize(
    ("changes", "error"), [({"window": 1}, InvalidParameter), ({"text": Path("/no")}, ConfigError)]
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_quality({"model_path": "dummy"}, **changes)


def test_the_grid_of_the_toy_model(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.bench.throughput.TURN_S", 0.01)
    grid = "--rows 1 --rows 2 --context 8 --context 16 --new-tokens 4 --repeats 1 --patience 0 --num-threads 1"
    paths = ("--path", "torch-float32", "--path", "native-gguf")
    status, out, _ = command("bench", "throughput", "dummy", *paths, *grid.split(), "--json")
    assert status == 0
    report = json.loads(out)
    assert [(cell["context"], cell["rows"]) for cell in report["cells"]] == [(8, 1), (8, 2), (16, 1), (16, 2)]
    ran, absent = report["paths"]
    assert ran["resolved"]["kernels"] == "torch"
    assert "weights are dummy" in absent["unavailable"]
    for cell in report["cells"]:
        step_s = cell["step_s"]
        assert math.isclose(cell["tokens_per_s"] * step_s, cell["rows"])
        assert math.isclose(cell["weight_bytes_per_s"] * step_s, ran["resolved"]["step_weights_bytes"])
        assert ran["resolved"]["step_weights_bytes"] < ran["resolved"]["weights_bytes"]  # an embedding is looked up
    assert command("bench", "throughput", "dummy", "--path", "native-int9")[0] == 1
