"""The one parser of all formats: text in any pieces to events.

Owns what stands around calls: free text, reasoning, the beginnings of blocks, and what becomes of a call that goes
wrong. Descriptions (`shapes.py`) say what to look for, `calls.py` reads the calls. Called through
`ToolFormat.parser` and `sgl.grammars.formats.message_parser`.

Invariants:

* Any way to cut the text into pieces gives the same events, after `merged`.
* Time and memory are linear in the text: no character is read twice but the few of a marker under way. A call that goes
  wrong is not read again: what was read of it is text, and reading goes on behind it.
* Every character of the text is in an event, except markers, and white space around calls and reasoning.

A malformed call whose name is not known yet is content. Once its start was told, its end says `malformed`, with what
was written. Nothing here fails: every text has events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sgl.errors import InternalError
from sgl.grammars.formats.calls import BlockReader, mark
from sgl.grammars.formats.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    Status,
    merged,
    message_of,
)
from sgl.grammars.formats.shapes import Block, JsonCalls, NamedCalls, PythonCalls, ReasoningFormat, TagCalls
from sgl.grammars.formats.source import Malformed, Markers, Source, Steps, Truncated
from sgl.grammars.formats.tools import Tool, tools_of


class _Trimmed:
    """Passes text on without the white space at its ends, where that is wanted."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._held: list[str] = []
        self.at_start = False  # leave out the white space that comes next
        self.last = "\n"  # the last character; a line end where white space was left out

    def write(self, text: str) -> None:
        if self.at_start:
            text = text.lstrip()
        if not text:
            return
        self.at_start = False
        end = len(text.rstrip())
        if end:
            self.flush()
            self._emit(text[:end])
        if end < len(text):
            self._held.append(text[end:])
        self.last = text[-1]

    def flush(self) -> None:
        """Pass on white space at the end."""
        if self._held:
            self._emit("".join(self._held))
            self._held.clear()

    def trim(self) -> None:
        """Leave out the white space here, before and after."""
        self._held.clear()
        self.at_start = True
        self.last = "\n"


