"""What a program appends to its prompt: `gen`, `select`, roles, images, and their sums with text.

Owns the immutable expression values and the functions that users call to make them. `state` turns them into graph
nodes. Everything wrong with an argument is raised here, at the call that has it; lists given by the caller are copied.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from sgl.errors import InvalidParameter, InvalidProgram, Unsupported
from sgl.grammars.spec import Constraint, Regex, constraint_of
from sgl.lang.choices import ChoicesSamplingMethod, method_name
from sgl.lang.graph import ChoicesMethod, MediaKind, Sampling, Select, plain, sampling_values

DType: TypeAlias = type | str | None

_DTYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (r"[-+]?[0-9]+[ \n]*", (" ", "\n")),
    "float": (r"[-+]?[0-9]*\.?[0-9]+[ \n]*", (" ", "\n")),
    "str": (r"\"[\w\d\s]*\"", ()),
    "bool": (r"(True|False)", ()),
}
"""Per type: the pattern of its text, and stops that end it."""


class Expr:
    """Something that can be appended to a prompt. Immutable; `+` with another one or with text gives a sequence."""

    __slots__ = ()

    def __add__(self, other: object) -> ExprList:
        if not isinstance(other, (str, Expr)):
            return NotImplemented
        return ExprList((*_items(self), *_items(other)))

    def __radd__(self, other: object) -> ExprList:
        if not isinstance(other, str):
            return NotImplemented
        return ExprList((other, *_items(self)))

    def __str__(self) -> str:
        raise InvalidProgram(
            f"{type(self).__name__} was turned into text (by an f-string, str() or format())",
            hint='join it with +: "text " + sgl.gen("name"), and not f"text {sgl.gen(...)}"',
        )

    def __format__(self, spec: str) -> str:
        return str(self)


@dataclass(frozen=True)
class ExprList(Expr):
    """Expressions and text in order."""

    items: tuple[str | Expr, ...]


@dataclass(frozen=True)
class GenExpr(Expr):
    """A generation: `given` holds the sampling fields that the caller set, as `Sampling` stores them."""

    name: str | None
    given: tuple[tuple[str, Any], ...] = ()
    constraint: Constraint | None = None
    stops: tuple[str, ...] = ()
    dtype: str | None = None

    def sampling(self, base: Sampling) -> Sampling:
        """The fields given here over those of the run; the stops of the data type come on top."""
        values = dict(self.given)
        stops = values.get("stop", base.stop)
        extra = tuple(stop for stop in self.stops if stop not in stops)
        return msgspec.structs.replace(base, **(values | {"stop": stops + extra} if extra else values))


@dataclass(frozen=True)
class SelectExpr(Expr):
    """A choice between options by score."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    all_scores: bool = True


@dataclass(frozen=True)
class RoleExpr(Expr):
    """The beginning or end of a chat turn."""

    role: str
    begin: bool


@dataclass(frozen=True)
class MediaExpr(Expr):
    """An image or video part; `data` are the bytes of the file."""

    kind: MediaKind
    data: bytes
    num_frames: int | None = None


Appendable: TypeAlias = str | Expr


def _items(value: Appendable) -> tuple[str | Expr, ...]:
    return value.items if isinstance(value, ExprList) else (value,)


# --- arguments ------------------------------------------------------------------------------------------------------


def check_name(name: object) -> str | None:
@overload
def gen(name: str | None = None, *, type: builtins.type[T], **sampling: Any) -> GenExpr[T]: ...
@overload
def gen(name: str | None = None, *, type: object, **sampling: Any) -> GenExpr[Any]: ...
@overload
def gen(
    name: str | None = None,
    *,
    choices: Sequence[str],
    choices_method: ChoicesSamplingMethod | str | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    list_append: bool = False,
) -> SelectExpr: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: DType = None,
    choices: None = None,
    choices_method: None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    type: None = None,
    constraint: Constraint | None = None,
    list_append: bool = False,
    ebnf: str | None = None,
    lark: str | None = None,
    structural_tag: str | dict[str, Any] | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    no_stop_trim: bool | None = None,
    skip_special_tokens: bool | None = None,
    spaces_between_special_tokens: bool | None = None,
    token_ids_logprob: Sequence[int] | None = None,
    custom_logit_processor: str | None = None,
    custom_params: Any = None,
    unsupported: Literal["refuse", "check"] | None = None,
    grammar_backend: Literal["auto", "llguidance", "xgrammar"] | None = None,
    token_healing: bool | None = None,
) -> GenExpr[str]: ...
    """A capture's name, or `None` for an unnamed one."""
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise InvalidParameter(f"name is {name!r}; expected a non-empty string or nothing", param="name")
    return str(name)


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


