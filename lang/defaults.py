"""Which backend programs use when none is given.

Owns the process-wide default backend. `set_default_backend` sets it; otherwise the factory that was registered (by
`sgl`, so that this room does not know the engine) makes one on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from sgl.errors import ConfigError, InvalidParameter
from sgl.lang.backend import Backend

_lock = threading.RLock()
_backend: Backend | None = None
_factory: Callable[[], Backend] | None = None


def register_default_backend(factory: Callable[[], Backend] | None) -> None:
    """What makes the default backend on first use."""
    global _factory
    with _lock:
        _factory = factory


def set_default_backend(backend: Backend | None) -> None:
    """Use `backend` for programs that are run without one; `None` goes back to the engine made on first use.

    Example:
        >>> import sgl
        >>> sgl.set_default_backend(sgl.MockBackend(["four"]))
        >>> @sgl.function
        ... def add(s):
        ...     s += "2 + 2 = " + sgl.gen("sum")
        >>> add.run()["sum"]
        'four'
        >>> sgl.set_default_backend(None)
    """
    global _backend
    if backend is not None and not isinstance(backend, Backend):
        raise InvalidParameter(f"backend is {backend!r}; expected an object with open()", param="backend")
    with _lock:
        _backend = backend


def default_backend() -> Backend:
    """The default backend, made now if need be.

    Raises:
        ConfigError: none is set and no factory is registered.
    """
    global _backend
    with _lock:
        if _backend is None:
            if _factory is None:
                raise ConfigError("no backend is set", hint="call sgl.set_default_backend(...) or pass backend=")
            _backend = _factory()
        return _backend


def flush_cache(backend: Backend | None = None) -> bool:
    """Drop what no program uses from the backend's prefix cache; False if it has none.

    Example:
        >>> import sgl
        >>> sgl.flush_cache(sgl.MockBackend())
        False
    """
    return (backend or default_backend()).flush_cache()


def get_server_info(backend: Backend | None = None) -> Mapping[str, Any]:
    """What the backend runs.

    Example:
        >>> import sgl
        >>> sgl.get_server_info(sgl.MockBackend())["backend"]
        'mock'
    """
    return (backend or default_backend()).server_info()
