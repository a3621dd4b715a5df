"""How quick a model's work could be on a GPU: bytes and operations that follow from its shape, over measured rates.

Owns the shapes that `sgl bench gpu` measures, the mixed workload, and the floors. Bytes are counted once: all weights
that a step reads, and keys and values of every row. Operations are those of products and of causal attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from sgl.bench.ceilings import Ceilings

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
"""`config.json` fields of the models whose shapes are measured."""


def layer_weights(shape: Mapping[str, Any]) -> int:
    """Numbers in the matrices of all layers."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = hidden * shape["head_dim"] * (2 * heads + 2 * shape["num_key_value_heads"])
    return int(shape["num_hidden_layers"] * (attention + 3 * hidden * shape["intermediate_size"]))


def prefill_flops(shape: Mapping[str, Any], length: int) -> float:
    """Operations of one prompt from its beginning, logits of the last token included; 0 for an unknown shape.

    Example:
        >>> round(prefill_flops(SHAPES["llama-3-8b"], 8192) / 1e12)
        132
    """
    if not shape:
        return 0.0
    width = shape["num_attention_heads"] * shape["head_dim"]
    attention = 2 * length * length * width * shape["num_hidden_layers"]  # two products, half of each is masked
    return float(2 * layer_weights(shape) * length + attention + 2 * shape["vocab_size"] * shape["hidden_size"])


def mixed_lengths(count: int, longest_prompt: int, longest_output: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 100 tokens to the longest, and output lengths alike, from seed 0: the workload of nano-vllm's bench.

    Example:
        >>> prompts, outputs = mixed_lengths(256, 1024, 1024)
        >>> sum(map(len, prompts)), sum(outputs)
        (142827, 133966)
    """
    random = Random(0)
    least = min(100, longest_prompt, longest_output)
    prompts = [[random.randint(0, 10_000) for _ in range(random.randint(least, longest_prompt))] for _ in range(count)]
    return prompts, [random.randint(least, longest_output) for _ in range(count)]


def mixed_floor_s(
    shape: Mapping[str, Any],
    prompts: Sequence[int],
    outputs: Sequence[int],
    weights_bytes: int,
    token_bytes: int,
    ceilings: Ceilings,
) -> float:
    """Seconds of all prompts at the product's rate, and of the steps that decode everyone together at memory's."""
    flops = sum(prefill_flops(shape, length) for length in prompts)
    moved = 0
    for step in range(1, max(outputs)):  # the first token comes with the prompt
        alive = [length for length, output in zip(prompts, outputs, strict=True) if output > step]
        moved += weights_bytes + token_bytes * (sum(alive) + step * len(alive))
    return flops / ceilings.flops_per_s + moved / ceilings.bytes_per_s
