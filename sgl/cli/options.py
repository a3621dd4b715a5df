"""Command-line flags made from the fields of a configuration, so that no flag, default or help text is written twice.

`engine_options` and `server_options` add one keyword-only parameter per field to a command's signature, where typer
finds it. A flag that was not given is `None` and is left out of what the command receives, unless the environment has
it (`SGL_<OPTION>`): defaults stay with the configuration. Values are checked where it is made, which refuses with a
`ConfigError`; typer only parses them. A field that is a tuple is a flag that may be repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from sgl.environment import variable_of, with_environment
from sgl.runtime.config import EngineConfig


def flag_of(field: str) -> str:
    """The flag of an engine field.

    Example:
        >>> flag_of("model_path")
        '--model-path'
    """
    return "--" + field.replace("_", "-")


def _plain(annotation: Any) -> Any:
    """The type that typer parses: bounds, descriptions and `None` taken off; a list for a tuple."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return _plain(kinds[0])
    if get_origin(annotation) is tuple:
        return list[_plain(get_args(annotation)[0])]  # type: ignore[misc]
    return annotation


def _description(annotation: Any) -> str:
    return next((m.description for m in get_args(annotation) if isinstance(m, msgspec.Meta) and m.description), "")


def parameters_of(config: type[msgspec.Struct], panel: str) -> list[inspect.Parameter]:
    """One optional parameter per field of a configuration, as typer wants them."""
    hints = get_type_hints(config, include_extras=True)
    parameters = []
    for field in msgspec.structs.fields(config):
        kind = _plain(hints[field.name])
        default = _default_text(field.default)
        names = [flag_of(field.name)]
        if kind is bool:
            names = [f"{names[0]}/--no-{names[0][2:]}"]
            default = "on" if field.default else "off"
        elif get_origin(kind) not in (Literal, list) and kind not in (int, float, str):
            raise TypeError(f"field {field.name} is {kind}; teach sgl.cli.options to parse it")
        option = typer.Option(
            *names,
            help=_help(_description(hints[field.name]), default, variable_of(field.name)),
            show_default=False,
            rich_help_panel=panel,
        )
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    return parameters


def _help(description: str, default: str, variable: str) -> str:
    """A description with its default, which it may tell itself, and the variable."""
    text, said, own = description.partition(" [default: ")
    return f"{text} [default: {own.removesuffix(']') if said else default}; {variable}]"


def _default_text(default: Any) -> str:
    if default is None:
        return "decided at start"
    return (" ".join(map(str, default)) or "none") if isinstance(default, tuple) else str(default)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: `command(..., engine: Mapping[str, Any])` gets as `engine` the options that were given as flags or in
    the environment."""
    return config_options(command, "engine", EngineConfig, "Engine")


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: `command(..., server: Mapping[str, Any])`, as `engine_options`."""
    from sgl.server.config import ServerConfig

    return config_options(command, "server", ServerConfig, "Server")


def config_options(
    command: Callable[..., Any], name: str, config: type[msgspec.Struct], panel: str
) -> Callable[..., Any]:
    """A command whose parameter `name` is a mapping, with flags in its place."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for each, parameter in signature.parameters.items() if each != name]
    extra = parameters_of(config, panel)
    fields = {parameter.name for parameter in extra}
    if clash := fields & {parameter.name for parameter in own}:
        raise TypeError(f"{command.__name__} already has parameters named {sorted(clash)}")

    @wraps(command)
    def with_config(*args: Any, **kwargs: Any) -> Any:
        flags = {each: value for each, value in kwargs.items() if each in fields and value not in (None, [])}
        for each, value in flags.items():
            if isinstance(value, list):
                flags[each] = tuple(value)
        given = {name: with_environment(flags, config)}
        rest = {each: value for each, value in kwargs.items() if each not in fields}
        return command(*args, **given, **rest)

    with_config.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
    with_config.__annotations__ = {p.name: p.annotation for p in (*own, *extra)}
    return with_config
