"""Python types as JSON schemas, and JSON text as values of them.

Owns the one schema generator (`schema_of`), its inverse (`parse`, `dump`) and the form of a function as a tool
(`function_of`). Called by `sgl.grammars.spec.constraint_of`, and by `lang` for typed generations and tools. No torch
and no grammar engine; Pydantic is imported when a type is converted.

Known: `int float bool str None Any`, `list set frozenset tuple dict[str, X]` and the abstract `Sequence`, `Set`,
`Mapping`, with keys that are strings, integers, or a `Literal` or `Enum` of strings; `Literal`, `Enum`, unions;
`TypedDict` (`total`, `Required`, `NotRequired`), dataclasses, also generic ones, `msgspec.Struct`, `NamedTuple` (an
array), Pydantic models (their own schema); `date`, `time`, `datetime`, `timedelta`, `UUID`, `Path`, `Decimal` (a string
of digits, which loses none); `NewType`; `Annotated` with the constraints of `annotated_types`, `msgspec.Meta` or
Pydantic's `Field`; functions by their parameters. Classes with fields stand in
`$defs`, so that they may refer to themselves. Objects are closed: no property that the class does not name.

Pydantic converts, and checks the constraints again. msgspec converts what holds a Struct, and before Python 3.12 a
`typing.TypedDict` (take `typing_extensions.TypedDict` to mix it with Pydantic models).

A set is an array whose repeated items count once. Where two members of a union have the same JSON form, the value
that comes back is Pydantic's choice.

Fails with `UnsupportedSchema` whose `path` names the place (`Person.photo`, `list[0]`).
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import datetime
import decimal
import enum
import inspect
import json
import math
import pathlib
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from sgl.errors import GenerationError, UnsupportedSchema
from sgl.grammars.pointers import pointer_of

T = TypeVar("T")
Schema = dict[str, Any]

_SECONDS = r"[0-9]{1,5}(\.[0-9]{1,6})?S"
_CLOCK = rf"T([0-9]{{1,2}}H([0-9]{{1,2}}M)?({_SECONDS})?|[0-9]{{1,2}}M({_SECONDS})?|{_SECONDS})"
_DURATION = rf"^-?P([0-9]{{1,3}}Y([0-9]{{1,6}}D)?({_CLOCK})?|[0-9]{{1,6}}D({_CLOCK})?|{_CLOCK})$"
_SCALARS: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    Any: {},
    object: {},
    datetime.date: {"type": "string", "format": "date"},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.time: {"type": "string", "format": "time"},
    datetime.timedelta: {"type": "string", "pattern": _DURATION},
    decimal.Decimal: {"type": "string", "pattern": r"^-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,12})?$"},
    pathlib.Path: {"type": "string", "minLength": 1},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
_ARRAYS = (list, set, frozenset, abc.Sequence, abc.Set, abc.MutableSequence, abc.Collection, abc.Iterable)
_MAPS = (dict, abc.Mapping, abc.MutableMapping)
_INTEGER_NAME = "^(0|-?[1-9][0-9]{0,17})$"
_MAYBE_INFINITE = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{300}")
_WRAPPERS = tuple(
    getattr(typing, name)
    for name in ("Required", "NotRequired", "ReadOnly", "Final", "ClassVar")
    if hasattr(typing, name)
)
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}


def schema_of(tp: Any) -> Schema:
    """The JSON schema of a type, or of a function's arguments.

    Raises:
        UnsupportedSchema: a type without a JSON form; `path` says where it stands.

    Example:
        >>> schema_of(dict[str, list[int]])
        {'type': 'object', 'additionalProperties': {'type': 'array', 'items': {'type': 'integer'}}}
        >>> schema_of(Literal["a", 1] | None)
        {'anyOf': [{'enum': ['a', 1]}, {'type': 'null'}]}
        >>> schema_of(list[bytes])
        Traceback (most recent call last):
        sgl.errors.UnsupportedSchema: list[0] is bytes, which has no JSON form (use str)
    """
    writer = _Writer()
    if inspect.isroutine(tp):
        tp = _arguments(tp)
    schema, defs = writer.schema(tp, _name(tp)), writer.defs
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in defs and not _refers(defs, schema["$ref"]):
        schema = defs.pop(name)  # used once, at the root: no need for a name
    return {**schema, "$defs": defs} if defs else schema


def function_of(function: Callable[..., Any]) -> Schema:
    """A function as a tool: its name, the first paragraph of its docstring, and the schema of its parameters.

    Raises:
        UnsupportedSchema: a parameter without a type, `*args`, `**kwargs`, or a type without a JSON form.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     "Add two numbers."
        ...     return a + b
        >>> tool = function_of(add)
        >>> tool["name"], tool["description"], tool["parameters"]["required"]
        ('add', 'Add two numbers.', ['a'])
    """
    description = (inspect.getdoc(function) or "").partition("\n\n")[0]
    parameters = schema_of(function)
    return {"name": function.__name__, "description": description, "parameters": parameters}


def parse(tp: type[T] | Any, text: str) -> T:
    """The value that JSON text stands for; for a function, the dict of its arguments.

    Raises:
        GenerationError: the text is no JSON value of the type; `partial` holds it.

    Example:
        >>> parse(tuple[int, set[str]], '[1, ["a", "a"]]')
        (1, {'a'})
        >>> parse(int, '"x"')  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        sgl.errors.GenerationError: the text is no int: ...
    """
    shown = _name(tp)
    target = _arguments(tp) if inspect.isroutine(tp) else tp
    try:
        if _MAYBE_INFINITE.search(text):
            json.loads(text, parse_float=_finite)
        if _is_msgspec(target):
            # What stands inside and is Pydantic's own comes through the hook.
            return cast(
                T, msgspec.json.decode(text, type=target, dec_hook=lambda own, v: _adapter(own).validate_python(v))
            )
        return cast(T, _adapter(target).validate_json(text))
    except (msgspec.MsgspecError, ValueError) as error:
        first = _problem(error)[:300]
        raise GenerationError(f"the text is no {shown}: {first}", hint="generate it again", partial=text) from None


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is too large for a number of 64 bits, which would be infinite")
    return value


def _problem(error: Exception) -> str:
    """What is wrong and where, without the library's own names for it."""
    if not hasattr(error, "errors"):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = pointer_of(first["loc"])
    return f"{first['msg']} at {place}" if place else str(first["msg"])


