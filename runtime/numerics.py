"""In what form a model's weights are kept, and whose kernels compute with them: one decision, from facts.

Owns the choice of dtype, quantization and kernels, with its reasons. Called by `resolution.resolve`. Pure; no torch.

Three paths on a CPU. `torch` in float32 is the reference, and bit-exact in deterministic mode, as Triton's kernels are
on a GPU. The native kernels (`sgl.kernels.native`) compute with 16-bit weights, or with blocks of 8 and 4 bits;
activations between the layers are float32 there, `dtype` is that of the KV cache and of weights that are not quantized.
On a GPU the kernels are Triton's (`sgl.kernels.triton`) where it is installed and takes the model's heads, else
torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from sgl.errors import ConfigError

if TYPE_CHECKING:
    from sgl.runtime.config import EngineConfig, Facts

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "gguf", "int8", "int4"]
Kernels = Literal["torch", "native", "triton"]


class Numerics(NamedTuple):
    """The decision. `reasons` are (field, value, why) of what the user left open; `prepacked` says that torch is to
    compute with weights in oneDNN's order, which is faster and sums in another order than plain torch."""

    dtype: Dtype
    quantization: Quantization
    kernels: Kernels
    reasons: tuple[tuple[str, str, str], ...]
    prepacked: bool = False


def decide_numerics(config: EngineConfig, facts: Facts, device: Literal["cpu", "cuda"]) -> Numerics:
    """Dtype, quantization and kernels of an engine on `device`.

    Raises:
        ConfigError: a quantization or deterministic mode that cannot be had, with what prevents it.
    """
    obstacle = _obstacle(config, facts, device)
    reasons: list[tuple[str, str, str]] = []
    quantization: Quantization = "none"
    if config.quantization == "auto":
        quantization, why = _auto_quantization(config, facts, obstacle)
        reasons.append(("quantization", quantization, why))
    elif config.quantization != "none":
        quantization = config.quantization
        _check(quantization, facts, obstacle)

    dtype: Any = config.dtype
    if dtype == "auto":
        dtype, why = _auto_dtype(facts, device, quantization)
        reasons.append(("dtype", dtype, why))
    kernels, why = _kernels(config, facts, device, dtype, quantization, obstacle)
    if config.kernels == "auto":
        reasons.append(("kernels", kernels, why))
    if config.enable_deterministic_inference:
        _check_order_of_sums(device, dtype, kernels, why)
    prepacked = device == "cpu" and kernels == "torch" and _packing(config, facts, dtype) == _PACKED
    return Numerics(dtype, quantization, kernels, tuple(reasons), prepacked)


def _obstacle(config: EngineConfig, facts: Facts, device: str) -> str:
    """Why the native kernels cannot be used; empty when they can."""
    if device != "cpu":
        return f"the native kernels compute on the CPU, not on {device}"
    if facts.layers_obstacle:
        return facts.layers_obstacle
    if config.enable_deterministic_inference:
        return "deterministic mode computes with torch in float32"
    if config.kernels == "torch":
        return "kernels is torch"
    if config.dtype == "float16":
        return "the native kernels keep keys and values in float32 or bfloat16, not in float16"
    return facts.native_obstacle


def _auto_quantization(config: EngineConfig, facts: Facts, obstacle: str) -> tuple[Quantization, str]:
    """Blocks of a GGUF file are kept unless something speaks against it: a dtype is also a wish for weights in it."""
    if facts.weights_kind != "gguf":
        return "none", "only blocks of a GGUF file are kept; other weights are read as numbers"
    if obstacle:
        return "none", f"the file's blocks are expanded: {obstacle}"
    if config.dtype != "auto":
        return "none", f"the file's blocks are expanded to {config.dtype}, as dtype says"
    return "gguf", "the file's blocks are kept as they are: a quarter of the memory to read for each token"


