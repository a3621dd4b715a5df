"""A conversation as one live program: what `sgl chat` talks to, without a terminal in it.

Owns the turns, the settings of the next answer, and the program whose state holds them. The program stays open between
turns, so the engine keeps the state itself and computes what is new only; `undo` rewinds it. Where it cannot go on (a
stopped or failed generation, an expired lease, another system prompt) it is dropped, and the next turn begins a new one
with the turns so far, of which the prefix cache still has what it has.

Fails with the program's `SglError`s; a turn that failed leaves no trace in the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import sgl
from sgl.errors import InvalidParameter, SglError, StateLost
from sgl.grammars.formats import message_parser, reasoning_format
from sgl.grammars.formats.events import ContentDelta, Event, ReasoningDelta
from sgl.lang.backend import Backend
from sgl.lang.branches import Point
from sgl.lang.defaults import model_format, sampling_defaults
from sgl.lang.expr import Expr
from sgl.lang.graph import ProgramOptions
from sgl.lang.interpreter import Program
from sgl.lang.state import ProgramState

MAX_TOKENS = 1024
"""Of an answer, unless it is set: one that does not end is the reader's to stop."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answer.

    Attributes:
        prompt_tokens, cached_tokens, completion_tokens: of the answer; 0 where they are not known (a stopped answer, a
            loaded turn).
        finish: why the answer ended: `stop`, `length`, or `stopped` by the reader.
    """

    user: str
    assistant: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: str = "stop"

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens


class Piece(NamedTuple):
    """A piece of an answer as it comes, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that a conversation is kept in."""

    turns: list[Turn]
    system: str = ""
    settings: dict[str, Any] = {}
    schema: Any = None


class Conversation:
    """One conversation on a backend.

    Args:
        backend: an engine, or any other backend of the language.
        system: the system prompt; empty is none.

    Attributes:
        turns: what was said.
        settings: parameters of `sgl.gen` for the next answers.
        schema: JSON schema that answers must fit; `None` is free text.

    Example:
        >>> talk = Conversation(sgl.MockBackend(["Hello!"]))
        >>> "".join(piece.text for piece in talk.ask("Hi")), talk.turns[0].user, talk.undo(), talk.turns
        ('Hello!', 'Hi', True, [])
        >>> talk.close()
    """

    def __init__(self, backend: Backend, *, system: str = "") -> None:
        self._backend = backend
        own = model_format(backend, "reasoning")
        self._reasoning = reasoning_format(own) if own is not None else None
        self._system = system
        self.turns: list[Turn] = []
        self.settings: dict[str, Any] = {}
        self.schema: Any = None
        self._state: ProgramState[None] | None = None
        self._points: list[Point] = []  # before each turn
        self._num_asked = 0

    @property
    def system(self) -> str:
        """The system prompt; setting it keeps the turns."""
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        self._system = text
        self._drop()

    def set(self, name: str, value: Any) -> None:
        """Set a parameter of the next answers, by its name in `sgl.gen`; `None` takes it back.

        Raises:
            InvalidParameter: there is no such parameter, or it does not take that value.
        """
        settings = {**self.settings, name: value}
        if value is None:
            del settings[name]
        if name in ("name", "json_schema", "type", "n", "tools", "choices"):
            raise InvalidParameter(f"{name} is not a setting of a chat", hint="as in temperature=0.7", param=name)
        _check(settings, self.schema)
        self.settings = settings

    def set_schema(self, schema: Any) -> None:
        """Let answers be JSON that fits `schema`; `None` is free text again.

        Raises:
            SglError: it is no schema that can be kept.
        """
        _check(self.settings, schema)
        self.schema = schema

    def ask(self, text: str) -> Iterator[Piece]:
        """The answer to `text`, as it comes. Leaving it before its end stops it; what came is kept as a turn.

        What a model reasons is no part of its turn.

        Raises:
            SglError: it failed; the conversation is as it was.
        """
        pieces: list[str] = []
        try:
            for attempt in range(2):
                try:
                    name = self._append(text)
                    for piece in self._pieces(name):
                        if not piece.is_reasoning:
                            pieces.append(piece.text)
                        yield piece
                    break
                except StateLost:  # its lease ended while nobody said anything
                    self._drop()
                    if attempt or pieces:
                        raise
            answer, info = self._live()[name], self._live().get_meta_info(name)
        except SglError:
            self._drop()
            raise
        except BaseException:  # Ctrl-C, or the reader has gone
            self._drop()
            if pieces:
                self.turns.append(Turn(user=text, assistant="".join(pieces), finish="stopped"))
            raise
        self.turns.append(
            Turn(
                user=text,
                assistant=answer,
                prompt_tokens=info["prompt_tokens"],
                cached_tokens=info["cached_tokens"],
                completion_tokens=info["completion_tokens"],
                finish=info["finish_reason"]["type"],
            )
        )

    def undo(self) -> bool:
        """Take back the last turn; whether there was one."""
        if not self.turns:
            return False
        self.turns.pop()
        if self._state is not None:
            self._state.rewind(self._points.pop())
        return True

    def reset(self) -> None:
        """Forget all turns; settings and the system prompt stay."""
        self.turns.clear()
        self._drop()

    def save(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            OSError: it cannot be written.
        """
        saved = Saved(self.turns, self.system, self.settings, self.schema)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n")

    def load(self, path: Path) -> None:
        """Go on with one that was saved.

        Raises:
            OSError: it cannot be read.
            InvalidParameter: it is none; nothing has changed.
        """
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=Saved)
        except msgspec.DecodeError as error:
            raise InvalidParameter(f"{path} is no saved chat: {error}", hint="give a file that /save wrote") from None
        _check(saved.settings, saved.schema)
        self.turns, self.settings, self.schema = list(saved.turns), dict(saved.settings), saved.schema
        self.system = saved.system

    def close(self) -> None:
        """End the program. Idempotent."""
        self._drop()

    # --- the program ---

    def _append(self, text: str) -> str:
        """Append the turn to the program, which is begun where there is none; the variable of its answer."""
        if self._state is None:
            self._begin()
        state = self._live()
        self._num_asked += 1
        name = f"answer_{self._num_asked}"
        point = state.mark()
        answer: Expr = sgl.gen(name, **_arguments(self.settings, self.schema))
        state += sgl.user(text)
        state += sgl.assistant(answer if self._reasoning is None else sgl.separate_reasoning(answer))
        self._points.append(point)
        return name

    def _pieces(self, name: str) -> Iterator[Piece]:
        """An answer as it comes, with the reasoning told apart where the model has a form of it."""
        state = self._live()
        if self._reasoning is None:
            yield from map(Piece, state.text_iter(name))
            return
        parser = message_parser(reasoning=self._reasoning)
        seen = 0
        for event in state.events():
            if event.name != name:
                continue
            if event.kind == "delta":
                seen += len(event.text)
                yield from _told(parser.feed(event.text))
            elif event.kind == "value":
                yield from _told([*parser.feed(event.text[seen:]), *parser.close()])
                return

    def _begin(self) -> None:
        options = ProgramOptions(name="chat", stream=True, want_text=False)
        state: ProgramState[None] = ProgramState(Program(self._backend, options, sampling_defaults(self._backend)))
        self._state, self._points = state, []
        if self.system:
            state += sgl.system(self.system)
        for turn in self.turns:
            self._points.append(state.mark())
            state += sgl.user(turn.user)
            state += sgl.assistant(turn.assistant)

    def _live(self) -> ProgramState[None]:
        if self._state is None:
            raise StateLost("the conversation's program has ended")
        return self._state

    def _drop(self) -> None:
        if self._state is not None:
            self._state.cancel()
        self._state, self._points = None, []


def _told(events: Iterable[Event]) -> Iterator[Piece]:
    for event in events:
        if isinstance(event, (ContentDelta, ReasoningDelta)):
            yield Piece(event.text, isinstance(event, ReasoningDelta))


def _arguments(settings: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    found = {"max_tokens": MAX_TOKENS, **settings}
    return found if schema is None else {**found, "json_schema": json.dumps(schema)}


def _check(settings: Mapping[str, Any], schema: Any) -> None:
    """Raise unless `sgl.gen` takes these."""
    sgl.gen("answer", **_arguments(settings, schema))
