"""Matrices that a safetensors checkpoint stores as small integers or 8-bit floats with scales, as numbers again.

Owns the layouts: GPTQ, AWQ (`gemm`), compressed-tensors (packed and plain) and fp8 with scales per tensor, row or
block. A layout is one of a layer: matrices that a checkpoint left alone are read as they are, beside it. Called by
`tensors`, which hands over the parts of one matrix at a time. Numbers are made some rows at a time, so that beside the
result in float32 little is held. Shapes are checked against each other before anything is allocated by them.

Shapes: O rows (out), I columns (in), G groups of columns, W numbers in an integer of 32 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import CorruptModel, UnsupportedModel

if TYPE_CHECKING:
    import torch

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_WORD_BITS = 32
_ROWS_AT_ONCE = 1024
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring rows each nibble of a word holds, the lowest nibble first."""
_SCALES = ("weight_scale", "weight_scale_inv")
_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx", *_SCALES),
)
"""Last parts of names that belong to a quantized matrix."""
_OF_ACTIVATIONS = ("input_scale", "output_scale", "input_zero_point", "input_global_scale", "k_scale", "v_scale")
"""Calibration of activations and of the cache, which are not rounded here."""


class WeightScheme(msgspec.Struct, frozen=True, kw_only=True):
    """What `quantization_config` says of the matrices; the rest is seen in their shapes.

    Attributes:
        method: one of `METHODS`.
        bits: of GPTQ and AWQ.
        zero_offset: GPTQ stores zero points less this.
        block: rows and columns that share a scale; 0 for all of them, or where the shapes say it.
    """

    method: str
    bits: int = 8
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)


def read_scheme(given: Mapping[str, Any]) -> WeightScheme:
    """The layout that a `quantization_config` names.

    Raises:
        UnsupportedModel: one that is not read here.

    Example:
        >>> read_scheme({"quant_method": "gptq", "bits": 4})
        WeightScheme(method='gptq', bits=4, zero_offset=1, block=(0, 0))
    """
    method = given.get("quant_method")
    if method not in METHODS:
        raise _unsupported(f"quantized by {method!r}")
    bits, block = given.get("bits", given.get("w_bit", 4)), _block(given)
    if method == "gptq":
        if bits not in (2, 4, 8):
            raise _unsupported(f"GPTQ of {bits!r} bits")
        offset = int(given.get("checkpoint_format") != "gptq_v2")
        return WeightScheme(method=method, bits=bits, zero_offset=offset, block=block)
    if method == "awq":
        if bits != 4 or str(given.get("version", "gemm")).lower() != "gemm":
            raise _unsupported(f"AWQ of {bits!r} bits, version {given.get('version')!r}")
        return WeightScheme(method=method, bits=4, block=block)
    if method == "compressed-tensors" and given.get("format") not in (None, *_COMPRESSED_FORMATS):
        raise _unsupported(f"compressed-tensors of format {given.get('format')!r}")
    return WeightScheme(method=method, block=block)


