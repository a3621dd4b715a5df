"""The embedded model in transformers, read from the same GGUF file by transformers' own loader, in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from sgl.runtime.loading.sources import locate


@cache
def transformers_smollm2() -> Any:
    """`LlamaForCausalLM` in evaluation mode; loaded once per test process."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(locate("smollm2-135m").path)
    # What from_pretrained(gguf_file=...) does, step by step: that itself insists on accelerate being installed.
    config = LlamaConfig.from_dict(load_gguf_checkpoint(path)["config"])
    with torch.device("meta"):  # only asked for the names of its parameters
        named = LlamaForCausalLM(config)
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=named)["tensors"]
    outcome = model.load_state_dict(tensors, strict=False)
    assert outcome.missing_keys == ["lm_head.weight"]
    assert not outcome.unexpected_keys
    model.tie_weights()
    return model.eval()
