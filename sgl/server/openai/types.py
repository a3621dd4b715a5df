"""Bodies of OpenAI's requests, with the fields that SGLang and vLLM add to them.

Owns the names and types; meanings and ranges of sampling fields are those of `sgl.lang.graph.Sampling`. A field that is
not here is refused (or passed over with a warning, `--lenient`). What is taken without effect is listed apart.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

Object: TypeAlias = dict[str, Any]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage` adds a last chunk with usage; `continuous_usage_stats` puts what there is so far into each."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TextPart(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """Text of a message; `cache_control`, which clients of several dialects send, has no effect."""

    text: str
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    annotations: Any = None


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """Where an image is: a `data:` URL (nothing is fetched)."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type", forbid_unknown_fields=True):
    """An image of a message."""

    image_url: ImageUrl
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(msgspec.Struct, tag="refusal", tag_field="type"):
    """A refusal of an earlier turn."""

    refusal: str


Part: TypeAlias = TextPart | ImagePart | RefusalPart


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call in an earlier turn; `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None
    annotations: Any = None
    function_call: Any = None


class JsonSchemaFormat(msgspec.Struct, rename={"schema_": "schema"}, forbid_unknown_fields=True):
    """The schema of `response_format`."""

    name: str = "response"
    schema_: Object | bool | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer's text is."""

    type: Literal["text", "json_object", "json_schema", "regex", "structural_tag", "ebnf", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    pattern: str | None = None
    grammar: str | None = None
    structures: list[Object] | None = None
    triggers: list[str] | None = None
    format: Object | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form of constraints."""

    json: Object | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Object | None = None
    whitespace_pattern: str | None = None


class Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions share."""

    model: str | None = None
    # --- sampling ---
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    custom_logit_processor: str | None = None
    custom_params: Object | None = None
    token_healing: bool | None = None
    # --- constraints ---
    response_format: ResponseFormat | None = None
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    json_schema: Object | str | None = None
    structural_tag: Object | str | None = None
    structured_outputs: StructuredOutputs | None = None
    unsupported: Literal["refuse", "check"] | None = None
    grammar_backend: str | None = None
    # --- the request ---
    stream: bool = False
    stream_options: StreamOptions | None = None
    rid: str | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    # --- taken without effect ---
    user: str | None = None
    metadata: Object | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    # --- refused by name, see `sampling.refuse` ---
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    lora_path: Any = None
    chat_template: Any = None
    best_of: int | None = None


class ChatRequest(Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool = True
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    # --- taken without effect ---
    modalities: list[str] | None = None
    verbosity: str | None = None
    prediction: Any = None
    # --- refused by name ---
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None


class CompletionRequest(Common, kw_only=True):
    """`POST /v1/completions`; `prompt` is a text, a list of token ids, or a list of these."""

    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = None
