"""Random matrices in every layout of quantized weights, packed word by word as the layouts are described, with the
numbers that they mean: `scale * (code - zero)` of the codes before they were packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file


class Stored(NamedTuple):
    """A matrix in a layout: its parts, and the numbers that they mean."""

    parts: dict[str, torch.Tensor]
    numbers: torch.Tensor


def random_codes(generator: torch.Generator, least: int, most: int, *shape: int) -> torch.Tensor:
    return torch.randint(least, most + 1, shape, generator=generator)


def scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).half().float()


def word(codes: list[int], bits: int) -> int:
    """A signed word of 32 bits, the first code in its lowest bits."""
    value = sum(code << (bits * place) for place, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def words_along_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`[R, C]` codes as `[R / W, C]` words: neighbours of a column together."""
    per_word = 32 // bits
    table = codes.tolist()
    return torch.tensor(
        [
            [word([table[row + place][column] for place in range(per_word)], bits) for column in range(codes.shape[1])]
            for row in range(0, codes.shape[0], per_word)
        ],
        dtype=torch.int32,
    )


def words_along_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return words_along_rows(codes.T, bits).T.contiguous()


def gptq(
    generator: torch.Generator, bits: int, *, act_order: bool, version: int = 1, rows: int, columns: int
) -> Stored:
    groups = columns // 16
    codes = random_codes(generator, 0, 2**bits - 1, columns, rows)
    zeros = random_codes(generator, 2 - version, 2**bits - 1, groups, rows)
    scale = scales(generator, groups, rows)
    group = torch.arange(columns) // 16
    if act_order:
        group = group[torch.randperm(columns, generator=generator)]
    parts = {
        "qweight": words_along_rows(codes, bits),
        "qzeros": words_along_columns(zeros - (2 - version), bits),
        "scales": scale.half(),
        "g_idx": group.int(),
    }
    numbers = torch.stack([scale[group[c]] * (codes[c] - zeros[group[c]]) for c in range(columns)], dim=1)
    return Stored(parts, numbers)


def awq(generator: torch.Generator, *, rows: int, columns: int) -> Stored:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = torch.tensor([8 * block + place for block in range(rows // 8) for place in order])
    codes = random_codes(generator, 0, 15, columns, rows)
    zeros = random_codes(generator, 0, 15, columns // 32, rows)
    scale = scales(generator, columns // 32, rows)
    parts = {
        "qweight": words_along_columns(codes[:, shuffled], 4),
        "qzeros": words_along_columns(zeros[:, shuffled], 4),
        "scales": scale.half(),
    }
    group = torch.arange(columns) // 32
    return Stored(parts, (scale[group] * (codes - zeros[group])).T.contiguous())


def packed(generator: torch.Generator, bits: int, *, group_size: int, zero: bool, rows: int, columns: int) -> Stored:
    half = 2 ** (bits - 1)
    groups = columns // group_size
    codes = random_codes(generator, -half, half - 1, rows, columns)
    zeros = random_codes(generator, -half, half - 1, rows, groups) if zero else torch.zeros(rows, groups)
    scale = scales(generator, rows, groups)
    parts = {
        "weight_packed": words_along_columns(codes + half, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zero:
        parts["weight_zero_point"] = words_along_rows(zeros + half, bits)
    group = torch.arange(columns) // group_size
    return Stored(parts, scale[:, group] * (codes - zeros[:, group]))


def fp8(generator: torch.Generator, kind: str, *, rows: int, columns: int) -> Stored:
    weight = (torch.randn(rows, columns, generator=generator) * 20).to(torch.float8_e4m3fn)
    if kind == "block":  # of 32 x 32; the last row of blocks is cut off
        scale = scales(generator, -(-rows // 32), columns // 32)
        spread = scale.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)
        return Stored({"weight": weight, "weight_scale_inv": scale}, weight.float() * spread)
    scale = scales(generator, 1) if kind == "tensor" else scales(generator, rows, 1)
    return Stored({"weight": weight, "weight_scale": scale, "input_scale": torch.ones(1)}, weight.float() * scale)


def int8(generator: torch.Generator, *, rows: int, columns: int) -> Stored:
    codes = random_codes(generator, -128, 127, rows, columns).to(torch.int8)
    scale = scales(generator, rows, 1)
    return Stored({"weight": codes, "weight_scale": scale}, codes.float() * scale)


def groups(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


Make = Callable[..., Stored]
LAYOUTS: dict[str, tuple[dict[str, Any], Make]] = {
    "gptq-4": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16},
        lambda g, **size: gptq(g, 4, act_order=False, **size),
    ),
    "gptq-8-act-order": (
        {"quant_method": "gptq", "bits": 8, "group_size": 16},
        lambda g, **size: gptq(g, 8, act_order=True, **size),
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
        lambda g, **size: gptq(g, 4, act_order=True, version=2, **size),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "packed-4": (
        groups(num_bits=4, group_size=16, strategy="group"),
        lambda g, **size: packed(g, 4, group_size=16, zero=False, **size),
    ),
    "packed-4-zero": (
        groups(num_bits=4, group_size=32, strategy="group", symmetric=False),
        lambda g, **size: packed(g, 4, group_size=32, zero=True, **size),
    ),
    "packed-8-channel": (
        groups(num_bits=8, strategy="channel"),
        lambda g, **size: packed(g, 8, group_size=size["columns"], zero=False, **size),
    ),
    "int8-channel": (groups(num_bits=8, strategy="channel", type="int"), int8),
    "fp8-channel": (groups(num_bits=8, strategy="channel", type="float"), lambda g, **size: fp8(g, "channel", **size)),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda g, **size: fp8(g, "tensor", **size)),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        lambda g, **size: fp8(g, "block", **size),
    ),
}


def quantize_folder(folder: Path, layout: str, *names: str) -> dict[str, torch.Tensor]:
    """Put random matrices in the layout in place of some of a folder's, and return them as numbers."""
    config, make = LAYOUTS[layout]
    tensors = load_file(folder / "model.safetensors")
    numbers = {}
    for seed, name in enumerate(names):
        rows, columns = tensors.pop(f"{name}.weight").shape
        stored = make(torch.Generator().manual_seed(seed), rows=rows, columns=columns)
        numbers[f"{name}.weight"] = stored.numbers
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in stored.parts.items()}
    shards = {name: f"{name.split('.')[-1]}.safetensors" for name in tensors}  # parts of one matrix in several files
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return numbers
