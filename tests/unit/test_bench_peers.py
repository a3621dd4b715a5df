"""Sides of a comparison: the protocol, processes that misbehave, and the two adapters on the toy model."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from sgl.bench.comparison import (
    DECODE,
    FIRST,
    WHOLE,
    Case,
    check_comparable,
    common_prefix_len,
    compare,
    readable,
)
from sgl.bench.harness import PairPlan
from sgl.bench.load import Snapshot
from sgl.bench.peers import PEERS, find_peer
from sgl.bench.peers.adapter import Adapter
from sgl.bench.peers.host import Host
from sgl.bench.peers.messages import (
    Close,
    Closed,
    Failed,
    Generate,
    Generated,
    Load,
    Loaded,
    Preferences,
    Preferred,
    Tune,
    Tuned,
    Weights,
    WeightsDigest,
    line_of,
    replies,
    requests,
)
from sgl.bench.peers.process import Side
from sgl.bench.prompts import Prompts
from sgl.errors import BenchError, InternalError, InvalidParameter
from sgl.runtime.loading.sources import ModelSource

LOAD = Load(model_path="dummy", dtype="float32", device="cpu", num_threads=1)
LOADED = Loaded(vocab_size=512, dtype="float32", device="cpu", num_threads=1)


class Counting(Adapter):
    """The smallest adapter: continues by counting up from the last token."""

    def __init__(self, load: Load) -> None:
        self.log: list[str] = []
        self.short = bool(load.settings.get("short"))
        if load.model_path == "missing":
            raise InternalError("no such model")

    def loaded(self) -> Loaded:
        return LOADED

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        self.log.append("generate")
        return [[prompt[-1] + i + 1 for i in range(new_tokens - self.short)] for prompt in prompts]

    def forget(self) -> None:
        self.log.append("forget")

    def close(self) -> None:
        self.log.append("close")


# --- the host -------------------------------------------------------------------------------------------------------


def test_the_smallest_adapter_answers_everything() -> None:
    host = Host(Counting)
    assert host.answer(LOAD) == msgspec.structs.replace(LOADED, versions={"python": platform.python_version()})
    told = host.answer(Generate([[1, 2], [7]], 3))
    assert isinstance(told, Generated)
    assert told.token_ids == [[3, 4, 5], [8, 9, 10]]
    assert told.seconds > 0
    assert host.answer(Tune([[1]], 2)) == Tuned()
    assert host.answer(Preferred([[1, 2, 9, 10]], 1)) == Preferences([[3, 10, 11]])
    assert host.answer(Weights()) == WeightsDigest(None)
    assert host.answer(Close()) == Closed()
    assert isinstance(host._adapter, Counting)
    assert host._adapter.log == ["forget", "generate", "generate", "generate", "close"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([Generate([[1]], 2)], "no model is loaded"),
        ([LOAD, LOAD], "loaded already"),
        ([Load(model_path="missing", num_threads=1)], "no such model"),
        ([Load(model_path="x", num_threads=1, settings={"short": True}), Generate([[1]], 2)], r"rows of \[1\] tokens"),
        ([LOAD, Generate([[]], 2)], "IndexError"),
    ],
)
def test_an_error_is_a_reply(asked: list[Load | Generate], message: str) -> None:
    host = Host(Counting)
    *before, last = [host.answer(request) for request in asked]
    assert not any(isinstance(reply, Failed) for reply in before)
    assert isinstance(last, Failed)
    with pytest.raises(Exception, match=message):
        raise BenchError(last.error.message)


def test_messages_are_single_lines_and_come_back() -> None:
    for request in (LOAD, Generate([[1, 2], [3]], 4), Tune([[1]], 2), Preferred([[1]]), Weights(), Close()):
        line = line_of(request)
        assert line.count(b"\n") == 1
        assert requests.decode(line) == request
    for reply in (LOADED, Generated(0.5, [[1]]), Tuned({"a": 1}, {"b": 2.0}), Preferences(None), WeightsDigest("x")):
        assert replies.decode(line_of(reply)) == reply


# --- the process ----------------------------------------------------------------------------------------------------


def scripted(code: str, timeout_s: float = 20.0) -> Side:
    """A side whose process runs `code` instead of the host."""
    return Side("odd", [0], {}, program=[sys.executable, "-c", code], timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.stderr.write('no room here\\n'); sys.exit(3)", "ended with status 3: no room here"),
        ("print('hello')", "answered b'hello'"),
        ("""print('{"type": "weights_digest", "sha256": null}')""", "answered WeightsDigest; expected Loaded"),
        ("""print('{"type": "failed", "error": {"code": "bench_error", "message": "not today"}}')""", "odd: not today"),
    ],
)
def test_what_a_side_does_wrong_is_named(code: str, message: str) -> None:
    until_closed = "import sys; sys.stdout.flush(); sys.stdin.readline(); sys.stdin.readline()"
    with scripted(f"{code}\n{until_closed}") as side, pytest.raises(BenchError, match=message):
        side.load(LOAD)


def test_a_side_that_never_answers_is_ended() -> None:
    with scripted("import time; time.sleep(60)", timeout_s=0.2) as side:
        with pytest.raises(BenchError, match="no answer in"):
            side.load(LOAD)
        side.close(timeout_s=0.1)
    assert side._process.returncode == -9


def test_a_side_runs_in_an_interpreter_of_its_own_with_nothing_of_ours_but_sgl(tmp_path: Path) -> None:
    """The interpreter here is a script that notes what it is given and then is this one."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s" "$PYTHONPATH" > {tmp_path}/path\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    load = msgspec.structs.replace(LOAD, settings={"loop": "fast"})
    with (
        Side("transformers", os.sched_getaffinity(0), {}, python=str(python)) as side,
        pytest.raises(InvalidParameter, match="side transformers: peer setting loop=fast"),
    ):
        side.load(load)
    assert (tmp_path / "path").read_text() == ""


