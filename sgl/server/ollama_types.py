"""Bodies of Ollama's API.

Owns names and types; `ollama.py` gives them their meaning.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sgl.server.openai.types import Object


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call; `arguments` is an object."""

    name: str
    arguments: Object = {}
    index: int | None = None
    description: str | None = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an earlier turn."""

    function: Function
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One turn; `images` are base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`options`: how to sample."""

    num_predict: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # --- taken without effect: they are the server's own to decide, or what is done anyway ---
    num_ctx: int | None = None
    num_batch: int | None = None
    num_keep: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    vocab_only: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    # --- refused by name ---
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What `/api/chat` and `/api/generate` share."""

    model: str | None = None
    format: str | Object | None = None
    options: Options | None = None
    stream: bool = True
    think: bool | str | None = None
    chat_template_kwargs: Object | None = None
    unsupported: Literal["refuse", "check"] | None = None
    # --- taken without effect: the model stays, and nothing is cut ---
    keep_alive: str | float | None = None
    truncate: bool | None = None
    shift: bool | None = None
    # --- refused by name ---
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(_Common, kw_only=True):
    """`POST /api/chat`."""

    messages: list[OllamaMessage] = []
    tools: list[Object] | None = None


class OllamaGenerateRequest(_Common, kw_only=True):
    """`POST /api/generate`."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool = False
    # --- refused by name ---
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class ShowRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /api/show`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /api/embed`."""

    input: str | list[str]
    model: str | None = None
    truncate: bool = True
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /api/embeddings`, the older form."""

    prompt: str
    model: str | None = None
    options: Options | None = None
    keep_alive: str | float | None = None