class StreamParser:
    """Parses one message.

    Args:
        blocks: where calls may stand.
        reasoning: where reasoning may stand.
        tools: what may be called; they tell the types of arguments, and which bare JSON or Python is a call.
        inside: the text begins within reasoning.

    Attributes:
        in_reasoning: the text so far ends within reasoning.

    Example:
        >>> from sgl.grammars.formats import tool_format
        >>> parser = tool_format("hermes").parser()
        >>> parser.feed('Hi <tool_call>{"name": "f", "argu')
        [ContentDelta(text='Hi'), CallStart(index=0, id='call_0', name='f')]
        >>> parser.feed('ments": {"a": 1}}</tool_call>')
        [ArgumentsDelta(index=0, text='{"a": 1}'), CallEnd(index=0, status='complete', text='')]
        >>> parser.close()
        []
    """

    def __init__(
        self,
        blocks: Sequence[Block] = (),
        reasoning: ReasoningFormat | None = None,
        tools: Sequence[Tool] | None = None,
        *,
        inside: bool = False,
    ) -> None:
        self.tools: Mapping[str, Tool] | None = {tool.name: tool for tool in tools} if tools else None
        self._source = Source()
        self._events: list[Event] = []
        self._content = _Trimmed(lambda text: self._events.append(ContentDelta(text)))
        self._thoughts = _Trimmed(lambda text: self._events.append(ReasoningDelta(text)))
        self._thoughts.at_start = True
        self._num_calls = 0
        self._open = False  # a call was started and has not ended
        self._begins = triggers(blocks)
        reasoning_begins = reasoning.begin if reasoning is not None else ()
        self._reasoning_begins = frozenset(reasoning_begins)
        silent: tuple[str, ...] = ()
        inside_texts: list[str] = []
        if reasoning is not None:
            silent, inside_texts = reasoning.silent, [*reasoning.end]
            if reasoning.calls_end_it:  # and its end may still come, behind them
                silent, inside_texts = (*silent, *reasoning.end), [*reasoning.end, *self._begins]
        self._outside = Markers([*self._begins, *reasoning_begins, *silent])
        self._inside = Markers(inside_texts)
        self.in_reasoning = inside
        self._steps = self._read()
        next(self._steps, None)

    @property
    def examined(self) -> int:
        """Characters looked at so far; at most a constant times those fed."""
        return self._source.examined

    def feed(self, text: str) -> list[Event]:
        """The events that more text makes certain."""
        if self._source.closed:
            raise InternalError("text is fed to a parser that was closed")
        if text:
            self._source.add(text)
            next(self._steps, None)
        return self._taken()

    def close(self) -> list[Event]:
        """The last events: the text is complete. A second call gives none."""
        self._source.closed = True
        next(self._steps, None)
        return self._taken()

    def parse(self, text: str) -> Message:
        """The message of a whole text."""
        return message_of([*self.feed(text), *self.close()])

    def _taken(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events

    # --- reading ---

    def _read(self) -> Steps[None]:
        source = self._source
        if self.in_reasoning:
            yield from source.space()
            yield from source.match(Markers(self._reasoning_begins))  # some models write it although the prompt has
        while True:
            inside = self.in_reasoning
            text = self._thoughts if inside else self._content
            found = yield from source.until(self._inside if inside else self._outside, text.write)
            if not found:
                break
            if found in self._reasoning_begins or (inside and found not in self._begins):
                self.in_reasoning = not inside
                self._content.trim()
                self._thoughts.trim()
            elif found in self._begins:
                if not self._may_begin(found, text):
                    text.write(found)
                    continue
                self.in_reasoning = False
                self._thoughts.trim()
                yield from self._block(found)
        self._content.flush()

    def _may_begin(self, found: str, text: _Trimmed) -> bool:
        """Bare calls begin where a line does (JSON), or behind white space (Python)."""
        return (found != "{" or text.last == "\n") and (found != "[" or text.last.isspace())

    def _block(self, begin: str) -> Steps[None]:
        source = self._source
        is_bare = begin in ("{", "[")
        if is_bare:
            source.back()  # it is part of the call
        source.mark("" if is_bare else begin)
        try:
            blocks = self._begins[begin]
            block = blocks[0]
            if len(blocks) > 1:
                yield from source.space()
                char = yield from source.peek()
                block = next((block for block in blocks if _can_begin(block, char)), block)
            yield from BlockReader(block, source, self, is_bare=is_bare).read()
            source.since_mark()
        except Malformed:
            self._fall_back("malformed")
        except Truncated:
            self._fall_back("truncated")

    def _fall_back(self, status: Status) -> None:
        text = self._source.since_mark()
        if not self._open:
            self._content.write(text)
        elif status == "truncated":
            self._finish(status, "")
        else:
            self._finish(status, text)
            self._content.at_start = False  # what follows belongs to the same piece of text

    # --- calls, as `calls.Calls` has them ---

    def start(self, name: str, call_id: str = "", *, is_bare: bool = False) -> None:
        """See `Calls.start`."""
        if not name or (is_bare and self.tools is not None and name not in self.tools):
            raise Malformed
        self._content.trim()
        self._events.append(CallStart(self._num_calls, call_id or f"call_{self._num_calls}", name))
        self._open = True

    def arguments(self, text: str) -> None:
        """See `Calls.arguments`."""
        if text:
            self._events.append(ArgumentsDelta(self._num_calls, text))

    def end(self) -> None:
        """See `Calls.end`."""
        self._finish("complete", "")

    def _finish(self, status: Status, text: str) -> None:
        self._events.append(CallEnd(self._num_calls, status, text))
        self._num_calls += 1
        self._open = False


def triggers(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """What begins which blocks."""
    triggers: dict[str, list[Block]] = {}
    for block in blocks:
        begins = [mark(text) for text in (block.begin, *block.also) if text]
        if not block.begin:
            match block.body:
                case JsonCalls():
                    begins += ["{", "["]
                case PythonCalls():
                    begins += ["["]
                case NamedCalls(begin=begin) | TagCalls(begin=begin):
                    begins += [mark(begin)]
        for begin in begins:
            triggers.setdefault(begin, []).append(block)
    return triggers


def _can_begin(block: Block, char: str) -> bool:
    """Whether the calls of a block may begin with a character."""
    match block.body:
        case JsonCalls():
            return char in ("{", "[")
        case PythonCalls():
            return char == "["
        case _:
            return char not in ("{", "[")


def is_open(reasoning: ReasoningFormat, prompt: str) -> bool:
    """Whether a message behind `prompt` begins within reasoning: its template may have opened or closed it.

    Example:
        >>> from sgl.grammars.formats import reasoning_format
        >>> r1 = reasoning_format("deepseek-r1")
        >>> is_open(r1, ""), is_open(r1, "<think></think>"), is_open(reasoning_format("qwen3"), "<think>")
        (True, False, True)
    """
    tail = prompt[-_PROMPT_TAIL:].rstrip()
    if any(tail.endswith(begin) for begin in reasoning.begin):
        return True
    return reasoning.starts_inside and not any(tail.endswith(end) for end in reasoning.end)


def began_inside(reasoning: ReasoningFormat, text: str, num_thoughts: int, num_tokens: int) -> bool | None:
    """Whether a finished text began within reasoning that something before it had opened; `None` where it says nothing.

    For whoever has not seen the prompt, into which a chat template may have written the opening marker.

    Args:
        num_thoughts, num_tokens: of the text, as the model's side counted them: tokens of reasoning, and all.

    Example:
        >>> from sgl.grammars.formats import reasoning_format
        >>> qwen3 = reasoning_format("qwen3")
        >>> began_inside(qwen3, "Hm.</think>A.", 2, 5), began_inside(qwen3, "<think>Hm.</think>A.", 2, 6)
        (True, None)
    """
    found = Markers([*reasoning.begin, *reasoning.end]).search(text, 0, len(text))
    if found is None:
        return (0 < num_thoughts == num_tokens) or None
    is_end = found.group() in reasoning.end and (num_thoughts > 0 or not text[: found.start()].strip())
    return is_end or None


_PROMPT_TAIL = 256


def stream_parser(
    blocks: Sequence[Block] = (),
    reasoning: ReasoningFormat | None = None,
    tools: Iterable[Any] | None = None,
    prompt: str = "",
    starts_inside: bool | None = None,
) -> StreamParser:
    """A parser for a message behind `prompt`; `starts_inside` says whether it begins within reasoning, if known."""
    inside = starts_inside
    if inside is None:
        inside = reasoning is not None and is_open(reasoning, prompt)
    return StreamParser(blocks, reasoning, tools_of(tools) if tools is not None else None, inside=inside)
