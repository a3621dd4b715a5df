"""`sgl bench startup`: what is started, with which cache, and what is said when nothing starts. No times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sgl.bench import startup
from sgl.bench.startup import Start, run, start_once
from sgl.errors import BenchError, ConfigError, InvalidParameter


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the user's with a fetched model and a converted tokenizer."""
    for name in ("models", "tokenizers"):
        (tmp_path / name).mkdir()
    (tmp_path / "models" / "fetched.gguf").write_bytes(b"x")
    (tmp_path / "tokenizers" / "converted").write_bytes(b"x")
    monkeypatch.setenv("SGL_CACHE", str(tmp_path))
    return tmp_path


def test_starts_are_made_in_both_caches(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start converts the tokenizer where it is missing, as the loader does; the user's cache stays as it is."""
    seen: list[bool] = []

    def start(fields: Mapping[str, Any], folder: Path) -> Start:
        assert fields == {"model_path": "dummy"}
        assert (folder / "models" / "fetched.gguf").read_bytes() == b"x"
        seen.append((folder / "tokenizers").exists())
        (folder / "tokenizers").mkdir(exist_ok=True)
        return Start(ready=float(len(seen)), first_token=10.0 + len(seen))

    monkeypatch.setattr(startup, "start_once", start)
    monkeypatch.setattr(startup, "import_seconds", lambda: 0.1)
    report = run({"model_path": "dummy"}, repeats=3)
    assert seen == [False, True, True, True, False, False, False]
    assert [(row.what, row.samples) for row in report.measured] == [
        ("import sgl", (0.1, 0.1, 0.1)),
        ("process start to ready, tokenizer cache filled", (2.0, 3.0, 4.0)),
        ("process start to first token, tokenizer cache filled", (12.0, 13.0, 14.0)),
        ("process start to ready, tokenizer cache empty", (5.0, 6.0, 7.0)),
        ("process start to first token, tokenizer cache empty", (15.0, 16.0, 17.0)),
    ]
    assert [path.name for path in sorted(cache.rglob("*"))] == ["models", "fetched.gguf", "tokenizers", "converted"]


def test_a_start_is_a_process_that_gives_a_token(tmp_path: Path) -> None:
    start = start_once({"model_path": "dummy", "max_total_tokens": 512}, tmp_path)
    assert 0 < start.ready < start.first_token


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="page_sise"):
        start_once({"model_path": "dummy", "page_sise": 4}, tmp_path)


def test_a_process_that_dies_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_PROGRAM", "import sys; print('ready'); sys.exit('out of luck')")
    with pytest.raises(BenchError, match="out of luck"):
        start_once({}, tmp_path)


def test_nothing_to_repeat_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="repeats is 0"):
        run({}, repeats=0)
