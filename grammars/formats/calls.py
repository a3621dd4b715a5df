"""Readers of tool calls, one per kind of body.

Owns the way from text behind a block's beginning to call events. `StreamParser` owns everything around: where blocks
begin, free text, reasoning, and what becomes of a call that goes wrong. A reader returns when the calls of its block
are over; it raises `Malformed` or `Truncated` as `Source` does. Once a call's arguments are complete, nothing that
follows can spoil it: an end marker that is missing is no error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from sgl.grammars.formats.literals import escaped, json_string, json_text, json_value, python_value
from sgl.grammars.formats.shapes import Block, Body, JsonCalls, NamedCalls, PythonCalls, TagCalls
from sgl.grammars.formats.source import Malformed, Markers, Source, Steps, Truncated
from sgl.grammars.formats.tools import Tool
from sgl.grammars.formats.values import allowed_types, as_json, refuse_constant

MAX_NAME = 256
"""Characters of a header or a key."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_IDENTIFIER = re.compile(r"[\w.\-]+")
_NAME_KEYS = ("name",)
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type", "index")
_TEXT = frozenset(["string"])
_ESCAPES = re.compile(r"\\.", re.DOTALL)
"""What may hold a quote that ends no string."""


class Calls(Protocol):
    """Where readers report."""

    tools: Mapping[str, Tool] | None

    def start(self, name: str, call_id: str = "", *, is_bare: bool = False) -> None:
        """A call begins."""

    def arguments(self, text: str) -> None:
        """More of its arguments."""

    def end(self) -> None:
        """It is complete."""


def mark(text: str) -> str:
    """A marker as readers look for it."""
    return text.strip()


def reads_key(body: Body, key: str) -> bool:
    """Whether readers find an argument's name again where a body writes it bare.

    Example:
        >>> reads_key(PythonCalls(), "days"), reads_key(PythonCalls(), "first name"), reads_key(JsonCalls(), "a b")
        (True, False, True)
    """
    match body:
        case TagCalls():
            ends = [mark(text) for text in (body.key_end, body.other_key_end) if text]
            found = [Markers(ends).search(key + end, 0, len(key + end)) for end in ends]
            is_whole = all(each is not None and each.start() == len(key) for each in found)
            return is_whole and key == key.strip() and len(key) <= MAX_NAME
        case PythonCalls():
            return _IDENTIFIER.fullmatch(key) is not None and len(key) <= MAX_NAME
    return True


