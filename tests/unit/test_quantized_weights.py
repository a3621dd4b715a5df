"""Layouts of quantized matrices: what is read back equals the numbers that were packed by
`support/quantized_layouts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantized_layouts import LAYOUTS, quantize_folder
from support.tiny_llama import logits_of, open_folder, write_llama

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.runtime.loading.quantized import dequantized, read_scheme

ROWS, COLUMNS = 48, 64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_is_what_was_packed(layout: str) -> None:
    config, make = LAYOUTS[layout]
    stored = make(torch.Generator().manual_seed(3), rows=ROWS, columns=COLUMNS)
    got = dequantized(read_scheme(config), "layer", stored.parts)
    assert got.shape == (ROWS, COLUMNS)
    assert torch.allclose(got, stored.numbers, rtol=1e-6, atol=0)
    assert stored.numbers.std() > 0.01


@pytest.mark.parametrize("layout", ["gptq-8-act-order", "awq", "packed-4-zero", "fp8-block"])
def test_a_model_computes_with_what_was_packed(tmp_path: Path, layout: str) -> None:
    """Beside matrices that the checkpoint left alone, and with its parts in several files."""
    model = write_llama(tmp_path, hidden_size=64, intermediate_size=96)
    numbers = quantize_folder(
        tmp_path,
        layout,
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.up_proj",
    )
    model.load_state_dict(numbers, strict=False)
    tokens = list(range(60))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert float((logits_of(open_folder(tmp_path), tokens) - expected).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"quant_method": "fp8", "weight_block_size": "all"}, "in blocks of 'all'"),
    ],
)
def test_layouts_that_are_not_read(config: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what) as caught:
        read_scheme(config)
    assert "gptq, awq, compressed-tensors, fp8" in caught.value.hint


@pytest.mark.parametrize(
    ("layout", "part", "value"),
    [
        ("gptq-4", "qzeros", None),
        ("gptq-4", "scales", torch.ones(3, ROWS)),
        ("gptq-4", "g_idx", torch.full((COLUMNS,), 9)),
        ("awq", "qweight", torch.zeros(COLUMNS, 2, dtype=torch.int32)),
        ("packed-4", "weight_shape", torch.tensor([2**40, 2**40])),
        ("packed-4", "weight_shape", torch.tensor([ROWS])),
        ("packed-4", "weight_scale", torch.ones(ROWS, 5)),
        ("fp8-block", "weight_scale_inv", torch.ones(7, 2)),
        ("fp8-tensor", "weight_scale", torch.ones(0)),
    ],
)
def test_parts_that_do_not_fit_are_a_corrupt_model(layout: str, part: str, value: torch.Tensor | None) -> None:
    config, make = LAYOUTS[layout]
    parts = make(torch.Generator().manual_seed(3), rows=ROWS, columns=COLUMNS).parts
    changed = {name: given for name, given in parts.items() if name != part}
    if value is not None:
        changed[part] = value
    with pytest.raises(CorruptModel, match="layer"):
        dequantized(read_scheme(config), "layer", changed)
