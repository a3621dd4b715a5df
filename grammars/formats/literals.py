"""JSON values and Python literals, read piece by piece and passed on as JSON.

Owns the two readers. Both check what they pass on, so that the text behind them is JSON whenever they return. JSON
goes through as it was written, but control characters in strings are escaped: models write line ends there. Python's
strings, words, tuples and numbers become JSON's.

Fails with `Malformed` where the text is neither, or nested deeper than `sgl.limits` allows, and with `Truncated`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from sgl.grammars.formats.source import Malformed, Sink, Source, Steps, Truncated
from sgl.limits import DEFAULT_LIMITS

_JSON_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_PYTHON_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_NUMBER_CHARS = re.compile(r"[-+.0-9eE_]+")
_WORD_CHARS = re.compile(r"[A-Za-z]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"([-+]?)(0|[1-9][0-9]*)?(?:(\.)([0-9]*))?([eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", **_JSON_WORDS}
_LONGEST_WORD = 5
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_PYTHON_CODES = {"x": 2, "u": 4, "U": 8}


def json_string(source: Source, sink: Sink) -> Steps[None]:
    """One JSON string, from its quote on."""
    sink(source.skip())
    while True:
        yield from source.run(_JSON_PLAIN, sink)
        char = yield from source.peek()
        if char == '"':
            sink(source.skip())
            return
        if char == "":
            raise Truncated
        if char != "\\":
            sink(escaped(source.skip()))
            continue
        escape = yield from source.exactly(2)
        if escape[1] == "u":
            escape += yield from source.exactly(4)
            if not _HEX.issuperset(escape[2:]):
                raise Malformed
        elif escape[1] not in '"\\/bfnrt':
            raise Malformed
        sink(escape)


def json_text(source: Source) -> Steps[str]:
    """What one JSON string says."""
    parts: list[str] = []
    yield from json_string(source, parts.append)
    text: str = json.loads("".join(parts))
    return text


def json_value(source: Source, sink: Sink) -> Steps[None]:
    """One JSON value, white space inside it included."""
    stack: list[str] = []
    while True:
        char = yield from source.peek()
        if char in ("{", "["):
            _push(stack, char)
            sink(source.skip())
            yield from source.space(sink)
            if (yield from source.peek()) == _CLOSING[char]:
                stack.pop()
                sink(source.skip())
            else:
                if char == "{":
                    yield from _json_key(source, sink)
                continue
        elif char == '"':
            yield from json_string(source, sink)
        elif char != "" and char in "-0123456789":
            sink((yield from _number(source, lambda text: text if _JSON_NUMBER.fullmatch(text) else "")))
        else:
            sink((yield from _word(source, char, _JSON_WORDS)))
        while stack:
            yield from source.space(sink)
            char = yield from source.peek()
            if char == ",":
                sink(source.skip())
                yield from source.space(sink)
                if stack[-1] == "{":
                    yield from _json_key(source, sink)
                break
            _close(stack, char)
            sink(source.skip())
        else:
            return


def _json_key(source: Source, sink: Sink) -> Steps[None]:
    char = yield from source.peek()
    _expect(char, '"')
    yield from json_string(source, sink)
    yield from source.space(sink)
    _expect((yield from source.peek()), ":")
    sink(source.skip())
    yield from source.space(sink)


def python_value(source: Source, sink: Sink) -> Steps[None]:
    """One Python literal as JSON. Tuples are arrays; keys of dicts are strings."""
    stack: list[str] = []
    while True:
        char = yield from source.peek()
        if char != "" and char in _CLOSING:
            _push(stack, char)
            source.skip()
            sink("{" if char == "{" else "[")
            yield from source.space()
            if (yield from source.peek()) != _CLOSING[char]:
                if char == "{":
                    yield from _python_key(source, sink)
                continue
            _leave(source, stack, sink)
        elif char != "" and char in "'\"":
            yield from python_string(source, sink)
        elif char != "" and char in "-+.0123456789":
            sink((yield from _number(source, _from_python)))
        else:
            sink((yield from _word(source, char, _PYTHON_WORDS)))
        while stack:
            yield from source.space()
            if (yield from source.peek()) == ",":
                source.skip()
                yield from source.space()
                if (yield from source.peek()) != _CLOSING[stack[-1]]:
                    sink(", ")
                    if stack[-1] == "{":
                        yield from _python_key(source, sink)
                    break
            _close(list(stack), (yield from source.peek()))
            _leave(source, stack, sink)
        else:
            return


def python_string(source: Source, sink: Sink) -> Steps[None]:
    """One Python string, from its quote on, as a JSON string."""
    quote = source.skip()
    sink('"')
    while True:
        yield from source.run(_PYTHON_PLAIN[quote], lambda text: sink(escaped(text)))
        char = yield from source.peek()
        if char == quote:
            source.skip()
            sink('"')
            return
        if char == "":
            raise Truncated
        escape = (yield from source.exactly(2))[1]
        if escape in _PYTHON_CODES:
            digits = yield from source.exactly(_PYTHON_CODES[escape])
            if not _HEX.issuperset(digits) or int(digits, 16) > 0x10FFFF:
                raise Malformed
            code = int(digits, 16)
            sink(f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else escaped(chr(code)))  # two halves are one in JSON
        elif escape == "/":  # JSON's: what a constraint lets models write is JSON
            sink("/")
        elif escape in _PYTHON_ESCAPES:
            sink(escaped(_PYTHON_ESCAPES[escape]))
        else:  # a quote or a backslash, or what Python leaves as it is
            sink(escaped(escape if escape in "\\'\"" else "\\" + escape))


def _python_key(source: Source, sink: Sink) -> Steps[None]:
    char = yield from source.peek()
    if char == "":
        raise Truncated
    if char not in "'\"":
        raise Malformed
    yield from python_string(source, sink)
    yield from source.space()
    _expect((yield from source.peek()), ":")
    source.skip()
    sink(": ")
    yield from source.space()


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string.

    Example:
        >>> escaped('"\\n')
        '\\\\"\\\\n'
    """
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(source: Source, read: Callable[[str], str]) -> Steps[str]:
    """A number as JSON writes it; `read` gives that, or nothing."""
    number = read((yield from _collected(source, _NUMBER_CHARS)))
    if not number:
        raise Truncated if (yield from source.peek()) == "" else Malformed
    return number