def _block(given: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, where one number holds for all matrices."""
    groups = given.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else [given]
    found = {_block_of(each) for each in weights if isinstance(each, dict)}
    return found.pop() if len(found) == 1 else (0, 0)


def _block_of(weights: Mapping[str, Any]) -> tuple[int, int]:
    sides = weights.get("weight_block_size") or weights.get("block_structure")
    if sides is None:
        sides = (0, weights.get("group_size", weights.get("q_group_size")) or 0)
    if not (isinstance(sides, list | tuple) and len(sides) == 2 and all(isinstance(side, int) for side in sides)):
        raise _unsupported(f"quantized in blocks of {sides!r}")
    return max(sides[0], 0), max(sides[1], 0)  # -1 is all


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights are {what}",
        hint=f"read are {', '.join(METHODS)} (GPTQ of 2, 4 or 8 bits, AWQ gemm, compressed-tensors "
        f"{', '.join(_COMPRESSED_FORMATS)}); use such weights, unquantized ones, or a GGUF file",
    )


def parts_beside(name: str, names: Collection[str]) -> dict[str, str]:
    """The parts of the quantized matrix that a tensor belongs to, by the last part of their names; empty where it is a
    tensor of its own. `names` are all that the checkpoint has."""
    stem, _, leaf = name.rpartition(".")
    found = {part: f"{stem}.{part}" for part in (*_PARTS, "weight") if f"{stem}.{part}" in names}
    return found if leaf in found and set(found) - {"weight"} else {}


def is_calibration(name: str) -> bool:
    """Whether a tensor is of no use where activations are not rounded."""
    return name.rpartition(".")[2] in _OF_ACTIVATIONS


def dequantized(scheme: WeightScheme, stem: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The matrix `[O, I]` in float32.

    Args:
        stem: of the names, for messages.
        parts: by the last part of their names.

    Raises:
        CorruptModel: a part is missing, or shapes do not fit each other.
    """
    try:
        if "qweight" in parts:
            return _awq(scheme, parts) if scheme.method == "awq" else _gptq(scheme, parts)
        if "weight_packed" in parts:
            return _packed(scheme, parts)
        return _scaled(scheme, parts)
    except KeyError as error:
        raise CorruptModel(f"the matrix {stem} lacks its part {error}", hint="fetch the model again") from None
    except (RuntimeError, IndexError, ValueError) as error:  # torch, of shapes that do not fit
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        raise CorruptModel(
            f"the parts of matrix {stem} do not fit each other: {shapes} ({str(error).splitlines()[0]})",
            hint="fetch the model again",
        ) from None


def _gptq(scheme: WeightScheme, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`scale * (q - zero)`; words hold neighbouring columns, `qweight [I / W, O]`, zero points `[G, O / W]`."""
    import torch

    qweight, scales_GO = parts["qweight"], parts["scales"].float()
    per_word = _WORD_BITS // scheme.bits
    num_columns, num_rows = qweight.shape[0] * per_word, qweight.shape[1]
    group_I = _groups(parts.get("g_idx"), num_columns, len(scales_GO), scheme)
    zeros_GO = _unpacked(parts["qzeros"], scheme.bits).flatten(1)[:, :num_rows] + scheme.zero_offset
    _fits(scales_GO.shape == zeros_GO.shape == (len(scales_GO), num_rows))
    out_OI = torch.empty(num_rows, num_columns)
    for rows in _slices(num_rows, per_word):
        codes_IR = _unpacked(qweight[:, rows], scheme.bits).transpose(1, 2).flatten(0, 1)
        numbers_IR = (codes_IR - zeros_GO[:, rows][group_I]) * scales_GO[:, rows][group_I]
        out_OI[rows] = numbers_IR.T
    return out_OI


def _awq(scheme: WeightScheme, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`scale * (q - zero)`; words hold eight rows in AWQ's order, `qweight [I, O / 8]`, zero points `[G, O / 8]`."""
    import torch

    qweight, scales_GO = parts["qweight"], parts["scales"].float()
    num_columns, num_rows = qweight.shape[0], qweight.shape[1] * len(_AWQ_ORDER)
    group_I = _groups(None, num_columns, len(scales_GO), scheme)
    zeros_GO = _awq_rows(parts["qzeros"])
    _fits(scales_GO.shape == zeros_GO.shape == (len(scales_GO), num_rows))
    out_OI = torch.empty(num_rows, num_columns)
    for rows in _slices(num_rows, len(_AWQ_ORDER)):
        words = slice(rows.start // len(_AWQ_ORDER), rows.stop // len(_AWQ_ORDER))
        codes_IR = _awq_rows(qweight[:, words])
        out_OI[rows] = ((codes_IR - zeros_GO[:, rows][group_I]) * scales_GO[:, rows][group_I]).T
    return out_OI


def _awq_rows(words: torch.Tensor) -> torch.Tensor:
    """`[A, O / 8]` words as `[A, O]` numbers in the order of rows."""
    nibbles = _unpacked(words, 4)
    ordered = nibbles.new_empty(nibbles.shape)
    ordered[..., list(_AWQ_ORDER)] = nibbles
    return ordered.flatten(1)


def _packed(scheme: WeightScheme, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """compressed-tensors' `pack-quantized`: signed numbers stored from 0 on, neighbouring columns in a word.

    Zero points, where there are any, are packed the same way along rows, `[O / W, G]`.
    """
    import torch

    words_OW = parts["weight_packed"]
    num_rows, num_columns = (int(size) for size in parts["weight_shape"].tolist())
    per_word = -(-num_columns // words_OW.shape[1])
    _fits(len(words_OW) == num_rows and per_word in (4, 8, 16) and -(-num_columns // per_word) == words_OW.shape[1])
    bits = _WORD_BITS // per_word
    offset = 1 << (bits - 1)
    scales_OG = _per_row(parts["weight_scale"], num_rows)
    group_I = _groups(parts.get("weight_g_idx"), num_columns, scales_OG.shape[1], scheme)
    zeros_OG = torch.zeros_like(scales_OG)
    if "weight_zero_point" in parts:
        zeros_OG = _unpacked(parts["weight_zero_point"], bits).transpose(1, 2).flatten(0, 1)[:num_rows] - offset
    out_OI = torch.empty(num_rows, num_columns)
    for rows in _slices(num_rows):
        codes_RI = _unpacked(words_OW[rows], bits).flatten(1)[:, :num_columns] - offset
        out_OI[rows] = (codes_RI - zeros_OG[rows][:, group_I]) * scales_OG[rows][:, group_I]
    return out_OI


def _scaled(scheme: WeightScheme, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Plain 8-bit numbers: one scale, one for each row, for each group of a row's columns, or for each block."""
    import torch

    weight_OI = parts["weight"]
    num_rows, num_columns = weight_OI.shape
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    zero = parts.get("weight_zero_point")
    scale_BG = scale.float().reshape(-1, 1) if scale.dim() < 2 else scale.float()
    zero_BG = torch.zeros_like(scale_BG) if zero is None else zero.float().reshape(scale_BG.shape)
    row_O = _blocks(num_rows, scale_BG.shape[0], scheme.block[0])
    column_I = _blocks(num_columns, scale_BG.shape[1], scheme.block[1])
    out_OI = torch.empty(num_rows, num_columns)
    for rows in _slices(num_rows):
        scales_RI, zeros_RI = (each[row_O[rows]][:, column_I] for each in (scale_BG, zero_BG))
        out_OI[rows] = (weight_OI[rows].float() - zeros_RI) * scales_RI
    return out_OI


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`[A, B]` words of 32 bits as `[A, B, W]` numbers of `bits`, the lowest first."""
    import torch

    _fits(words.dtype == torch.int32)
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _groups(given: torch.Tensor | None, num_columns: int, num_groups: int, scheme: WeightScheme) -> torch.Tensor:
    """`[I]`, the group of each column: as given, else as many neighbours in each."""
    if given is None or not given.numel() or bool((given < 0).any()):  # -1 stands for "not given"
        return _blocks(num_columns, num_groups, scheme.block[1])
    _fits(len(given) == num_columns and int(given.max()) < num_groups)
    return given.long()


def _blocks(size: int, count: int, side: int) -> torch.Tensor:
    """`[size]`, the block of each row or column; the last of `count` blocks may be cut off."""
    import torch

    _fits(0 < count <= size)
    if side == 0 or -(-size // side) != count:  # not said, or not of this matrix
        _fits(size % count == 0)
        side = size // count
    return torch.arange(size) // side


def _per_row(scale: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`[O, G]` of scales for a tensor, for rows or for groups."""
    scale = scale.float().reshape(-1, 1) if scale.dim() < 2 else scale.float()
    return scale.expand(num_rows, -1)


def _slices(num_rows: int, multiple: int = 1) -> list[slice]:
    step = _ROWS_AT_ONCE // multiple * multiple
    return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


def _fits(condition: bool) -> None:
    if not condition:
        raise ValueError("sizes or types contradict each other")
