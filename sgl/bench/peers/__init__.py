"""Who can be measured: a table of names, and for each the class that drives it in a process of its own.

Owns the table. To add a peer, write one file with an `Adapter` (see `sgl.bench.peers.adapter`) and add one row; the
process, the protocol over its pipes, timing and pairing are there already. `sgl` is in the table as well: measured
against itself it shows what the harness's own error is.
"""

from __future__ import annotations

import difflib
import importlib.util

import msgspec

from sgl.errors import BenchError, InvalidParameter


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One row: `adapter` is `module:Class`; `packages` must be installed, and their versions are reported."""

    name: str
    adapter: str
    packages: tuple[str, ...] = ()


_TABLE = (
    Peer(name="sgl", adapter="sgl.bench.peers.engine_adapter:EngineAdapter"),
    Peer(
        name="transformers",
        adapter="sgl.bench.peers.transformers_adapter:TransformersAdapter",
        packages=("transformers", "torch"),
    ),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _TABLE}


def find_peer(name: str) -> Peer:
    """The row of a peer that can run here.

    Raises:
        InvalidParameter: no such peer.
        BenchError: a package that it needs is not installed.
    """
    peer = PEERS.get(name)
    if peer is None:
        near = difflib.get_close_matches(name, PEERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(PEERS)}"
        raise InvalidParameter(f"no peer {name!r}", hint=hint, param="peer")
    missing = [package for package in peer.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise BenchError(f"peer {name} needs {', '.join(missing)}", hint=f"pip install {' '.join(missing)}")
    return peer
