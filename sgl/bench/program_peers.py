"""`sgl bench program --peer NAME`: programs against the same tasks as users of other libraries write them.

Owns the comparison and its report. Six tasks (`program_tasks`), or the 17 workloads where they apply
(`program_workloads`), run as programs on our engine and, with the same weights, cores and threads, through the peer
(`program_process`); they take turns in pairs, by the rule of `sgl.bench.harness`. `plain` is our own engine asked with
plain requests, its cache on.

Each run begins with empty caches on both sides. A peer that can run in several ways is tried in each, and the fastest
is measured. Answers are compared and shown, and need not be equal: libraries choose an option token by token under a
constraint, where `select` compares whole options.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import ProcSampler, Sampler, least_busy
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.peers.convert import converted
from sgl.bench.program import unit_of
from sgl.bench.program_drivers import LIBRARIES
from sgl.bench.program_process import LibraryPeer, Peer, PlainPeer
from sgl.bench.program_requests import ABILITIES
from sgl.bench.program_tasks import TASKS, Task
from sgl.bench.program_wall import FormTokens, cost_of, timed_waves
from sgl.bench.program_workloads import NEEDS
from sgl.bench.provenance import Provenance, provenance, side_variables
from sgl.bench.workloads import Workload
from sgl.errors import BenchError, ConfigError
from sgl.runtime.config import config_from_mapping
from sgl.runtime.engine import Engine
from sgl.runtime.loading.facts import cpu_count
from sgl.runtime.loading.sources import locate

PLAIN = "plain"
PEERS = (PLAIN, *LIBRARIES)
MAX_TURN_S = 20.0


class TaskComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One task or workload. The ratio is the peer's time over ours; without one, `why` says what is missing.

    Attributes:
        cost: what one run makes our engine do.
        variant: of the peer, the fastest; `tried` has the seconds of all.
        equal: answers in which both sides agree, of `num_answers`; of a workload none are compared.
    """

    task: str
    about: str
    cost: FormTokens | None = None
    variant: str = ""
    tried: dict[str, float] = {}
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
    quantization: str
    peer_dtype: str
    mixed: bool
    engine: dict[str, Any]
    provenance: Provenance
    tasks: tuple[TaskComparison, ...]
    geometric_mean: float | None
    measured: int


class Job(msgspec.Struct, frozen=True):
    """What is measured: one run on each side, on empty caches; seconds and answers."""

    name: str
    about: str
    needs: tuple[str, ...]
    ours: Callable[[Engine], tuple[float, list[str]]]
    theirs: Callable[[Peer], tuple[float, list[str]]]


def task_job(task: Task) -> Job:
    """A task as programs, and as calls."""
    return Job(
        task.name, task.about, task.needs, lambda engine: task.timed(engine, engine), lambda peer: peer.run(task)
    )


def workload_job(workload: Workload, seed: int, scale: float, model_path: str) -> Job:
    """A workload as programs, and as plain requests to the peer."""
    calls = workload.build(seed, scale, unit_of(model_path))

    def ours(engine: Engine) -> tuple[float, list[str]]:
        engine.flush_cache()
        return timed_waves(calls, engine), []

    return Job(workload.name, workload.stresses, NEEDS[workload.name], ours, lambda peer: (peer.run_calls(calls), []))


