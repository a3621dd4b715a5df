"""What an engine will hold in memory, in bytes, before a weight is read.

Owns the plan: what is held, how much, why, and when (while loading, while serving, always), beside what is available
and who says so. `runtime.resolution.resolve` fits the KV pool with it and refuses what cannot work; `sgl doctor`, the
progress display and `server_info` show it. Pure arithmetic over `Facts`; imports no torch.

The plan is a bound, not a forecast: each part is the most that the code of today can hold at once, and the pool counts
as full. A test compares it with what the worker really holds (`tests/e2e/test_memory_plan.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from sgl.errors import ConfigError
from sgl.kernels.workspace import (
    capped_attention_bytes,
    decode_attention_bytes,
    native_attention_bytes,
    prefill_attention_bytes,
)
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.decode_graphs import VERIFIED_TOKENS, early_rows, graph_bytes, graph_rows, verified_bytes
from sgl.runtime.numerics import Kernels, Quantization
from sgl.runtime.speculation.options import draft_slots

if TYPE_CHECKING:
    from sgl.runtime.config import EngineConfig, Facts, ResolvedConfig

MiB = 2**20
GiB = 2**30

When = Literal["always", "loading", "serving"]

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Size of one number by dtype."""

_BLOCK_BYTES = {"int8": 34, "int4": 20}
"""Of 32 weights with their scales."""

USABLE_SHARE = 0.9
"""Of what is available; the rest is for fragmentation and for the neighbours."""

_HOST_BASE = 208 * MiB
"""Anonymous memory of Python, torch and the socket, and what malloc keeps between steps (measured: 150 MiB at rest)."""
_CUDA_BASE = 768 * MiB
"""cuBLAS workspaces and what torch's caching allocator loses to fragmentation; the context is taken already."""
_VOCABULARY_ROW = 2048
"""Host bytes per token id: tokenizer tables, byte trie of the grammar compiler, one compiled grammar."""
_SAMPLED_ROW = 14
"""Bytes per logit of a sampled row: two float32 copies, the mask, comparisons, one sorted row in float64."""
_SCORED_ROW = 8
"""Bytes per logit of a scored row: the rows picked, and their log-softmax."""


class MemoryLimit(msgspec.Struct, frozen=True):
    """What one authority (the machine, a control group, a resource limit, the device) lets this process hold, what it
    holds now included."""

    source: str
    bytes: int


class MemoryItem(msgspec.Struct, frozen=True):
    """One part of the plan."""

    what: str
    bytes: int
    when: When
    why: str


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parts, their sums, and what there is. `available_bytes` is 0 where nothing could be found out."""

    device: Literal["cpu", "cuda"]
    items: tuple[MemoryItem, ...]
    loading_bytes: int
    serving_bytes: int
    available_bytes: int
    available_source: str
    static_share: float | None = None
    """`mem_fraction_static`: of what is available, for weights and pool together."""

    @property
    def needed_bytes(self) -> int:
        """The most that is held at once."""
        return max(self.loading_bytes, self.serving_bytes)

    @property
    def static_bytes(self) -> int:
        """Weights and pool."""
        return self.bytes_of("weights") + self.bytes_of("KV pool")

    @property
    def least_available_bytes(self) -> int:
        """How much would have to be available for this plan."""
        share = self.static_share or 1.0
        return math.ceil(max(self.needed_bytes / USABLE_SHARE, self.static_bytes / share))

    @property
    def fits(self) -> bool:
        """Whether the plan can be carried out. What is not known does not limit."""
        return not self.available_bytes or self.least_available_bytes <= self.available_bytes

    def bytes_of(self, what: str) -> int:
        """The size of one part."""
        return sum(item.bytes for item in self.items if item.what == what)

    def summary(self) -> str:
        """The plan in one line.

        Example:
            >>> item = MemoryItem("weights", 512 * MiB, "always", "")
            >>> MemoryPlan(
            ...     device="cpu",
            ...     items=(item,),
            ...     loading_bytes=item.bytes,
            ...     serving_bytes=item.bytes,
            ...     available_bytes=2 * GiB,
            ...     available_source="MemAvailable",
            ... ).summary()
            'weights 512 MiB; at most 512 MiB at once, of 2.00 GiB available (MemAvailable)'
        """
        parts = ", ".join(f"{item.what} {size_text(item.bytes)}" for item in self.items)
        there = f"{size_text(self.available_bytes)} available" if self.available_bytes else "an unknown amount"
        return f"{parts}; at most {size_text(self.needed_bytes)} at once, of {there} ({self.available_source})"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions that the plan depends on."""

    device: Literal["cpu", "cuda"]
    dtype: str
    quantization: Quantization = "none"
    kernels: Kernels = "torch"
    context_len: int
    pool_tokens: int
    max_running_requests: int
    chunked_prefill_size: int
    cuda_graph_max_bs_decode: int = 0
    max_drafts: int = 0

    @classmethod
    def of(cls, config: ResolvedConfig) -> Sizes:
        """Of an engine that runs."""
        return cls(
            device=config.device,
            dtype=config.dtype,
            quantization=config.quantization,
            kernels=config.kernels,
            context_len=config.context_len,
            pool_tokens=config.pool_tokens,
            max_running_requests=config.max_running_requests,
            chunked_prefill_size=config.chunked_prefill_size,
            cuda_graph_max_bs_decode=config.cuda_graph_max_bs_decode,
            max_drafts=config.max_drafts,
        )


