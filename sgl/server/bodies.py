"""Bodies of requests: read within bounds, checked, and turned into values.

Owns size, time and depth of a body and the strictness about its fields. A body is never decoded before its size and
depth are known; one that takes long to look at is looked at on a thread (and handlers go through it with `Call.apart`).
Turns of a conversation are bounded, since every dialect goes through them one by one; so is what a request makes of its
body by putting parts of it together again and again.

Fails with `BodyTooLarge`, `BodyTimeout` and `InvalidParameter`, whose `param` is the path of the field.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from sgl.errors import (
    BodyTimeout,
    BodyTooLarge,
    Cancelled,
    ConstraintTooComplex,
    InvalidParameter,
    UnsupportedMediaType,
)
from sgl.limits import DEFAULT_LIMITS

T = TypeVar("T")

_DISCARD_S = 1.0
_FETCH = "sec-fetch-site"
LARGE = 64 * 2**10
"""Bytes, characters, tokens or numbers from which they are looked at on a thread: 0.3 ms of work to some 50 ms."""
MAX_TURNS = 4096
"""Turns of a conversation, parts of their contents included: some 30 ms of work."""
MAX_EXPANDED = 2**22
"""Characters or tokens of the prompts that a request puts together out of parts that it has once (a query with each
item, a template with each row): as many as the longest body has by default."""
CONSTRAINTS = frozenset(
    (
        "json_schema",
        "structural_tag",
        "regex",
        "ebnf",
        "lark",
        "response_format",
        "structured_outputs",
        "guided_json",
        "format",
    )
)
"""Fields at the top of a body that hold what an output has to look like."""
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_NESTING = np.zeros(256, dtype=np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1
_ESCAPED_BACKSLASH = re.compile(rb"\\\\")
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEPS = re.compile(r"\[(?:\d+|\.\.\.)\]|[^.\[\]]+")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")


def check_media_type(headers: Mapping[str, str]) -> None:
    """Raise unless a body may be JSON by what its request says of it.

    A browser sends other types than JSON for any page without asking the server first. A form of URL's encoding is what
    `curl -d` says of everything, so it passes where no browser is at work.

    Raises:
        UnsupportedMediaType: it is something else.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_form = kind == "application/x-www-form-urlencoded"
    if kind in ("text/plain", "multipart/form-data") or (is_form and ("origin" in headers or _FETCH in headers)):
        raise UnsupportedMediaType(f"the body is {kind}", hint="send JSON, with Content-Type: application/json")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """All of a body.

    Raises:
        BodyTooLarge: as soon as that is known: from its declared length, or while it is read.
        BodyTimeout: it was not complete in time.
        Cancelled: the client is gone.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        await _discard(request)
        raise _too_large(int(declared), max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    break
            else:
                return bytes(body)
        body.clear()
        await _discard(request)
    except TimeoutError:
        raise BodyTimeout(
            f"the body was not complete after {timeout_s:g} s", hint="send it faster, or raise --body-timeout"
        ) from None
    except ClientDisconnect:
        raise Cancelled("the client went away while its request was read") from None
    raise _too_large(max_bytes + 1, max_bytes)


async def _discard(request: Request) -> None:
    """Read on for a moment: a connection that is closed on a client that is still sending is reset, and the client
    never sees the answer."""
    try:
        async with asyncio.timeout(_DISCARD_S):
            async for _ in request.stream():
                continue
    except (TimeoutError, ClientDisconnect):
        return


def _too_large(size: int, most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {size} bytes or more; at most {most} are taken", hint="send less, or raise --max-body-bytes"
    )


async def decode(body: bytes, kind: type[T], lenient: bool = False) -> tuple[T, list[str]]:
    """A body as a `kind`, and warnings about what was passed over (with `lenient`).

    Raises:
        InvalidParameter: not JSON, nested too deeply, a wrong value, or a field that there is not.
    """
    if len(body) >= LARGE:
        return await asyncio.to_thread(decode_now, body, kind, lenient)
    return decode_now(body, kind, lenient)


def decode_now(body: bytes, kind: type[T], lenient: bool = False) -> tuple[T, list[str]]:
    """`decode`, here and now.

    Example:
        >>> class Ask(msgspec.Struct, forbid_unknown_fields=True):
        ...     temperature: float = 1.0
        >>> decode_now(b'{"temprature": 1}', Ask)
        Traceback (most recent call last):
        sgl.errors.InvalidParameter: unknown field 'temprature' (did you mean 'temperature'?)
        >>> decode_now(b'{"temprature": 1}', Ask, lenient=True)
        (Ask(temperature=1.0), ["unknown field 'temprature' was passed over (did you mean 'temperature'?)"])
    """
    check_depth(body)
    if len(body) >= LARGE:
        check_constraints(body)
    warnings: list[str] = []
    for _ in range(_MOST_UNKNOWN):
        try:
            value = msgspec.json.decode(body, type=kind)
            for name in ("messages", "system"):
                check_turns(name, getattr(value, name, None))
            return value, warnings
        except msgspec.ValidationError as error:
            found = _UNKNOWN.search(str(error))
            if found is None:
                raise _invalid(error, kind) from None
            path = _path(error)
            hint = _nearest(kind, found["field"], path)
            if not lenient:
                raise InvalidParameter(
                    f"unknown field {_dotted(path, found['field'])!r}",
                    hint=hint or "leave it out, or start the server with --lenient",
                    param=_dotted(path, found["field"]),
                ) from None
            warnings.append(
                f"unknown field {_dotted(path, found['field'])!r} was passed over{f' ({hint})' if hint else ''}"
            )
            body = _without(body, path, found["field"])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if lone := _LONE_SURROGATE.search(_ESCAPED_BACKSLASH.sub(b"", body)):
                raise InvalidParameter(
                    f"the body has a lone surrogate, {lone[0].decode()}: half of a character",
                    hint="decode the input with errors='replace' before sending it",
                    param=_place_of_surrogate(body),
                ) from None
            raise InvalidParameter(f"the body is no JSON: {error}", hint="send a JSON object") from None
    raise InvalidParameter(f"the body has {_MOST_UNKNOWN} unknown fields", hint="leave them out")


_MOST_UNKNOWN = 32


def _place_of_surrogate(body: bytes) -> str | None:
    """The path of the first text with a lone surrogate, as far as that can be told."""
    try:
        left: list[tuple[str, Any]] = [("", json.loads(body))]
    except ValueError:
        return None
    while left:
        path, value = left.pop()
        if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
            return path or None
        if isinstance(value, dict):
            left += [(_dotted(path, name), value[name]) for name in reversed(value)]
        elif isinstance(value, list):
            left += [(f"{path}[{index}]", value[index]) for index in range(len(value) - 1, -1, -1)]
    return None


def check_depth(body: bytes, most: int = DEFAULT_LIMITS.max_json_depth) -> None:
    """Raise `InvalidParameter` for JSON that is nested deeper than `most`; linear in the text, 10 ms a megabyte.

    Example:
        >>> check_depth(b'{"a": "[[[["}', most=1)
    """
    if body.count(b"[") + body.count(b"{") <= most:
        return
    text = np.frombuffer(_ESCAPED.sub(b"", body) if b"\\" in body else body, dtype=np.uint8)
    is_text = np.cumsum(text == ord('"'), dtype=np.uint8) % 2 == 1
    steps = np.where(is_text, 0, _NESTING[text])
    if np.cumsum(steps[steps != 0], dtype=np.int32).max(initial=0) > most:
        raise InvalidParameter(f"the body is nested deeper than {most} levels", hint="send a flatter object")


def check_constraints(body: bytes, most: int = 4 * DEFAULT_LIMITS.max_schema_bytes) -> None:
    """Raise for a field of `CONSTRAINTS` whose text is longer than `most`, with room for blanks and escapes: values of
    so many parts take a tenth of a second to make, and nobody else runs meanwhile.

    Raises:
        ConstraintTooComplex: one is longer.

    Example:
        >>> check_constraints(b'{"json_schema": {"const": "aaaa"}}', most=10)
        Traceback (most recent call last):
        sgl.errors.ConstraintTooComplex: json_schema has 17 bytes; at most 10 are read (shorten it)
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # no object, or no JSON: whoever decodes it says so
    for name in CONSTRAINTS & fields.keys():
        if len(fields[name]) > most:
            raise ConstraintTooComplex(
                f"{name} has {len(fields[name])} bytes; at most {most} are read",
                hint="shorten it",
                param=name,
            )


