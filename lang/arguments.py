"""The arguments of `gen` and `select`, checked one by one and against each other.

Owns what is wrong with an argument and how it is told: errors name the argument as the caller spelt it (`param`).
Called by `expressions`; `refuse` also by runs and states.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict

import msgspec

from sgl.errors import InvalidParameter, Unsupported
from sgl.grammars.spec import Constraint, JsonSchema, constraint_of
from sgl.lang.forms import DType, Form, dtype_form, json_form, type_form
from sgl.lang.graph import Sampling, plain, sampling_values


def check_known(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise for the first keyword that `function` has no parameter for, with the nearest one that it has."""
    if unknown:
        param, parameters = next(iter(unknown)), inspect.signature(function).parameters.values()
        names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        near = difflib.get_close_matches(param, names, n=1)
        raise InvalidParameter(
            f"{function.__name__} has no parameter {param!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}",
            param=param,
        )


def check_name(name: object) -> str | None:
    """A capture's name, or `None` for an unnamed one."""
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise InvalidParameter(f"name is {name!r}; expected a non-empty string or nothing", param="name")
    return str(name)


def check_list_append(name: str | None, list_append: object) -> bool:
    """Whether a capture is added to a list of its name."""
    if not isinstance(list_append, bool):
        raise InvalidParameter(f"list_append is {list_append!r}; expected True or False", param="list_append")
    if list_append and name is None:
        raise InvalidParameter("list_append needs a name", hint="name the list", param="list_append")
    return list_append


def many(param: str, value: Any, kind: type) -> tuple[Any, ...] | None:
    """`value` as a tuple: one of `kind` stands for itself; a sequence is copied.

    Raises:
        InvalidParameter: neither.
    """
    if value is None:
        return None
    if isinstance(value, kind):
        return (plain(value),)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise InvalidParameter(f"{param} is {value!r}; expected {kind.__name__} or a list of them", param=param)
    return tuple(plain(item) for item in value)


def refuse(**given: Any) -> None:
    """Raise `Unsupported` for the first argument that is set but that no backend executes yet."""
    for param, value in given.items():
        if value is not None and value is not False:
            raise Unsupported(f"{param}={value!r} is not supported yet", hint=f"leave {param} out", param=param)


_DEFAULTS = Sampling()
_UNBOUNDED = Sampling(max_new_tokens=2**31)  # how many tokens at most is not known yet when it comes from the run


def sampling_fields(given: dict[str, Any], names: dict[str, str]) -> tuple[tuple[str, Any], ...]:
    """Check the values that were given; errors name the argument as the caller spelt it."""
    given = {key: value for key, value in given.items() if value is not None}
    if not given:
        return ()
    base = _UNBOUNDED if "max_new_tokens" not in given else _DEFAULTS
    try:
        values = sampling_values(given)
        msgspec.structs.replace(base, **values)  # checks
    except InvalidParameter as error:
        param = str(error.details.get("param", ""))
        own = names.get(param, param)
        message = error.message.replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
        raise InvalidParameter(message, hint=error.hint, param=own) from None
    return tuple(values.items())


def value_form(given: Mapping[str, Any], dtype: DType, tp: Any) -> tuple[Constraint | None, Form | None]:
    """The constraint and the form of the value that a call's arguments say, checked against each other."""
    named = [name for name, value in given.items() if value is not None and name != "unsupported"]
    if tp is not None:
        if dtype is not None or named:
            raise InvalidParameter(
                f"type and {'dtype' if dtype is not None else named[0]} are both given; one must go", param="type"
            )
        form = type_form(tp)
        return form.constraint, form
    schema = given["json_schema"]
    if isinstance(schema, (int, float, bytes, list, tuple)) and not isinstance(schema, (bool, Enum)):
        raise InvalidParameter(
            f"json_schema is {schema!r}; expected JSON text, a dict or a Python type", param="json_schema"
        )
    explicit = given["constraint"]
    others = [name for name in named if name != "constraint"]
    if explicit is not None:
        if others:
            raise InvalidParameter(f"constraint and {others[0]} are both given; one must go", param=others[0])
        if not isinstance(explicit, Constraint):
            raise InvalidParameter(
                f"constraint is {explicit!r}; expected one of sgl.grammars.spec (Regex, JsonSchema, ...)",
                hint="give patterns and schemas with regex=, json_schema=, ebnf=, lark=, choices=",
                param="constraint",
            )
    constraint: Constraint | None = explicit if explicit is not None else constraint_of(given)
    by_dtype = dtype_form(dtype)
    if by_dtype is not None:
        if constraint is not None:
            warnings.warn("dtype wins over the other constraint; give only one of them", stacklevel=3)
        return by_dtype.constraint, by_dtype
    return constraint, json_form(constraint) if isinstance(constraint, JsonSchema) else None


def check_tools_alone(others: Mapping[str, Any]) -> None:
    """Raise if something else than tools says what the text of a generation is."""
    for param, value in others.items():
        if value is not None:
            raise InvalidParameter(f"tools and {param} are both given; one must go", param=param)


_WITHOUT_TOOLS = {"tool_choice": "auto", "parallel_tool_calls": True, "tool_format": None}


def check_no_tools(**given: Any) -> None:
    """Raise if something says how tools are called where there are none."""
    for param, value in given.items():
        if value != _WITHOUT_TOOLS[param]:
            raise InvalidParameter(f"{param} is given without tools", hint="give tools=[...] too", param=param)


class SamplingArguments(TypedDict, total=False):
    """What every generation takes, by name: see `gen`."""

    max_tokens: int | None
    min_tokens: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    token_ids_logprob: Sequence[int] | None
    seed: int | None
    custom_logit_processor: str | None
    custom_params: Any
    token_healing: bool | None
    max_reasoning_tokens: int | None
