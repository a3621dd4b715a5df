"""`sgl bench startup`: what happens before the first token, as it is on this machine.

Owns three times: `import sgl`, process start to ready, and process start to first token; the last two with an empty
tokenizer cache and with a filled one. Every sample is a process of its own, after one that is not counted: by then the
weights are in the system's file cache.

An empty cache means a cache folder that leads to the fetched models of the user's, and has nothing made from them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

import sgl
from sgl import environment
from sgl.bench.samples import Sampled, import_seconds, measure
from sgl.errors import BenchError, ErrorInfo, InvalidParameter, SglError
from sgl.runtime.config import config_from_mapping
from sgl.runtime.loading.cache import cache_folder

_PROGRAM = """
import sys, msgspec
from sgl.errors import SglError
from sgl.runtime.engine import Engine
try:
    with Engine(**msgspec.json.decode(sys.argv[1])) as engine:
        print("ready", flush=True)
        engine.generate("Hello", {"max_new_tokens": 1, "temperature": 0})
        print("first token", flush=True)
except SglError as error:
    print(msgspec.json.encode(error.to_info()).decode(), flush=True)
"""
_MADE = ("tokenizers",)
"""Folders of the cache that hold what was made from fetched models."""


class Start(msgspec.Struct, frozen=True):
    """Seconds since the process was started."""

    ready: float
    first_token: float


class StartupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, on what."""

    model: str
    versions: dict[str, str]
    repeats: int
    measured: tuple[Sampled, ...]


def start_once(fields: Mapping[str, Any], cache: Path) -> Start:
    """Start an engine in a new process, with its caches in `cache`, and end it again.

    Raises:
        SglError: the engine's own, when it cannot start.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, msgspec.json.encode(dict(fields)).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment.inherited(SGL_CACHE=str(cache), PYTHONPATH=path),
        ) as process,
    ):
        times = {line.strip(): time.perf_counter() - began for line in process.stdout or ()}
        process.wait()
        if {"ready", "first token"} <= times.keys():
            return Start(times["ready"], times["first token"])
        log.seek(0)
        raise _failure([*times, *log.read().splitlines()])


def run(
    fields: Mapping[str, Any], *, repeats: int = 3, progress: Callable[[str], None] = lambda what: None
) -> StartupReport:
    """Measure everything; `fields` are those of `EngineConfig`.

    Raises:
        InvalidParameter: nothing to repeat.
        SglError: the engine's own, when it cannot start.
    """
    if repeats < 1:
        raise InvalidParameter(f"repeats is {repeats}; expected at least 1", param="repeats")
    progress("import")
    measured = [measure("import sgl", "s", repeats, import_seconds)]
    with _empty_cache() as cache:
        progress("warm-up")
        start_once(fields, cache)  # fills the system's file cache, and this cache folder
        progress("start with a filled tokenizer cache")
        filled = [start_once(fields, cache) for _ in range(repeats)]
    progress("start with an empty tokenizer cache")
    empty = []
    for _ in range(repeats):
        with _empty_cache() as cache:
            empty.append(start_once(fields, cache))
    for what, starts in (("filled", filled), ("empty", empty)):
        for until in ("ready", "first_token"):
            name = f"process start to {until.replace('_', ' ')}, tokenizer cache {what}"
            measured.append(Sampled.of(name, "s", [getattr(start, until) for start in starts]))
    return StartupReport(
        model=config_from_mapping(fields).model_path,
        versions={"sgl": sgl.__version__, "torch": version("torch"), "python": platform.python_version()},
        repeats=repeats,
        measured=tuple(measured),
    )


@contextmanager
def _empty_cache() -> Iterator[Path]:
    """A cache folder with what is in the user's, but for what was made from it."""
    with tempfile.TemporaryDirectory(prefix="sgl-cache-") as name:
        users = cache_folder().absolute()
        for entry in users.iterdir() if users.is_dir() else ():
            if entry.name not in _MADE:
                (Path(name) / entry.name).symlink_to(entry)
        yield Path(name)


def _failure(lines: list[str]) -> SglError:
    """What the process said instead of starting: an error of sgl, or the end of what it printed."""
    for line in lines:
        try:
            return SglError.from_info(msgspec.json.decode(line, type=ErrorInfo))
        except msgspec.MsgspecError:
            continue
    return BenchError(f"the engine's process ended without a token: {' / '.join(lines[-5:])}")
