"""The embedded model in transformers, read from the same GGUF file by transformers' own loader, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch

from sgl.runtime.loading.sources import locate


@cache
def transformers_smollm2() -> Any:
    """`LlamaForCausalLM` in evaluation mode; loaded once per test process."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(locate("smollm2-135m").path)
    # What from_pretrained(gguf_file=...) does, step by step: that itself insists on accelerate being installed.
    with _each_thing_once():
        config = LlamaConfig.from_dict(load_gguf_checkpoint(path)["config"])
        with torch.device("meta"):  # only asked for the names of its parameters
            named = LlamaForCausalLM(config)
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=named)["tensors"]
    model = LlamaForCausalLM(config)
    outcome = model.load_state_dict(tensors, strict=False)
    assert outcome.missing_keys == ["lm_head.weight"]
    assert not outcome.unexpected_keys
    model.tie_weights()
    return model.eval()


@contextmanager
def _each_thing_once() -> Iterator[None]:
    """The loader as it is, in a third of its time: it asks gguf for one table of names anew for each module, and slices
    a hundred thousand pieces out of a `memmap`, whose slices run Python, where those of an array do not."""
    table, mapped = cache(gguf.get_tensor_name_map), np.memmap
    with (
        mock.patch.object(gguf, "get_tensor_name_map", table),
        mock.patch.object(np, "memmap", lambda path, mode: np.asarray(mapped(path, mode=mode))),
    ):
        yield
