"""The GGUF reader against the `gguf` package's, and against damage."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from sgl.errors import CorruptModel, ModelNotFound, UnsupportedModel
from sgl.runtime.loading import gguf_reader
from sgl.runtime.loading.gguf_reader import GGUFFile

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
RAW_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0")
"""Types that the package reads and does not write: any bytes are a tensor."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small file with every kind of value and several tensor types."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("an.uint", 7)
    writer.add_int64("an.int", -(2**40))
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Grüße")
    writer.add_array("some.strings", ["a", "", "<|im_end|>"])
    writer.add_array("some.ints", [1, 2, 3])
    random = np.random.default_rng(1)
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        values = random.standard_normal((6, 64), dtype=np.float32)
        writer.add_tensor(f"t.{name}", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_agree_with_the_package(path: Path) -> None:
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert ours.metadata["some.strings"] == ["a", "", "<|im_end|>"]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        values = ours.load(tensor.name)
        assert values.dtype == np.float32
        assert values.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(values, gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape))


@pytest.mark.parametrize("name", [*RAW_TYPES, "Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_any_bytes_agree_with_the_package(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where scales are infinite or no numbers, and where a tensor is longer than a chunk."""
    monkeypatch.setattr(gguf_reader, "_CHUNK_BLOCKS", 5)
    kind = gguf.GGMLQuantizationType[name]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 256, (8, 2 * block_bytes), dtype=np.uint8)
    path = tmp_path / "raw.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        values = GGUFFile(path).load("t")
        expected = gguf.quants.dequantize(raw, kind)
    assert values.shape == expected.shape == (8, 2 * per_block)
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.isfinite(values).mean() > 0.8


def test_lists_of_strings_are_decoded_on_first_use(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"<|im_end|>", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"))
    file = GGUFFile(path)
    assert file.metadata["a.string"] == "Gr\u00fc\u00dfe"
    with pytest.raises(CorruptModel, match="not UTF-8"):
        file.metadata["some.strings"]


def test_values_outlive_the_file(path: Path) -> None:
    values = GGUFFile(path).load("vector")
    values += 1
    assert values.tolist() == [1, 2, 3, 4, 5]


def test_every_truncation_is_found(path: Path) -> None:
    whole = path.read_bytes()
    end = max(info.offset + info.num_bytes for info in GGUFFile(path).tensors.values())  # padding follows
    for length in range(0, end, 13):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptModel, match=r"small\.gguf"):
            GGUFFile(path)


def test_no_single_changed_byte_escapes_as_another_error(path: Path) -> None:
    """Damage in the header is refused with a typed error, or reads as another valid header."""
    whole = bytearray(path.read_bytes())
    refused = 0
    for index in range(0, 900):
        damaged = bytearray(whole)
        damaged[index] ^= 0xFF
        path.write_bytes(damaged)
        try:
            GGUFFile(path)
        except (CorruptModel, UnsupportedModel):
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("head", "error", "match"),
    [
        (b"ABCD" + bytes(64), CorruptModel, "does not begin"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0) + bytes(64), CorruptModel, "cannot lie in"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63) + bytes(64), CorruptModel, "cannot lie in"),
        (struct.pack("<4sIQQ", b"GGUF", 99, 0, 0), UnsupportedModel, "version 99"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), UnsupportedModel, "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**61), CorruptModel, "lie"),
    ],
)
def test_absurd_headers(tmp_path: Path, head: bytes, error: type[Exception], match: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(head)
    with pytest.raises(error, match=match):
        GGUFFile(path)


def test_overlapping_tensors(tmp_path: Path) -> None:
    path = tmp_path / "overlap.gguf"
    entries = b"".join(struct.pack("<Q1sIQIQ", 1, name, 1, 8, 0, 0) for name in (b"a", b"b"))
    head = struct.pack("<4sIQQ", b"GGUF", 3, 2, 0) + entries
    path.write_bytes(head + bytes(128))
    with pytest.raises(CorruptModel, match="overlap"):
        GGUFFile(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no file"):
        GGUFFile(tmp_path / "none.gguf")