def _sampling(given: dict[str, Any], names: dict[str, str]) -> tuple[tuple[str, Any], ...]:
    """Check the values that were given; errors name the argument as the caller spelt it."""
    given = {key: value for key, value in given.items() if value is not None}
    # How many tokens at most is not known yet when it comes from the run.
    base = Sampling(max_new_tokens=2**31) if "max_new_tokens" not in given else Sampling()
    try:
        values = sampling_values(given)
        msgspec.structs.replace(base, **values)  # checks
    except InvalidParameter as error:
        param = str(error.details.get("param", ""))
        own = names.get(param, param)
        message = error.message.replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
        raise InvalidParameter(message, hint=error.hint, param=own) from None
    return tuple(values.items())


def _form(given: Mapping[str, Any], dtype: DType, tp: Any) -> tuple[Constraint | None, Form | None]:
    """The constraint and the form of the value that a call's arguments say, checked against each other."""
    named = [name for name, value in given.items() if value is not None and name != "unsupported"]
    if tp is not None:
        if dtype is not None or named:
            raise InvalidParameter(
                f"type and {'dtype' if dtype is not None else named[0]} are both given; one must go", param="type"
            )
        form = type_form(tp)
        return form.constraint, form
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
    constraint = explicit if explicit is not None else constraint_of(given)
        unsupported: what becomes of a keyword of `json_schema` that is not enforced while decoding: `refuse` (default)
            the schema, or `check` the finished value, which fails with `SchemaViolation` when it is not valid.
        grammar_backend: which backend compiles and checks the constraint, if not the engine's own.
        token_healing: the last token of the text before is drawn anew where a longer one begins with it, so that the
            value may begin inside a token: after `"http:"` the token `://` can be written.
    form = dtype_form(dtype)
    if form is not None:
        if constraint is not None:
            warnings.warn("dtype wins over the other constraint; give only one of them", stacklevel=3)
        return form.constraint, form
    return constraint, json_form(constraint) if isinstance(constraint, JsonSchema) else None


