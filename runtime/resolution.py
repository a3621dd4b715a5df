"""How an engine is resolved: one pure function, `resolve(config, facts) -> ResolvedConfig`.

Owns every decision that the user left open, with its reason, and the order in which they are made: device and numerics
(`numerics`), lengths and rows, threads, what is guessed (`speculation.options`), and then as large a pool as the memory
plan (`memory_plan`) lets be. Called by the worker before a weight is read, by `sgl doctor` and by the simulator.
Nothing here reads the environment or the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, Facts, Reason, ResolvedConfig, limits_of
from sgl.runtime.decode_graphs import max_graph_rows
from sgl.runtime.eviction import parse_parameters
from sgl.runtime.memory_plan import MemoryPlan, Sizes, fit_pool, kv_bytes_per_token, shortage, weights_bytes
from sgl.runtime.numerics import Dtype, decide_numerics
from sgl.runtime.speculation.options import Speculation, resolve_speculation

_SMALL_MACHINE = 4
"""Cores up to which a CPU model gets all of them."""
_MASK_THREADS = 8
"""More than these wait for the interpreter's lock."""
_CPU_POOL_TOKENS = 64 * 1024
_LEAST_POOL_TOKENS = 1024
"""Fewer are taken only when the user asks for them, or when the context is shorter."""


