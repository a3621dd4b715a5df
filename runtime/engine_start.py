"""From a configuration to an engine core that computes: the model is found, what was left open is resolved, weights are
loaded and put to work.

Owns the order of a start, which tells what is wrong with options, names and files before torch is imported, and what
`server_info` says of a decoder. Called by the worker, and by whoever drives a core without a process around it
(benches, tests, tutorial 16); `encoder_start` is its counterpart for encoders.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import msgspec

from sgl import environment
from sgl.errors import UnsupportedModel
from sgl.grammars.formats import detect_reasoning_format, detect_tool_format
from sgl.lang.graph import Event
from sgl.runtime.config import EngineConfig, Facts, ResolvedConfig
from sgl.runtime.core import EngineCore
from sgl.runtime.decode_graphs import early_rows
from sgl.runtime.faults import SWITCH, FaultPoints, parse_faults
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.sources import ModelSource, locate
from sgl.runtime.memory_plan import BYTES_OF
from sgl.runtime.processors import LogitProcessor, load_processors
from sgl.runtime.resolution import resolve
from sgl.runtime.sampling_defaults import model_defaults
from sgl.runtime.speculation.draft_model import DraftModel, check_tokenizers
from sgl.runtime.speculation.options import draft_slots, resolve_speculation
from sgl.runtime.speculation.start import make_drafter
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.runtime.trace import Tracer

if TYPE_CHECKING:
    from sgl.runtime.device_clock import DeviceClock
    from sgl.runtime.model_runner import ModelRunner
    from sgl.runtime.models.registry import ModelConfig
    from sgl.runtime.sampler import Sampler

IMPORTING = "importing torch"

log = logging.getLogger("sgl.worker")


def load_extras(config: EngineConfig) -> tuple[FaultPoints | None, dict[str, LogitProcessor]]:
    """What tests make fail, and the logit processors that a user brings along.

    Raises:
        ConfigError: one of them is wrong.
    """
    faults = None
    if config.fault_points is not None:
        faults = parse_faults(config.fault_points, allowed=environment.read(SWITCH) == "1")
    return faults, load_processors(config.logit_processors)


def find_model(config: EngineConfig, progress: Callable[[str], None] = lambda text: None) -> ModelSource:
    """The model that `config` names, fetched if need be. Raises as `locate`."""
    progress(f"opening {config.model_path}")

    def downloading(done: int, total: int | None) -> None:
        whole = f" of {total / 2**20:.0f}" if total else ""
        progress(f"fetching {config.model_path}: {done / 2**20:.0f}{whole} MiB")

    return locate(
        config.model_path,
        load_format=config.load_format,
        offline=config.offline,
        revision=config.revision,
        progress=downloading,
    )


def build_core(
    config: EngineConfig,
    *,
    emit: Callable[[int, Event], None],
    executor: Executor | None = None,
    wake: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda text: None,
    kind: type[EngineCore] = EngineCore,
    source: ModelSource | None = None,
) -> tuple[EngineCore, dict[str, Any]]:
    """Load a model and put an engine core on it, in this process.

    Args:
        emit, executor, wake: as `EngineCore` takes them.
        progress: gets a line for each phase.
        kind: the core's class, for those who watch it from within.
        source: the model, where it has been found already.

    Returns:
        The core, and what `server_info` shows.

    Raises:
        ModelError: the model cannot be found, fetched or loaded.
        ConfigError: it does not fit the wishes in `config`.
    """
    faults, processors = load_extras(config)
    source = source or find_model(config, progress)
    checkpoint = open_checkpoint(source, config.json_model_override_args, config.model_impl)
    defaults = model_defaults(checkpoint.folder) if config.sampling_defaults == "model" else {}
    path = config.tokenizer_path
    tokenizer = checkpoint.tokenizer() if path is None else Tokenizer.from_folder(path)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise UnsupportedModel(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model {checkpoint.config.vocab_size}",
            hint="give the tokenizer that belongs to the model",
        )

    # Imported here: torch takes seconds, and a wrong option, name or file has been told before.
    progress(IMPORTING)
    importlib.import_module("sgl.runtime.model_runner")

    progress(f"planning {source.name}")
    facts = checkpoint.facts()
    draft = _open_draft_model(config, tokenizer, progress)
    if draft is not None:
        facts = msgspec.structs.replace(facts, draft=draft.facts())
    resolved = _resolve_and_load_kernels(config, facts, progress)
    if resolved.model_impl == "transformers":
        log.warning("transformers' layers compute %s, which is slower than sgl's own", checkpoint.config.architecture)
    if resolved.memory is not None:
        progress(f"loading {source.name}: {resolved.memory.summary()}")
        log.info("memory plan of %s: %s", source.name, resolved.memory.summary())
    model = checkpoint.build_model(
        resolved.dtype,
        resolved.device,
        deterministic=resolved.deterministic,
        context_len=resolved.context_len,
        kernels=resolved.kernels,
        quantization=resolved.quantization,
    )
    runner, sampler, device_clock = _put_to_work(model, checkpoint.config, resolved, tokenizer, processors)
    drafter = None
    if draft is not None:
        progress(f"loading the draft model {config.speculative_draft_model_path}")
        drafter = make_drafter(resolved, tokenizer, _load_draft_model(config, resolved, draft, tokenizer, processors))
    if early := early_rows(resolved.cuda_graph_max_bs_decode):
        progress(f"recording decoding steps of {', '.join(map(str, early))} rows")
        runner.capture(early)
    tracer = Tracer(config.trace_file, time.monotonic) if config.trace_file is not None else None
    core = kind(
        resolved,
        tokenizer,
        runner,
        sampler,
        emit=emit,
        executor=executor,
        wake=wake,
        processors=processors,
        tracer=tracer,
        device_clock=device_clock,
        shared_prefix_tokens=lambda: runner.shared_prefix_tokens,
        faults=faults,
        drafter=drafter,
    )
    info = {
        "kind": "decoder",
        "model": source.name,
        "model_path": str(source.path) if source.path else source.name,
        "architecture": checkpoint.config.architecture,
        "model_impl": resolved.model_impl,
        "vocab_size": tokenizer.vocab_size,
        "sampling_defaults": defaults,
        "formats": _formats(tokenizer),
        "logit_processors": sorted(processors),
        "resolved": msgspec.to_builtins(resolved),
        "step_weights_bytes": _step_weights_bytes(checkpoint.config, resolved),
        "overrides": [],
    }
    return core, info


def _open_draft_model(config: EngineConfig, tokenizer: Tokenizer, progress: Callable[[str], None]) -> Checkpoint | None:
    """The draft model's checkpoint, if guesses come from one.

    Raises:
        ModelError: it cannot be found, fetched or read.
        ConfigError: its tokens are others, or options of speculation contradict each other.
    """
    options = resolve_speculation(config)
    if options is None or options.draft_model_path is None:
        return None
    draft = msgspec.structs.replace(config, model_path=options.draft_model_path, revision=options.draft_model_revision)
    checkpoint = open_checkpoint(find_model(draft, progress))
    check_tokenizers(checkpoint.tokenizer(), tokenizer)
    return checkpoint


def _load_draft_model(
    config: EngineConfig,
    resolved: ResolvedConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    processors: Mapping[str, LogitProcessor],
) -> DraftModel:
    """The draft model at work, with keys and values of its own; what it may hold is in the plan of `resolved`."""
    num_slots = draft_slots(resolved.context_len)
    own = resolve(
        EngineConfig(
            dtype=config.dtype,
            quantization=config.quantization,
            device=resolved.device,
            kernels=config.kernels,
            max_total_tokens=num_slots,
            max_running_requests=resolved.max_running_requests,
            chunked_prefill_size=resolved.chunked_prefill_size,
            num_threads=resolved.num_threads,
            enable_deterministic_inference=resolved.deterministic,
        ),
        msgspec.structs.replace(checkpoint.facts(), available_bytes=0),  # nothing limits: it is in the plan already
    )
    # What the model accepted comes to the draft model as chunks of few tokens, which are recorded where it speculates.
    own = msgspec.structs.replace(own, speculation=resolved.speculation)
    model = checkpoint.build_model(
        own.dtype,
        own.device,
        deterministic=own.deterministic,
        context_len=own.context_len,
        kernels=own.kernels,
        quantization=own.quantization,
    )
    runner, sampler, clock = _put_to_work(model, checkpoint.config, own, tokenizer, processors)
    return DraftModel(
        runner,
        sampler,
        num_slots=num_slots,
        context_len=own.context_len,
        chunk=own.chunked_prefill_size,
        by_distribution=resolved.speculation is not None and resolved.speculation.accept != "drawn",
        device_clock=clock,
    )


def _put_to_work(
    model: Any,
    model_config: ModelConfig,
    resolved: ResolvedConfig,
    tokenizer: Tokenizer,
    processors: Mapping[str, LogitProcessor],
) -> tuple[ModelRunner, Sampler, DeviceClock | None]:
    """What computes steps and draws tokens. Where Triton's kernels compute, one of them draws, so that the host need
    not wait, and the device is timed."""
    from sgl.runtime.model_runner import ModelRunner
    from sgl.runtime.sampler import Sampler

    if resolved.kernels != "triton":
        return ModelRunner(model, model_config, resolved), Sampler(tokenizer.vocab_size, processors), None
    from sgl.runtime.device_clock import DeviceClock
    from sgl.runtime.device_sampler import DeviceSampler

    clock = DeviceClock()
    runner = ModelRunner(model, model_config, resolved, clock)
    return runner, DeviceSampler(tokenizer.vocab_size, processors, clock), clock


def _step_weights_bytes(config: ModelConfig, resolved: ResolvedConfig) -> int:
    """Bytes of weights that a decoding step reads: of an embedding that is not the head, only its rows' own."""
    if config.tie_word_embeddings or resolved.quantization != "none":
        return resolved.weights_bytes
    return resolved.weights_bytes - config.vocab_size * config.hidden_size * BYTES_OF[resolved.dtype]