# --- what users call ------------------------------------------------------------------------------------------------


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
        "unsupported": unsupported,
        "constraint": constraint,
    return_text_in_logprobs: bool | None = None,
    dtype: DType = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    ebnf: str | None = None,
    lark: str | None = None,
    structural_tag: str | dict[str, Any] | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    no_stop_trim: bool | None = None,
    skip_special_tokens: bool | None = None,
    spaces_between_special_tokens: bool | None = None,
    token_ids_logprob: Sequence[int] | None = None,
    custom_logit_processor: str | None = None,
    custom_params: Any = None,
    unsupported: Literal["refuse", "check"] | None = None,
    grammar_backend: Literal["auto", "llguidance", "xgrammar"] | None = None,
    token_healing: bool | None = None,
) -> GenExpr[Any] | SelectExpr:
    """Let the model continue; the text is captured under `name`.

    Args:
        name: of the capture; an unnamed one cannot be read, but its text is there.
        max_tokens, min_tokens, temperature, ...: sampling (see `sgl.lang.sampling.Sampling`); what is not given comes
            from `run`, then from what the model recommends, then from constants.
        n: samples to draw from the same prompt: `s[name]` is the list of them, and so is the meta information. Each has
            a seed of its own. The state goes on as if nothing had been generated: which sample it should continue with
            is not known. A stream of the name gives the list, once all are there.
        stop_regex: patterns that end the text like `stop`, as soon as they match.
        logprob_start_len: with log-probabilities also of the prompt, from this token of the state on.
        "grammar_backend": grammar_backend,
        "token_healing": token_healing,
        custom_logit_processor: one that the engine was started with, by name; `custom_params` is handed to it.
        dtype: `int`, `float`, `str` or `bool`: constrains the text; `s.value(name)` is the typed value.
        choices: the value is one of them (this is `select`).
        regex: the whole value matches it.
        json_schema: text, dict or a Python type (Pydantic model, dataclass, TypedDict, Enum, `list[int]`, ...; see
            `sgl.grammars.types`); the value is JSON valid under it, with its properties in this order.
        ebnf: a grammar as GBNF writes it; the whole value is a text of it.
        lark: a grammar in llguidance's dialect of Lark.
        structural_tag: JSON text or dict; free text in which triggers begin constrained parts.
        seed: makes this generation reproducible on its own.

    Raises:
        InvalidParameter: an argument is out of range or contradicts another (`param` names it).
        InvalidRegex, InvalidSchema, InvalidGrammar: the constraint cannot be read.
        Unsupported: `return_text_in_logprobs`.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def greet(s):
        ...     s += "Hello, " + sgl.gen("who", max_tokens=4, stop=".")
        >>> greet.run(backend=sgl.MockBackend({"who": "world. And more"}))["who"]
        'world'
        >>> @sgl.function
        ... def ideas(s):
        ...     s += "An idea: " + sgl.gen("idea", n=3)
        >>> state = ideas.run(backend=sgl.MockBackend(["tea", "coffee", "cake"]))
        >>> state["idea"], state.text()
        (['tea', 'coffee', 'cake'], 'An idea: ')
    """
    name = check_name(name)
    refuse(return_text_in_logprobs=return_text_in_logprobs)
    kind = _dtype(dtype)
    constraints: dict[str, Any] = {
        "regex": regex,
        "json_schema": json_schema,
        "ebnf": ebnf,
        "lark": lark,
        "structural_tag": structural_tag,
    }
    if choices is not None:
        many_samples = None if n == 1 else n
        for param, value in {**constraints, "dtype": dtype, "n": many_samples}.items():
            if value is not None:
                raise InvalidParameter(f"choices and {param} are both given; one must go", param=param)
    elif choices_method is not None:
        raise InvalidParameter("choices_method is given without choices", param="choices_method")
    constraint = constraint_of(constraints)
    stops: tuple[str, ...] = ()
    if kind is not None:
        if constraint is not None:
            warnings.warn("dtype wins over the other constraint; give only one of them", stacklevel=2)
        pattern, stops = _DTYPES[kind]
        constraint = Regex(pattern)
    given = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "stop_regex": stop_regex,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": logit_bias,
        "ignore_eos": ignore_eos,
        "no_stop_trim": no_stop_trim,
        "skip_special_tokens": skip_special_tokens,
        "spaces_between_special_tokens": spaces_between_special_tokens,
        "return_logprob": return_logprob,
        "top_logprobs_num": top_logprobs_num,
        "token_ids_logprob": token_ids_logprob,
        "logprob_start_len": logprob_start_len,
        "custom_logit_processor": custom_logit_processor,
        "custom_params": custom_params,
        "seed": seed,
    }
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    sampling = _sampling(given, names)
    if choices is not None:
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method, seed=seed)
    return GenExpr(name, sampling, constraint, stops, kind)


def _typed(dtype: Literal["int", "str"], doc: str) -> Callable[..., GenExpr]:
    def typed(
        name: str | None = None,
        max_tokens: int | None = None,
        n: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        ignore_eos: bool | None = None,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        **sampling: Any,
    ) -> GenExpr:
        expr = gen(
            name, max_tokens, None, n, stop, stop_token_ids, stop_regex, temperature, top_p, top_k, min_p,
            frequency_penalty, presence_penalty, ignore_eos, return_logprob, logprob_start_len, top_logprobs_num,
            return_text_in_logprobs, dtype,
            **sampling,
        )  # fmt: skip
        return cast(GenExpr, expr)  # without choices it is one

    typed.__doc__ = doc
    typed.__name__ = typed.__qualname__ = "gen_int" if dtype == "int" else "gen_string"
    return typed


gen_int = _typed(
    "int",
    """An integer: `gen` with `dtype=int`. Positional arguments as in `gen` without `min_tokens`; others by name.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def hours(s):
        ...     s += "Hours in a day: " + sgl.gen_int("hours")
        >>> hours.run(backend=sgl.MockBackend(["24 of course"])).value("hours")
        24
    """,
)

