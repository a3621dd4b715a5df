"""What executes request graphs: the protocol between the language and every backend.

Owns the protocols `Backend` and `Session`. The local engine, remote servers, API backends, replay and the mock
implement them; the interpreter uses nothing else. Every implementation passes `tests/support/backend_conformance.py`.

A session is one running program. Its events arrive through the sink given to `open`, on a thread of the backend, in
order, ending with exactly one `DoneEvent` or `FailedEvent`. The sink must not block. No call blocks except on the
returned futures; a backend that dies sends `FailedEvent` (`EngineDead`) to every open session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias, runtime_checkable

from sgl.lang.graph import Event, Graph, ProgramOptions, StateText

EventSink: TypeAlias = Callable[[Event], None]


@runtime_checkable
class Session(Protocol):
    """One open program on a backend. Thread-safe."""

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute a whole program or the next fragment; fragments run in the order of submission.

        Args:
            finish: nothing follows; the state is released when all nodes are done, then `DoneEvent` comes.

        Raises:
            Unsupported: this backend cannot execute one of the nodes. Nothing was submitted.
        """

    def read_state(self, branch: int) -> Future[StateText]:
        """The text and token ids of a live branch after everything submitted so far; fails with `StateLost`."""

    def cancel(self) -> None:
        """Stop everything and release the state; `FailedEvent` with `Cancelled` comes unless the program had ended."""


@runtime_checkable
class Backend(Protocol):
    """Something that executes request graphs.

    One whose model recommends sampling parameters also has `sampling_defaults() -> Mapping[str, Any]`: fields of
    `Sampling`, which the language puts below every explicit value.
    """

    def open(self, sink: EventSink, options: ProgramOptions) -> Session:
        """Start a program."""

    def flush_cache(self) -> bool:
        """Drop what no program uses from the prefix cache; False if there is none."""

    def server_info(self) -> Mapping[str, Any]:
        """What this backend runs, for people and logs."""

    def shutdown(self) -> None:
        """Release everything; open sessions fail. Idempotent."""
