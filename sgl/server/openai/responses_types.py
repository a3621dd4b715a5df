"""Bodies of `/v1/responses`: the request, and the items of its input.

Owns names and types. Items are read one by one, each by its `type`, so that an error names the item's field; a message
may leave its type out, as OpenAI's own short form does. What a client got as output may come back as it is.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from sgl.server.openai.types import Int64, Object


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "response"
    schema_: Object | bool | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`; summaries are not written, the reasoning itself is given."""

    effort: str | None = None
    mode: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    encrypted_content: bool | None = None
    context: str | None = None


class ResponseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[Object] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool = False
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    # --- as in chat completions; not of OpenAI's API ---
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    max_reasoning_tokens: int | None = None
    chat_template_kwargs: Object | None = None
    rid: str | None = None
    unsupported: Literal["refuse", "check"] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    # --- taken without effect ---
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    stream_options: Object | None = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    # --- refused by name, see `responses` ---
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None
    background_options: Any = None


# --- items ----------------------------------------------------------------------------------------------------------


class _Part(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """What a content part may carry besides; without effect."""

    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class InputText(_Part, tag="input_text"):
    """Text that was given."""

    text: str


class OutputText(_Part, tag="output_text"):
    """Text that was generated."""

    text: str


class PlainText(_Part, tag="text"):
    """Text, in the words of chat completions."""

    text: str


class Refusal(_Part, tag="refusal"):
    """A refusal that was generated."""

    refusal: str


class InputImage(_Part, tag="input_image"):
    """An image as a `data:` URL."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


Part: TypeAlias = InputText | OutputText | PlainText | Refusal | InputImage


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What an item may carry besides; without effect."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    agent: Any = None
    caller: Any = None
    created_by: Any = None


class MessageItem(_Item):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class CallItem(_Item):
    """A call of a tool in an earlier turn; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class OutputItem(_Item):
    """What a tool gave."""

    call_id: str
    output: str | list[Part]
    name: str | None = None


class ReasoningItem(_Item):
    """Reasoning of an earlier turn; chat templates leave it out, so it is not shown to the model."""

    summary: Any = None
    content: Any = None
    encrypted_content: str | None = None


Item: TypeAlias = MessageItem | CallItem | OutputItem | ReasoningItem

KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