gen_string = _typed(
    "str",
    """A quoted string: `gen` with `dtype=str`. Positional arguments as in `gen` without `min_tokens`; others by name.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def word(s):
        ...     s += "A word: " + sgl.gen_string("word")
        >>> state = word.run(backend=sgl.MockBackend(['"tea"']))
        >>> state["word"], state.value("word")
        ('"tea"', 'tea')
    """,
)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | str | None = None,
    *,
    seed: int | None = None,
    all_scores: bool = True,
) -> SelectExpr:
    """Append the option that the model scores highest; drawn from the scores when `temperature` > 0.

    Args:
        all_scores: False stops as soon as the best option is certain: with hundreds of options most are never
            computed, and those have a bound in place of their score (`ChoiceScore.complete`). The option found is the
            same. The `unconditional_likelihood_normalized` method has no such bound and computes all.

    Raises:
        InvalidParameter: no options, the same twice, not strings, or an unknown method.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def judge(s):
        ...     s += "Good? " + sgl.select("verdict", ["yes", "no"])
        >>> judge.run(backend=sgl.MockBackend(choices={"verdict": "no"}))["verdict"]
        'no'
    """
    name = check_name(name)
    if choices is None or isinstance(choices, (str, Set)):  # a set has no order, and the first option wins a tie
        raise InvalidParameter(f"choices is {choices!r}; expected a list of strings", param="choices")
    options = many("choices", choices, str) or ()
    method = method_name(choices_method)
    temperature, seed = plain(temperature), plain(seed)
    if not isinstance(all_scores, bool):
        raise InvalidParameter(f"all_scores is {all_scores!r}; expected True or False", param="all_scores")
    checked = Select(
        id=0, name=name or "", choices=options, method=method, temperature=temperature, seed=seed, all_scores=all_scores
    )
    return SelectExpr(name, options, checked.method, checked.temperature, checked.seed, all_scores)


def _media(kind: MediaKind, source: str | bytes | Path, num_frames: int | None = None) -> MediaExpr:
    if isinstance(source, bytes):
        return MediaExpr(kind, source, num_frames)
    text = str(source)
    if text.startswith("data:"):
        return MediaExpr(kind, base64.b64decode(text.partition(",")[2]), num_frames)
    try:
        return MediaExpr(kind, Path(text).read_bytes(), num_frames)
    except OSError as error:
        raise InvalidParameter(
            f"{kind} {text!r} cannot be read: {error.strerror}", hint="give a path to a file, or bytes", param="path"
        ) from None


def image(path: str | bytes | Path) -> MediaExpr:
    """An image: a path, a `data:` address or the bytes of a file.

    Example:
        >>> import sgl
        >>> sgl.image(b"\\x89PNG").kind
        'image'
    """
    return _media("image", path)


def video(path: str | bytes | Path, num_frames: int) -> MediaExpr:
    """A video of which `num_frames` frames are shown to the model.

    Example:
        >>> import sgl
        >>> sgl.video(b"....", 4).num_frames
        4
    """
    if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
        raise InvalidParameter(f"num_frames is {num_frames!r}; expected an integer >= 1", param="num_frames")
    return _media("video", path, num_frames)


def _turn(role: str, expr: Appendable | None) -> ExprList:
    if expr is not None and not isinstance(expr, (str, Expr)):
        raise InvalidParameter(f"{role}() got {expr!r}; expected text or an expression", param="expr")
    inner = () if expr is None else _items(expr)
    return ExprList((RoleExpr(role, True), *inner, RoleExpr(role, False)))


def system(expr: Appendable | None = None) -> ExprList:
    """A system turn.

    Example:
        >>> import sgl
        >>> sgl.system("Be brief.").items[1]
        'Be brief.'
    """
    return _turn("system", expr)


def user(expr: Appendable | None = None) -> ExprList:
    """A turn of the user.

    Example:
        >>> import sgl
        >>> sgl.user("Hi").items[1]
        'Hi'
    """
    return _turn("user", expr)


def assistant(expr: Appendable | None = None) -> ExprList:
    """A turn of the assistant.

    Example:
        >>> import sgl
        >>> len(sgl.assistant(sgl.gen("answer")).items)
        3
    """
    return _turn("assistant", expr)


def system_begin() -> RoleExpr:
    """Begin a system turn.

    Example:
        >>> import sgl
        >>> sgl.system_begin() + "Be brief." + sgl.system_end() == sgl.system("Be brief.")
        True
    """
    return RoleExpr("system", True)


def system_end() -> RoleExpr:
    """End a system turn.

    Example:
        >>> import sgl
        >>> sgl.system_end().begin
        False
    """
    return RoleExpr("system", False)


def user_begin() -> RoleExpr:
    """Begin a turn of the user.

    Example:
        >>> import sgl
        >>> sgl.user_begin().role
        'user'
    """
    return RoleExpr("user", True)


def user_end() -> RoleExpr:
    """End a turn of the user.

    Example:
        >>> import sgl
        >>> sgl.user_end().begin
        False
    """
    return RoleExpr("user", False)


def assistant_begin() -> RoleExpr:
    """Begin a turn of the assistant.

    Example:
        >>> import sgl
        >>> sgl.assistant_begin().role
        'assistant'
    """
    return RoleExpr("assistant", True)


def assistant_end() -> RoleExpr:
    """End a turn of the assistant.

    Example:
        >>> import sgl
        >>> sgl.assistant_end().begin
        False
    """
    return RoleExpr("assistant", False)
