"""Reading a running program's text as it appears.

Owns the cursor over a program's streamed events: a branch's text, or the value of one variable. It takes what is there
without waiting, so the same cursor serves the blocking iterator and the asynchronous one (no thread waits for it).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from sgl.lang.graph import DeltaEvent
from sgl.lang.interpreter import Capture, Program


class Cursor:
    """A place in the stream of one branch (or, with `name`, of one variable on it).

    Args:
        capture: gives the variable's capture once the body has made it. The first one found is followed to its end.
        final: gives the value of a variable that no generation or select made, once the program is over; it raises
            when there is no such variable.
    """

    def __init__(
        self,
        program: Program,
        branch: int,
        name: str | None,
        capture: Callable[[], Capture | None],
        final: Callable[[], Any],
    ) -> None:
        self._program = program
        self._branch = branch
        self._name = name
        self._find = capture
        self._final = final
        self._capture: Capture | None = None
        self._position = 0
        self._sent = 0

    def take(self) -> tuple[list[Any], bool]:
        """Pieces that came since the last call, and whether that was all.

        Raises:
            UnknownName: the program is over and has no such variable.
            SglError: the program failed (after the pieces that came before it were taken).
        """
        program = self._program
        with program.changed:
            if self._name is not None and self._capture is None:
                self._capture = self._find()
            capture = self._capture
            # Until the capture is known, events are left where they are: they may be its own.
            events = program.stream[self._position :] if self._name is None or capture is not None else []
            self._position += len(events)
            over = program.done is not None
            if capture is not None:
                over = over or capture.event is not None
        pieces: list[Any] = []
        for event in events:
            if event.branch != self._branch or not event.text:
                continue
            if self._name is not None:
                if not isinstance(event, DeltaEvent) or capture is None or event.node != capture.node:
                    continue
                self._sent += len(event.text)
            pieces.append(event.text)
        if over and capture is not None and capture.event is not None:
            rest = capture.event.value[self._sent :]  # a select has no deltas
            pieces.extend([rest] if rest else [])
        if over and capture is None and self._name is not None:
            pieces.append(self._final())
        if not pieces and not over:
            program.raise_if_failed()
        return pieces, over


def iterate(program: Program, cursor: Cursor) -> Iterator[Any]:
    """Pieces until the end, waiting for each."""
    while True:
        with program.changed:
            seen = program.version
        pieces, over = cursor.take()
        yield from pieces
        if over:
            return
        if pieces:
            continue  # an error that came with them is raised by the next look
        with program.changed:
            while program.version == seen:
                program.sleep()


async def iterate_async(program: Program, cursor: Cursor) -> AsyncIterator[Any]:
    """Pieces until the end, without a thread that waits."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        # The loop may close at any moment, and this is a thread of the backend: the consumer's end is no error of it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(woken.set)

    program.listen(wake, on=True)
    try:
        while True:
            woken.clear()
            pieces, over = cursor.take()
            for piece in pieces:
                yield piece
            if over:
                return
            if pieces:
                continue
            await woken.wait()
    finally:
        program.listen(wake, on=False)
