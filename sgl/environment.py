"""Environment variables: the one table, and the one module that reads them.

Owns `VARIABLES` (those that are no engine option), the rule that every engine option may also be given as
`SGL_<OPTION>`, and the environment of child processes. A test keeps `os.environ` out of every other module.

Precedence, highest first: argument or flag, environment, default. `Engine` and the commands apply it; what they hand on
is complete, so that nothing below them, the worker included, depends on the environment for an option. A leaf: standard
library and msgspec only.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from sgl.errors import ConfigError

PREFIX = "SGL_"


class Variable(msgspec.Struct, frozen=True):
    """One variable: its name, what it means, and its value now (`None` when it is not set)."""

    name: str
    meaning: str
    value: str | None = None


VARIABLES = (
    Variable("SGL_CACHE", "Folder of fetched models; else XDG_CACHE_HOME/sgl, else ~/.cache/sgl."),
    Variable("SGL_TEST_FAULTS", "1 allows the option fault_points, with which tests break an engine on purpose."),
)
"""Variables of sgl that are no engine option."""


def read(name: str) -> str | None:
    """The value of a variable; `None` when it is not set or empty."""
    return os.environ.get(name) or None


def inherited(
    *, default: Mapping[str, str] | None = None, without: Collection[str] = (), **changes: str
) -> dict[str, str]:
    """The environment of a child process: this one's `without` some variables, with `changes`; `default` fills what is
    not set."""
    own = {name: value for name, value in os.environ.items() if name not in without}
    return {**(default or {}), **own, **changes}


def variable_of(option: str) -> str:
    """The variable of an engine option.

    Example:
        >>> variable_of("max_total_tokens")
        'SGL_MAX_TOTAL_TOKENS'
    """
    return PREFIX + option.upper()


def with_environment(given: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """`given`, completed by the variables of the fields of `kind` that it lacks.

    Args:
        given: fields that were given as arguments or flags. `None` is given, too.
        kind: the struct of options, `EngineConfig`.

    Raises:
        ConfigError: a variable's text is no value of its field.
    """
    hints = get_type_hints(kind, include_extras=True)
    found = {
        option: parse_option(text, hints[option], variable_of(option))
        for option in kind.__struct_fields__
        if option not in given and (text := read(variable_of(option))) is not None
    }
    return {**found, **given}


def export(given: Mapping[str, Any]) -> None:
    """Set the variables of options for this process and its children, so that every engine in it takes them.

    Example:
        >>> export({"page_size": 4, "logit_processors": ("a:b",)})
        >>> read("SGL_PAGE_SIZE"), read("SGL_LOGIT_PROCESSORS")
        ('4', '["a:b"]')
        >>> del os.environ["SGL_PAGE_SIZE"], os.environ["SGL_LOGIT_PROCESSORS"]
    """
    for option, value in given.items():
        os.environ[variable_of(option)] = value if isinstance(value, str) else msgspec.json.encode(value).decode()


def parse_option(text: str, annotation: Any, name: str) -> Any:
    """A value of type `annotation` from text: numbers and words as they are, `true`, `false`, `1` or `0` for what is
    on or off, tuples as JSON or with commas.

    Raises:
        ConfigError: the text is none, with `name`, the text and what was expected.

    Example:
        >>> parse_option("4", int, "SGL_PAGE_SIZE"), parse_option("a,b", tuple[str, ...], "SGL_X")
        (4, ('a', 'b'))
    """
    value: Any = text
    if is_tuple(annotation):
        try:
            value = msgspec.json.decode(text) if text.lstrip().startswith("[") else text.split(",")
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name} is {text!r}: {error}", hint=f"set {name} to words with commas between") from None
    try:
        return msgspec.convert(value, annotation, strict=False)
    except msgspec.ValidationError as error:
        option = name.removeprefix(PREFIX).lower()
        raise ConfigError(f"{name} is {text!r}: {error}", hint=f"set {name} to such a value", param=option) from None


def is_tuple(annotation: Any) -> bool:
    """Whether a field holds a tuple, bounds and `None` aside."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return any(is_tuple(kind) for kind in get_args(annotation) if kind is not NoneType)
    return get_origin(annotation) is tuple


def table(kind: type[msgspec.Struct]) -> tuple[Variable, ...]:
    """Every variable with its value now: those of `VARIABLES`, then one per field of `kind`."""
    hints = get_type_hints(kind, include_extras=True)
    options = (Variable(variable_of(option), _description(hints[option])) for option in kind.__struct_fields__)
    return tuple(
        Variable(variable.name, variable.meaning, os.environ.get(variable.name)) for variable in (*VARIABLES, *options)
    )


def unknown_variables(kind: type[msgspec.Struct]) -> tuple[tuple[str, str | None], ...]:
    """(name, nearest known one if any) of each variable that looks like ours and is not."""
    known = [variable.name for variable in table(kind)]
    strange = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return tuple((name, next(iter(difflib.get_close_matches(name, known, n=1)), None)) for name in strange)


def _description(annotation: Any) -> str:
    return next((m.description for m in get_args(annotation) if isinstance(m, msgspec.Meta) and m.description), "")