def _from_python(text: str) -> str:
    found = _PYTHON_NUMBER.fullmatch(text.replace("_", ""))
    if found is None or not (found[2] or found[4]):
        return ""
    sign, whole, point, fraction, exponent = found.groups()
    sign = "-" if sign == "-" else ""
    return f"{sign}{whole or '0'}{'.' + (fraction or '0') if point else ''}{exponent or ''}"


def _collected(source: Source, pattern: re.Pattern[str]) -> Steps[str]:
    parts: list[str] = []
    yield from source.run(pattern, parts.append)
    return "".join(parts)


def _word(source: Source, char: str, words: dict[str, str]) -> Steps[str]:
    if char == "":
        raise Truncated
    if not _WORD_CHARS.match(char):
        raise Malformed
    word = yield from _collected(source, _WORD_CHARS)
    if word in words:
        return words[word]
    if (yield from source.peek()) == "" and len(word) <= _LONGEST_WORD and any(w.startswith(word) for w in words):
        raise Truncated
    raise Malformed


def _push(stack: list[str], char: str) -> None:
    if len(stack) >= DEFAULT_LIMITS.max_json_depth:
        raise Malformed
    stack.append(char)


def _close(stack: list[str], char: str) -> None:
    _expect(char, _CLOSING[stack.pop()])


def _leave(source: Source, stack: list[str], sink: Sink) -> None:
    source.skip()
    sink("}" if stack.pop() == "{" else "]")


def _expect(char: str, expected: str) -> None:
    if char == "":
        raise Truncated
    if char != expected:
        raise Malformed
