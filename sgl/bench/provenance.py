"""On what, with what and by which command something was measured: what a figure is worthless without.

Owns the record and how it is gathered. No torch here: the sides say themselves what they run with.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

import sgl
from sgl.bench.peers import versions as package_versions
from sgl.bench.peers.weights import file_digest
from sgl.environment import read
from sgl.runtime.loading.sources import ModelSource

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_FORWARDED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MALLOC_CONF", "LD_PRELOAD")
"""Variables of the user's that change speed; they reach both sides, and the record."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The machine, the software and the call."""

    time_utc: str
    command: str
    system: str
    cpu: str
    cores: tuple[int, ...]
    """Those that both sides ran on."""
    usable_cores: int
    variables: dict[str, str]
    """Set for both sides."""
    versions: dict[str, str | None]
    sgl_source_sha256: str
    """Of the package's Python files, which tells builds apart that call themselves the same version."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What was run; `sha256` is of its weight file (of the digests in a row of several), empty for random weights."""

    name: str
    kind: str
    sha256: str


def provenance(cores: Collection[int], variables: Mapping[str, str], packages: Iterable[str]) -> Provenance:
    """The record for this process, now."""
    return Provenance(
        time_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cores=tuple(sorted(cores)),
        usable_cores=len(os.sched_getaffinity(0)),
        variables=dict(variables),
        versions={
            "sgl": sgl.__version__,
            **package_versions(sorted({"torch", *packages})),
        },
        sgl_source_sha256=source_digest(),
    )


def side_variables(num_threads: int) -> dict[str, str]:
    """The environment variables that both sides get. They wait for work without spinning: a resting side must not hold
    a core, and threads that spin for a neighbour who lost its core would measure that instead."""
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **{name: value for name in _FORWARDED if (value := read(name)) is not None},
        **dict.fromkeys(_THREAD_VARIABLES, str(num_threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def model_record(source: ModelSource) -> Model:
    """Name and checksum of a model that is here."""
    files: list[Path] = []
    if source.path is not None and source.kind != "dummy":
        files = sorted(source.path.glob("*.safetensors")) if source.path.is_dir() else [source.path]
    digests = [file_digest(path) for path in files]
    together = hashlib.sha256("".join(digests).encode()).hexdigest() if len(digests) > 1 else "".join(digests)
    return Model(name=source.name, kind=source.kind, sha256=together)


def cpu_name() -> str:
    """The processor's own name for itself."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def source_digest() -> str:
    """SHA-256 over the names and bytes of the package's Python files."""
    root = Path(sgl.__file__).parent
    files = [Path(folder) / name for folder, _, names in os.walk(root, followlinks=True) for name in names]
    checksum = hashlib.sha256()
    for path in sorted(path for path in files if path.suffix == ".py"):
        checksum.update(f"{path.relative_to(root).as_posix()} {file_digest(path)}\n".encode())
    return checksum.hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
