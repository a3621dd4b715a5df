"""What is kept of a run for looking at it afterwards: its nodes, its values, and when they came.

Owns `RunRecord`, which a program fills as it goes (references only; nothing is copied), and the last record of each
program by the place of its function. A record stops growing at a bound, so that a program of a million nodes is not
held by its looks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable

from sgl.lang.backend import Backend
from sgl.lang.graph import DoneEvent, Event, FailedEvent, Node, ValueEvent

MAX_NODES = 20_000
_MAX_NAMES = 64

_lock = threading.Lock()
_last: OrderedDict[str, RunRecord] = OrderedDict()


class RunRecord:
    """One run. Filled by `interpreter.Program`, under its lock.

    Attributes:
        name: of the program; `key` (an argument) is under what the last one is found.
        fragments: per message, the seconds since the start and the nodes.
        values: by node, the seconds since the start and the event.
        end: how it ended, and after how many seconds.
        complete: False once it stopped growing.
    """

    def __init__(self, name: str, backend: Backend, key: str | None = None) -> None:
        self.name = name
        self._backend = weakref.ref(backend)  # being looked at keeps no engine alive
        self.fragments: list[tuple[float, tuple[Node, ...]]] = []
        self.values: dict[int, tuple[float, ValueEvent]] = {}
        self.end: tuple[float, DoneEvent | FailedEvent] | None = None
        self.complete = True
        self._num_nodes = 0
        self._started = time.monotonic()
        if key is not None:
            with _lock:
                _last[key] = self
                _last.move_to_end(key)
                if len(_last) > _MAX_NAMES:
                    _last.popitem(last=False)

    def sent(self, nodes: Iterable[Node]) -> None:
        """A message is on its way."""
        sent = tuple(nodes)
        self._num_nodes += len(sent)
        self.complete = self.complete and self._num_nodes <= MAX_NODES
        if self.complete:
            self.fragments.append((time.monotonic() - self._started, sent))

    def came(self, event: Event) -> None:
        """Something came back."""
        now = time.monotonic() - self._started
        if isinstance(event, ValueEvent) and self.complete:
            self.values[event.node] = (now, event)
        elif isinstance(event, (DoneEvent, FailedEvent)):
            self.end = (now, event)

    @property
    def backend(self) -> Backend | None:
        """What executed it, if somebody still has it."""
        return self._backend()

    @property
    def nodes(self) -> list[Node]:
        """Everything that was sent, in order."""
        return [node for _, nodes in self.fragments for node in nodes]

    def to_html(self) -> str:
        """The run as one page without anything from elsewhere: the fork tree with its texts, and when what came."""
        from sgl.lang.view.run import run_page

        return run_page(self)

    def _repr_html_(self) -> str:
        from sgl.lang.view.run import run_part

        return run_part(self)


def last_run(key: str) -> RunRecord | None:
    """The record of the last run that was started under that key, if it is still kept."""
    with _lock:
        return _last.get(key)