def check_turns(name: str, turns: Any) -> None:
    """Raise `InvalidParameter` for a conversation, the field `name`, of more turns and parts than `MAX_TURNS`.

    Example:
        >>> check_turns("messages", [{"content": [{}] * 4096}])
        Traceback (most recent call last):
        sgl.errors.InvalidParameter: messages has 4097 turns and parts; at most 4096 are taken (shorten it)
    """
    if not isinstance(turns, list):
        return
    num = len(turns)
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else getattr(turn, "content", None)
        num += len(content) if isinstance(content, list) else 0
    if num > MAX_TURNS:
        raise InvalidParameter(
            f"{name} has {num} turns and parts; at most {MAX_TURNS} are taken",
            hint="shorten it",
            param=name,
        )


def check_count(name: str, num: int, most: int) -> None:
    """Raise `InvalidParameter` unless the field `name` has 1 to `most` entries.

    Example:
        >>> check_count("items", 3, 2)
        Traceback (most recent call last):
        sgl.errors.InvalidParameter: items has 3 entries; expected 1 to 2 (send fewer at a time)
    """
    if not 1 <= num <= most:
        raise InvalidParameter(
            f"{name} has {num} entries; expected 1 to {most}",
            hint="send fewer at a time" if num else "give at least one",
            param=name,
        )