def size_text(number: int) -> str:
    """Bytes for people, in binary units.

    Example:
        >>> size_text(92_871_040), size_text(3 * GiB // 2)
        ('89 MiB', '1.50 GiB')
    """
    return f"{number / GiB:.2f} GiB" if number >= GiB else f"{number / MiB:.0f} MiB"


def weights_bytes(facts: Facts, dtype: str, quantization: Quantization = "none") -> int:
    """Weights once loaded; those of a quantized file are expanded unless `quantization` keeps them."""
    if quantization == "gguf":
        return facts.packed_bytes
    if quantization != "none":
        tables = min(2 * facts.vocab_size * facts.hidden_size, facts.num_parameters)  # 8 bits at least
        rest = facts.num_parameters - tables
        return (tables * _BLOCK_BYTES["int8"] + rest * _BLOCK_BYTES[quantization]) // 32
    return facts.num_parameters * BYTES_OF[dtype]


def kv_bytes_per_token(facts: Facts, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * BYTES_OF[dtype]


def plan_memory(sizes: Sizes, facts: Facts, static_share: float | None = None) -> MemoryPlan:
    """The plan of an engine of these sizes on the model and machine of `facts`."""
    cuda = sizes.device == "cuda"
    token = kv_bytes_per_token(facts, sizes.dtype)
    items = (
        MemoryItem(
            "weights",
            weights_bytes(facts, sizes.dtype, sizes.quantization),
            "always",
            f"{facts.num_parameters / 1e6:.1f} million parameters in "
            f"{sizes.dtype if sizes.quantization == 'none' else sizes.quantization}",
        ),
        _base(facts, cuda=cuda),
        MemoryItem(
            "loading buffer",
            facts.largest_tensor * (8 if facts.weights_kind == "dummy" else 4),
            "loading",
            f"the largest tensor ({facts.largest_tensor / 1e6:.1f} million numbers) in float32, before it is converted",
        ),
        MemoryItem("KV pool", sizes.pool_tokens * token, "serving", f"{sizes.pool_tokens} tokens of {token} bytes"),
        *_draft_model(sizes, facts),
        _activations(sizes, facts),
        _attention(sizes, facts),
        _logits(sizes, facts),
        *_graphs(sizes, facts),
    )
    available, source = (facts.cuda_bytes, "CUDA free") if cuda else (facts.available_bytes, facts.available_source)
    return MemoryPlan(
        device=sizes.device,
        items=items,
        loading_bytes=sum(item.bytes for item in items if item.when != "serving"),
        serving_bytes=sum(item.bytes for item in items if item.when != "loading"),
        available_bytes=available,
        available_source=source if available else "unknown",
        static_share=static_share,
    )


def fit_pool(
    sizes: Sizes, facts: Facts, *, least: int, most: int, static_share: float | None = None
) -> tuple[Sizes, MemoryPlan]:
    """The largest pool between `least` and `most` tokens whose plan fits; the plan for `least` when none does."""

    def with_pool(tokens: int) -> tuple[Sizes, MemoryPlan]:
        sized = msgspec.structs.replace(sizes, pool_tokens=tokens)
        return sized, plan_memory(sized, facts, static_share)

    tokens = largest(least, most, lambda tokens: with_pool(tokens)[1].fits)
    return with_pool(least if tokens is None else tokens)


def largest(least: int, most: int, works: Callable[[int], bool]) -> int | None:
    """The largest number between the two that works, given that everything below a working one works."""
    if least > most or not works(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if works(middle) else (least, middle - 1)
    return least


def _base(facts: Facts, *, cuda: bool) -> MemoryItem:
    if cuda:
        return MemoryItem("libraries", _CUDA_BASE, "always", "cuBLAS workspaces, fragments of torch's allocator")
    tables = facts.vocab_size * _VOCABULARY_ROW
    why = f"Python and torch {size_text(_HOST_BASE)}, tables of {facts.vocab_size} token ids {size_text(tables)}"
    return MemoryItem("libraries", _HOST_BASE + tables, "always", why)


def _draft_model(sizes: Sizes, facts: Facts) -> tuple[MemoryItem, ...]:
    """Weights of the draft model, and its own keys and values."""
    draft = facts.draft
    if draft is None:
        return ()
    quantization = sizes.quantization if draft.weights_kind == "gguf" else "none"
    weights, slots = weights_bytes(draft, sizes.dtype, quantization), draft_slots(sizes.context_len)
    total = weights + slots * kv_bytes_per_token(draft, sizes.dtype)
    why = f"{draft.num_parameters / 1e6:.1f} million weights, keys and values of {slots} tokens"
    return (MemoryItem("draft model", total, "always", why),)


def _activations(sizes: Sizes, facts: Facts) -> MemoryItem:
    """What one layer holds for every token of the largest step, whichever of its two halves holds more."""
    each = BYTES_OF["float32" if sizes.kernels == "native" else sizes.dtype]
    wide = 12  # norms and rotary angles are computed in float32, in up to three copies
    projected = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    attention = 3 * projected * each
    feed_forward = 4 * facts.intermediate_size * each
    token = facts.hidden_size * (4 * each + wide) + facts.head_dim * (wide + 2 * each) + max(attention, feed_forward)
    num_tokens = sizes.chunked_prefill_size
    return MemoryItem(
        "activations", num_tokens * token, "serving", f"{num_tokens} tokens of the largest step, {token} bytes each"
    )


def _attention(sizes: Sizes, facts: Facts) -> MemoryItem:
    context = min(sizes.context_len, sizes.pool_tokens)
    is_plain = not (facts.attention_window or facts.attention_softcap)
    if sizes.kernels == "native" and is_plain:
        rows = sizes.chunked_prefill_size
        total = native_attention_bytes(rows, context, facts.num_heads, facts.head_dim)
        return MemoryItem(
            "attention", total, "serving", f"partial results of {rows} single tokens looking at {context}"
        )
    each = BYTES_OF[sizes.dtype]
    if sizes.kernels == "native":  # whose activations are float32: keys and values are gathered, and converted
        each += BYTES_OF["float32"]
    capped = capped_attention_bytes(facts.num_heads, context) if facts.attention_softcap else 0
    prefill = prefill_attention_bytes(
        sizes.chunked_prefill_size, context, facts.num_heads, facts.num_kv_heads, facts.head_dim, each
    )
    rows = sizes.chunked_prefill_size  # options of selects come as single tokens, too, and are not counted as running
    decode = decode_attention_bytes(rows, context, facts.num_kv_heads, facts.head_dim, each)
    if prefill >= decode:
        why = f"{sizes.chunked_prefill_size} tokens looking at {context}: keys and values gathered, and the mask"
    else:
        why = f"{rows} single tokens looking at {context} each: keys and values gathered in groups, and slot numbers"
    return MemoryItem("attention", max(prefill, decode) + capped, "serving", why)


def _logits(sizes: Sizes, facts: Facts) -> MemoryItem:
    """Rows that a step may have (the scheduler holds to these limits), and what sampling and scoring copy of them."""
    sampled = min(sizes.max_running_requests + sizes.max_drafts, sizes.chunked_prefill_size)
    scored = min(max(DEFAULT_LIMITS.max_logit_rows, DEFAULT_LIMITS.max_choices), sizes.chunked_prefill_size)
    both = DEFAULT_LIMITS.max_logit_rows + DEFAULT_LIMITS.max_choices + sampled
    rows = min(both, sizes.chunked_prefill_size)
    half = 0 if sizes.dtype == "float32" else BYTES_OF[sizes.dtype]
    total = facts.vocab_size * (rows * (4 + half) + scored * _SCORED_ROW + sampled * _SAMPLED_ROW)
    why = f"{rows} rows of {facts.vocab_size}, up to {scored} scored and {sampled} sampled at once"
    return MemoryItem("logits", total, "serving", why)


def _graphs(sizes: Sizes, facts: Facts) -> tuple[MemoryItem, ...]:
    """Recorded decoding steps, the whole of them, whether recorded at start or when they are needed."""
    most = sizes.cuda_graph_max_bs_decode
    if not most:
        return ()
    early, rows = early_rows(most), graph_rows(most)
    why = (
        f"logits and integers of steps of up to {rows[-1]} rows: {len(early)} are recorded at start "
        f"({', '.join(map(str, early))}), {len(rows) - len(early)} at their first use"
    )
    total = graph_bytes(most, facts.vocab_size)
    if sizes.max_drafts:
        total += verified_bytes(facts.vocab_size)
        why += f"; verifications of up to {VERIFIED_TOKENS[-1]} tokens when they have come up several times"
    return (MemoryItem("CUDA graphs", total, "serving", why),)


# --- when it does not fit ---------------------------------------------------------------------------------------------

_LEAST_USEFUL = {"max_total_tokens": 64, "max_running_requests": 1, "chunked_prefill_size": 32, "context_length": 256}
"""Advice does not go below these."""


def shortage(
    config: EngineConfig, sizes: Sizes, plan: MemoryPlan, works: Callable[[EngineConfig], bool]
) -> ConfigError:
    """The error for a plan that does not fit: the numbers, and the one option whose change makes it fit.

    Args:
        config, sizes: what the user gave, and what was decided from it.
        works: whether another configuration would fit on the same machine.
    """
    there = f"{size_text(plan.available_bytes)} available ({plan.available_source})"
    share = plan.static_share
    if share is not None and plan.static_bytes > share * plan.available_bytes:
        message = (
            f"weights ({size_text(plan.bytes_of('weights'))}) and KV pool ({size_text(plan.bytes_of('KV pool'))}) need "
            f"{size_text(plan.static_bytes)}; mem_fraction_static {share} of {there} is "
            f"{size_text(int(share * plan.available_bytes))}"
        )
    else:
        serving = plan.serving_bytes >= plan.loading_bytes
        parts = ", ".join(
            f"{item.what} {size_text(item.bytes)}"
            for item in plan.items
            if item.when in ("always", "serving" if serving else "loading")
        )
        message = (
            f"this engine needs {size_text(plan.needed_bytes)} while {'serving' if serving else 'loading'} ({parts}); "
            f"{USABLE_SHARE:.0%} of {there} is {size_text(int(USABLE_SHARE * plan.available_bytes))}"
        )
    for field, value in _changes(config, sizes, works):
        return ConfigError(message, hint=f"set {field} to {value}", param=field)
    needed = math.ceil(plan.least_available_bytes / GiB * 100) / 100
    return ConfigError(
        message,
        hint=f"set model_path to a smaller model: no other option is enough, and this one needs {needed:.2f} GiB",
        param="model_path",
    )


def _changes(
    config: EngineConfig, sizes: Sizes, works: Callable[[EngineConfig], bool]
) -> Iterator[tuple[str, str | int | float]]:
    """(field, value) of each single change that is enough, best first: what the user set himself, then what costs
    least to give up."""

    def changed(field: str, value: object) -> EngineConfig:
        return msgspec.structs.replace(config, **{field: value})

    if config.mem_fraction_static is not None:
        percent = next((p for p in range(1, 100) if works(changed("mem_fraction_static", p / 100))), None)
        if percent is not None:
            yield "mem_fraction_static", percent / 100
    now = {
        "max_total_tokens": config.max_total_tokens or 1024,
        "chunked_prefill_size": sizes.chunked_prefill_size,
        "max_running_requests": sizes.max_running_requests,
        "context_length": sizes.context_len,
    }
    given = [field for field in now if getattr(config, field) is not None]
    numbers = [*given, *(field for field in ("chunked_prefill_size", "max_running_requests") if field not in given)]
    last = [field for field in ("context_length", "max_total_tokens") if field not in given]
    for field in (*numbers, "dtype", *last):
        if field == "dtype":
            if sizes.dtype == "float32" and works(changed("dtype", "bfloat16")):
                yield "dtype", "bfloat16"
            continue
        least = max(_LEAST_USEFUL[field], config.page_size if field == "max_total_tokens" else 1)
        found = largest(least, now[field] - 1, lambda value, field=field: works(changed(field, value)))  # type: ignore[misc]
        if found is not None:
            yield field, _rounded(found, least)


def _rounded(value: int, least: int) -> int:
    """A number for people, at most `value` and at least `least`: three leading binary digits.

    Example:
        >>> _rounded(12_345, 64), _rounded(70, 64), _rounded(7, 1)
        (12288, 64, 7)
    """
    step = 1 << max(0, value.bit_length() - 3)
    return max(least, value // step * step)
