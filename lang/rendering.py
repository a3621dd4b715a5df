"""A prompt state as text and token ids, without an engine: what counting and explaining need of a model.

Owns the protocols `Renderer` and `RenderedState`, and `PlainRenderer`, which needs no model: tokens are pieces of text,
roles are ChatML lines. A model's own, with its tokenizer and chat template, is `sgl.runtime.rendering.ModelRenderer`;
backends hand theirs out with `renderer()`.

A state's ids are the truth, as in the engine: text is buffered and encoded as one unit by `flush` (before a generation,
a fork or a mark), generated ids stay what they are, and a select's options are encoded together with the last unit.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class Options(Protocol):
    """The options of a select, as tokens after the state."""

    @property
    def paths(self) -> Sequence[tuple[int, ...]]:
        """Of each option, its tokens after the last one that does not depend on the option."""


class RenderedState(Protocol):
    """One prompt state."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids of everything that was flushed and generated."""

    @property
    def text(self) -> str:
        """All text, template text and what is not flushed included."""

    @property
    def rerendered(self) -> int:
        """Tokens that were replaced because the chat template rewrote earlier turns."""

    def copy(self) -> RenderedState:
        """A state that continues this one."""

    def add_text(self, text: str) -> None:
        """Append text as written."""

    def add_ids(self, ids: Sequence[int]) -> None:
        """Append token ids as they are."""

    def begin(self, role: str) -> None:
        """Begin a chat turn."""

    def end(self) -> None:
        """End the open turn."""

    def flush(self) -> None:
        """End the text unit: its ids are part of the state."""

    def add_generated(self, text: str, ids: Sequence[int] | None = None) -> None:
        """Append what a generation gave; the ids of the text alone, unless they are given."""

    def options(self, choices: Sequence[str]) -> Options:
        """Encode the options of a select; the state then ends with the last token that does not depend on them."""

    def choose(self, choice: str, path: Sequence[int]) -> None:
        """Append the option that a select took."""


@runtime_checkable
class Renderer(Protocol):
    """Makes states for one model."""

    @property
    def name(self) -> str:
        """Of the model, for people."""

    @property
    def exact(self) -> bool:
        """Whether its tokens are those that the backend counts; otherwise they are an estimate."""

    def state(self, now: float | None = None, template_kwargs: Mapping[str, Any] | None = None) -> RenderedState:
        """An empty state.

        Args:
            now: the time that chat templates see, in seconds since the epoch.
            template_kwargs: further variables of the chat template.
        """

    def filler(self, num_tokens: int) -> str:
        """Some text of that many tokens."""

    def split(self, text: str) -> list[str]:
        """A text alone as its tokens' texts, which put together are the text; a part of a character has none."""

    def count(self, text: str) -> int:
        """Tokens of a text alone."""


_WORD = re.compile(r"\s*\S+|\s+")


def words(text: str) -> list[str]:
    """Text in words, each with the space before it: the tokens of `MockBackend`.

    Example:
        >>> words("Hello, big world ")
        ['Hello,', ' big', ' world', ' ']
    """
    return _WORD.findall(text)


def quarters(text: str) -> list[str]:
    """Text in pieces of four characters, about a token each in most vocabularies."""
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def piece_id(piece: str) -> int:
    """A number for a piece of text, the same everywhere."""
    return zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0xFFFF


class PlainRenderer:
    """Counts without a model.

    Args:
        name: for people.
        split: what a text's tokens are.
        exact: whether the backend counts so.

    Example:
        >>> state = PlainRenderer("words", words).state()
        >>> state.begin("user"); state.add_text("Hi there"); state.end(); state.flush()
        >>> state.text, len(state.ids)
        ('<|im_start|>user\\nHi there<|im_end|>\\n', 4)
    """

    def __init__(self, name: str, split: Callable[[str], list[str]] = quarters, *, exact: bool = False) -> None:
        self._name = name
        self._split = split
        self._exact = exact

    @property
    def name(self) -> str:
        """Of what counts."""
        return self._name

    @property
    def exact(self) -> bool:
        """As given."""
        return self._exact

    def state(self, now: float | None = None, template_kwargs: Mapping[str, Any] | None = None) -> PlainState:
        """An empty state; there is no template that either argument could matter to."""
        return PlainState(self._split)

    def filler(self, num_tokens: int) -> str:
        """As many pieces that look the same."""
        return " abc" * num_tokens

    def split(self, text: str) -> list[str]:
        """Pieces of a text."""
        return self._split(text)

    def count(self, text: str) -> int:
        """Number of pieces."""
        return len(self._split(text))


class PlainState:
    """A state of `PlainRenderer`: its ids are those of its whole text, so text before a generation never shifts."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self.ids: list[int] = []
        self.rerendered = 0
        self._split = split
        self._text = ""
        self._pending = ""

    @property
    def text(self) -> str:
        """Everything."""
        return self._text + self._pending

    def copy(self) -> PlainState:
        """The same."""
        other = PlainState(self._split)
        other.ids, other._text, other._pending = list(self.ids), self._text, self._pending
        return other

    def add_text(self, text: str) -> None:
        """Append."""
        self._pending += text

    def add_ids(self, ids: Sequence[int]) -> None:
        """Append ids; their text is not known."""
        self.flush()
        self.ids.extend(ids)
        self._text += "".join(f"<{token_id}>" for token_id in ids)

    def begin(self, role: str) -> None:
        """A ChatML line."""
        self._pending += f"<|im_start|>{role}\n"

    def end(self) -> None:
        """A ChatML line."""
        self._pending += "<|im_end|>\n"

    def flush(self) -> None:
        """Encode what is pending."""
        self.ids.extend(map(piece_id, self._split(self._pending)))
        self._text, self._pending = self._text + self._pending, ""

    def add_generated(self, text: str, ids: Sequence[int] | None = None) -> None:
        """Append."""
        self.flush()
        self.ids.extend(ids if ids is not None else map(piece_id, self._split(text)))
        self._text += text

    def options(self, choices: Sequence[str]) -> PlainOptions:
        """Each option alone, behind the state."""
        self.flush()
        return PlainOptions([tuple(map(piece_id, self._split(choice))) for choice in choices])

    def choose(self, choice: str, path: Sequence[int]) -> None:
        """Append."""
        self.add_generated(choice, path)


class PlainOptions:
    """Options as pieces."""

    def __init__(self, paths: list[tuple[int, ...]]) -> None:
        self.paths = paths
