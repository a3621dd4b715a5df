"""`gen` and `select`: what a program asks of the model, checked at the call.

Owns the functions that users call to make generations and choices; the values that they make are in `expr`, turns and
media in `turns`. Everything wrong with an argument is raised here, at the call that has it (`arguments`); lists given
by the caller are copied.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack, overload

from sgl.errors import InvalidParameter
from sgl.grammars.spec import Constraint
from sgl.lang.arguments import (
    SamplingArguments,
    check_known,
    check_list_append,
    check_name,
    check_no_tools,
    check_tools_alone,
    many,
    refuse,
    sampling_fields,
    value_form,
)
from sgl.lang.choices import ChoicesSamplingMethod, method_name
from sgl.lang.expr import OWN_REASONING, Expr, ExprList, GenExpr, SelectExpr, items_of
from sgl.lang.forms import DType, Form
from sgl.lang.graph import Select, plain
from sgl.lang.tools import Toolbox, ToolFunction

T = TypeVar("T")


@overload
def gen(
    name: str | None = None, *, type: builtins.type[T], list_append: bool = False, **sampling: Unpack[SamplingArguments]
) -> GenExpr[T]: ...
@overload
def gen(
    name: str | None = None, *, type: object, list_append: bool = False, **sampling: Unpack[SamplingArguments]
) -> GenExpr[Any]: ...
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
    tools: Sequence[ToolFunction] | None = None,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    tool_format: str | None = None,
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
    max_reasoning_tokens: int | None = None,
) -> GenExpr[str]: ...
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
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    type: Any = None,
    constraint: Constraint | None = None,
    list_append: bool = False,
    tools: Sequence[ToolFunction] | None = None,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    tool_format: str | None = None,
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
    max_reasoning_tokens: int | None = None,
    **unknown: Any,
) -> GenExpr[Any] | SelectExpr:
    """Let the model continue; the text is captured under `name`.

    Args:
        name: of the capture; an unnamed one cannot be read, but its text is there.
        max_tokens, min_tokens, temperature, ...: sampling (see `sgl.lang.sampling.Sampling`); what is not given comes
            from `run`, then from what the model recommends, then from constants: 128 tokens at most, drawn with
            temperature 1.0.
        n: samples to draw from the same prompt: `s[name]` is the list of them, and so is the meta information. Each has
            a seed of its own. The state goes on behind the first one; to go on behind each, fork:
            `forks = s.fork(3); forks += sgl.gen(name)`. A stream of the name gives the list, once all are there.
        stop_regex: patterns that end the text like `stop`, as soon as they match.
        logprob_start_len: with log-probabilities also of the prompt, from this token of the state on.
        custom_logit_processor: one that the engine was started with, by name; `custom_params` is handed to it.
        dtype: `int`, `float`, `str` or `bool`: constrains the text; `s.value(name)` is the typed value.
        type: a Python type (see `json_schema`): `s[name]` is a value of it. An `int`, `float`, `bool`, or a `Literal`
            or `Enum` of words stands bare in the text; anything else is JSON.
        constraint: any of these constraints as a value (`sgl.grammars.spec`), for example one per row of a batch.
        list_append: `s[name]` is the list of what this name captured so far, this value at its end.
        tools: typed Python functions that the model may call: `s.calls(name)` are the calls it wrote, `s[name]` is the
            text beside them. `s.tools(...)` is the whole loop. `tool_choice` is `auto`, `none`, `required` or the name
            of one; `parallel_tool_calls` allows several; `tool_format` is how the model writes them (a name of
            `sgl.grammars.formats.TOOL_FORMATS`; the model's own without it).
        choices: the value is one of them (this is `select`).
        regex: the whole value matches it. `\\d` takes every digit of Unicode, as in `re`; `[0-9]` those of ASCII.
        json_schema: text, dict or a Python type (Pydantic model, dataclass, TypedDict, Enum, `list[int]`, ...; see
            `sgl.grammars.types`); the value is JSON valid under it, with its properties in this order.
        ebnf: a grammar as GBNF writes it; the whole value is a text of it.
        lark: a grammar in llguidance's dialect of Lark.
        structural_tag: JSON text or dict; free text in which triggers begin constrained parts.
        unsupported: what becomes of a keyword of `json_schema` that is not enforced while decoding: `refuse` (default)
            the schema, or `check` the finished value, which fails with `SchemaViolation` when it is not valid.
        grammar_backend: which backend compiles and checks the constraint, if not the engine's own.
        token_healing: the last token of the text before is drawn anew where a longer one begins with it, so that the
            value may begin inside a token: after `"http:"` the token `://` can be written.
        max_reasoning_tokens: most tokens of the reasoning of a model that reasons; then its end marker comes.
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
        (['tea', 'coffee', 'cake'], 'An idea: tea')
    """
    check_known(gen, unknown)
    name = check_name(name)
    refuse(return_text_in_logprobs=return_text_in_logprobs)
    constraints: dict[str, Any] = {
        "regex": regex,
        "json_schema": json_schema,
        "ebnf": ebnf,
        "lark": lark,
        "structural_tag": structural_tag,
        "unsupported": unsupported,
        "constraint": constraint,
    }
    if choices is not None:
        many_samples = None if n == 1 else n
        for param, value in {**constraints, "dtype": dtype, "type": type, "tools": tools, "n": many_samples}.items():
            if value is not None:
                raise InvalidParameter(f"choices and {param} are both given; one must go", param=param)
    elif choices_method is not None:
        raise InvalidParameter("choices_method is given without choices", param="choices_method")
    toolbox: Toolbox | None = None
    form: Form | None
    if tools is not None:
        check_tools_alone({**constraints, "dtype": dtype, "type": type})
        toolbox = Toolbox(tools, tool_format, tool_choice, parallel_tool_calls)
        constraint, form = toolbox.constraint(), toolbox.form()
    else:
        check_no_tools(tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, tool_format=tool_format)
        constraint, form = value_form(constraints, dtype, type)
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
        "grammar_backend": grammar_backend,
        "token_healing": token_healing,
        "max_reasoning_tokens": max_reasoning_tokens,
        "seed": seed,
    }
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    sampling = sampling_fields(given, names)
    if choices is not None:
        for param, value in given.items():
            spelt = names.get(param, param)
            if value is not None and spelt not in ("temperature", "seed", "n"):
                raise InvalidParameter(
                    f"choices and {spelt} are both given; an option is taken by its score, so {spelt} must go",
                    param=spelt,
                )
        greedy = 0.0 if temperature is None else temperature
        return select(name, choices, greedy, choices_method, seed=seed, list_append=list_append)
    return GenExpr(name, sampling, constraint, form, check_list_append(name, list_append), toolbox=toolbox)


def _typed(dtype: Literal["int", "str"], doc: str) -> Callable[..., GenExpr[str]]:
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
    ) -> GenExpr[str]:
        return gen(
            name, max_tokens, None, n, stop, stop_token_ids, stop_regex, temperature, top_p, top_k, min_p,
            frequency_penalty, presence_penalty, ignore_eos, return_logprob, logprob_start_len, top_logprobs_num,
            return_text_in_logprobs, dtype,
            **sampling,
        )  # fmt: skip

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
    list_append: bool = False,
    **unknown: Any,
) -> SelectExpr:
    """Append the option that the model scores highest; drawn from the scores when `temperature` > 0.

    Args:
        all_scores: False stops as soon as the best option is certain: with hundreds of options most are never
            computed, and those have a bound in place of their score (`ChoiceScore.complete`). The option found is the
            same. The `unconditional_likelihood_normalized` method has no such bound and computes all.
        list_append: as in `gen`.

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
    check_known(select, unknown)
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
    appends = check_list_append(name, list_append)
    return SelectExpr(name, options, checked.method, checked.temperature, checked.seed, all_scores, appends)


def separate_reasoning(expr: Expr | None = None, model_type: str | None = None) -> ExprList:
    """Take the reasoning out of what generations in `expr` give: `s[name]`, the text of the state and streams of `name`
    have the answer, and `s[name + "_reasoning_content"]` (which streams too) the reasoning.

    Args:
        model_type: the format of the reasoning: a name of `sgl.grammars.formats.REASONING_FORMATS`, such as
            `deepseek-r1`, `qwen3`, `gpt-oss`; the model's own without it, which is an error where it is not known. A
            constraint (or `type`) holds for the answer behind the reasoning.

    Raises:
        InvalidParameter: no such format.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def think(s):
        ...     s += "2 + 2? " + sgl.separate_reasoning(sgl.gen("sum"), model_type="qwen3")
        >>> state = think.run(backend=sgl.MockBackend(["<think>Two twos.</think>4"]))
        >>> state["sum"], state["sum_reasoning_content"], state.text()
        ('4', 'Two twos.', '2 + 2? 4')
    """
    from sgl.grammars.formats import reasoning_format

    fmt = OWN_REASONING
    if model_type is not None:
        try:
            fmt = reasoning_format(model_type).name
        except InvalidParameter as error:
            raise InvalidParameter(
                f"model_type is {model_type!r}; expected a format of reasoning", hint=error.hint, param="model_type"
            ) from None
    if expr is not None and not isinstance(expr, Expr):
        raise InvalidParameter(f"separate_reasoning got {expr!r}; expected an expression", param="expr")

    def separated(item: str | Expr) -> str | Expr:
        if not isinstance(item, GenExpr):
            return item
        return replace(item, reasoning=fmt)

    return ExprList(tuple(separated(item) for item in items_of(expr)) if expr is not None else ())
