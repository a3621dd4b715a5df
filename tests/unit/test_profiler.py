"""Profiles of steps: the trace has their names, and exactly the steps that were asked for."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import httpx2
import numpy as np
import pytest
from support.serving import serving

from sgl.errors import InvalidParameter
from sgl.runtime.engine import Engine
from sgl.runtime.plan import Chunk, StepPlan
from sgl.runtime.profiler import step_name

GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


def steps_of(path: str) -> list[str]:
    """Names of the steps in a trace, in order."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("step[")]
    return [event["name"] for event in sorted(named, key=lambda event: event["ts"])]


def test_a_profile_has_its_steps_by_name(dummy_engine: Engine, tmp_path: Path) -> None:
    dummy_engine.flush_cache()
    path = dummy_engine.start_profile(str(tmp_path / "new"), activities=["CPU"])
    with pytest.raises(InvalidParameter, match="under way"):
        dummy_engine.start_profile(str(tmp_path))
    dummy_engine.generate(["a profile of two", "b"], GREEDY)
    assert dummy_engine.stop_profile() == path
    names = steps_of(path)
    assert names[0].startswith("step[EXTEND bs=")
    assert names[-1].startswith("step[DECODE bs=")
    # Whether the second prompt arrives before the first one's step or after it, all tokens are told.
    tokens = {kind: sum(map(int, re.findall(rf" {kind}=(\d+)", " ".join(names)))) for kind in ("c_sq", "g_sq")}
    assert tokens == {"c_sq": 17, "g_sq": 2 * (GREEDY["max_new_tokens"] - 1)}
    with pytest.raises(InvalidParameter, match="no profile"):
        dummy_engine.stop_profile()


def test_the_window_is_exact(dummy_engine: Engine, tmp_path: Path) -> None:
    path = dummy_engine.start_profile(str(tmp_path), start_step=2, num_steps=3)
    dummy_engine.generate("exactly", GREEDY)
    names = steps_of(path)
    assert len(names) == 3
    assert all(name.startswith("step[DECODE bs=1 ") for name in names)
    dummy_engine.start_profile(str(tmp_path))  # the one before has ended by itself
    with pytest.raises(InvalidParameter, match="before its first step"):
        dummy_engine.stop_profile()


def test_without_a_folder_it_has_one_of_its_own(dummy_engine: Engine) -> None:
    folders = []
    for _ in range(2):
        folders.append(Path(dummy_engine.start_profile(num_steps=1)).parent)
        assert folders[-1].stat().st_mode & 0o777 == 0o700
        dummy_engine.generate("a", GREEDY)
    assert folders[0] != folders[1]
    for folder in folders:
        assert len([*folder.iterdir()]) == 1
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"activities": ["MEM"]}, "MEM"),
        ({"activities": ["CUDA_PROFILER"]}, "needs an engine on a GPU"),
        ({"activities": ["GPU"]}, "no GPU"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"output_dir": "/proc/nowhere"}, "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(dummy_engine: Engine, asked: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        dummy_engine.start_profile(**asked)  # type: ignore[arg-type]
    dummy_engine.generate("x", {"max_new_tokens": 1})


def test_over_http(dummy_engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    with serving(dummy_engine, profiler_dir=str(folder)) as served, httpx2.Client(base_url=served.url) as client:
        (tmp_path / "out").symlink_to("/")
        for name in ("/etc", str(tmp_path), "..", "a/../../b", "../out/tmp", "a\0b"):
            refused = client.post("/start_profile", json={"output_dir": name, "num_steps": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "output_dir")
        assert not folder.exists()
        begun = client.post("/start_profile", json={"output_dir": "mine", "num_steps": 2}).json()
        assert Path(begun["path"]).parent == folder / "mine"
        client.post("/generate", json={"text": "over http", "sampling_params": GREEDY}).raise_for_status()
        assert len(steps_of(begun["path"])) == 2
        assert client.post("/stop_profile").status_code == 400


def test_rows_that_are_verified() -> None:
    def row(length: int) -> Chunk:
        table = np.zeros(length, dtype=np.int32)
        return Chunk(sequence=1, token_ids=[0] * 3, start=length - 3, page_table=table, num_drafts=2)

    assert step_name(StepPlan(chunks=(row(10), row(20)))) == "step[VERIFY bs=2 g_sq=6 g_sqsq=18 g_sqsk=90 g_sk=30]"
