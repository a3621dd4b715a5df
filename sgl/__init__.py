"""sgl: structured generation that starts from the language.

A program is a function whose state `s` grows; what the model adds has names, and can be held to a form::

    import sgl

    @sgl.function
    def rate(s, review):
        s += sgl.user("Is this review positive or negative? " + review)
        s += sgl.assistant(sgl.select("mood", ["positive", "negative"]))
        s += sgl.user("How many stars of five?")
        s += sgl.assistant(sgl.gen_int("stars", max_tokens=2))

    state = rate.run("The food was cold.")
    print(state["mood"], state["stars"])

`help(sgl.gen)`, `help(sgl.select)` and `help(sgl.function)` go on from here; `tutorials/` has a script for each part.

Owns the public names (lazy: importing this loads no model code) and the default backend: with none set, an engine on
the embedded model starts at the first use and stops at exit.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl import errors
    from sgl.lang.api.anthropic import Anthropic
    from sgl.lang.api.litellm import LiteLLM, VertexAI
    from sgl.lang.api.openai import Crusoe, OpenAI
    from sgl.lang.api.remote import RemoteEngine
    from sgl.lang.async_state import AsyncProgramState
    from sgl.lang.backend import Backend
    from sgl.lang.base_backend import BaseBackend
    from sgl.lang.batch import Batch
    from sgl.lang.choices import (
        ChoicesSamplingMethod,
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from sgl.lang.compat import Runtime, RuntimeEndpoint, global_config
    from sgl.lang.compile import CompiledProgram
    from sgl.lang.decorator import function
    from sgl.lang.defaults import default_backend, flush_cache, get_server_info, set_default_backend
    from sgl.lang.expressions import gen, gen_int, gen_string, select, separate_reasoning
    from sgl.lang.fork import ProgramStateGroup
    from sgl.lang.function import SglFunction
    from sgl.lang.mock import MockBackend
    from sgl.lang.rendering import Renderer
    from sgl.lang.replay import Recorder, Replay
    from sgl.lang.state import ProgramState
    from sgl.lang.streams import StreamEvent
    from sgl.lang.templates import Template, template
    from sgl.lang.tools import tool_prompt
    from sgl.lang.turns import (
        assistant,
        assistant_begin,
        assistant_end,
        image,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from sgl.runtime.config import EngineConfig
    from sgl.runtime.config import EngineConfig as ServerArgs
    from sgl.runtime.engine import Engine

__version__ = "0.1.0"

logging.getLogger("sgl").addHandler(logging.NullHandler())  # silent until the user listens (see sgl.runtime.logs)

_HOME = {
    "sgl.lang.api.anthropic": ("Anthropic",),
    "sgl.lang.api.litellm": ("LiteLLM", "VertexAI"),
    "sgl.lang.api.openai": ("Crusoe", "OpenAI"),
    "sgl.lang.api.remote": ("RemoteEngine",),
    "sgl.lang.choices": (
        "ChoicesSamplingMethod",
        "greedy_token_selection",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
    ),
    "sgl.lang.defaults": ("default_backend", "flush_cache", "get_server_info", "set_default_backend"),
    "sgl.lang.async_state": ("AsyncProgramState",),
    "sgl.lang.batch": ("Batch",),
    "sgl.lang.expressions": ("gen", "gen_int", "gen_string", "select", "separate_reasoning"),
    "sgl.lang.fork": ("ProgramStateGroup",),
    "sgl.lang.base_backend": ("BaseBackend",),
    "sgl.lang.compat": ("Runtime", "RuntimeEndpoint", "global_config"),
    "sgl.lang.compile": ("CompiledProgram",),
    "sgl.lang.decorator": ("function",),
    "sgl.lang.function": ("SglFunction",),
    "sgl.lang.mock": ("MockBackend",),
    "sgl.lang.replay": ("Recorder", "Replay"),
    "sgl.lang.state": ("ProgramState",),
    "sgl.lang.streams": ("StreamEvent",),
    "sgl.lang.templates": ("Template", "template"),
    "sgl.lang.tools": ("tool_prompt",),
    "sgl.lang.turns": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "image",
        "system",
        "system_begin",
        "system_end",
        "user",
        "user_begin",
        "user_end",
        "video",
    ),
    "sgl.runtime.config": ("EngineConfig",),
    "sgl.runtime.engine": ("Engine",),
}
"""Where each public name lives."""

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_CALLED = {"ServerArgs": "EngineConfig"}
"""Names of SGLang's for what has another one here."""
_MODULE_OF["ServerArgs"] = "sgl.runtime.config"

__all__ = [
    "Anthropic",
    "AsyncProgramState",
    "BaseBackend",
    "Batch",
    "ChoicesSamplingMethod",
    "CompiledProgram",
    "Crusoe",
    "Engine",
    "EngineConfig",
    "LiteLLM",
    "MockBackend",
    "OpenAI",
    "ProgramState",
    "ProgramStateGroup",
    "Recorder",
    "RemoteEngine",
    "Replay",
    "Runtime",
    "RuntimeEndpoint",
    "ServerArgs",
    "SglFunction",
    "StreamEvent",
    "Template",
    "VertexAI",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "default_backend",
    "errors",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "set_default_options",
    "system",
    "system_begin",
    "system_end",
    "template",
    "token_length_normalized",
    "tool_prompt",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

_options: dict[str, Any] = {}
_options_lock = threading.Lock()


def set_default_options(**fields: Any) -> None:
    """Fields of the engine that starts when no backend is set; replaces those given before.

    Raises:
        ConfigError: a field is unknown or has a wrong value.

    Example:
        >>> set_default_options(max_total_tokens=4096)
        >>> set_default_options()
    """
    from sgl.runtime.config import config_from_mapping

    config_from_mapping(fields)
    with _options_lock:
        _options.clear()
        _options.update(fields)


def _start_default_engine() -> Backend:
    from sgl.runtime.engine import Engine

    with _options_lock:
        fields = dict(_options)
    return Engine(**fields)  # ends itself at exit


def _load_renderer(model: str | None) -> Renderer:
    from sgl.environment import with_environment
    from sgl.runtime.config import EngineConfig, config_from_mapping
    from sgl.runtime.rendering import model_renderer

    with _options_lock:
        fields = dict(_options) if model is None else {"model_path": model}
    return model_renderer(config_from_mapping(with_environment(fields, EngineConfig)))


@functools.cache
def _register_engine() -> None:
    """Give the language its default backend and renderer: once, so that a factory registered later stays."""
    defaults = importlib.import_module("sgl.lang.defaults")
    defaults.register_default_backend(_start_default_engine)
    defaults.register_renderers(_load_renderer)


@atexit.register
def _close_engines() -> None:
    """Registered with the import of this package, so that it comes after handlers of programs, which may generate."""
    client = sys.modules.get("sgl.runtime.client")
    if client is not None:
        client.close_all()


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("sgl.errors")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'sgl' has no attribute {name!r}")
    if module.startswith("sgl.lang."):
        _register_engine()
    value = getattr(importlib.import_module(module), _CALLED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
