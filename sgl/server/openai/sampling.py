"""The sampling and the constraint that a body of OpenAI's API asks for.

Owns the translation of names; ranges are checked by `Sampling`, as for every other caller. Names that other servers had
are refused with the one to use in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sgl.errors import InvalidParameter, Unsupported
from sgl.grammars.spec import PARAMETERS, Choices, Constraint, JsonSchema, canonical_schema, constraint_of
from sgl.lang.graph import Sampling, sampling_from_mapping
from sgl.server.call import Call
from sgl.server.openai.logprobs import within_logprobs
from sgl.server.openai.types import ChatRequest, Common, CompletionRequest, Object, ResponseFormat, StructuredOutputs

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "custom_logit_processor",
    "custom_params",
    "token_healing",
    "grammar_backend",
)
_GONE = {
    "guided_json": "structured_outputs.json, or response_format",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_decoding_backend": "grammar_backend",
    "guided_whitespace_pattern": "structured_outputs",
    "functions": "tools",
    "function_call": "tool_choice",
}
_NOT_HERE = {
    "lora_path": "adapters are not served here",
    "chat_template": "templates in requests are not taken: they are code",
    "audio": "answers are text",
    "moderation": "there is no moderation here",
    "web_search_options": "nothing is searched; offer a search as a tool",
}
ANY_OBJECT = canonical_schema({"type": "object"})


def refuse(body: Common) -> None:
    """Raise for fields that are known and not served.

    Raises:
        InvalidParameter: the hint names the field to use.
        Unsupported: there is none.
    """
    for name, instead in _GONE.items():
        if getattr(body, name, None) is not None:
            raise InvalidParameter(f"{name} is not taken any more", hint=f"use {instead}", param=name)
    for name, why in _NOT_HERE.items():
        if getattr(body, name, None) is not None:
            raise Unsupported(f"{name}: {why}", hint="leave it out", param=name)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidParameter("best_of is not served", hint="use n, and choose among the samples", param="best_of")
    if isinstance(body, ChatRequest) and body.modalities not in (None, ["text"]):
        raise Unsupported(
            f"modalities are {body.modalities}", hint='answers are text: give ["text"]', param="modalities"
        )
    if body.store:
        raise Unsupported(
            "store: completions are not kept", hint="leave it out; /v1/responses has a store", param="store"
        )
    if body.structured_outputs is not None and body.structured_outputs.whitespace_pattern is not None:
        raise InvalidParameter(
            "whitespace_pattern is not served",
            hint="leave it out: white space is bounded",
            param="structured_outputs.whitespace_pattern",
        )


def without_effect(body: Common) -> list[str]:
    """Warnings about fields that ask for something and change nothing here."""
    asked = [
        ("service_tier", body.service_tier not in (None, "auto", "default")),
        ("verbosity", getattr(body, "verbosity", None) not in (None, "medium")),
        ("prediction", getattr(body, "prediction", None) is not None),
    ]
    return [f"{name} has no effect here" for name, is_asked in asked if is_asked]


_TOOL = {"type", "function", "cache_control"}
_FUNCTION = {"name", "description", "parameters", "strict"}


def check_tools(tools: Sequence[Object], lenient: bool) -> list[str]:
    """Warnings about fields of tools that there are not; a slip there would be a tool without parameters.

    Raises:
        Unsupported: a tool that is no function.
        InvalidParameter: there is one, and the server is not lenient.
    """
    warnings = []
    for index, tool in enumerate(tools):
        if (kind := tool.get("type", "function")) != "function":
            raise Unsupported(
                f"tools[{index}] is of type {kind!r}", hint="only functions are served", param=f"tools[{index}].type"
            )
        function = tool.get("function")
        wrong = [(f"tools[{index}].{name}", _TOOL) for name in tool if isinstance(function, dict) and name not in _TOOL]
        if isinstance(function, dict):
            wrong += [(f"tools[{index}].function.{name}", _FUNCTION) for name in function if name not in _FUNCTION]
        for path, known in wrong:
            hint = f"expected {', '.join(sorted(known))}"
            if not lenient:
                raise InvalidParameter(f"unknown field {path!r}", hint=hint, param=path)
            warnings.append(f"unknown field {path!r} was passed over ({hint})")
    return warnings


def sampling_of(call: Call, body: ChatRequest | CompletionRequest) -> Sampling:
    """The sampling of each generation of a request; `n` is in it.

    Raises:
        InvalidParameter: a value is out of range.
    """
    refuse(body)
    call.warnings += without_effect(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.include_stop_str_in_output:
        fields["no_stop_trim"] = True
    if isinstance(body, ChatRequest):
        fields.update(_chat_fields(body))
    elif body.logprobs is not None:
        fields["return_logprob"] = True
        fields["top_logprobs_num"] = body.logprobs
    is_bounded = "max_tokens" in fields
    if not is_bounded:
        fields["max_tokens"] = call.server.default_new_tokens if isinstance(body, ChatRequest) else 16
    sampling = sampling_from_mapping(fields, sampling_from_mapping(call.server.engine.sampling_defaults()))
    return sampling if is_bounded else within_logprobs(sampling)


def words_of(body: ChatRequest | CompletionRequest) -> dict[str, str]:
    """The engine's names of fields, and those that the body has for them (see `Call.words`)."""
    names = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens", "top_logprobs_num": "logprobs"}
    if isinstance(body, ChatRequest):
        names["top_logprobs_num"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        if body.max_reasoning_tokens is None:
            names["max_reasoning_tokens"] = "thinking_budget"
    return names


def _chat_fields(body: ChatRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        fields["return_logprob"] = True
        fields["top_logprobs_num"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidParameter(
            "top_logprobs is given without logprobs", hint="set logprobs to true", param="top_logprobs"
        )
    budget = body.max_reasoning_tokens if body.max_reasoning_tokens is not None else body.thinking_budget
    if budget is not None:
        fields["max_reasoning_tokens"] = budget
    return fields


def constraint_in(body: Common) -> Constraint | None:
    """The constraint of a request.

    Raises:
        InvalidParameter: two of them.
        InvalidConstraint: what cannot be read.
    """
    found: dict[str, Constraint] = {}
    own = constraint_of({name: getattr(body, name) for name in PARAMETERS})
    if own is not None:
        found[next(name for name in PARAMETERS if getattr(body, name) is not None)] = own
    if body.response_format is not None and (asked := _of_format(body.response_format)) is not None:
        found["response_format"] = asked
    if body.structured_outputs is not None and (asked := _of_structured(body.structured_outputs)) is not None:
        found["structured_outputs"] = asked
    if len(found) > 1:
        first, second = list(found)[:2]
        raise InvalidParameter(f"{first} and {second} are both given; one must go", param=second)
    asked = next(iter(found.values()), None)
    if body.unsupported is None:
        return asked
    if not isinstance(asked, JsonSchema):
        raise InvalidParameter("unsupported is given without a JSON schema", hint="leave it out", param="unsupported")
    return msgspec.structs.replace(asked, unsupported=body.unsupported)


def constraint_field(body: Common) -> str:
    """The field that has the constraint of a request; empty without one."""
    given = next((name for name in PARAMETERS if getattr(body, name) is not None), "")
    if given or body.structured_outputs is None:
        return given or ("response_format" if body.response_format is not None else "")
    names = (name for name in _STRUCTURED if getattr(body.structured_outputs, name) not in (None, False))
    return f"structured_outputs.{next(names, '')}".rstrip(".")


def _of_format(given: ResponseFormat) -> Constraint | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return constraint_of({"json_schema": ANY_OBJECT})
        case "json_schema":
            if given.json_schema is None:
                raise InvalidParameter(
                    "response_format is of type json_schema and has no json_schema",
                    hint='give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
                    param="response_format.json_schema",
                )
            schema = given.json_schema.schema_
            if not isinstance(schema, (dict, bool)):
                raise InvalidParameter(
                    "response_format.json_schema has no schema",
                    hint='put the schema under "schema"',
                    param="response_format.json_schema.schema",
                )
            return constraint_of({"json_schema": canonical_schema(schema)})
        case "regex":
            return constraint_of({"regex": _needed("response_format.pattern", given.pattern)})
        case "ebnf" | "grammar":
            return constraint_of({"ebnf": _needed("response_format.grammar", given.grammar)})
        case "structural_tag":
            tag: dict[str, Any] = {"type": "structural_tag"}
            if given.format is not None:
                tag["format"] = given.format
            else:
                tag["structures"] = _needed("response_format.structures", given.structures)
                tag["triggers"] = _needed("response_format.triggers", given.triggers)
            return constraint_of({"structural_tag": tag})


_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _of_structured(given: StructuredOutputs) -> Constraint | None:
    asked = {name: value for name in _STRUCTURED if (value := getattr(given, name)) not in (None, False)}
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise InvalidParameter(
            f"structured_outputs has {first} and {second}; one must go", param=f"structured_outputs.{second}"
        )
    for name, value in asked.items():
        match name:
            case "json_object":
                return constraint_of({"json_schema": ANY_OBJECT})
            case "choice":
                if not value or not all(value):
                    raise InvalidParameter(
                        f"structured_outputs.choice has {'an empty option' if value else 'no options'}",
                        hint="give texts to choose from",
                        param="structured_outputs.choice",
                    )
                return Choices(tuple(value))
            case "json" | "grammar":
                return constraint_of({"json_schema" if name == "json" else "ebnf": value})
            case _:
                return constraint_of({name: value})
    return None


def _needed(name: str, value: Any) -> Any:
    if value is None:
        raise InvalidParameter(f"{name} is missing", param=name)
    return value
