"""Where in a JSON value a text breaks off.

Owns one function, a single pass over the text. Called by the runtime when a generation under a JSON schema ends at its
token budget, to say which value is unfinished. The text is taken for the beginning of valid JSON, as a constraint
guarantees; on other text the answer is some pointer, and never an error.
"""

from __future__ import annotations

import json
import re

from sgl.grammars.pointers import pointer_of

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_WORDS = ("true", "false", "null")


class _Container:
    """An open object or array: where its current value stands, and whether that is awaited or under way."""

    __slots__ = ("is_object", "key", "open")

    def __init__(self, is_object: bool) -> None:
        self.is_object = is_object
        self.key: str | int = "" if is_object else 0
        self.open = False


def open_pointer(text: str) -> str:
    """JSON pointer (RFC 6901) of the innermost value that is begun or awaited, and not done, at the end of `text`.

    A number at the end may go on, so it is not done. Between two members the object itself is what is unfinished.

    Example:
        >>> open_pointer('{"a": [true, {"b/c": "wor')
        '/a/1/b~1c'
        >>> open_pointer('{"a": 1, "b'), open_pointer('{"a": {"x":'), open_pointer("[1, 2")
        ('', '/a/x', '/1')
    """
    stack: list[_Container] = []
    name = ""  # the last complete string where a key is expected
    for match in _TOKEN.finditer(text):
        token = match.group()
        top = stack[-1] if stack else None
        if token in "{[":
            if top is not None:
                top.open = True
            stack.append(_Container(token == "{"))
        elif token in "}]":
            if stack:
                stack.pop()
            if stack:
                stack[-1].open = False
        elif top is None:
            continue  # a scalar is the whole value
        elif token == ":":
            top.key, top.open = name, True
        elif token == ",":
            top.open = isinstance(top.key, int)
            if isinstance(top.key, int):
                top.key += 1
        elif top.is_object and not top.open:
            name = _string(token) or ""
        else:
            top.open = match.end() == len(text) and not _is_done(token)
    return pointer_of(c.key for c in stack if c.open)


def _is_done(token: str) -> bool:
    """Whether a scalar at the end of the text cannot go on."""
    return token in _WORDS or (token.startswith('"') and _string(token) is not None)


def _string(token: str) -> str | None:
    """What a string token says; `None` when it is not complete."""
    try:
        value = json.loads(token, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
