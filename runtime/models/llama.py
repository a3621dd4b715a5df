"""Llama, and the models whose layers are Llama's.

What they differ in is said by their configurations, which `architectures.py` reads:

* Mistral: a window (in its first version).
* Qwen2: biases of queries, keys and values. Qwen3: a norm of each head's query and key.
* SmolLM3: layers without rotation.
* ERNIE 4.5: rotated features in pairs of neighbours, which the loader puts apart.
* Phi-3: checkpoints that hold queries, keys and values in one matrix, which the loader cuts apart; LongRoPE.
"""

from __future__ import annotations

from sgl.runtime.models.decoder import DecoderForCausalLM
from sgl.runtime.models.registry import register_model


@register_model(
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Phi3ForCausalLM",
)
class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder."""
