"""`sgl bench program --peer NAME`: programs against the same tasks as users of other libraries write them.

Owns the comparison and its report. Six tasks (`program_tasks`) run as programs on our engine and, with the same weights
(one folder), dtype, cores and threads, through the peer in a process of its own; they take turns in pairs, by the rule
of `sgl.bench.harness`. `plain` is our own engine asked with plain requests, its cache on. The 17 workloads of `--wall`
are not run here: they are made of random text and forced lengths, which the libraries have no calls for.

Each run begins with empty caches on both sides. Answers are compared and shown, and need not be equal: libraries choose
an option token by token under a constraint, where `select` compares whole options.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import sgl
from sgl import environment
from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import ProcSampler, Sampler, least_busy
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.peers import launch
from sgl.bench.peers.convert import converted
from sgl.bench.plain import PlainBackend
from sgl.bench.program_drivers import PACKAGES
from sgl.bench.program_tasks import TASKS, Task
from sgl.bench.provenance import Provenance, provenance, side_variables
from sgl.errors import BenchError, ConfigError
from sgl.runtime.config import config_from_mapping
from sgl.runtime.engine import Engine
from sgl.runtime.loading.facts import cpu_count
from sgl.runtime.loading.sources import locate

PLAIN = "plain"
PEERS = (PLAIN, *PACKAGES)
_DRIVERS = "sgl.bench.program_drivers"
_TIMEOUT_S = 900.0
_QUOTED = 600
"""Characters of a peer's complaint that an error quotes."""


class TaskComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One task. The ratio is the peer's time over ours; without one, `why` says what is missing.

    Attributes:
        equal: answers in which both sides agree, of `num_answers`.
    """

    task: str
    about: str
    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    equal: int = 0
    num_answers: int = 0
    result: Result | None = None
    pairs: tuple[Pair, ...] = ()
    why: str = ""


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `sgl bench program --peer` prints: every pair with its raw times, and what is needed to measure it again."""

    peer: str
    peer_settings: dict[str, str]
    peer_versions: dict[str, str | None]
    model: str
    dtype: str
    engine: dict[str, Any]
    provenance: Provenance
    tasks: tuple[TaskComparison, ...]
    geometric_mean: float | None
    measured: int


class Peer:
    """The other side of the comparison: runs a task once. Used as a context manager."""

    settings: dict[str, str]
    versions: dict[str, str | None]
    can: frozenset[str] = frozenset({"generate", "choose", "fill"})
    pid: int = 0
    """Of its process; 0 where it has none of its own."""

    def run(self, task: Task) -> tuple[float, list[str]]:
        """Seconds and answers of one run on empty caches."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        return

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainPeer(Peer):
    """Our own engine, asked with one request per generation and one per option, as clients of an API do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.settings = {"requests": "together", "cache": "on"}
        self.versions = {"sgl": sgl.__version__}

    def run(self, task: Task) -> tuple[float, list[str]]:
        return timed_programs(self._engine, PlainBackend(self._engine), task)