def check_expanded(name: str, size: int) -> None:
    """Raise `InvalidParameter` where the entries of the field `name` make longer prompts together than `MAX_EXPANDED`.

    Called before there are any, since each holds a copy of what they have in common.
    """
    if size > MAX_EXPANDED:
        raise InvalidParameter(
            f"{name} make prompts of {size} characters or tokens together; at most {MAX_EXPANDED} are taken",
            hint=f"send fewer {name} at a time",
            param=name,
        )


def _invalid(error: msgspec.ValidationError, kind: Any) -> InvalidParameter:
    path = _path(error)
    text = _AT.sub("", str(error))
    allowed = _allowed(kind, path) if text.startswith("Invalid ") else []
    return InvalidParameter(
        f"{path or 'the body'}: {text[:1].lower()}{text[1:]}",
        hint=f"expected {' or '.join(allowed)}" if allowed else "",
        param=path or None,
    )


def _allowed(kind: Any, path: str) -> list[str]:
    """The values, as JSON, that a field may have which takes some only.

    Example:
        >>> from typing import Literal
        >>> _allowed(dict[str, list[Literal["low", "high"]]], "[...][0]")
        ['"high"', '"low"']
    """
    here: list[inspect.Type] = [_type(kind)]
    for step in _STEPS.findall(path):
        here = [inner for each in here for outer in _alternatives(each) for inner in _inside(outer, step)]
    literals = [each for outer in here for each in _alternatives(outer) if isinstance(each, inspect.LiteralType)]
    return sorted({json.dumps(value) for each in literals for value in each.values})


@cache
def _type(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _alternatives(of: inspect.Type) -> tuple[inspect.Type, ...]:
    return of.types if isinstance(of, inspect.UnionType) else (of,)


def _inside(of: inspect.Type, step: str) -> list[inspect.Type]:
    """What is one step into a value: a field by its name, or an item (`[0]`)."""
    match of:
        case inspect.StructType():
            tags = [inspect.LiteralType((of.tag,))] if step == of.tag_field else []
            return [*tags, *(field.type for field in of.fields if field.encode_name == step)]
        case inspect.ListType() if step.startswith("["):
            return [of.item_type]
        case inspect.DictType() if step.startswith("["):
            return [of.value_type]
        case _:
            return []


def _path(error: msgspec.ValidationError) -> str:
    found = _AT.search(str(error))
    return found["path"] if found else ""


def _dotted(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _nearest(kind: Any, field: str, path: str) -> str:
    """The field beside it that was meant, if there is one."""
    here: list[inspect.Type] = [_type(kind)]
    for step in _STEPS.findall(path):
        here = [inner for each in here for outer in _alternatives(each) for inner in _inside(outer, step)]
    structs = [each for outer in here for each in _alternatives(outer) if isinstance(each, inspect.StructType)]
    near = difflib.get_close_matches(field, {each.encode_name for of in structs for each in of.fields}, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def _without(body: bytes, path: str, field: str) -> bytes:
    """The body without one field, named by its path as `messages[0]` or `a.b`."""
    value = json.loads(body)
    holder = value
    try:
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            holder = holder[name] if name else holder[int(index)]
    except (LookupError, TypeError):  # the field's own name looks like a path
        holder = None
    if not isinstance(holder, dict) or field not in holder:
        raise InvalidParameter(f"unknown field {_dotted(path, field)!r}", param=_dotted(path, field))
    del holder[field]
    return json.dumps(value).encode()
