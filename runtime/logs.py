"""Where log records go.

Owns the rule. This library logs to loggers below `sgl` and touches neither the root logger nor anybody's handlers; on
`sgl` sits a `NullHandler`, so what the client half logs is silent until the user installs a handler. A worker process
has no user: its records of `log_level` and above, Python warnings included, travel to the client, and are handed there
to the logger of their name (`sgl.worker`, ...). Where no handler listens to that, they are lines on standard error,
because what a worker warns of must not vanish. Records of other libraries in the worker go to its standard error.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable

from sgl.runtime.messages import Log

ROOT = "sgl"
_WARNINGS = "py.warnings"
"""Logger to which the standard library sends warnings."""


class ForwardingHandler(logging.Handler):
    """Collects a worker's records as messages.

    Args:
        notify: called after a record came in; on any thread. The owner of the socket takes what there is with `drain`.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self._notify = notify
        self._records: deque[Log] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record for the client."""
        name = "sgl.worker" if record.name == _WARNINGS else record.name
        self._records.append(Log(record.levelno, name, self.format(record)))
        self._notify()

    def drain(self) -> list[Log]:
        """The records since the last call, in order."""
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        return taken


def forward_worker_logs(level: str, notify: Callable[[], None]) -> ForwardingHandler:
    """Send this process's `sgl` records and warnings of `level` and above to the client. For a worker process only."""
    handler = ForwardingHandler(notify)
    logging.captureWarnings(True)
    for name in (ROOT, _WARNINGS):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    set_worker_level(level)
    return handler


def set_worker_level(level: str) -> None:
    """Forward records of `level` and above from now on."""
    for name in (ROOT, _WARNINGS):
        logging.getLogger(name).setLevel(level.upper())


def deliver(message: Log) -> None:
    """Hand a worker's record to the user's handlers, or to standard error where there are none.

    The worker's `log_level` has chosen it already: levels of loggers in this process do not hold it back, those of
    handlers do.
    """
    logger = logging.getLogger(message.logger)
    if _is_heard(logger):
        record = logger.makeRecord(
            logger.name, message.level, "(worker)", 0, message.text, (), None, extra={"sgl_worker": True}
        )
        logger.handle(record)
    elif sys.stderr is not None:
        try:
            sys.stderr.write(f"{message.logger}: {logging.getLevelName(message.level).lower()}: {message.text}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone, or the stream closed; the engine is not
            return


def _is_heard(logger: logging.Logger) -> bool:
    """Whether a handler that does something listens."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False
