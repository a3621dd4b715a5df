"""`sgl bench latency --peer`, `startup`: flags, what is printed and what is written. Nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl.bench import comparison, startup
from sgl.bench.comparison import DECODE, Agreement, Case, CaseReport, ComparisonReport, Tuning
from sgl.bench.harness import PairPlan
from sgl.bench.load import CleanRule, Fault, Window
from sgl.bench.pairs import Pair, Trial, summarise
from sgl.bench.peers.messages import Loaded
from sgl.bench.provenance import Model, model_record, provenance, side_variables
from sgl.bench.samples import Sampled
from sgl.bench.startup import StartupReport
from sgl.cli import main
from sgl.errors import BenchError
from sgl.runtime.loading.sources import ModelSource

QUIET = Window(elapsed_s=1.0, cores=2, busy_s=1.0, own_s=1.0, steal_s=0.0, resting_s=0.0)
LOADED = Loaded(vocab_size=512, dtype="bfloat16", device="cpu", num_threads=2)
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


def pairs(ratios: list[float], dirty: int) -> tuple[Pair, ...]:
    """Clean pairs with these ratios, and some that were dropped."""

    def pair(ratio: float, *faults: Fault) -> Pair:
        a, b = Trial({DECODE: 0.5}, QUIET), Trial({DECODE: 0.5 * ratio}, QUIET)
        return Pair(index=0, order="BA", before=QUIET, a=a, b=b, dirty=faults)

    return (*map(pair, ratios), *(pair(99.0, Fault("foreign load", 0.4)) for _ in range(dirty)))


def case_report(batch: int, made: tuple[Pair, ...], *doubts: Fault) -> CaseReport:
    case = Case(batch=batch, prompt_tokens=128, new_tokens=64)
    return CaseReport(
        name=str(case),
        case=case,
        results=(summarise(made, DECODE, 3),),
        pairs=made,
        calls_per_turn=1,
        agreement=Agreement(preferred=0.975, common_prefix=0.5),
        tuned={"transformers": Tuning(chosen={"cache": "static"}, tried={"x": 1.0}, dirty=doubts)},
    )


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the comparison; what it was called with."""
    calls: list[dict[str, Any]] = []

    def compare(fields: dict[str, Any], peer: str, **asked: Any) -> ComparisonReport:
        calls.append({"fields": fields, "peer": peer, **asked})
        return ComparisonReport(
            model=Model(name="dummy", kind="dummy", sha256=""),
            provenance=provenance([0, 1], side_variables(2), ["transformers"]),
            plan=asked["plan"],
            a=LOADED,
            b=LOADED,
            peer=peer,
            weights_sha256={"sgl": "abc", peer: "abc"},
            mixed=asked["mixed"],
            cases=(
                case_report(1, pairs([2.0, 2.5, 2.2], dirty=4)),
                case_report(8, pairs([2.0], dirty=2), Fault("foreign load", 0.7)),
            ),
        )

    monkeypatch.setattr(comparison, "compare", compare)
    return calls


def test_the_table_has_ratios_and_says_what_was_not_measured(command: Command, compared: list[dict[str, Any]]) -> None:
    status, out, _ = command("bench", "latency", "dummy", "--peer", "transformers")
    assert status == 0
    lines = [line.split("  ") for line in out.splitlines()]
    rows = {line[0]: [cell.strip() for cell in line[1:] if cell] for line in lines if line[0].startswith("batch")}
    assert rows["batch 1, 128+64 tokens: decode"] == ["0.5 s", "1.1 s", "2.20x", "2.00 to 2.50 (75%)", "3 of 7"]
    assert rows["batch 8, 128+64 tokens: decode"] == ["-", "-", "not measured", "needs 3", "1 of 3"]
    assert "99" not in out.replace("transformers", ""), "a dirty pair's time is no figure"
    assert "pairs dropped for foreign load (4)" in out
    assert "prefers 97.5% of our tokens" in out
    assert "cache static; doubtful, chosen under foreign load 70.0%" in out
    assert "identical on both sides" in out
    assert compared[0]["fields"] == {"model_path": "dummy"}