class LibraryPeer(Peer):
    """A library in a process of its own, spoken to in lines of JSON.

    Args:
        name: a key of `sgl.bench.program_drivers.DRIVERS`.
        python: the interpreter that has it; ours otherwise.

    Raises:
        BenchError: it does not start, or says something else than the protocol.
    """

    def __init__(self, name: str, cores: Sequence[int], folder: str, dtype: str, python: str | None = None) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        package = str(Path(sgl.__file__).parent)
        command = [python or sys.executable, "-P", launch.__file__, package, _DRIVERS]
        self._process = subprocess.Popen(
            [*command, name, ",".join(map(str, cores)), folder, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**environment.inherited(PYTHONPATH=""), **side_variables(len(cores))},
        )
        self.pid = self._process.pid
        try:
            hello = self._read()
        except BenchError:
            self.close()
            raise
        self.settings, self.versions = hello["settings"], hello["versions"]
        self.can = frozenset(hello["can"])

    def run(self, task: Task) -> tuple[float, list[str]]:
        stdin = self._process.stdin
        if stdin is None:
            raise BenchError(f"peer {self._name} has no input")
        try:
            stdin.write(json.dumps({"task": task.name}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading says so, with its last words
        reply = self._read()
        if "error" in reply:
            raise BenchError(f"peer {self._name} failed at {task.name}: {reply['error'][:_QUOTED]}")
        return float(reply["seconds"]), [str(answer) for answer in reply["answers"]]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise BenchError(f"peer {self._name} has no output")
        ready, _, _ = select.select([stdout], [], [], _TIMEOUT_S)
        line = stdout.readline() if ready else b""
        try:
            return dict(json.loads(line))
        except ValueError:
            self._log.seek(0)
            said = " ".join(self._log.read().decode(errors="replace").strip().splitlines()[-1:])[-_QUOTED:]
            what = "said nothing" if not ready else "ended, or broke the protocol"
            raise BenchError(
                f"peer {self._name} {what}: {said}",
                hint=f"it needs {', '.join(PACKAGES[self._name])}; --peer-python names an interpreter that has them",
            ) from None


def timed_programs(engine: Engine, backend: Any, task: Task) -> tuple[float, list[str]]:
    """Seconds and answers of a task's programs on an empty cache."""
    engine.flush_cache()
    start = time.perf_counter()
    answers = task.by_programs(backend)
    return time.perf_counter() - start, answers


def compare_peer(
    name: str,
    tasks: Sequence[str] = (),
    *,
    plan: PairPlan,
    fields: Mapping[str, Any],
    python: str | None = None,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> PeerReport:
    """Measure every task against a peer.

    Args:
        name: one of `PEERS`.
        tasks: names of `TASKS`; all of them by default.
        fields: of `EngineConfig`, for our side.
        python: the interpreter that has the peer.

    Raises:
        ConfigError: an unknown peer or task, or a model that the peer cannot be given.
        BenchError: the peer does not run.
    """
    if name not in PEERS:
        raise ConfigError(f"no peer {name!r}", hint=f"they are {', '.join(PEERS)}", param="peer")
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"no task {task!r}", hint=f"they are {', '.join(TASKS)}", param="task")
    config = config_from_mapping(fields)
    threads = config.num_threads or cpu_count()
    cores = least_busy(os.sched_getaffinity(0), threads)
    given: dict[str, Any] = {**fields, "num_threads": threads}
    if name != PLAIN:
        given |= _same_weights(config.model_path, str(fields.get("dtype", "bfloat16")), progress)
    with Engine(**given) as engine:
        info = engine.server_info()
        dtype = str(info["resolved"]["dtype"])
        progress(f"starting {name}")
        with _peer(name, engine, cores, given, dtype, python) as peer:
            sides = (engine.worker_pid, peer.pid) if peer.pid else ()
            sampler = ProcSampler(cores) if sampler is None else sampler
            found = [_compare(TASKS[task], engine, peer, sampler, plan, sides, progress) for task in tasks or TASKS]
            return _report(name, peer, found, engine, given, dtype, provenance(cores, side_variables(threads), ()))


def _same_weights(model_path: str, dtype: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Fields with which our engine loads what the peer loads: a folder, made from the GGUF file where it is one."""
    source = locate(model_path, offline=False)
    if source.path is None:
        raise ConfigError(f"a peer cannot load {model_path!r}", hint="name a model that has files", param="model_path")
    folder = source.path if source.path.is_dir() else converted(source, progress)
    return {"model_path": str(folder), "dtype": dtype}


def _peer(
    name: str, engine: Engine, cores: Sequence[int], given: Mapping[str, Any], dtype: str, python: str | None
) -> Peer:
    return PlainPeer(engine) if name == PLAIN else LibraryPeer(name, cores, str(given["model_path"]), dtype, python)


def _compare(
    task: Task,
    engine: Engine,
    peer: Peer,
    sampler: Sampler,
    plan: PairPlan,
    sides: Sequence[int],
    progress: Callable[[str], None],
) -> TaskComparison:
    lacking = [method for method in task.needs if method not in peer.can]
    if lacking:
        return TaskComparison(task=task.name, about=task.about, why=f"the peer has no {', '.join(lacking)}")
    progress(f"task {task.name}")
    _, ours = timed_programs(engine, engine, task)
    _, theirs = peer.run(task)
    run = measure_pairs(
        lambda number: {"wall": timed_programs(engine, engine, task)[0]},
        lambda number: {"wall": peer.run(task)[0]},
        sampler,
        plan,
        sides=sides,
        progress=progress,
    )
    return TaskComparison(
        task=task.name,
        about=task.about,
        ours=tuple(ours),
        theirs=tuple(theirs),
        equal=sum(one == other for one, other in zip(ours, theirs, strict=False)),
        num_answers=len(ours),
        result=summarise(run.pairs, "wall", plan.pairs),
        pairs=run.pairs,
    )


def _report(
    name: str,
    peer: Peer,
    found: Sequence[TaskComparison],
    engine: Engine,
    given: Mapping[str, Any],
    dtype: str,
    record: Provenance,
) -> PeerReport:
    ratios = [each.result.ratio.median for each in found if each.result is not None and each.result.ratio is not None]
    return PeerReport(
        peer=name,
        peer_settings=peer.settings,
        peer_versions=peer.versions,
        model=str(engine.server_info()["model"]),
        dtype=dtype,
        engine=dict(given),
        provenance=record,
        tasks=tuple(found),
        geometric_mean=math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        measured=len(ratios),
    )