class BlockReader:
    """Reads the calls of one block.

    Args:
        is_bare: nothing but the calls themselves says that here are calls, so names must be those of tools.
    """

    def __init__(self, block: Block, source: Source, calls: Calls, *, is_bare: bool) -> None:
        self.block = block
        self.source = source
        self.calls = calls
        self.is_bare = is_bare

    def read(self) -> Steps[None]:
        """All calls, and the block's end."""
        match self.block.body:
            case JsonCalls() as body:
                yield from self.json(body)
            case NamedCalls() as named:
                yield from self.several(named.begin, lambda: self.named(named))
            case TagCalls() as tagged:
                yield from self.several(tagged.begin, lambda: self.tagged(tagged))
            case PythonCalls():
                yield from self.python()
        yield from self.optional(mark(self.block.end))

    def several(self, begin: str, read: Callable[[], Steps[None]]) -> Steps[None]:
        """Calls that each have a beginning, or a single one where there is none."""
        begins = Markers([mark(begin)])
        if begin and self.block.begin:  # else the beginning of the first call is what led here
            yield from self.source.space()
            if not (yield from self.source.match(begins)):
                raise Truncated if (yield from self.source.peek()) == "" else Malformed
        yield from read()
        while begin:
            yield from self.source.space()
            if not (yield from self.source.match(begins)):
                return
            yield from read()

    def optional(self, text: str) -> Steps[bool]:
        """Move over a marker, if it comes next; whether it did."""
        if not text:
            return False
        yield from self.source.space()
        return bool((yield from self.source.match(Markers([text]))))

    def header(self, markers: Markers) -> Steps[tuple[str, str]]:
        """Text up to one of the markers, and which."""
        parts: list[str] = []
        found = yield from self.source.until(markers, parts.append, MAX_NAME)
        if not found:
            raise Truncated
        return "".join(parts).strip(), found

    # --- JSON objects ---

    def json(self, body: JsonCalls) -> Steps[None]:
        source = self.source
        yield from source.space()
        in_list = (yield from source.peek()) == "["
        if in_list:
            source.skip()
        num_calls = 0
        while True:
            yield from source.space()
            char = yield from source.peek()
            if char == "{":
                yield from (self.json_call() if body.name_key else self.keyed_call())
                num_calls += 1
                self.source.mark()
            elif num_calls and char and char in ",;":
                source.skip()
            elif in_list and char == "]" and num_calls:
                source.skip()
                return
            elif num_calls:
                return
            else:
                raise Truncated if char == "" else Malformed

    def json_call(self) -> Steps[None]:
        """`{"name": ..., "arguments": {...}}`, the keys in any order."""
        source, calls = self.source, self.calls
        held: list[str] = []
        name = call_id = ""
        has_arguments = False
        is_first = True
        source.skip()
        while True:
            yield from source.space()
            char = yield from source.peek()
            if char == "}" and not is_first:
                break
            if char != '"':
                raise Truncated if char == "" else Malformed
            key = yield from json_text(source)
            if self.is_bare and is_first and key not in (*_NAME_KEYS, *_ARGUMENTS_KEYS, *_OTHER_KEYS):
                raise Malformed
            is_first = False
            yield from source.space()
            yield from self.expect(":")
            yield from source.space()
            if key in _NAME_KEYS and not name:
                name = yield from self.text()
                self.start(name, call_id)
                calls.arguments("".join(held))
            elif key in _ARGUMENTS_KEYS and not has_arguments:
                has_arguments = True
                yield from self.object(None if name else held)
            elif key == "id" and not name and (yield from source.peek()) == '"':
                call_id = yield from json_text(source)
            else:
                yield from json_value(source, lambda text: None)
            yield from source.space()
            char = yield from source.peek()
            if char == ",":
                source.skip()
            elif char != "}":
                raise Truncated if char == "" else Malformed
        source.skip()
        if not name:
            raise Malformed
        if not has_arguments:
            calls.arguments("{}")
        calls.end()

    def keyed_call(self) -> Steps[None]:
        """`{name: {...}}`."""
        self.source.skip()
        yield from self.source.space()
        self.start((yield from self.text()))
        yield from self.source.space()
        yield from self.expect(":")
        yield from self.source.space()
        yield from self.object(None)
        yield from self.source.space()
        yield from self.expect("}")
        self.calls.end()

    def object(self, held: list[str] | None) -> Steps[None]:
        """Arguments: an object, an object in a string, or null; into `held` while the name is not known."""
        sink = self.calls.arguments if held is None else held.append
        char = yield from self.source.peek()
        if char == "{":
            yield from json_value(self.source, sink)
            return
        parts: list[str] = []
        if char == '"':
            yield from json_string(self.source, parts.append)
            text = json.loads("".join(parts))
            try:
                value = json.loads(text, parse_constant=refuse_constant)
            except (ValueError, RecursionError):
                raise Malformed from None
        else:
            yield from json_value(self.source, parts.append)
            text, value = "{}", {} if parts == ["null"] else None
        if not isinstance(value, dict):
            raise Malformed
        sink(text)

    # --- a name and a JSON object ---

    def named(self, body: NamedCalls) -> Steps[None]:
        """A call from behind its beginning on."""
        header, _ = yield from self.header(Markers([mark(body.name_mark or body.name_end)]))
        name = header
        before, _, after = body.header.partition("{name}")
        name = name.removeprefix(before)
        if after:
            name = name.rpartition(after[0])[0] or name
        found = _NAME.match(name)
        if found is None or not (body.name_mark or found.end() == len(name)):
            raise Malformed
        self.start(found.group(), header if after else "")
        yield from self.source.space()
        yield from self.object(None)
        self.calls.end()
        self.source.mark()
        yield from self.optional(mark(body.end))

    # --- tags ---

    def tagged(self, body: TagCalls) -> Steps[None]:
        """A call from behind its beginning on."""
        source, calls = self.source, self.calls
        end = mark(body.end or self.block.end)
        key_begin = mark(body.key_begin)
        after_name = mark(body.name_end)
        name, found = yield from self.header(Markers([after_name] if after_name else [key_begin, end]))
        if not _IDENTIFIER.fullmatch(name):
            raise Malformed
        self.start(name)
        calls.arguments("{")
        ends, num_keys = Markers([key_begin, end]), 0
        if after_name:
            found = ""
        while found != end:
            if not found:
                yield from source.space()
                found = yield from source.match(ends)
                if not found:
                    raise Truncated if (yield from source.peek()) == "" else Malformed
                continue
            calls.arguments(", " if num_keys else "")
            yield from self.tag(body, name)
            num_keys, found = num_keys + 1, ""
        calls.arguments("}")
        calls.end()
        source.mark()

    def tag(self, body: TagCalls, name: str) -> Steps[None]:
        """One argument from behind the beginning of its key on."""
        source, calls = self.source, self.calls
        key_ends = Markers([mark(body.key_end), mark(body.other_key_end)])
        key, found = yield from self.header(key_ends)
        calls.arguments(f'"{escaped(key)}": ')
        tool = (calls.tools or {}).get(name)
        types = allowed_types(tool.properties.get(key) if tool is not None else None, tool.parameters if tool else {})
        if body.other_key_end:  # the model has said which it is
            types = _TEXT if found == mark(body.key_end) else allowed_types(None, {})
        yield from self.optional(mark(body.value_begin))
        if (body.key_end + body.value_begin).endswith("\n"):
            yield from source.match(_LINE_END)
        value_end = mark(body.value_end)
        ends = Markers([value_end, *(["\n" + value_end] if body.value_end.startswith("\n") else [])])
        if types == _TEXT:
            calls.arguments('"')
            if not (yield from source.until(ends, lambda text: calls.arguments(escaped(text)))):
                raise Truncated
            calls.arguments('"')
            return
        is_json = bool(body.other_key_end) or not types & _TEXT
        calls.arguments(as_json((yield from self.bare_value(ends, is_json=is_json)), types))

    def bare_value(self, ends: Markers, *, is_json: bool) -> Steps[str]:
        """Text up to one of the markers; in JSON, not those in strings.

        In a string that JSON allows, no line end follows a marker: where one does, the string was left open.
        """
        parts: list[str] = []
        in_string, num_seen = False, 0
        while True:
            found = yield from self.source.until(ends, parts.append)
            if not found:
                raise Truncated
            if is_json:
                text = "".join(parts[num_seen:])
                self.source.examined += len(text)
                in_string ^= _ESCAPES.sub("", text).count('"') % 2 == 1
            num_seen = len(parts)
            if not in_string or found[0] == "\n" or (yield from self.source.peek()) in ("\n", ""):
                return "".join(parts)
            parts.append(found)
            num_seen += 1

    # --- Python ---

    def python(self) -> Steps[None]:
        """`[f(a=1), g()]`; the brackets may be missing where the block has markers of its own."""
        source = self.source
        yield from source.space()
        in_list = (yield from source.peek()) == "["
        if in_list:
            source.skip()
        while True:
            yield from source.space()
            yield from self.python_call()
            yield from source.space()
            char = yield from source.peek()
            if char == ",":
                source.skip()
                continue
            if in_list and char == "]":
                source.skip()
            return

    def python_call(self) -> Steps[None]:
        source, calls = self.source, self.calls
        name = yield from self.identifier()
        yield from source.space()
        yield from self.expect("(")
        self.start(name)
        calls.arguments("{")
        num_keys = 0
        while True:
            yield from source.space()
            if (yield from source.peek()) == ")":
                break
            key = yield from self.identifier()
            yield from source.space()
            yield from self.expect("=")
            yield from source.space()
            calls.arguments(f'{", " if num_keys else ""}"{escaped(key)}": ')
            yield from python_value(source, calls.arguments)
            num_keys += 1
            yield from source.space()
            char = yield from source.peek()
            if char == ",":
                source.skip()
            elif char != ")":
                raise Truncated if char == "" else Malformed
        source.skip()
        calls.arguments("}")
        calls.end()
        source.mark()

    # --- small parts ---

    def start(self, name: str, call_id: str = "") -> None:
        self.calls.start(name, call_id, is_bare=self.is_bare)

    def identifier(self) -> Steps[str]:
        parts: list[str] = []
        yield from self.source.run(_IDENTIFIER, parts.append, MAX_NAME)
        if not parts:
            raise Truncated if (yield from self.source.peek()) == "" else Malformed
        return "".join(parts)

    def text(self) -> Steps[str]:
        """A JSON string's text."""
        char = yield from self.source.peek()
        if char != '"':
            raise Truncated if char == "" else Malformed
        return (yield from json_text(self.source))

    def expect(self, char: str) -> Steps[None]:
        found = yield from self.source.peek()
        if found != char:
            raise Truncated if found == "" else Malformed
        self.source.skip()


_LINE_END = Markers(["\n"])