def test_flags_reach_the_comparison(command: Command, compared: list[dict[str, Any]]) -> None:
    flags = "--batch 1 --batch 4 --prompt-tokens 16 --new-tokens 8 --pairs 2 --attempts 3 --seed 5 --patience 0"
    rule = "--max-foreign 0.04 --max-steal 0.07"
    asked = "--peer-setting cache=static --peer-setting loop=generate --dtype bfloat16 --num-threads 2"
    asked += " --peer-python /x/bin/python --mixed"
    status, _, _ = command(
        "bench", "latency", "dummy", "--peer", "transformers", "--no-startup", *f"{flags} {rule} {asked}".split()
    )
    assert status == 0
    (call,) = compared
    assert call["cases"] == [Case(batch=batch, prompt_tokens=16, new_tokens=8) for batch in (1, 4)]
    assert call["plan"] == PairPlan(
        pairs=2, attempts=3, seed=5, patience_s=0.0, rule=CleanRule(max_foreign=0.04, max_steal=0.07)
    )
    assert call["startup"] is False
    assert (call["peer_python"], call["mixed"]) == ("/x/bin/python", True)
    assert call["peer_settings"] == {"cache": "static", "loop": "generate"}
    assert call["fields"] == {"model_path": "dummy", "dtype": "bfloat16", "num_threads": 2}


def test_the_report_is_written_with_every_raw_time(
    command: Command, compared: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    status, out, _ = command("bench", "latency", "dummy", "--peer", "transformers", "--save", str(file))
    assert status == 0
    assert "not measured" in out
    saved = json.loads(file.read_text())
    assert [case["results"][0]["ratio"] is None for case in saved["cases"]] == [False, True]
    assert saved["cases"][1]["pairs"][1]["dirty"] == [{"what": "foreign load", "share": 0.4}]
    assert len(saved["cases"][0]["pairs"]) == 7
    record = saved["provenance"]
    assert record["versions"]["torch"]
    assert record["variables"]["OMP_NUM_THREADS"] == "2"
    assert len(record["sgl_source_sha256"]) == 64
    assert {"command", "cpu", "cores", "system", "time_utc"} <= record.keys()
    assert (
        json.loads(command("bench", "latency", "dummy", "--peer", "transformers", "--json")[1])["peer"]
        == "transformers"
    )
    assert msgspec.json.decode(file.read_bytes(), type=ComparisonReport).cases[0].pairs[0].a is not None


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("dummy", "--peer", "transformer"), 1, "did you mean 'transformers'"),
        (("dummy", "--peer", "sgl", "--peer-setting", "cache"), 2, "expected NAME=VALUE"),
        (("dummy", "--model-path", "smollm2-135m"), 2, "give one of the two"),
        (("dummy", "--peer", "sgl", "--pairs", "5", "--attempts", "2"), 1, "attempts >= pairs"),
        (("dummy", "--peer", "sgl", "--new-tokens", "1"), 2, "--new-tokens"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], status: int, message: str
) -> None:
    def no_side(*given: object) -> None:
        raise BenchError("a side was started")

    monkeypatch.setattr(comparison, "Side", no_side)
    ended = command("bench", "latency", *args)
    assert ended[0] == status
    assert message in ended[2]


def test_a_report_that_cannot_be_written_is_an_error(
    command: Command, compared: list[dict[str, Any]], tmp_path: Path
) -> None:
    status, _, err = command("bench", "latency", "dummy", "--peer", "sgl", "--save", str(tmp_path / "no" / "x.json"))
    assert status == 2
    assert "cannot be written" in err


def test_startup_prints_medians(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(fields: dict[str, Any], *, repeats: int, progress: Callable[[str], None]) -> StartupReport:
        progress("nothing")
        measured = (Sampled.of("import sgl", "s", [0.3, 0.1, 0.2][:repeats]),)
        return StartupReport(model=fields["model_path"], versions={"sgl": "1"}, repeats=repeats, measured=measured)

    monkeypatch.setattr(startup, "run", run)
    status, out, err = command("bench", "startup", "dummy", "--repeats", "3")
    assert (status, err) == (0, "measuring: nothing\n")
    assert out.splitlines()[-1].split() == ["import", "sgl", "0.2", "s", "0.3", "0.1", "0.2"]


def test_checksum_of_a_model_is_that_of_its_files(tmp_path: Path) -> None:
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    one.write_bytes(b"abc")
    alone = model_record(ModelSource("m", "gguf", one)).sha256
    assert alone == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert model_record(ModelSource("m", "safetensors", tmp_path)).sha256 == alone
    two.write_bytes(b"d")
    both = model_record(ModelSource("m", "safetensors", tmp_path)).sha256
    two.write_bytes(b"e")
    assert len({alone, both, model_record(ModelSource("m", "safetensors", tmp_path)).sha256}) == 3
    assert model_record(ModelSource("dummy", "dummy", None)).sha256 == ""
