"""Bodies of Anthropic's messages API.

Owns names and types; `anthropic.py` gives them their meaning. What a client got as content may come back as it is.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from sgl.server.openai.types import Int64, Object


class _Block(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """What a block may carry besides; without effect: prefixes are shared without being asked for."""

    cache_control: Any = None
    citations: Any = None
    caller: Any = None


class TextBlock(_Block, tag="text"):
    """Text."""

    text: str


class ImageSource(msgspec.Struct, forbid_unknown_fields=True):
    """Where an image is: in the request, as base64."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(_Block, tag="image"):
    """An image."""

    source: ImageSource


class ToolUseBlock(_Block, tag="tool_use"):
    """A call in an earlier turn."""

    id: str
    name: str
    input: Object


class ToolResultBlock(_Block, tag="tool_result"):
    """What a tool gave."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block, tag="thinking"):
    """Reasoning of an earlier turn; chat templates leave it out, so it is not shown to the model."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    """Reasoning that was hidden; there is nothing in it for other models."""

    data: str


Block: TypeAlias = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: Object


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: str | None = None
    task_budget: Any = None


class CountRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/messages/count_tokens`, and what a message has of it."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Object] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: Object | None = None
    # --- taken without effect ---
    cache_control: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    # --- as in chat completions; not of Anthropic's API ---
    seed: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    rid: str | None = None
    unsupported: Literal["refuse", "check"] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    # --- taken without effect ---
    metadata: Object | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    # --- refused by name, see `anthropic` ---
    container: Any = None
    mcp_servers: list[Any] | None = None
    context_management: Any = None
