"""Errors as HTTP answers: status, headers, and a body in the shape that the caller's client knows.

Owns the translation from `SglError` to OpenAI's `{"error": {message, type, param, code}}`; a dialect with another shape
gives its own (`Shape`). What is not one of ours
becomes an `InternalError` whose text says nothing of the inside: its log line has the traceback under the request's id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response

from sgl.errors import (
    BodyTimeout,
    BodyTooLarge,
    EngineDead,
    InternalError,
    InvalidConstraint,
    InvalidParameter,
    Overloaded,
    PromptTooLong,
    SglError,
    Unauthorized,
)
from sgl.grammars.keywords import CHECK_HINT
from sgl.grammars.spec import PARAMETERS

Shape: TypeAlias = Callable[[SglError], dict[str, Any]]
"""The body of an error as a dialect's clients know it."""

RETRY_AFTER_S = 1
"""Told to clients that were turned away: a queue of one step's length is gone by then."""


def error_type(status: int) -> str:
    """The `type` that OpenAI's API gives errors of a status."""
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    named[499] = "cancelled_error"
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_message(error: SglError) -> str:
    """What went wrong, and the one thing to change."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def in_words(error: SglError, names: Mapping[str, str]) -> SglError:
    """An error about a field that is in `names`, with the names there for all that it speaks of; another one as it is.

    Example:
        >>> in_words(InvalidParameter("stop is 3", param="stop"), {"stop": "stop_sequences"})
        InvalidParameter('stop_sequences is 3')
    """
    param = str(error.details.get("param"))
    if not isinstance(error, InvalidParameter) or param not in names:
        return error

    def said(text: str) -> str:
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)

    details = {**error.details, "param": names[param]}
    return InvalidParameter(said(error.message), hint=said(error.hint), location=error.location, **details)


def at_field(error: SglError, field: str) -> SglError:
    """An error of a constraint with the field that has the constraint, another one as it is.

    Example:
        >>> at_field(InvalidConstraint("no"), "response_format").param
        'response_format'
    """
    if not isinstance(error, InvalidConstraint) or not field or error.details.get("param") not in (None, *PARAMETERS):
        return error
    hint = error.hint.removesuffix(CHECK_HINT).removesuffix("; ") if field == "tools" else error.hint
    return type(error)(error.message, hint=hint, location=error.location, **{**error.details, "param": field})


def error_body(error: SglError, **more: Any) -> dict[str, Any]:
    """`{"error": {...}}`; `hint` is part of the message, and `details` are named facts as `pointer`."""
    details = {name: value for name, value in error.details.items() if name != "param"}
    body: dict[str, Any] = {
        "message": error_message(error),
        "type": error_type(error.status),
        "param": error.details.get("param"),
        "code": error.code,
        **({"details": details} if details else {}),
        **more,
    }
    return {"error": body}


def openai_errors(prompt: str) -> Shape:
    """`error_body` with the code at which agents shorten a conversation; `prompt` is the field that has it."""

    def shape(error: SglError) -> dict[str, Any]:
        if isinstance(error, PromptTooLong):
            body = error_body(error)
            body["error"].update(code="context_length_exceeded", param=error.details.get("param") or prompt)
            return body
        return error_body(error)

    return shape


def error_response(error: SglError, shape: Shape = error_body) -> Response:
    """The answer to a request that failed before anything was sent."""
    headers = {}
    if isinstance(error, (Overloaded, EngineDead)):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (BodyTooLarge, BodyTimeout)):
        headers["Connection"] = "close"  # the rest of the body is not read
    return Response(encode(shape(error)), error.status, headers, "application/json")


def internal(request_id: str) -> InternalError:
    """What a client is told of a bug."""
    return InternalError("the server failed on this request", hint=f"its log says more under request id {request_id}")


def encode(value: Any) -> bytes:
    """JSON; text with lone surrogates is written with U+FFFD in their place."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_clean(msgspec.to_builtins(value)))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(each) for each in value]
    return value