def test_a_host_ends_with_its_harness() -> None:
    cores = ",".join(map(str, os.sched_getaffinity(0)))
    done = subprocess.run(
        [sys.executable, "-m", "sgl.bench.peers.host", "sgl", cores],
        input=b"",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == b""


# --- the registry and the checks ------------------------------------------------------------------------------------


def test_peers_are_found_by_name() -> None:
    assert find_peer("transformers") is PEERS["transformers"]
    with pytest.raises(InvalidParameter, match="did you mean 'transformers'"):
        find_peer("transformer")


def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.bench.peers._version", lambda name: None)
    with pytest.raises(
        BenchError, match=r"needs transformers, torch .*pip install transformers torch, or .*peer-python"
    ):
        find_peer("transformers")
    assert find_peer("transformers", elsewhere=True).name == "transformers"


@pytest.mark.parametrize("field", ["dtype", "device", "num_threads"])
def test_sides_that_differ_are_refused(field: str) -> None:
    other = {"dtype": "bfloat16", "device": "cuda", "num_threads": 2}[field]
    check_comparable(LOADED, LOADED, ["a", "a"])
    with pytest.raises(BenchError, match=f"{field} is .* on our side and {other}"):
        check_comparable(
            LOADED, Loaded(**{**{f: getattr(LOADED, f) for f in LOADED.__struct_fields__}, field: other}), []
        )


def test_different_weights_are_refused_and_unknown_ones_are_not() -> None:
    check_comparable(LOADED, LOADED, ["a", None])
    with pytest.raises(BenchError, match="different weights"):
        check_comparable(LOADED, LOADED, ["a", "b"])


def test_quantized_sides_compare_by_the_form_of_their_weights() -> None:
    blocks = msgspec.structs.replace(LOADED, quantization="gguf", dtype="bfloat16")
    check_comparable(blocks, msgspec.structs.replace(blocks, dtype="float16"), ["a", "a"])  # of keys and values
    with pytest.raises(BenchError, match="quantization is none on our side and gguf"):
        check_comparable(LOADED, blocks, [])
    check_comparable(LOADED, blocks, ["a", "b"], mixed=True)
    with pytest.raises(BenchError, match="num_threads"):
        check_comparable(LOADED, msgspec.structs.replace(blocks, num_threads=2), [], mixed=True)


def test_a_peer_is_given_a_model_that_it_reads(tmp_path: Path) -> None:
    any_form, file = PEERS["transformers"], ModelSource("m", "gguf", tmp_path / "m.gguf")
    folder, toy = ModelSource("m", "safetensors", tmp_path), ModelSource("dummy", "dummy", None)
    for peer, source in ((any_form, toy), (PEERS["llamacpp"], file), (PEERS["vllm"], folder)):
        assert readable(peer, source, print) is source
    for peer, source in ((PEERS["llamacpp"], folder), (PEERS["vllm"], toy)):
        with pytest.raises(BenchError, match=r"reads a (gguf|folder); .* is (safetensors|dummy)"):
            readable(peer, source, print)


def test_a_folder_is_made_once_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer keeps what it compiles by the path, so the path must stay."""
    monkeypatch.setenv("SGL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"no model")
    said: list[str] = []
    with pytest.raises(BenchError, match="could not be converted"):
        readable(PEERS["vllm"], ModelSource("m", "gguf", file), said.append)
    assert list((tmp_path / "cache" / "peers").iterdir()) == []
    assert said == ["converting m to a folder, once"]

    def make(command: list[str], **options: object) -> SimpleNamespace:
        Path(command[-1]).mkdir()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("sgl.bench.peers.convert.subprocess.run", make)
    first = readable(PEERS["vllm"], ModelSource("m", "gguf", file), said.append)
    assert readable(PEERS["vllm"], ModelSource("m", "gguf", file), said.append) == first
    assert first.path is not None
    assert first.path.is_dir()
    assert len(said) == 2


def test_prompts_differ_and_repeat_by_seed() -> None:
    prompts = Prompts(512, seed="0 a").take(50, 8)
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert all(3 <= token < 512 for prompt in prompts for token in prompt)
    assert prompts == Prompts(512, seed="0 a").take(50, 8) != Prompts(512, seed="0 b").take(50, 8)
    assert common_prefix_len([1, 2], [1, 2, 3]) == 2


# --- both sides for real --------------------------------------------------------------------------------------------


class Quiet:
    """Says that nobody else is there."""

    cores = 2

    def __init__(self) -> None:
        self._reads: Iterator[int] = iter(range(1_000_000))

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        return Snapshot(at_s=float(next(self._reads)), busy_s=0.0, sides_s=(0.0,) * len(sides))


def test_engine_against_transformers_on_the_toy_model() -> None:
    """Everything but the clock: same weights, same tokens, tuned settings, ratios from the pairs that were made."""
    report = compare(
        {"model_path": "dummy", "dtype": "float32", "device": "cpu", "num_threads": 1, "max_total_tokens": 2048},
        "transformers",
        cases=[Case(batch=2, prompt_tokens=12, new_tokens=32)],
        plan=PairPlan(pairs=1, attempts=20, quiet_s=0.01),  # a pair may be lost to a difference that is no time
        startup=False,
        sampler=Quiet(),
    )
    assert report.weights_sha256["sgl"] == report.weights_sha256["transformers"] is not None
    assert (report.a.dtype, report.b.dtype, report.b.details["attention"]) == ("float32", "float32", "sdpa")
    assert {*report.provenance.versions} == {"sgl", "python", "torch", "transformers"}
    (case,) = report.cases
    assert case.agreement is not None
    assert case.agreement.preferred == case.agreement.common_prefix == 1.0
    assert len(case.tuned["transformers"].tried) == 4
    assert [result.metric for result in case.results] == [FIRST, DECODE, WHOLE]
    whole = case.results[2]
    assert (whole.clean, whole.attempted) == (1, len(case.pairs))
    assert whole.ratio is not None
    last = case.pairs[-1]
    assert last.a is not None
    assert last.b is not None
    assert whole.ratio.median == last.b.seconds[WHOLE] / last.a.seconds[WHOLE]
    assert (whole.ratio.a_s, whole.ratio.b_s) == (last.a.seconds[WHOLE], last.b.seconds[WHOLE])


@pytest.mark.parametrize("setting", ["cache=big", "loop=fast", "speed=high"])
def test_a_wrong_setting_of_the_peer_is_refused(setting: str) -> None:
    from sgl.bench.peers.transformers_adapter import TransformersAdapter

    name, _, value = setting.partition("=")
    load = Load(model_path="dummy", dtype="float32", device="cpu", num_threads=1, settings={name: value})
    with pytest.raises(InvalidParameter, match=r"known are loop=forward\|generate, cache=dynamic\|static"):
        TransformersAdapter(load)