def compare_peer(
    name: str,
    tasks: Sequence[str] = (),
    *,
    plan: PairPlan,
    fields: Mapping[str, Any],
    python: str | None = None,
    workloads: Sequence[Workload] = (),
    scale: float = 0.002,
    max_turn_s: float = MAX_TURN_S,
    mixed: bool = False,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> PeerReport:
    """Measure every task, or workload, against a peer.

    Args:
        name: one of `PEERS`.
        tasks: names of `TASKS`; all of them by default, unless there are workloads.
        fields: of `EngineConfig`, for our side.
        python: the interpreter that has the peer.
        workloads: to run instead, at this scale.
        max_turn_s: tasks of which one run takes the peer longer are not measured.
        mixed: the peer's form of the weights may differ from ours: our engine runs the file in the form that it
            resolves, a peer that reads folders gets the same file expanded.

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
    path = dtype = ""
    if name != PLAIN:
        path, dtype = _peer_weights(name, config.model_path, fields, progress)
        if not mixed:
            form = {"dtype": dtype} if dtype else {"quantization": fields.get("quantization", "gguf")}
            given |= {"model_path": path, **form}
    jobs = [task_job(TASKS[task]) for task in tasks or (() if workloads else TASKS)]
    jobs += [workload_job(each, plan.seed, scale, config.model_path) for each in workloads]
    with Engine(**given) as engine:
        resolved = engine.server_info()["resolved"]
        progress(f"starting {name}")
        other: Peer = PlainPeer(engine) if name == PLAIN else LibraryPeer(name, cores, path, dtype, python, engine)
        with other as peer:
            compare = _Compare(
                engine, peer, ProcSampler(cores) if sampler is None else sampler, plan, max_turn_s, progress
            )
            found = tuple(compare(job) for job in jobs)
            ratios = [each.result.ratio.median for each in found if each.result and each.result.ratio]
            return PeerReport(
                peer=name,
                peer_settings=peer.settings,
                peer_versions=peer.versions,
                model=str(engine.server_info()["model"]),
                dtype=str(resolved["dtype"]),
                quantization=str(resolved["quantization"]),
                peer_dtype=dtype,
                mixed=mixed,
                engine=given,
                provenance=provenance(cores, side_variables(threads), ()),
                tasks=found,
                geometric_mean=math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
                measured=len(ratios),
            )


def _peer_weights(
    name: str, model_path: str, fields: Mapping[str, Any], progress: Callable[[str], None]
) -> tuple[str, str]:
    """What the peer loads, and its dtype: the GGUF file, whose blocks have their own (so ""), or a folder, made from
    the GGUF file where it is one."""
    source = locate(model_path, offline=False)
    if source.path is None:
        raise ConfigError(f"a peer cannot load {model_path!r}", hint="name a model that has files", param="model_path")
    if LIBRARIES[name].reads == "gguf":
        if source.path.is_dir():
            raise ConfigError(f"{name} reads GGUF files, not folders", hint="name one", param="model_path")
        return str(source.path), ""
    folder = source.path if source.path.is_dir() else converted(source, progress)
    return str(folder), str(fields.get("dtype", "bfloat16"))


class _Compare:
    """Measures jobs on two sides."""

    def __init__(
        self,
        engine: Engine,
        peer: Peer,
        sampler: Sampler,
        plan: PairPlan,
        max_turn_s: float,
        progress: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._peer = peer
        self._sampler = sampler
        self._plan = plan
        self._max_turn_s = max_turn_s
        self._progress = progress

    def __call__(self, job: Job) -> TaskComparison:
        engine, peer = self._engine, self._peer
        lacking = [ABILITIES[each] for each in job.needs if each not in peer.can]
        if lacking:
            return TaskComparison(task=job.name, about=job.about, why=f"the peer has no {', '.join(lacking)}")
        self._progress(f"task {job.name}")
        _, ours = job.ours(engine)
        try:
            tried, theirs = self._tried(job)
        except BenchError as error:
            return TaskComparison(task=job.name, about=job.about, why=error.message)
        best = min(tried, key=tried.__getitem__)
        found = TaskComparison(
            task=job.name,
            about=job.about,
            cost=cost_of(engine, lambda: job.ours(engine)),
            variant=best,
            tried=tried,
            ours=tuple(ours),
            theirs=tuple(theirs),
            equal=sum(one == other for one, other in zip(ours, theirs, strict=False)),
            num_answers=len(ours),
        )
        if tried[best] > self._max_turn_s:
            why = f"a run takes the peer {tried[best]:.0f} s, more than {self._max_turn_s:g}"
            return msgspec.structs.replace(found, why=why)
        peer.use(best)
        run = measure_pairs(
            lambda number: {"wall": job.ours(engine)[0]},
            lambda number: {"wall": job.theirs(peer)[0]},
            self._sampler,
            self._plan,
            sides=(engine.worker_pid, peer.pid) if peer.pid else (),
            progress=self._progress,
        )
        return msgspec.structs.replace(found, result=summarise(run.pairs, "wall", self._plan.pairs), pairs=run.pairs)

    def _tried(self, job: Job) -> tuple[dict[str, float], list[str]]:
        """Seconds of a run by variant of the peer, after one that warms it up; the answers of the last."""
        tried: dict[str, float] = {}
        answers: list[str] = []
        for variant in self._peer.variants:
            self._peer.use(variant)
            job.theirs(self._peer)
            tried[variant], answers = job.theirs(self._peer)
        return tried, answers
