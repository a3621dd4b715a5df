"""How a generation's text becomes a typed value: constraint, stops and reader of each kind, in one place.

Owns `Form`, made once per expression: from `dtype` (SGLang's four), from a JSON schema, or from a Python type
(`gen(type=T)`). A type whose text can stand bare does so: an `int` is digits and a `Literal` of words is one of the
words; whatever else is JSON. Reading fails with `Truncated` where the token budget broke the text off, and with
`GenerationError` where the text is something else; both keep it in `partial`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args, get_origin

from sgl.errors import GenerationError, InvalidParameter, InvalidProgram, SglError, SourceLocation, Truncated
from sgl.grammars.spec import Choices, Constraint, JsonSchema, Regex, canonical_schema

DType: TypeAlias = type | str | None

_NUMBER_STOPS = (" ", "\n")
_DTYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (r"[-+]?[0-9]+[ \n]*", _NUMBER_STOPS),
    "float": (r"[-+]?[0-9]*\.?[0-9]+[ \n]*", _NUMBER_STOPS),
    "str": (r"\"[\w\d\s]*\"", ()),
    "bool": (r"(True|False)", ()),
}
"""Per `dtype`: the pattern of its text, and stops that end it."""


@dataclass(frozen=True)
class Form:
    """What a generation's text is.

    Attributes:
        label: for errors: `int`, `Person`, `JSON value`.
        constraint: what holds the text to it; `None` for free text.
        stops: strings that end the text, besides those that the program gives.
        read: text to value; raises `ValueError` or `GenerationError`.
        is_typed: `s[name]` is the value (`gen(type=T)`); otherwise it is the text, and `s.value(name)` the value.
    """

    label: str
    constraint: Constraint | None
    stops: tuple[str, ...]
    read: Callable[[str], Any]
    is_typed: bool = False

    def value(self, name: str, text: str, *, cut: bool, location: SourceLocation | None) -> Any:
        """The typed value of a capture's text.

        Args:
            cut: the token budget ended the text.

        Raises:
            Truncated: the text is no complete value, and was cut.
            GenerationError: it is no value of the type.
        """
        try:
            return self.read(text)
        except InvalidProgram:  # of a value that is not known while the program is traced
            raise
        except (ValueError, KeyError, GenerationError) as error:
            unfinished = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip())  # a stop ended it
            kind = Truncated if cut or unfinished else GenerationError
            why = f": {error.message}" if isinstance(error, SglError) and not cut else f": {text!r}"
            raise kind(
                f"{name!r} is not a complete {self.label}{why}"
                if kind is Truncated
                else f"{name!r} is no {self.label}{why}",
                hint="raise max_tokens" if cut else "let no stop end it" if unfinished else "generate it again",
                location=location,
                partial=text,
            ) from error


def dtype_form(dtype: DType) -> Form | None:
    """The form of `dtype=int | float | str | bool`, given as a type or by its name."""
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", repr(dtype))
    if name not in _DTYPES:
        raise InvalidParameter(
            f"dtype is {dtype!r}; expected int, float, str or bool", hint="type= takes other types", param="dtype"
        )
    pattern, stops = _DTYPES[name]
    return Form(name, Regex(pattern), stops, partial(_read_bare, name))


def json_form(constraint: JsonSchema) -> Form:
    """The form of a generation under a JSON schema: its text, and the decoded JSON as the value."""
    return Form("JSON value", constraint, (), json.loads)


def type_form(tp: Any) -> Form:
    """The form of `gen(type=tp)`: the value that comes back is a `tp`.

    Raises:
        InvalidParameter: the name of a type in place of the type.
        UnsupportedSchema: a type without a JSON form.

    Example:
        >>> type_form(Literal["yes", "no"]).constraint
        Choices(options=('yes', 'no'))
        >>> type_form(list[int]).read("[1, 2]")
        [1, 2]
        >>> type_form(int).read("24 "), type_form(bool).read("True")
        (24, True)
    """
    if (text := _as_text(tp)) is not None:
        whole = "" if tp == text else f" in {tp}"
        raise InvalidParameter(
            f"type is given as text: {text!r}{whole}", hint=f"pass the type itself: {text}", param="type"
        )
    if tp is str:
        return Form("str", None, (), str, is_typed=True)
    if tp in (int, float, bool):
        name = tp.__name__
        pattern, stops = _DTYPES[name]
        return Form(name, Regex(pattern), stops, partial(_read_bare, name), is_typed=True)
    if (words := _bare_words(tp)) is not None:
        return Form(_name(tp), Choices(tuple(words)), (), words.__getitem__, is_typed=True)
    from sgl.grammars.types import parse, schema_of

    schema = JsonSchema(canonical_schema(schema_of(tp)))
    return Form(_name(tp), schema, (), partial(parse, tp), is_typed=True)


def form_name(form: Form | None) -> str | None:
    """The name under which a form can be had again without its Python type (`portable_form`); `None`: it is text."""
    if form is None or isinstance(form.constraint, Choices):
        return None
    if isinstance(form.constraint, JsonSchema):
        return "json"
    return form.label if form.label in _DTYPES and form.constraint is not None else None


def portable_form(name: str) -> Form:
    """The form of a name that `form_name` gave: values are numbers, strings, and what JSON holds.

    Example:
        >>> portable_form("json").read('{"age": 3}'), portable_form("int").read("3 ")
        ({'age': 3}, 3)
    """
    if name == "json":
        return Form("JSON value", None, (), json.loads)
    return Form(name, None, (), partial(_read_bare, name))


def _as_text(tp: Any) -> str | None:
    """The text that stands in the place of a type: of `tp`, or of an argument of it."""
    if isinstance(tp, str):
        return tp
    if get_origin(tp) is Literal:
        return None
    arguments = get_args(tp)[:1] if hasattr(tp, "__metadata__") else get_args(tp)
    return next((text for argument in arguments if (text := _as_text(argument)) is not None), None)


def _bare_words(tp: Any) -> dict[str, Any] | None:
    """Text to member of a `Literal` or an `Enum` whose members are told apart by their bare text; else `None`."""
    if get_origin(tp) is Literal:
        members = [(arg.value if isinstance(arg, enum.Enum) else arg, arg) for arg in get_args(tp)]
    elif isinstance(tp, type) and issubclass(tp, enum.Enum):
        members = [(member.value, member) for member in tp]
    else:
        return None
    if not all(isinstance(value, (str, int)) for value, _ in members):
        return None
    words = {str(value): member for value, member in members}
    return words if "" not in words and len(words) == len(members) else None


def _name(tp: Any) -> str:
    return str(tp) if get_origin(tp) is not None else str(getattr(tp, "__name__", tp))


def _read_bare(name: str, text: str) -> Any:
    """The value of bare text, of a `dtype` by name."""
    return _READERS[name](text.strip())


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": json.loads,
    "bool": {"True": True, "False": False}.__getitem__,
}
