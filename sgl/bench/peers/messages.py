"""What the harness and a side's process say to each other: one JSON object a line over the process's pipes.

Owns the closed union of requests and of replies. Every request gets exactly one reply, in order; `Failed` may be the
reply to any of them. Token ids everywhere: no side's tokenizer is part of a measurement.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgl.errors import ErrorInfo


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Bring the model up and answer with `Loaded`. `settings` are the side's own options."""

    model_path: str
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int
    settings: dict[str, Any] = {}


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Continue all prompts together, greedily, by exactly `new_tokens` each; nothing may be known of them before."""

    prompts: list[list[int]]
    new_tokens: int


class Tune(msgspec.Struct, frozen=True, tag="tune"):
    """Find the settings that are fastest for such a call, and keep them."""

    prompts: list[list[int]]
    new_tokens: int


class Preferred(msgspec.Struct, frozen=True, tag="preferred"):
    """The most likely next token after every position of these texts from `start` on."""

    texts: list[list[int]]
    start: int = 0


class Weights(msgspec.Struct, frozen=True, tag="weights"):
    """Checksum of the weights as they are computed with."""


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End; the process exits after its `Closed`."""


Request = Load | Generate | Tune | Preferred | Weights | Close


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """A model that is ready, and how it runs.

    Attributes:
        dtype: of weights, keys and values; where the weights are quantized, of keys and values only.
        quantization: in what form the weights are computed with, in the words of `EngineConfig.quantization`.
        versions: of the interpreter and the packages that the side runs with; the host fills them in.
    """

    vocab_size: int
    dtype: str
    device: str
    num_threads: int
    quantization: str = "none"
    details: dict[str, Any] = {}
    versions: dict[str, str | None] = {}


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    """`seconds` from the prompts' arrival to the last token, measured in the side's process."""

    seconds: float
    token_ids: list[list[int]]


class Tuned(msgspec.Struct, frozen=True, tag="tuned"):
    """What was chosen, and the seconds of each candidate; both empty where there is nothing to choose."""

    chosen: dict[str, Any] = {}
    tried: dict[str, float] = {}


class Preferences(msgspec.Struct, frozen=True, tag="preferences"):
    """One list per text, an entry for each position from `start` on; None from a side that cannot say."""

    token_ids: list[list[int]] | None


class WeightsDigest(msgspec.Struct, frozen=True, tag="weights_digest"):
    """None from a side that cannot say."""

    sha256: str | None


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Everything is freed."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request could not be done; the process goes on."""

    error: ErrorInfo


Reply = Loaded | Generated | Tuned | Preferences | WeightsDigest | Closed | Failed

requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def line_of(message: Request | Reply) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message) + b"\n"
