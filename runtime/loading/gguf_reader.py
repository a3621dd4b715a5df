"""GGUF files: header, metadata and tensors, bounds-checked.

Owns the reading of the container (versions 2 and 3, little-endian) from a memory map, fast enough for vocabularies of
100,000 tokens; the arithmetic of quantized types is the `gguf` package's. Called by `checkpoint`. Every count, length
and offset is checked against the file before it is followed, so a truncated or hostile file raises `CorruptModel` and
never reads outside itself or allocates what it does not hold.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sgl.errors import CorruptModel, ModelNotFound, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types of the format -> struct codes."""
_MAX_DIMS = 4
_MAX_NESTING = 4
_DEFAULT_ALIGNMENT = 32
_ROW_BLOCKS = 4096
"""Blocks per row given to the dequantizer: many, so that the loop over rows costs little."""
# Smallest possible entries: an empty name with its lengths. They bound the counts before anything is allocated.
_MIN_FIELD_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class TensorInfo(msgspec.Struct, frozen=True):
    """Where a tensor lies. `shape` is row-major (the reverse of the file's), `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata`, `tensors` by name, and `load` for their values.

    Raises:
        ModelNotFound: there is no such file.
        CorruptModel: not a GGUF file, truncated, or pointing outside itself.
        UnsupportedModel: a version, byte order or tensor type that is not known here.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFound(f"there is no file {self.path}", hint="check the path") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CorruptModel(f"{self.path} cannot be read: {error}", hint="fetch the file again") from error
        header = _Header(self._map, self.path)
        self.metadata: dict[str, Any] = header.metadata
        """Field name -> value; arrays are lists."""
        self.tensors: dict[str, TensorInfo] = header.tensors

    def load(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values in float32, dequantized; the array is the caller's own."""
        from gguf import GGMLQuantizationType, quants

        info = self.tensors[name]
        kind = GGMLQuantizationType[info.type_name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        if info.type_name == "F32":
            return raw.view(np.float32).reshape(info.shape).copy()
        if info.type_name == "F16":
            return raw.view(np.float16).astype(np.float32).reshape(info.shape)
        try:
            # Blocks are independent, and the package works on 16 rows at a time: long rows save it most of its time.
            values = quants.dequantize(raw.reshape(_even_rows(info.num_bytes // _type_bytes(kind)), -1), kind)
        except NotImplementedError:
            raise UnsupportedModel(
                f"tensor {name} of {self.path} is of type {info.type_name}, which cannot be dequantized here",
                hint="convert the file to a type such as Q4_K, Q8_0 or F16",
            ) from None
        return np.asarray(values, dtype=np.float32).reshape(info.shape)


def _type_bytes(kind: Any) -> int:
    from gguf import GGML_QUANT_SIZES

    return int(GGML_QUANT_SIZES[kind][1])


def _even_rows(num_blocks: int) -> int:
    """The number of rows that cuts `num_blocks` evenly with the fewest rows of at most `_ROW_BLOCKS` blocks."""
    rows = -(-num_blocks // _ROW_BLOCKS)
    return next(count for count in range(rows, num_blocks + 1) if num_blocks % count == 0)


class _Header:
    """One pass over the header; `_at` is the position in the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self._at = 0
        if self._take(4) != _MAGIC:
            raise self._corrupt("it does not begin with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is big-endian" if swapped in _VERSIONS else f"is of GGUF version {version}"
            raise UnsupportedModel(f"{path} {what}", hint="convert it to little-endian GGUF version 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self._check_count("metadata fields", num_fields, _MIN_FIELD_BYTES)
        self._check_count("tensors", num_tensors, _MIN_TENSOR_BYTES)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            if name in self.metadata:
                raise self._corrupt(f"metadata field {name!r} comes twice")
            self.metadata[name] = self._value(self._number("I"), 0)
        raw = [self._tensor() for _ in range(num_tensors)]
        self.tensors = self._place(raw)

    def _corrupt(self, why: str) -> CorruptModel:
        return CorruptModel(f"{self._path} is not a valid GGUF file: {why}", hint="fetch the file again")

    def _check_count(self, what: str, count: int, each_bytes: int) -> None:
        if count * each_bytes > self._size - self._at:
            raise self._corrupt(f"{count} {what} cannot lie in the {self._size - self._at} bytes that are left")

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > self._size:
            raise self._corrupt(f"truncated at byte {self._at} of {self._size}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self._take(size))[0]

    def _string(self) -> str:
        at = self._at
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"the string at byte {at} is not UTF-8") from None

    def _strings(self, count: int) -> list[str]:
        """The hot loop of a vocabulary: same checks as `_string`, without a call per field."""
        data, size, at, unpack = self._data, self._size, self._at, struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                if at > size:
                    raise self._corrupt(f"truncated in the string at byte {begin} of {size}")
                found.append(data[begin:at].decode())
        except struct.error:
            raise self._corrupt(f"truncated at byte {at} of {size}") from None
        except UnicodeDecodeError:
            raise self._corrupt(f"the string before byte {at} is not UTF-8") from None
        self._at = at
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self._corrupt(f"unknown value type {kind} at byte {self._at}, or arrays nested too deeply")
        kind, count = self._number("I"), self._number("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            self._check_count("array elements", count, struct.calcsize("<" + code))
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code))))
        self._check_count("array elements", count, 8)
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, row-major shape, type id, offset in the data section)."""
        name = self._string()
        num_dims = self._number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dims)]))
        return name, shape, self._number("I"), self._number("Q")

    def _place(self, raw: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, TensorInfo]:
        """Check where the tensors lie: aligned, inside the file, none over another."""
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two")
        data_begin = -(-self._at // alignment) * alignment
        layout = _type_layout()
        placed: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in raw:
            type_name, block, block_bytes = layout(type_id, name, self._path)
            count = math.prod(shape)
            if count == 0 or shape[-1] % block:
                raise self._corrupt(f"tensor {name!r} of type {type_name} has shape {shape}")
            num_bytes = count // block * block_bytes
            if offset % alignment or data_begin + offset + num_bytes > self._size:
                raise self._corrupt(
                    f"tensor {name!r} ({num_bytes} bytes at {data_begin + offset}) is misaligned or ends beyond the "
                    f"file's {self._size} bytes"
                )
            if name in placed:
                raise self._corrupt(f"tensor {name!r} comes twice")
            placed[name] = TensorInfo(name, shape, type_name, data_begin + offset, num_bytes)
        end, before = data_begin, ""
        for info in sorted(placed.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self._corrupt(f"tensors {before!r} and {info.name!r} overlap")
            end, before = info.offset + info.num_bytes, info.name
        return placed


def _type_layout() -> Callable[[int, str, Path], tuple[str, int, int]]:
    """Type id -> (name, elements per block, bytes per block), from the `gguf` package's tables."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    def layout(type_id: int, name: str, path: Path) -> tuple[str, int, int]:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise UnsupportedModel(
                f"tensor {name!r} of {path} is of type {type_id}, which is not known here",
                hint="update the gguf package, or convert the file",
            ) from None
        return kind.name, *GGML_QUANT_SIZES[kind]

    return layout