class _Decided(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the size of the pool, and the reasons for what the user left open."""

    sizes: Sizes
    num_threads: int
    num_mask_threads: int
    random_seed: int
    disable_overlap_schedule: bool
    speculation: Speculation | None
    prepacked: bool
    reasons: list[Reason]


def resolve(config: EngineConfig, facts: Facts) -> ResolvedConfig:
    """Decide everything that the user left open. Pure: the same arguments give the same answer.

    Raises:
        ConfigError: contradictory wishes, or more memory than there is, with the one field to change.
    """
    decided = _decide(config, facts)
    sizes, memory = _fit(config, facts, decided.sizes)
    if not memory.fits:
        raise shortage(
            config, sizes, memory, lambda changed: _fit(changed, facts, _decide(changed, facts).sizes)[1].fits
        )
    reasons = decided.reasons
    token = kv_bytes_per_token(facts, sizes.dtype)
    if config.max_total_tokens is None:
        reasons.append(Reason("max_total_tokens", str(sizes.pool_tokens), _why_pool(config, facts, sizes)))
    return ResolvedConfig(
        dtype=cast(Dtype, sizes.dtype),
        device=sizes.device,
        quantization=sizes.quantization,
        kernels=sizes.kernels,
        model_impl="transformers" if facts.layers_obstacle else "sgl",
        context_len=sizes.context_len,
        page_size=config.page_size,
        num_pages=sizes.pool_tokens // config.page_size,
        max_running_requests=sizes.max_running_requests,
        chunked_prefill_size=sizes.chunked_prefill_size,
        disable_radix_cache=config.disable_radix_cache,
        deterministic=config.enable_deterministic_inference,
        rerender=config.rerender,
        random_seed=decided.random_seed,
        num_threads=decided.num_threads,
        weights_bytes=weights_bytes(facts, sizes.dtype, sizes.quantization),
        kv_bytes_per_token=token,
        schedule_policy=config.schedule_policy,
        radix_eviction_policy=config.radix_eviction_policy,
        radix_eviction_policy_config=parse_parameters(
            config.radix_eviction_policy, config.radix_eviction_policy_config
        ),
        max_pinned_tokens=_pinned_tokens(config, sizes.pool_tokens, reasons),
        disable_forced_tokens=config.disable_forced_tokens,
        disable_overlap_schedule=decided.disable_overlap_schedule,
        speculation=decided.speculation,
        prepacked=decided.prepacked,
        cuda_graph_max_bs_decode=sizes.cuda_graph_max_bs_decode,
        disable_cascade_attention=config.disable_cascade_attention,
        num_mask_threads=decided.num_mask_threads,
        schedule_conservativeness=config.schedule_conservativeness,
        grammar_backend=config.grammar_backend,
        retraction_policy=config.retraction_policy,
        state_lease=config.state_lease,
        preemption_threshold=None
        if config.disable_priority_preemption
        else config.priority_scheduling_preemption_threshold,
        limits=limits_of(config),
        facts=facts,
        memory=memory,
        reasons=tuple(reasons),
    )


def _pinned_tokens(config: EngineConfig, pool_tokens: int, reasons: list[Reason]) -> int:
    """How many tokens may be pinned; the rest of the pool has to be enough for everything else."""
    pinned = config.max_pinned_tokens
    if pinned is None:
        pinned = pool_tokens // 4
        reasons.append(Reason("max_pinned_tokens", str(pinned), "a quarter of the pool"))
    if pinned >= pool_tokens:
        raise ConfigError(
            f"max_pinned_tokens is {pinned}, but the pool holds {pool_tokens}: nothing else could run",
            hint=f"set max_pinned_tokens to at most {pool_tokens - 1}, or raise max_total_tokens",
            param="max_pinned_tokens",
        )
    return pinned


def _fit(config: EngineConfig, facts: Facts, sizes: Sizes) -> tuple[Sizes, MemoryPlan]:
    """The sizes with a pool as the user wants it, else as large as memory and use allow."""
    least = most = config.max_total_tokens
    if least is None or most is None:
        least, most = max(config.page_size, min(sizes.context_len, _LEAST_POOL_TOKENS)), _most_tokens(facts, sizes)
    return fit_pool(sizes, facts, least=least, most=most, static_share=config.mem_fraction_static)


def _most_tokens(facts: Facts, sizes: Sizes) -> int:
    """What the pool may grow to when nobody says: on a GPU all that fits, on a CPU what it can compute in a while."""
    if sizes.device == "cuda":
        return max(1, facts.cuda_bytes // kv_bytes_per_token(facts, sizes.dtype))
    return max(_CPU_POOL_TOKENS, sizes.context_len)


def _why_pool(config: EngineConfig, facts: Facts, sizes: Sizes) -> str:
    token = kv_bytes_per_token(facts, sizes.dtype)
    if sizes.pool_tokens == _most_tokens(facts, sizes):
        return f"{token} bytes each; more than a {sizes.device} fills in use"
    share = config.mem_fraction_static
    limit = f"mem_fraction_static {share}" if share is not None else "the memory plan"
    return f"{token} bytes each; as many as {limit} leaves room for"


def _decide(config: EngineConfig, facts: Facts) -> _Decided:
    """Everything but the pool.

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

    if facts.layers_obstacle and config.model_impl == "auto":
        decide("model_impl", "transformers", "sgl has no layers for it")
    numerics = decide_numerics(config, facts, device)
    reasons.extend(Reason(*reason) for reason in numerics.reasons)
    dtype = numerics.dtype

    context_len = config.context_length
    if context_len is None:
        context_len = decide("context_length", facts.model_context_len, "the model's own")
    elif context_len > (longest := max(facts.model_context_len, facts.longest_context_len)):
        if not config.allow_longer_context:
            raise ConfigError(
                f"context_length is {context_len}, but the model was trained for {facts.model_context_len}",
                hint=f"set context_length to at most {longest}, stretch the model's rope with "
                "json_model_override_args, or set allow_longer_context",
                param="context_length",
            )
        decide("context_length", context_len, f"as given; the model was made for {facts.model_context_len}")
    if config.max_total_tokens is not None and config.max_total_tokens < config.page_size:
        raise ConfigError(
            f"max_total_tokens is {config.max_total_tokens}, less than one page of {config.page_size}",
            hint=f"set max_total_tokens to at least {config.page_size}",
            param="max_total_tokens",
        )

    running = config.max_running_requests
    if running is None:
        running = decide("max_running_requests", 256 if device == "cuda" else 64, f"rows that still pay on {device}")
    chunk = config.chunked_prefill_size
    if chunk is None:
        chunk = decide("chunked_prefill_size", 8192 if device == "cuda" else 512, f"keeps a step short on {device}")
    threads, masks = _threads(config, facts.cpu_count, device, decide)
    seed = config.random_seed
    if seed is None:
        seed = decide("random_seed", 0, "fixed, so that a run can be repeated")
    graphs, why = max_graph_rows(
        device, numerics.kernels, config.cuda_graph_max_bs_decode, running, disabled=config.disable_decode_cuda_graph
    )
    if device == "cuda":
        decide("cuda_graph_max_bs_decode", graphs, why)
    speculation = resolve_speculation(config)
    sizes = Sizes(
        device=device,
        dtype=dtype,
        quantization=numerics.quantization,
        kernels=numerics.kernels,
        context_len=context_len,
        pool_tokens=0,
        max_running_requests=running,
        chunked_prefill_size=chunk,
        cuda_graph_max_bs_decode=graphs,
        max_drafts=speculation.most_of_step(running) if speculation is not None else 0,
    )
    no_overlap = config.disable_overlap_schedule
    if no_overlap is None:
        why = "the host prepares a step while the device computes" if device == "cuda" else "the host computes itself"
        no_overlap = decide("disable_overlap_schedule", device != "cuda", why)
    return _Decided(
        sizes=sizes,
        num_threads=threads,
        num_mask_threads=masks,
        random_seed=seed,
        disable_overlap_schedule=no_overlap,
        speculation=speculation,
        prepacked=numerics.prepacked,
        reasons=reasons,
    )


def _threads(config: EngineConfig, cores: int, device: str, decide: Callable[[str, Any, str], Any]) -> tuple[int, int]:
    """Threads of the model and of token masks: no more than the cores together, unless the user gives the model more.

    A CPU model keeps every core of a small machine; on a large one it misses one the least. Beside a GPU half may fill.
    """
    threads, masks = config.num_threads, config.num_mask_threads
    if threads is not None and threads > 4 * cores:
        raise ConfigError(
            f"num_threads is {threads}, but this process may use {cores} cores",
            hint=f"set num_threads to at most {4 * cores}",
            param="num_threads",
        )
    if masks is not None and masks + (threads or 1) > cores:
        raise ConfigError(
            f"{masks} mask threads and {threads or 1} of the model are more than the {cores} cores of this process",
            hint=f"set num_mask_threads to at most {max(0, cores - (threads or 1))}",
            param="num_mask_threads",
        )
    if masks is None:
        if device == "cuda":
            most, why = cores // 2, "half of the cores, at most 8, and none of the model's"
        elif threads is None:
            most, why = int(cores > _SMALL_MACHINE), "one where the model does not miss the core"
        else:
            most, why = cores - threads, "the cores that the model leaves, at most 8"
        masks = decide("num_mask_threads", max(0, min(_MASK_THREADS, most, cores - (threads or 1))), why)
    if threads is None:
        why = "one per available core" + (", less those that fill masks" if masks else "")
        threads = decide("num_threads", cores - masks, why)
    return threads, masks