def _check(quantization: Quantization, facts: Facts, obstacle: str) -> None:
    if obstacle:
        raise ConfigError(
            f"quantization is {quantization}, but {obstacle}",
            hint="set quantization to none",
            param="quantization",
        )
    if quantization == "gguf" and facts.weights_kind != "gguf":
        raise ConfigError(
            f"quantization is gguf, but the weights are {facts.weights_kind}",
            hint="set quantization to int8, or name a GGUF file",
            param="quantization",
        )


def _check_order_of_sums(device: str, dtype: Dtype, kernels: Kernels, why: str) -> None:
    """Deterministic mode has one path per device."""
    if device == "cuda" and kernels != "triton":
        raise ConfigError(
            f"enable_deterministic_inference computes with Triton's kernels on cuda, but {why}",
            hint="set device to cpu and dtype to float32, or leave out enable_deterministic_inference",
            param="enable_deterministic_inference",
        )
    if device == "cpu" and dtype != "float32":
        raise ConfigError(
            f"enable_deterministic_inference works with float32 on the CPU, not with {dtype}",
            hint="set dtype to float32",
            param="enable_deterministic_inference",
        )


def _kernels(
    config: EngineConfig, facts: Facts, device: str, dtype: Dtype, quantization: Quantization, obstacle: str
) -> tuple[Kernels, str]:
    if device == "cuda":
        return _gpu_kernels(config, facts)
    if config.kernels == "triton":
        raise ConfigError(f"kernels is triton, but the device is {device}", hint="set kernels to auto", param="kernels")
    if config.kernels == "native" and obstacle:
        raise ConfigError(f"kernels is native, but {obstacle}", hint="set kernels to torch", param="kernels")
    if quantization != "none":
        return "native", f"weights are kept as {quantization}; {facts.native}"
    if config.kernels == "native" or (dtype == "bfloat16" and not obstacle):
        return "native", f"weights are read once for all rows of a step; {facts.native}"
    return "torch", (obstacle or f"torch computes with {dtype} weights") + _packing(config, facts, dtype)


_PACKED = "; oneDNN keeps the weights in its own order"


def _packing(config: EngineConfig, facts: Facts, dtype: Dtype) -> str:
    """In what order torch finds its weights on a CPU. Who asks for torch gets it as it is."""
    if config.enable_deterministic_inference or config.kernels == "torch":
        return ""
    if facts.layers_obstacle:
        return ""
    if obstacle := facts.prepacked_obstacles.get(dtype, ""):
        return f"; weights are not prepacked: {obstacle}"
    return _PACKED


def _gpu_kernels(config: EngineConfig, facts: Facts) -> tuple[Kernels, str]:
    obstacle = "" if facts.triton else "Triton is not installed"
    if facts.head_dim < 16 or facts.head_dim & (facts.head_dim - 1):
        obstacle = f"the Triton kernels need heads of a power of two from 16, not of {facts.head_dim}"
    if facts.attention_window:
        obstacle = f"the Triton kernels look at the whole context, and layers of this model at {facts.attention_window}"
    if facts.attention_softcap:
        obstacle = "the Triton kernels have no soft caps"
    if facts.layers_obstacle:
        obstacle = facts.layers_obstacle
    if config.kernels == "native":
        obstacle = "the native kernels compute on the CPU"
    if config.kernels in ("triton", "native") and obstacle:
        raise ConfigError(f"kernels is {config.kernels}, but {obstacle}", hint="set kernels to auto", param="kernels")
    if obstacle or config.kernels == "torch":
        return "torch", obstacle or "kernels is torch"
    return "triton", f"Triton {facts.triton}: layers are fused, decoding steps are recorded as graphs"


def _auto_dtype(facts: Facts, device: str, quantization: Quantization) -> tuple[Dtype, str]:
    if device == "cpu":
        if quantization != "none":
            return "bfloat16", "of keys and values, beside quantized weights"
        return "float32", "exact on the CPU, and fastest with plain torch at batch 1"
    known: Any = facts.checkpoint_dtype if facts.checkpoint_dtype in get_args(Dtype) else "bfloat16"
    return "bfloat16" if known == "float32" else known, "the checkpoint's, at most 16 bits"
