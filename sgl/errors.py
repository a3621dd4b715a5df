"""Every way in which something can go wrong, as one tree.

Owns the exception types, their stable codes and their form on the wire. Every room raises these; the HTTP layer turns
them into status codes, the messages between processes carry them as `ErrorInfo`, and `from_info` brings the same type
back on the other side. Standard library and msgspec only, so that every room may import it.

    SglError
    +-- InvalidRequest              400  the caller can mend it
    |   +-- InvalidParameter             a field is missing, misspelt, of the wrong type or out of range
    |   +-- InvalidProgram               a program is put together wrongly (also GraphError on the wire)
    |   +-- InvalidConstraint            a constraint cannot be used as given
    |   |   +-- InvalidRegex
    |   |   +-- InvalidSchema            `pointer` is a JSON pointer into the schema
    |   |   +-- UnsupportedSchema        valid JSON schema, but a keyword that nothing here would enforce
    |   |   +-- InvalidGrammar           EBNF, Lark, structural tag: line and column, or `pointer`
    |   |   +-- ConstraintTooComplex     over a limit of `sgl.limits`
    |   +-- EmptyPrompt
    |   +-- PromptTooLong                both numbers are in the message
    |   +-- NeverFits                    larger than the whole KV pool
    |   +-- PinBudgetExceeded            both numbers are in the message
    |   +-- EngineBusy                   it asks for an idle engine
    |   +-- Unauthorized            401  no key, or a wrong one
    |   +-- Forbidden               403  the key may not do this
    |   +-- NotFound                404  no such route or object
    |   +-- MethodNotAllowed        405
    |   +-- BodyTimeout             408
    |   +-- BodyTooLarge            413
    |   +-- UnsupportedMediaType    415  a body that says that it is no JSON
    |   +-- Unsupported             400  this backend cannot execute that node
    +-- ConfigError                 400  engine fields, flags, environment
    +-- ModelError                  500  a model cannot be used
    |   +-- ModelNotFound           404
    |   +-- CorruptModel                 truncated, wrong checksum, bad offsets
    |   +-- UnsupportedModel             architecture, tokenizer or data type that is not known here
    |   +-- AccessDenied            403  a hub repository that asks for an account or for accepted terms
    |   +-- DownloadFailed          502  offline mode, no network, package index said no
    |       +-- DiskFull            507  the cache's disk; `folder`, `needed_bytes`, `free_bytes`
    +-- Overloaded                  503
    |   +-- QueueFull               429
    |   +-- QueueTimeout            503
    |   +-- Draining                503  the server ends, and takes nothing new
    |   +-- SlowReader              503  a stream that its client does not read
    +-- StateLost                   410  a state handle that is expired or belongs to another engine
    +-- Cancelled                   499  the caller (or the end of its program) cancelled it
    +-- DeadlineExceeded            408  the caller's own
    +-- GenerationError             500  the model produced something unusable
    |   +-- InvalidLogits                NaN or no finite logit in one row; neighbours go on
    |   +-- ConstraintDeadEnd            the grammar allows no token
    |   +-- RequirementFailed            no attempt passed its check; `value` and `reason` of the last one
    |   +-- ToolError                    a tool raised, or a call could not be run; the cause is what it raised
    |   +-- Truncated                    the typed value ended before it was complete; `partial` holds the text
    |   +-- SchemaViolation              a value that was checked after decoding is not valid; `value` holds it
    +-- EngineDead                  503  the worker ended; every open program gets this
    +-- RemoteError                 502  an API said no, or nothing; `remote_status`, `request_id`, `retryable`
    +-- BenchError                  500  a measurement that cannot be made: a peer that fails, sides that differ
    +-- InternalError               500  a bug of ours

Example:
    >>> import sgl
    >>> try:
    ...     sgl.gen("x", max_tokens=-1)
    ... except sgl.errors.InvalidParameter as error:
    ...     error.param, error.code
    ('max_tokens', 'invalid_parameter')
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class SourceLocation(msgspec.Struct, frozen=True, array_like=True):
    """The line of a user's program that made a node."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on the wire: between processes, in HTTP bodies, in `--json` output."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}
    location: SourceLocation | None = None


