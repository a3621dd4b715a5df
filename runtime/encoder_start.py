"""From a configuration to an encoder that computes: what is decided, with reasons, and the loading.

Owns the few decisions that an encoder needs (device, dtype, threads, size of a step). Called by the worker, and by `sgl
doctor` for the decisions. An option that means nothing to an encoder is refused only where it would change numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Literal

import msgspec

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, Reason
from sgl.runtime.encoder import EncoderCore
from sgl.runtime.loading.encoder_checkpoint import EncoderCheckpoint
from sgl.runtime.memory_plan import BYTES_OF, USABLE_SHARE, size_text
from sgl.runtime.models.encoder_config import EncoderConfig
from sgl.runtime.numerics import Dtype

_STEP_TOKENS = {"cpu": 2048, "cuda": 16384}


class EncoderMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: cores, a device, and memory that can still be taken (0 where nothing says)."""

    cpu_count: int
    cuda_name: str = ""
    available_bytes: int = 0


class ResolvedEncoder(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, as `ResolvedConfig` is of a decoder."""

    dtype: Dtype
    device: Literal["cpu", "cuda"]
    context_len: int
    max_batch_tokens: int
    num_threads: int
    weights_bytes: int
    reasons: tuple[Reason, ...] = ()


def resolve_encoder(
    config: EngineConfig, model: EncoderConfig, num_parameters: int, machine: EncoderMachine
) -> ResolvedEncoder:
    """Decide what the user left open. Pure.

    Raises:
        ConfigError: a wish that an encoder cannot have, or more memory than there is.
    """
    reasons: list[Reason] = []

    def decide(field: str, given: Any, value: Any, why: str) -> Any:
        if given not in (None, "auto"):
            return given
        reasons.append(Reason(field, str(value), why))
        return value

    has_cuda = bool(machine.cuda_name)
    device = decide("device", config.device, "cuda" if has_cuda else "cpu", machine.cuda_name or "no CUDA device")
    _check(config, device, has_cuda)
    half = "float16" if model.checkpoint_dtype == "float16" else "bfloat16"
    why = "16 bits on a GPU" if device == "cuda" else "exact on the CPU"
    dtype = decide("dtype", config.dtype, half if device == "cuda" else "float32", why)
    context_len = decide("context_length", config.context_length, model.max_len, "the model's own")
    if context_len > model.max_position_embeddings:
        raise ConfigError(
            f"context_length is {context_len}, but the model has {model.max_position_embeddings} positions",
            hint=f"set context_length to at most {model.max_position_embeddings}",
            param="context_length",
        )
    step = decide("chunked_prefill_size", config.chunked_prefill_size, _STEP_TOKENS[device], f"a step on {device}")
    weights = num_parameters * BYTES_OF[dtype]
    if device == "cpu" and machine.available_bytes and weights > USABLE_SHARE * machine.available_bytes:
        raise ConfigError(
            f"the weights need {size_text(weights)}; {USABLE_SHARE:.0%} of {size_text(machine.available_bytes)} can be "
            "used",
            hint="use a smaller model",
            param="model_path",
        )
    return ResolvedEncoder(
        dtype=dtype,
        device=device,
        context_len=context_len,
        max_batch_tokens=step,
        num_threads=decide("num_threads", config.num_threads, machine.cpu_count, "one per available core"),
        weights_bytes=weights,
        reasons=tuple(reasons),
    )


def _check(config: EngineConfig, device: str, has_cuda: bool) -> None:
    if device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but no CUDA device was found", hint="set device to cpu", param="device")
    for field, plain in (
        ("quantization", ("auto", "none")),
        ("kernels", ("auto", "torch")),
        ("model_impl", ("auto", "sgl")),
        ("enable_deterministic_inference", (False,)),
        ("json_model_override_args", (None,)),
        ("tokenizer_path", (None,)),
    ):
        if (value := getattr(config, field)) not in plain:
            raise ConfigError(
                f"{field} is {value!r}, which encoders do not have", hint=f"leave out {field}", param=field
            )


def find_machine() -> EncoderMachine:
    """This process's."""
    import torch

    from sgl.runtime.loading.facts import available_bytes, cpu_count

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return EncoderMachine(cpu_count=cpu_count(), cuda_name=name, available_bytes=available_bytes())


def build_encoder(
    config: EngineConfig,
    checkpoint: EncoderCheckpoint,
    *,
    executor: Executor | None = None,
    wake: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[EncoderCore, dict[str, Any]]:
    """Load an encoder and put its core on it, in this process.

    Returns:
        The core, and what `server_info` shows.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: it does not fit the wishes in `config`.
    """
    import torch

    tokenizer = checkpoint.tokenizer()
    resolved = resolve_encoder(config, checkpoint.config, checkpoint.num_parameters(), find_machine())
    progress(f"loading {checkpoint.source.name}: weights {size_text(resolved.weights_bytes)}")
    if resolved.device == "cpu":
        torch.set_num_threads(resolved.num_threads)
    model = checkpoint.build_model(resolved.dtype, resolved.device)
    core = EncoderCore(
        msgspec.structs.replace(checkpoint.config, max_len=resolved.context_len),
        tokenizer,
        model,
        max_batch_tokens=resolved.max_batch_tokens,
        device=resolved.device,
        executor=executor,
        wake=wake,
    )
    info = {
        "kind": "encoder",
        "model": checkpoint.source.name,
        "model_path": str(checkpoint.folder),
        "architecture": checkpoint.config.architecture,
        "vocab_size": tokenizer.vocab_size,
        "encoder": msgspec.to_builtins(checkpoint.config),
        "sampling_defaults": {},
        "formats": {"tool": None, "reasoning": None},
        "logit_processors": [],
        "resolved": msgspec.to_builtins(resolved),
        "overrides": [],
    }
    return core, info
