"""A side's process: reads requests from its standard input, drives an adapter, answers on its standard output.

Started by `sgl.bench.peers.process`. Owns the process: it runs on the given cores only, whatever libraries print goes
to standard error, and the end of its input ends it, in the middle of a call too, so that it never outlives the harness.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import BinaryIO

import msgspec

from sgl.bench.peers import PEERS, find_peer, versions
from sgl.bench.peers.adapter import Adapter
from sgl.bench.peers.messages import (
    Close,
    Closed,
    Failed,
    Generate,
    Generated,
    Load,
    Preferences,
    Preferred,
    Reply,
    Request,
    Tune,
    Weights,
    WeightsDigest,
    line_of,
    requests,
)
from sgl.errors import BenchError, SglError


class Host:
    """Answers requests with the adapter that `build` makes; reports the versions of `packages` with it."""

    def __init__(self, build: Callable[[Load], Adapter], packages: Sequence[str] = ()) -> None:
        self._build = build
        self._packages = packages
        self._adapter: Adapter | None = None

    def answer(self, request: Request) -> Reply:
        """The reply; an error of the adapter is one as well."""
        try:
            return self._answer(request)
        except SglError as error:
            return Failed(error.to_info())
        except Exception as error:  # noqa: BLE001 - of whatever engine this is: the harness says it to the user
            return Failed(BenchError(f"{type(error).__name__}: {error}").to_info())

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Load):
            if self._adapter is not None:
                raise BenchError("a model is loaded already", hint="one process runs one model")
            self._adapter = self._build(request)
            return msgspec.structs.replace(self._adapter.loaded(), versions=versions(self._packages))
        if isinstance(request, Close):
            if self._adapter is not None:
                self._adapter.close()
            return Closed()
        adapter = self._adapter
        if adapter is None:
            raise BenchError("no model is loaded", hint="send Load first")
        match request:
            case Generate():
                return _timed(adapter, request)
            case Tune():
                return adapter.tune(request.prompts, request.new_tokens)
            case Preferred():
                return Preferences(adapter.preferred(request.texts, request.start))
            case Weights():
                return WeightsDigest(adapter.weights_digest())


def _timed(adapter: Adapter, request: Generate) -> Generated:
    adapter.forget()
    gc.collect()  # the garbage of earlier calls is not this call's
    start = time.perf_counter()
    token_ids = adapter.generate(request.prompts, request.new_tokens)
    seconds = time.perf_counter() - start
    lengths = [len(row) for row in token_ids]
    if lengths != [request.new_tokens] * len(request.prompts):
        raise BenchError(
            f"{len(request.prompts)} prompts gave rows of {lengths} tokens; expected {request.new_tokens} each",
            hint="the peer must ignore the end-of-sequence token",
        )
    return Generated(seconds, token_ids)


def _serve(host: Host, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until `Close`. A thread waits for the input's end, which means that the harness is gone."""
    inbox: SimpleQueue[bytes] = SimpleQueue()

    def listen() -> None:
        for line in source:
            inbox.put(line)
        os._exit(1)

    threading.Thread(target=listen, name="sgl-bench-input", daemon=True).start()
    while True:
        request = requests.decode(inbox.get())
        sink.write(line_of(host.answer(request)))
        sink.flush()
        if isinstance(request, Close):
            return


def _adapter(name: str, load: Load) -> Adapter:
    module, _, attribute = find_peer(name).adapter.partition(":")
    kind: type[Adapter] = getattr(importlib.import_module(module), attribute)
    return kind(load)


def main(name: str, cores: str) -> None:
    """Serve as the side `name` on the cores `cores` (`0,1`)."""
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not protocol
    _serve(Host(lambda load: _adapter(name, load), PEERS[name].packages), sys.stdin.buffer, sink)
    sys.stderr.flush()
    os._exit(0)  # threads of torch have nothing left to say


if __name__ == "__main__":
    main(*sys.argv[1:])