class SglError(Exception):
    """Base of every error that sgl raises on purpose.

    Args:
        message: what was given and what was expected.
        hint: the one thing to change. Shown after the message.
        location: the program line concerned, if a program is running.
        details: named facts (numbers, pointers); each is also an attribute of the error.

    Example:
        >>> error = InvalidParameter("temperature is -1.0; it must be finite and at least 0", param="temperature")
        >>> error.code, error.status, error.param
        ('invalid_parameter', 400, 'temperature')
        >>> type(SglError.from_info(error.to_info())).__name__
        'InvalidParameter'
    """

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "", location: SourceLocation | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.location = location
        self.details = details

    def __getattr__(self, name: str) -> Any:
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        text = self.message
        if self.hint:
            text = f"{text} ({self.hint})"
        if self.location is not None:
            text = f"{text}\n  at {self.location}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (SglError.from_info, (self.to_info(),))

    def at(self, location: SourceLocation | None) -> SglError:
        """The same error pointing at `location`, unless it already points somewhere."""
        if self.location is None:
            self.location = location
        return self

    def to_info(self) -> ErrorInfo:
        """The wire form. The cause and the traceback stay on this side."""
        return ErrorInfo(self.code, self.message, self.hint, self.details, self.location)

    @staticmethod
    def from_info(info: ErrorInfo) -> SglError:
        """The error that `info` describes; a code from a newer protocol becomes `InternalError`."""
        kind = _BY_CODE.get(info.code, InternalError)
        return kind(info.message, hint=info.hint, location=info.location, **info.details)


class InvalidRequest(SglError, ValueError):
    """The request cannot be executed as given; the caller can mend it."""

    code = "invalid_request"
    status = 400


class InvalidParameter(InvalidRequest):
    """One field is missing, misspelt, of the wrong type or out of range (`param` names it)."""

    code = "invalid_parameter"


class InvalidProgram(InvalidRequest):
    """A program is put together wrongly: nested roles, unknown variables, a graph that breaks its rules."""

    code = "invalid_program"


class InvalidConstraint(InvalidRequest):
    """A constraint cannot be used as given."""

    code = "invalid_constraint"


class InvalidRegex(InvalidConstraint):
    """A regular expression that cannot be compiled or uses what a grammar cannot enforce."""

    code = "invalid_regex"


class InvalidSchema(InvalidConstraint):
    """Not a JSON schema; `pointer` says where."""

    code = "invalid_schema"


class UnsupportedSchema(InvalidConstraint):
    """A JSON schema keyword that no backend here enforces; `pointer` says where."""

    code = "unsupported_schema"


class InvalidGrammar(InvalidConstraint):
    """An EBNF, Lark or structural-tag grammar that cannot be read (`line` and `column`, or `pointer`, say where)."""

    code = "invalid_grammar"


class ConstraintTooComplex(InvalidConstraint):
    """The constraint is over a size, depth, time or memory limit of `sgl.limits`."""

    code = "constraint_too_complex"


class EmptyPrompt(InvalidRequest):
    """Nothing to condition on, and the model has no beginning-of-sequence token."""

    code = "empty_prompt"


class PromptTooLong(InvalidRequest):
    """Prompt (and requested output) exceed the context (`prompt_tokens`, `context_len`)."""

    code = "prompt_too_long"


class NeverFits(InvalidRequest):
    """The request needs more KV pages than the pool has (`needed_tokens`, `pool_tokens`)."""

    code = "never_fits"


class PinBudgetExceeded(InvalidRequest):
    """A prefix cannot be pinned: the budget for pins, or the room that requests need, would be exceeded."""

    code = "pin_budget_exceeded"


class EngineBusy(InvalidRequest):
    """Something that needs an idle engine was asked of one that works."""

    code = "engine_busy"


class Unauthorized(InvalidRequest):
    """No API key, or a wrong one."""

    code = "invalid_api_key"
    status = 401


class Forbidden(InvalidRequest):
    """The API key is right and may not do this."""

    code = "forbidden"
    status = 403


class NotFound(InvalidRequest):
    """No such route or object."""

    code = "not_found"
    status = 404


class MethodNotAllowed(InvalidRequest):
    """The route exists and takes other methods."""

    code = "method_not_allowed"
    status = 405


