"""An answer as blocks that follow each other: reasoning, text, calls. As `/v1/responses` and `/v1/messages` show it.

Owns where one block ends and the next begins, and what white space is worth: what stands between two calls, or alone
before the first block, is none of the answer's text.

Example:
    >>> blocks = Blocks()
    >>> [*blocks.feed([Thought("Hm."), Said("\\n"), Said("Hi")]), *blocks.close()] == [
    ...     BlockBegins("reasoning"), BlockGrows("Hm."), BlockEnds(),
    ...     BlockBegins("text"), BlockGrows("\\nHi"), BlockEnds()]
    True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from sgl.server.dialogue import CallArguments, CallBegins, Piece, Said, Thought

Kind: TypeAlias = Literal["text", "reasoning", "call"]


class BlockBegins(NamedTuple):
    """A block begins; a call's has the tool's name."""

    kind: Kind
    name: str = ""


class BlockGrows(NamedTuple):
    """More of its text; of a call: of its arguments."""

    text: str


class BlockEnds(NamedTuple):
    """It is over."""


BlockEvent: TypeAlias = BlockBegins | BlockGrows | BlockEnds


class Blocks:
    """The blocks of one answer, in as many pieces as they come in: the same for every way of cutting the text."""

    def __init__(self) -> None:
        self._open: Kind | None = None
        self._any = False
        self._space = ""

    def feed(self, pieces: Iterable[Piece]) -> Iterator[BlockEvent]:
        """What more pieces add."""
        for piece in pieces:
            match piece:
                case Said(text=text):
                    yield from self._said(text)
                case Thought(text=text):
                    yield from self._begin("reasoning")
                    yield BlockGrows(text)
                case CallBegins(name=name):
                    yield from self._end()
                    yield from self._begin("call", name)
                case CallArguments(text=text):
                    yield BlockGrows(text)
                case _:  # a call is closed by what follows it, which knows whether it was cut
                    pass

    def close(self) -> Iterator[BlockEvent]:
        """The answer is over. One that says nothing has an empty text."""
        if not self._any:
            yield from self._begin("text")
            if self._space:
                yield BlockGrows(self._space)
        yield BlockEnds()

    def _said(self, text: str) -> Iterator[BlockEvent]:
        if self._open != "text":
            self._space += text
            if not self._space.strip():
                return
            text, self._space = self._space, ""
            yield from self._begin("text")
        yield BlockGrows(text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[BlockEvent]:
        if self._open == kind and kind != "call":
            return
        yield from self._end()
        self._open, self._any, self._space = kind, True, ""
        yield BlockBegins(kind, name)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            self._open = None
            yield BlockEnds()
