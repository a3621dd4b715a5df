"""Text that arrives in pieces, read as if it were all there.

Owns the buffer, the position in it and the few ways to move on. A reader is a generator that yields whenever it needs
text that has not come yet; it is resumed when some has, or when no more will. What it decides depends on the text
alone and never on where that was cut: whatever could still become something else is waited for.

Linear by construction: nothing is read twice, except the at most `max_len` characters in which a marker may be under
way. `examined` counts characters looked at, for tests.

Fails inside readers with `Malformed` (the text is not what must come here) and `Truncated` (it ended before).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A reader: yields for more text, returns a `T`."""

Sink: TypeAlias = Callable[[str], object]

_SPACE = re.compile(r"\s+")
_UNLIMITED = sys.maxsize


class Malformed(Exception):
    """The text is not what must come here."""


class Truncated(Exception):
    """The text has ended where more must come."""


class Markers:
    """Texts to look for. Where two begin at the same place, the longer one counts.

    Example:
        >>> Markers(["<a>", "<ab>"]).held("x<a", 0)
        1
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        self.max_len = max(map(len, self.texts), default=0)
        self._prefixes = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        """The first marker between two places."""
        return self._pattern.search(text, start, end)

    def match(self, text: str, start: int) -> str:
        """The marker that begins at `start`; empty if there is none."""
        found = self._pattern.match(text, start)
        return found.group() if found is not None else ""

    def held(self, text: str, start: int) -> int:
        """Where in the text, not before `start`, its end may be the beginning of a marker; its length if nowhere."""
        for index in range(max(start, len(text) - self.max_len + 1), len(text)):
            if text[index:] in self._prefixes:
                return index
        return len(text)


class Source:
    """The text so far, and how far it has been read.

    Attributes:
        closed: nothing more comes.
        examined: characters that were looked at, those that were looked at again included.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        self.examined = 0
        self._mark: int | None = None
        self._kept: list[str] = []

    def add(self, text: str) -> None:
        """More text."""
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.at])
            self._mark = 0
        self.text = self.text[self.at :] + text
        self.at = 0

    # --- what was read ---

    def mark(self, begin: str = "") -> None:
        """Remember what is read from here on, as if `begin` had come just before."""
        self._kept = [begin]
        self._mark = self.at

    def since_mark(self) -> str:
        """What was read since, and no longer remembered."""
        text = "".join(self._kept) + (self.text[self._mark : self.at] if self._mark is not None else "")
        self._kept = []
        self._mark = None
        return text

    # --- readers ---

    def peek(self) -> Steps[str]:
        """The next character, left where it is; empty at the end."""
        while self.at == len(self.text):
            if self.closed:
                return ""
            yield
        self.examined += 1
        return self.text[self.at]

    def skip(self) -> str:
        """Move over the character that was peeked at."""
        self.at += 1
        return self.text[self.at - 1]

    def back(self) -> None:
        """Move back over the character that was read last."""
        self.at -= 1

    def exactly(self, count: int) -> Steps[str]:
        """The next `count` characters.

        Raises:
            Truncated: the text ends before.
        """
        while len(self.text) - self.at < count:
            if self.closed:
                raise Truncated
            yield
        self.at += count
        self.examined += count
        return self.text[self.at - count : self.at]

    def run(self, pattern: re.Pattern[str], sink: Sink, limit: int = _UNLIMITED) -> Steps[None]:
        """Pass on as many characters as `pattern` takes; it matches runs of single characters.

        Raises:
            Malformed: they are more than `limit`.
        """
        while True:
            found = pattern.match(self.text, self.at)
            if found is not None:
                self.examined += found.end() - self.at
                limit = self._pass(found.end(), sink, limit)
            if self.at < len(self.text) or self.closed:
                return
            yield

    def space(self, sink: Sink | None = None) -> Steps[None]:
        """Move over white space."""
        if self.at < len(self.text) and not self.text[self.at].isspace():
            return
        yield from self.run(_SPACE, sink or _nowhere)

    def match(self, markers: Markers) -> Steps[str]:
        """Move over the marker that comes here; empty, and no move, if none does."""
        while True:
            found = markers.match(self.text, self.at)
            self.examined += min(markers.max_len, len(self.text) - self.at)
            if self.closed or len(self.text) - self.at >= markers.max_len or markers.held(self.text, self.at) > self.at:
                self.at += len(found)
                return found
            yield

    def until(self, markers: Markers, sink: Sink, limit: int = _UNLIMITED) -> Steps[str]:
        """Pass on the text up to the first marker, and move over that; empty when the text ends without one.

        Raises:
            Malformed: no marker within `limit` characters; those are passed on.
        """
        while True:
            start = self.at
            end = min(len(self.text), start + limit + markers.max_len)  # a marker beyond the limit is none
            found = markers.search(self.text, start, end)
            self.examined += (found.end() if found is not None else end) - start + markers.max_len
            is_near_end = found is None or found.start() + markers.max_len > len(self.text)
            held = markers.held(self.text, start) if is_near_end and not self.closed else len(self.text)
            if found is not None and found.start() < held:
                self._pass(found.start(), sink, limit)
                self.at = found.end()
                return found.group()
            limit = self._pass(held, sink, limit)
            if self.closed:
                return ""
            yield

    def _pass(self, end: int, sink: Sink, limit: int) -> int:
        """Pass on the text up to `end`, or up to the limit; what is left of that."""
        stop = min(end, self.at + limit)
        if stop > self.at:
            sink(self.text[self.at : stop])
        left = limit - (stop - self.at)
        self.at = stop
        if stop < end:
            raise Malformed
        return left


def _nowhere(text: str) -> None:
    """A sink for what is not wanted."""