class BodyTimeout(InvalidRequest):
    """The body of a request did not come in time."""

    code = "body_timeout"
    status = 408


class BodyTooLarge(InvalidRequest):
    """The body of a request is over the server's `max_body_bytes`."""

    code = "body_too_large"
    status = 413


class UnsupportedMediaType(InvalidRequest):
    """The body of a request says that it is something else than JSON."""

    code = "unsupported_media_type"
    status = 415


class Unsupported(InvalidRequest):
    """This backend cannot execute that node or option."""

    code = "unsupported"


class ConfigError(SglError, ValueError):
    """An engine field, flag or environment variable is unknown, invalid or contradicts another."""

    code = "config_error"
    status = 400


class ModelError(SglError):
    """A model cannot be used."""

    code = "model_error"


class ModelNotFound(ModelError, LookupError):
    """No model under that name."""

    code = "model_not_found"
    status = 404


class CorruptModel(ModelError):
    """The model's files are truncated, have a wrong checksum or point outside themselves."""

    code = "corrupt_model"


class UnsupportedModel(ModelError):
    """An architecture, tokenizer or data type that is not known here."""

    code = "unsupported_model"


class DownloadFailed(ModelError):
    """A model could not be fetched: offline mode, no network, or the source refused."""

    code = "download_failed"
    status = 502


class DiskFull(DownloadFailed):
    """The disk of the cache cannot hold what is fetched (`folder`, `needed_bytes`, `free_bytes`)."""

    code = "disk_full"
    status = 507


class AccessDenied(ModelError):
    """A repository that is gated: its owner asks for an account, or for terms to be accepted."""

    code = "access_denied"
    status = 403


class Overloaded(SglError):
    """The engine cannot take more now; the same request may succeed later."""

    code = "overloaded"
    status = 503


class QueueFull(Overloaded):
    """The waiting queue is at its cap."""

    code = "queue_full"
    status = 429


class QueueTimeout(Overloaded):
    """The request waited longer than allowed without being started."""

    code = "queue_timeout"


class Draining(Overloaded):
    """The server is ending and takes nothing new."""

    code = "draining"


class SlowReader(Overloaded):
    """A client that does not read its stream; its request was aborted."""

    code = "slow_reader"


class StateLost(SglError):
    """A state handle that is expired, released, or belongs to another engine."""

    code = "state_lost"
    status = 410


class Cancelled(SglError):
    """Cancelled by the caller or because a sibling failed."""

    code = "cancelled"
    status = 499


class DeadlineExceeded(SglError, TimeoutError):
    """The program's deadline passed."""

    code = "deadline_exceeded"
    status = 408


class GenerationError(SglError):
    """The model produced something unusable."""

    code = "generation_error"


class InvalidLogits(GenerationError):
    """NaN, or no finite logit, in this row; neighbours in the batch go on."""

    code = "invalid_logits"


class ConstraintDeadEnd(GenerationError):
    """The constraint allows no token of the vocabulary."""

    code = "constraint_dead_end"


class RequirementFailed(GenerationError):
    """No attempt of `s.require` passed its check; `value` (its repr) and `reason` are those of the last one."""

    code = "requirement_failed"


class ToolError(GenerationError):
    """A tool that a model called has raised (its cause), or a call cannot be run; `tool` names it."""

    code = "tool_error"


class Truncated(GenerationError):
    """A typed value ended before it was complete; `partial` holds the text so far."""

    code = "truncated"


class SchemaViolation(GenerationError):
    """A value checked after decoding breaks its schema: `value` is its text, `pointer` the place in it that is wrong,
    `schema_pointer` the keyword that says so."""

    code = "schema_violation"


class EngineDead(SglError):
    """The worker process ended; every open program gets this."""

    code = "engine_dead"
    status = 503


class RemoteError(SglError):
    """An API that a program runs on failed (`remote_status` and `request_id` where it answered; `retryable`)."""

    code = "remote_error"
    status = 502


class BenchError(SglError):
    """A measurement cannot be made as asked: a peer does not start or answer, or the two sides are not comparable."""

    code = "bench_error"


class InternalError(SglError):
    """A bug in sgl."""

    code = "internal_error"


def _tree(kind: type[SglError]) -> dict[str, type[SglError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE: dict[str, type[SglError]] = _tree(SglError)