def _formats(tokenizer: Tokenizer) -> dict[str, str | None]:
    """How this model writes tool calls and reasoning, as its chat template has it."""
    template = tokenizer.chat_template.source if tokenizer.chat_template is not None else ""
    reasoning = detect_reasoning_format(template)
    return {"tool": detect_tool_format(template).name, "reasoning": reasoning.name if reasoning is not None else None}


def _resolve_and_load_kernels(config: EngineConfig, facts: Facts, progress: Callable[[str], None]) -> ResolvedConfig:
    """What runs, with the native kernels loaded where they compute. A compiler that turns out not to work is one fact
    more: the rest is decided without native kernels, and said once.

    Raises:
        ConfigError: the wishes in `config` cannot be had.
    """
    from sgl.runtime.loading.facts import load_native_kernels

    resolved = resolve(config, facts)
    obstacle = facts.native_obstacle
    if resolved.kernels == "native" and not (obstacle := load_native_kernels(progress)):
        return resolved
    if obstacle:
        slower = resolve(config, msgspec.structs.replace(facts, native="", native_obstacle=obstacle))
        if resolve(config, msgspec.structs.replace(facts, native_obstacle="")).kernels == "native":
            log.warning("the model runs on torch, which is slower: %s", obstacle)
        return slower
    return resolved
