"""From an exception that nobody expected to an error that a client may see.

Owns the line between the two. The client gets a stable code, what failed, the exception's type and an error id, and
nothing of its text, which may hold paths, addresses or other people's data. The log of the process gets everything
under the same id, at level `error` whatever was asked for: such an exception is a bug, and may not come again.
"""

from __future__ import annotations

import logging
import uuid

from sgl.errors import InternalError, SglError

log = logging.getLogger("sgl.failures")


def internal_error(what: str, error: BaseException) -> InternalError:
    """The typed error for `error`, which is logged; `error_id` joins the two.

    Example:
        >>> logging.getLogger("sgl.failures").disabled = True
        >>> failure = internal_error("a model step failed", RuntimeError("/secret/path"))
        >>> failure.message == f"a model step failed: RuntimeError, error id {failure.error_id}"
        True
        >>> logging.getLogger("sgl.failures").disabled = False
    """
    error_id = uuid.uuid4().hex[:12]
    log.error("%s (error id %s)", what, error_id, exc_info=error)
    failure = InternalError(
        f"{what}: {type(error).__name__}, error id {error_id}",
        hint="the log of the engine's worker has the details under this id",
        error_id=error_id,
    )
    failure.__cause__ = error
    return failure


def typed(what: str, error: Exception) -> SglError:
    """`error` itself when it was raised on purpose, else what stands for it."""
    return error if isinstance(error, SglError) else internal_error(what, error)
