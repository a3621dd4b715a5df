"""GGUF files: header, metadata and tensors, bounds-checked.

Owns the reading of the container (versions 2 and 3, little-endian) from a memory map. Lists of strings (a vocabulary
has 100,000) are checked when the file is opened and decoded when they are first asked for. The arithmetic of quantized
types is the `gguf` package's; the three plainest have a faster form here, equal to the bit. Called by `checkpoint`.

Every count, length and offset is checked against the file before it is followed, so a truncated or hostile file raises
`CorruptModel` and never reads outside itself or allocates what it does not hold.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
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
_CHUNK_BLOCKS = 16384
"""Blocks dequantized at once: the package's temporary arrays stay small, and few calls are made."""
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
        self.metadata: Mapping[str, Any] = _Metadata(header)
        """Field name -> value; arrays are lists."""
        self._spans = header.spans
        self.tensors: dict[str, TensorInfo] = header.tensors

    def digest(self, prefix: str) -> bytes:
        """SHA-256 of the metadata fields whose names begin with `prefix`: names, types and values as they lie there."""
        digest = hashlib.sha256()
        for name, (begin, end) in self._fields(prefix):
            digest.update(f"{len(name)} {name} {end - begin} ".encode())
            digest.update(memoryview(self._map)[begin:end])
        return digest.digest()

    def _fields(self, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
        return ((name, span) for name, span in self._spans.items() if name.startswith(prefix))

    def read_ahead(self) -> None:
        """Tell the system that all of the file will be read, so that a disk is busy before it is asked."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """Matrices as they lie in the file, `[rows, bytes of a row]`: a view, which nobody may keep or change."""
        info = self.tensors[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        return raw.reshape(math.prod(info.shape[:-1]), -1)

    def load(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values in float32, dequantized; the array is the caller's own. Safe in several threads."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        info = self.tensors[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        if info.type_name == "F32":
            return raw.view(np.float32).reshape(info.shape).copy()
        if info.type_name == "F16":
            return raw.view(np.float16).astype(np.float32).reshape(info.shape)
        kind = GGMLQuantizationType[info.type_name]
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = raw.reshape(-1, block_bytes)
        values = np.empty((len(blocks), per_block), dtype=np.float32)
        dequantize = _DEQUANTIZE.get(info.type_name) or self._package_dequantizer(info, kind)
        for begin in range(0, len(blocks), _CHUNK_BLOCKS):
            chunk = slice(begin, begin + _CHUNK_BLOCKS)
            dequantize(blocks[chunk], values[chunk])
        return values.reshape(info.shape)

    def _package_dequantizer(self, info: TensorInfo, kind: Any) -> _Dequantize:
        from gguf import quants

        def dequantize(blocks: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> None:
            try:
                # The package works on 16 rows at a time: one long row saves it most of its time.
                values[...] = quants.dequantize(blocks.reshape(1, -1), kind).reshape(values.shape)
            except NotImplementedError:
                raise UnsupportedModel(
                    f"tensor {info.name} of {self.path} is of type {info.type_name}, which cannot be dequantized here",
                    hint="convert the file to a type such as Q4_K, Q8_0 or F16",
                ) from None

        return dequantize


_Dequantize = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.float32]], None]
"""Blocks `[N, bytes]` to values `[N, elements]`, written in place."""


def _halves(blocks: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.float32]:
    """The first `count` half-precision numbers of each block."""
    return np.ascontiguousarray(blocks[:, : 2 * count]).view(np.float16).astype(np.float32)


def _nibbles(packed: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> None:
    """Low halves of the bytes first, then the high ones."""
    half = values.shape[1] // 2
    np.bitwise_and(packed, 15, out=values[:, :half], casting="unsafe")
    np.right_shift(packed, 4, out=values[:, half:], casting="unsafe")


def _q4_0(blocks: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> None:
    """`scale * (nibble - 8)`."""
    _nibbles(blocks[:, 2:], values)
    values -= 8
    values *= _halves(blocks, 1)


def _q4_1(blocks: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> None:
    """`scale * nibble + least`."""
    scales = _halves(blocks, 2)
    _nibbles(blocks[:, 4:], values)
    values *= scales[:, :1]
    values += scales[:, 1:]


def _q8_0(blocks: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> None:
    """`scale * byte`."""
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 1), out=values)


_DEQUANTIZE: dict[str, _Dequantize] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


class _Metadata(Mapping[str, Any]):
    """Fields by name; lists of strings are decoded on first use and kept."""

    def __init__(self, header: _Header) -> None:
        self._header = header
        self._values: dict[str, Any] = header.metadata

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if isinstance(value, _Strings):
            value = self._values[name] = self._header.decode(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Strings(msgspec.Struct, frozen=True):
    """`count` strings from byte `begin` on, whose lengths have been checked."""

    begin: int
    count: int


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
        self.spans: dict[str, tuple[int, int]] = {}
        for _ in range(num_fields):
            name = self._string()
            if name in self.metadata:
                raise self._corrupt(f"metadata field {name!r} comes twice")
            begin = self._at
            self.metadata[name] = self._value(self._number("I"), 0)
            self.spans[name] = (begin, self._at)
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

    def _strings(self, count: int) -> _Strings:
        """Walk over strings: the hot loop of opening a file, without a call per string."""
        begin = at = self._at
        data, last, unpack = self._data, self._size - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                raise self._corrupt(f"truncated at byte {at} of {self._size}")
            at += 8 + unpack(data, at)[0]
        if at > self._size:
            raise self._corrupt(f"truncated in the string that ends at byte {at} of {self._size}")
        self._at = at
        return _Strings(begin, count)

    def decode(self, strings: _Strings) -> list[str]:
        """The strings themselves.

        Raises:
            CorruptModel: one is not UTF-8.
        """
        data, at, unpack = self._data, strings.begin, struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(strings.count):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                found.append(data[begin:at].decode())
        except UnicodeDecodeError:
            raise self._corrupt(f"the string before byte {at} is not UTF-8") from None
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
            return self._strings(count) if depth == 0 else self.decode(self._strings(count))
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