def dump(tp: Any, value: Any) -> str:
    """A value as the JSON text that `parse` reads back.

    Example:
        >>> dump(set[int], {3})
        '[3]'
    """
    if _is_msgspec(tp):
        encoded = msgspec.json.encode(value, enc_hook=lambda own: _adapter(type(own)).dump_python(own, mode="json"))
        return encoded.decode()
    return cast(bytes, _adapter(tp).dump_json(value)).decode()


class _Writer:
    """Collects `$defs` along the way; one per schema."""

    def __init__(self) -> None:
        self.defs: dict[str, Schema] = {}
        self.names: dict[Any, str] = {}

    def schema(self, tp: Any, path: str) -> Schema:
        origin, args = get_origin(tp), get_args(tp)
        if isinstance(tp, typing.Hashable) and tp in _SCALARS:
            return dict(_SCALARS[tp])
        if origin is typing.Annotated:
            return self.annotated(args[0], args[1:], path)
        if origin in _WRAPPERS:
            return self.schema(args[0], path)
        if isinstance(tp, typing.NewType):
            return self.schema(tp.__supertype__, path)
        if type(tp).__name__ == "TypeAliasType":
            return self.schema(tp.__value__, path)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.schema(arg, path) for arg in args]}
        if origin is Literal:
            return {"enum": [self.value(arg, path) for arg in args]}
        if tp is tuple:
            return {"type": "array", "items": {}}
        if origin is tuple:
            return self.array(args, path)
        if (origin or tp) in _ARRAYS:
            return {"type": "array", "items": self.schema(args[0], f"{path}[0]") if args else {}}
        if (origin or tp) in _MAPS:
            return self.map(args, path)
        if isinstance(tp, type) and issubclass(tp, enum.Enum):
            if not list(tp):
                raise UnsupportedSchema(
                    f"{path} is an Enum without members, so no value fits", hint="give it members", path=path
                )
            return {"enum": [self.value(member, path) for member in tp]}
        if isinstance(tp, TypeVar):
            raise _unsupported(f"the type variable {tp.__name__}", path, "say which type it is, as in Page[int]")
        if isinstance(tp, type) or _is_typeddict(tp) or isinstance(origin, type):
            return self.named(tp, path)
        raise _unsupported(tp, path, "use a class, or a type that JSON has")

    def array(self, args: tuple[Any, ...], path: str) -> Schema:
        if len(args) == 2 and args[1] is ...:
            return {"type": "array", "items": self.schema(args[0], f"{path}[0]")}
        if not args:
            return {"type": "array", "maxItems": 0}
        items = [self.schema(arg, f"{path}[{index}]") for index, arg in enumerate(args)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def map(self, args: tuple[Any, ...], path: str) -> Schema:
        if not args or args[0] is str:
            return {"type": "object", "additionalProperties": self.schema(args[1], f"{path}[str]") if args else {}}
        if args[0] is int:
            values = {_INTEGER_NAME: self.schema(args[1], f"{path}[int]")}
            return {"type": "object", "patternProperties": values, "additionalProperties": False}
        names = self.schema(args[0], f"{path} key").get("enum", [None])
        if not all(isinstance(name, str) for name in names):
            hint = "use str, int, or a Literal or Enum of strings; the keys of JSON objects are strings"
            raise _unsupported(args[0], f"{path} key", hint)
        return {
            "type": "object",
            "properties": {name: self.schema(args[1], f"{path}[{name!r}]") for name in names},
            "additionalProperties": False,
        }

    def value(self, value: Any, path: str) -> Any:
        plain = value.value if isinstance(value, enum.Enum) else value
        if isinstance(plain, (str, int, float, bool, type(None))):
            return plain
        raise _unsupported(type(plain), f"{path}.{getattr(value, 'name', value)}", "use strings or numbers as values")

    # --- classes with fields ---

    def named(self, tp: Any, path: str) -> Schema:
        """A reference to the class in `$defs`, where it is written once."""
        if tp in self.names:
            return {"$ref": f"#/$defs/{self.names[tp]}"}
        name = self.free_name(_name(tp))
        if hasattr(tp, "model_json_schema"):
            self.names[tp] = name
            self.defs[name] = {}
            self.defs[name] = self.model(tp)
            return {"$ref": f"#/$defs/{name}"}
        fields = _fields(tp)
        if fields is None:
            is_own = hasattr(tp, "__module__") and tp.__module__ not in sys.stdlib_module_names
            raise _unsupported(tp, path, "make it a dataclass" if is_own else "use str")
        self.names[tp] = name
        self.defs[name] = {}
        properties = {field: self.schema(hint, f"{_name(tp)}.{field}") for field, (hint, _) in fields.items()}
        required = [field for field, (_, is_required) in fields.items() if is_required]
        if _is_namedtuple(tp):
            items = list(properties.values())
            self.defs[name] = {"type": "array", "prefixItems": items, "items": False, "minItems": len(required)}
            return {"$ref": f"#/$defs/{name}"}
        self.defs[name] = {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    def free_name(self, name: str) -> str:
        """A name that no other class has."""
        return next(n for n in (name, *(f"{name}_{i}" for i in range(2, 10_000))) if n not in self.defs)

    def model(self, tp: Any) -> Schema:
        """A Pydantic model's own schema; its `$defs` move to ours."""
        own = tp.model_json_schema()
        inner = own.pop("$defs", {})
        moved = {name: self.names[tp] if name == tp.__name__ else self.free_name(name) for name in inner}
        for name, new in moved.items():
            self.defs.setdefault(new, {})
            self.defs[new] = _closed(_moved(inner[name], moved))
        if set(own) == {"$ref"}:
            return self.defs[self.names[tp]]  # a model within itself stands in its own `$defs`
        return cast(Schema, _closed(_moved(own, moved)))

    # --- constraints ---

    def annotated(self, tp: Any, metadata: tuple[Any, ...], path: str) -> Schema:
        schema = self.schema(tp, path)
        added: Schema = {}
        for item in _flat(metadata):
            added |= self.constraint(item, schema, path)
        if "$ref" in schema and added:
            return {"allOf": [schema], **added}
        return {**schema, **added}

    def constraint(self, item: Any, schema: Schema, path: str) -> Schema:
        """What one piece of metadata says; what is no constraint says nothing."""
        if type(item).__name__ in (
            "Predicate",
            "Timezone",
            "Unit",
            "AfterValidator",
            "BeforeValidator",
            "WrapValidator",
        ):
            raise _unsupported(type(item), path, "use bounds, lengths or a pattern")
        found: Schema = {}
        kind = schema.get("type")
        lengths = {"array": ("minItems", "maxItems"), "object": ("minProperties", "maxProperties")}
        least, most = lengths.get(str(kind), ("minLength", "maxLength"))
        words = {**_BOUNDS, "min_length": least, "max_length": most, "pattern": "pattern"}
        for attribute, word in words.items():
            value = getattr(item, attribute, None)
            if value is not None and not callable(value):
                if attribute in _BOUNDS and kind == "string":
                    hint = "use int or float, or check the value afterwards"
                    raise _unsupported(f"bounded by {attribute} and written as a string", path, hint)
                found[word] = getattr(value, "pattern", value)
        if isinstance(getattr(item, "description", None), str):
            found["description"] = item.description
        return found


def _flat(metadata: typing.Iterable[Any]) -> typing.Iterator[Any]:
    """Metadata one by one: Pydantic's `Field` and the groups of `annotated_types` hold several."""
    for item in metadata:
        inner = getattr(item, "metadata", None)
        if isinstance(inner, list):
            yield from _flat(inner)
            yield item
        elif getattr(item, "__is_annotated_types_grouped_metadata__", False):
            yield from _flat(item)
        else:
            yield item


def _fields(tp: Any) -> dict[str, tuple[Any, bool]] | None:
    """Name in JSON -> (type, whether it must be there), in order; `None` for a class without fields."""
    if isinstance(get_origin(tp), type):
        own = _fields(get_origin(tp)) or {}
        given = dict(zip(getattr(get_origin(tp), "__parameters__", ()), get_args(tp), strict=False))
        return {name: (_substituted(hint, given), needed) for name, (hint, needed) in own.items()} or None
    if not (
        _is_typeddict(tp) or _is_namedtuple(tp) or dataclasses.is_dataclass(tp) or isinstance(tp, type(msgspec.Struct))
    ):
        return None
    hints = get_type_hints(tp, include_extras=True)
    if _is_namedtuple(tp):
        return {name: (hints.get(name, Any), name not in tp._field_defaults) for name in tp._fields}
    if _is_typeddict(tp):
        return {name: (hint, _is_required(hint, name in tp.__required_keys__)) for name, hint in hints.items()}
    if dataclasses.is_dataclass(tp):
        none = dataclasses.MISSING
        return {
            field.name: (hints[field.name], field.default is none and field.default_factory is none)
            for field in dataclasses.fields(tp)
            if field.init
        }
    config = tp.__struct_config__
    if config.array_like:
        raise _unsupported(tp, tp.__name__, "use a Struct that is not array_like")
    tag = {config.tag_field: (Literal[config.tag], True)} if config.tag is not None else {}
    return {**tag, **{f.encode_name: (hints[f.name], f.required) for f in msgspec.structs.fields(tp)}}


def _substituted(hint: Any, given: dict[Any, Any]) -> Any:
    """A field's type with the type variables of its class replaced."""
    if hint in given:
        return given[hint]
    inner = getattr(hint, "__parameters__", ()) if get_origin(hint) is not None else ()
    return hint[tuple(given.get(variable, variable) for variable in inner)] if inner else hint


def _is_namedtuple(tp: Any) -> bool:
    tp = get_origin(tp) or tp
    return isinstance(tp, type) and issubclass(tp, tuple) and hasattr(tp, "_field_defaults")


def _is_typeddict(tp: Any) -> bool:
    """Also of `typing_extensions`, whose TypedDict is another class before Python 3.12."""
    return isinstance(tp, type) and issubclass(tp, dict) and hasattr(tp, "__required_keys__")


def _is_required(hint: Any, otherwise: bool) -> bool:
    """What the annotation says; the class itself cannot read one that is postponed text."""
    origin = get_origin(hint)
    return origin is typing.Required or (origin is not typing.NotRequired and otherwise)


@lru_cache(maxsize=256)
def _arguments(function: Callable[..., Any]) -> Any:
    """The arguments of a function as a TypedDict."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        path = f"{function.__name__}.{parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _unsupported(str(parameter), path, "name each parameter")
        if parameter.name not in hints:
            raise _unsupported("a parameter without a type", path, "annotate it")
        hint = hints[parameter.name]
        fields[parameter.name] = hint if parameter.default is parameter.empty else typing.NotRequired[hint]
    from typing_extensions import TypedDict

    return TypedDict(function.__name__, fields)  # type: ignore[operator]


def _refers(value: Any, reference: str) -> bool:
    """Whether a `$ref` within a schema is this one."""
    if isinstance(value, list):
        return any(_refers(item, reference) for item in value)
    if not isinstance(value, dict):
        return False
    return value.get("$ref") == reference or any(_refers(item, reference) for item in value.values())


def _moved(value: Any, names: dict[str, str]) -> Any:
    """A schema whose references into `$defs` follow the new names."""
    if isinstance(value, list):
        return [_moved(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    start = "#/$defs/"
    return {
        key: f"{start}{names.get(item[len(start) :], item[len(start) :])}"
        if key == "$ref" and isinstance(item, str) and item.startswith(start)
        else _moved(item, names)
        for key, item in value.items()
    }


def _closed(value: Any) -> Any:
    """A Pydantic schema without what it leaves open: other properties, which it would ignore, and sets."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    data = ("default", "const", "enum", "examples")
    found = {key: item if key in data else _closed(item) for key, item in value.items() if key != "uniqueItems"}
    if found.get("type") == "object" and isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def _is_msgspec(tp: Any) -> bool:
    """Whether a type holds a Struct, or a constraint of msgspec's, which only that library converts."""
    seen: set[Any] = set()
    todo = [tp]
    while todo:
        at = todo.pop()
        if isinstance(at, (type(msgspec.Struct), msgspec.Meta)):
            return True
        if sys.version_info < (3, 12) and typing.is_typeddict(at):
            return True  # Pydantic refuses these; those of typing_extensions it takes
        if not isinstance(at, typing.Hashable) or at in seen:
            continue
        seen.add(at)
        todo += get_args(at)
        if isinstance(get_origin(at), type):
            todo.append(get_origin(at))
        if isinstance(at, type) or _is_typeddict(at):
            todo += [hint for hint, _ in (_fields(at) or {}).values()]
    return False


def _adapter(tp: Any) -> Any:
    """Pydantic's reader and writer of a type, which takes milliseconds to make."""
    try:
        hash(tp)
    except TypeError:  # an annotation that holds a list, for example
        return _new_adapter(tp)
    return _kept_adapter(tp)


def _new_adapter(tp: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(tp)


_kept_adapter = lru_cache(maxsize=256)(_new_adapter)


def _name(tp: Any) -> str:
    origin = get_origin(tp)
    return str(getattr(tp if origin is None else origin, "__name__", None) or tp)


def _unsupported(tp: Any, path: str, hint: str) -> UnsupportedSchema:
    shown = tp if isinstance(tp, str) else _name(tp)
    subject = shown if path == shown else f"{path} is {shown}, which"
    return UnsupportedSchema(f"{subject} has no JSON form", hint=hint, path=path)
