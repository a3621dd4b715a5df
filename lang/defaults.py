"""Which backend programs use when none is given.

Owns the process-wide default backend. `set_default_backend` sets it; otherwise the factory that was registered (by
`sgl`, so that this room does not know the engine) makes one on first use: the automatic backend. There is one of it at
a time: it is kept while another backend is set, and another is made only when it is no longer alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from sgl.errors import ConfigError, InvalidParameter
from sgl.lang.backend import Backend
from sgl.lang.graph import Sampling, sampling_from_mapping
from sgl.lang.rendering import PlainRenderer, Renderer

_lock = threading.RLock()
_chosen: Backend | None = None
_automatic: Backend | None = None
_factory: Callable[[], Backend] | None = None
_renderers: Callable[[str | None], Renderer] | None = None


def register_default_backend(factory: Callable[[], Backend] | None) -> None:
    """What makes the automatic backend on first use; it answers for its end at exit."""
    global _factory
    with _lock:
        _factory = factory


def register_renderers(factory: Callable[[str | None], Renderer] | None) -> None:
    """What makes the renderer of a model by its name or path, of the default engine's for `None`, without an engine."""
    global _renderers
    with _lock:
        _renderers = factory


def renderer_for(model: str | None) -> Renderer:
    """What counts and renders for a model, by its name or path (see `sgl.lang.rendering`).

    Raises:
        ConfigError: nothing here knows models.
        ModelError: the model cannot be found or read.

    Example:
        >>> import sgl
        >>> _ = sgl.MockBackend  # the package brings the models
        >>> renderer_for("dummy").count("four")
        4
    """
    with _lock:
        factory = _renderers
    if factory is None:
        raise ConfigError("nothing here knows models", hint="import sgl, and not a part of it alone")
    return factory(model)


def default_renderer() -> Renderer:
    """What counts tokens for the backend that programs use now; none is started for it.

    Example:
        >>> import sgl
        >>> sgl.set_default_backend(sgl.MockBackend())
        >>> default_renderer().name
        'words'
        >>> sgl.set_default_backend(None)
    """
    with _lock:
        chosen = _chosen
    if chosen is None:
        return renderer_for(None)
    make = getattr(chosen, "renderer", None)
    found: Renderer = make() if make is not None else PlainRenderer("an estimate of four characters per token")
    return found


def set_default_backend(backend: Backend | None) -> None:
    """Use `backend` for programs that are run without one; `None` goes back to the automatic engine.

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
    global _chosen
    if backend is not None:
        check_backend(backend)
    with _lock:
        _chosen = backend


def default_backend() -> Backend:
    """The backend that programs use now; with none set, the automatic engine, started if it is not alive.

    Raises:
        ConfigError: none is set and no factory is registered.

    Example:
        >>> import sgl
        >>> sgl.set_default_backend(sgl.MockBackend())
        >>> sgl.default_backend().server_info()["backend"]
        'mock'
        >>> sgl.set_default_backend(None)
    """
    global _automatic
    with _lock:
        if _chosen is not None:
            return _chosen
        if _automatic is not None and not getattr(_automatic, "alive", True):
            ended, _automatic = _automatic, None
            ended.shutdown()  # its worker is gone; this frees what it held here
        if _automatic is None:
            if _factory is None:
                raise ConfigError("no backend is set", hint="call sgl.set_default_backend(...) or pass backend=")
            _automatic = _factory()
        return _automatic


def check_backend(backend: object) -> None:
    """Raise `InvalidParameter` unless `backend` is one: the object, not its class."""
    if isinstance(backend, type) and issubclass(backend, Backend):
        raise InvalidParameter(
            f"backend is the class {backend.__name__}; expected an instance",
            hint=f"make one: {backend.__name__}(...)",
            param="backend",
        )
    if not isinstance(backend, Backend):
        raise InvalidParameter(f"backend is {backend!r}; expected an engine or another backend", param="backend")


def backend_of(backend: Backend | None) -> Backend:
    """The backend that was given, checked, or else the default one."""
    if backend is None:
        return default_backend()
    check_backend(backend)
    return backend


def chosen_backend() -> Backend | None:
    """What `set_default_backend` was given, or `None`."""
    with _lock:
        return _chosen


def sampling_defaults(backend: Backend) -> Sampling:
    """What holds for sampling on `backend` where nothing else is said: its model's recommendation over the constants.

    Example:
        >>> import sgl
        >>> sampling_defaults(sgl.MockBackend()).temperature
        1.0
    """
    recommend = getattr(backend, "sampling_defaults", None)
    return sampling_from_mapping(recommend() if recommend is not None else {})


def model_format(backend: Backend, kind: Literal["tool", "reasoning"]) -> str | None:
    """The format (`sgl.grammars.formats`) of tool calls or reasoning of the model on `backend`, by name; `None`
    where the backend does not know.

    Example:
        >>> import sgl
        >>> model_format(sgl.MockBackend(), "tool") is None
        True
    """
    found = backend.server_info().get("formats", {}).get(kind)
    return str(found) if found is not None else None


def flush_cache(backend: Backend | None = None) -> bool:
    """Drop what no program uses from the backend's prefix cache; False if it has none.

    Example:
        >>> import sgl
        >>> sgl.flush_cache(sgl.MockBackend())
        False
    """
    return backend_of(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> Mapping[str, Any]:
    """What the backend runs.

    Example:
        >>> import sgl
        >>> sgl.get_server_info(sgl.MockBackend())["backend"]
        'mock'
    """
    return backend_of(backend).server_info()
