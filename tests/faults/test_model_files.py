"""Hostile and damaged model files: each is refused with a typed error, runs no code, and takes no memory.

Everything here is read under a limit of address space, so that a count or a length that is believed would end in
`MemoryError` and fail its test.
"""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.tiny_llama import open_folder, write_llama

from sgl.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from sgl.runtime.loading import folder as folder_module
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.text.tokenizer import Tokenizer

ROOM_BYTES = 256 * 2**20
"""Address space that a test may take beyond what the process has."""
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def little_room() -> Iterator[None]:
    import torch  # noqa: F401 - before the limit: its libraries are large

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    (folder / "tokenizer.json").write_text(Tokenizer.toy().to_json())
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A good model folder, to be damaged."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def load(folder: Path) -> None:
    """All that an engine reads of a folder."""
    checkpoint = open_folder(folder)
    checkpoint.tokenizer()
    checkpoint.build_model()


def safetensors(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(*shape: Any, begin: int = 0, end: int | None = None, dtype: str = "F32") -> dict[str, Any]:
    size = 4
    for one in shape:
        size *= one if isinstance(one, int) else 1
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size if end is None else end]}


SAFETENSORS: dict[str, bytes] = {
    "empty": b"",
    "only-a-length": struct.pack("<Q", 8),
    "header-of-2^60": safetensors({}, length=2**60),
    "header-of-2^64-1": safetensors({}, length=2**64 - 1),
    "not-json": safetensors(b"{{{{"),
    "not-utf8": safetensors(b"\xff\xfe{}"),
    "deeply-nested": safetensors(b"[" * 100_000),
    "offsets-beyond": safetensors({"a": tensor(4, begin=2**40)}, bytes(16)),
    "offsets-backwards": safetensors({"a": tensor(4, begin=16, end=0)}, bytes(16)),
    "offsets-negative": safetensors({"a": tensor(4, begin=-16, end=0)}, bytes(16)),
    "overlapping": safetensors({"a": tensor(4), "b": tensor(4, begin=8)}, bytes(24)),
    "a-hole": safetensors({"a": tensor(4), "b": tensor(4, begin=32)}, bytes(48)),
    "size-of-another-shape": safetensors({"a": tensor(4, end=8)}, bytes(8)),
    "shape-that-overflows": safetensors({"a": tensor(2**40, 2**40, end=0)}),
    "shape-of-nan": safetensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "shape-of-text": safetensors({"a": tensor("4")}, bytes(16)),
    "negative-shape": safetensors({"a": tensor(-4, end=16)}, bytes(16)),
    "unknown-dtype": safetensors({"a": tensor(4, dtype="PICKLE")}, bytes(16)),
    "a-pickle": b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(folder: Path, name: str) -> None:
    (folder / "model.safetensors").write_bytes(SAFETENSORS[name])
    with pytest.raises(CorruptModel, match=r"model\.safetensors cannot be read"):
        load(folder)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_numbers_that_mean_something_else(folder: Path, dtype: str) -> None:
    content = (folder / "model.safetensors").read_bytes()
    assert b'"F32"' in content
    (folder / "model.safetensors").write_bytes(content.replace(b'"F32"', f'"{dtype}"'.encode()))
    with pytest.raises(UnsupportedModel, match="is of type"):
        load(folder)


def test_no_changed_byte_of_a_header_escapes_as_another_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = struct.unpack_from("<Q", whole)[0]
    chosen = random.Random(5)
    refused = 0
    for index in [*range(8), *(chosen.randrange(8, 8 + header) for _ in range(120))]:
        damaged = bytearray(whole)
        damaged[index] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        try:
            load(folder)
        except ModelError:
            refused += 1
    assert refused > 60


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("../model.safetensors", "shards lie beside"),
        ("/etc/passwd", "shards lie beside"),
        ("sub/model.safetensors", "shards lie beside"),
        ("pytorch_model.bin", "shards lie beside"),
        ("..", "shards lie beside"),
        ("", "shards lie beside"),
        (7, "shards lie beside"),
        (["model.safetensors"], "shards lie beside"),
        ("absent.safetensors", "missing"),
    ],
)
def test_an_index_that_points_elsewhere(folder: Path, name: Any, error: str) -> None:
    (folder.parent / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CorruptModel, match=error):
        load(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000, "\x00"])
def test_an_index_that_is_none(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(CorruptModel, match=r"index\.json"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_link_out_of_the_folder(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    content = (folder / name).read_bytes()
    outside.write_bytes(content)
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    with pytest.raises(CorruptModel, match="link out of its folder"):
        load(folder)
    inside = folder / "inside"
    inside.write_bytes(content)
    (folder / name).unlink()
    (folder / name).symlink_to("inside")
    load(folder)


def test_links_of_the_hubs_cache_stay_good_and_others_do_not(folder: Path, tmp_path: Path) -> None:
    """`snapshots/COMMIT/NAME -> ../../blobs/HASH`, and nothing else outside of the snapshot."""
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(folder.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    load(snapshot)
    (repository / "other").write_bytes((snapshot / "config.json").read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../other")
    with pytest.raises(CorruptModel, match="link out of its folder"):
        load(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", INDEX])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "dangling"])
def test_what_is_no_file_is_not_opened(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[], None]] = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere"),
    }
    make[kind]()
    with pytest.raises(ModelError):
        load(folder)


def test_text_of_any_size_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # takes no place on the disk
    with pytest.raises(CorruptModel, match="1099511627776 bytes; at most"):
        load(folder)
    monkeypatch.setattr(folder_module, "TEXT_BYTES", 100)
    with pytest.raises(CorruptModel, match=r"config\.json has \d+ bytes; at most 100"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'"text"', b"{}"])
def test_a_config_that_is_none(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)


def test_no_changed_byte_of_a_config_escapes_as_another_error(folder: Path) -> None:
    path = folder / "config.json"
    whole, chosen = path.read_bytes(), random.Random(6)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[chosen.randrange(len(whole))] = chosen.randrange(256)
        path.write_bytes(damaged)
        try:
            open_folder(folder)
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": float("nan")},
        {"hidden_size": float("inf")},
        {"hidden_size": -32},
        {"hidden_size": 2**62},
        {"num_hidden_layers": 2**62},
        {"num_attention_heads": 0},
        {"num_attention_heads": "4"},
        {"head_dim": 7},
        {"rms_norm_eps": -1.0},
        {"rope_parameters": {"rope_theta": 0}},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"rope_parameters": {"rope_type": {"a": 1}}},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"intermediate_size": 2**24},
    ],
    ids=str,
)
def test_shapes_that_cannot_be(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError):
        load(folder)


def test_code_in_a_repository_is_never_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = folder / "ran"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
    for name in ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py", "__init__.py", "torch.py"):
        (folder / name).write_text(code)
    path, good = folder / "config.json", json.loads((folder / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}
    monkeypatch.chdir(folder)
    path.write_text(json.dumps({**good, "auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil"})
    )
    load(folder)  # a Llama, whatever else it says
    path.write_text(json.dumps({**good, "auto_map": auto_map, "architectures": ["Evil"]}))
    with pytest.raises(UnsupportedModel, match="'Evil' is not supported"):
        load(folder)
    assert not marker.exists()
    assert not [name for name in sys.modules if "evil" in name]


def test_pickles_are_no_weights(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(SAFETENSORS["a-pickle"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors file"):
        load(folder)


def test_tensors_that_come_in_two_shards(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    weight_map = dict.fromkeys(names, "a.safetensors") | {names[0]: "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptModel, match="unexpected"):
        load(folder)


@pytest.mark.parametrize("content", ["", "{}", "[]", "{" * 100_000, '{"model": {"type": "BPE"}}', '{"version": 9}'])
def test_a_tokenizer_that_is_none(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load(folder)


# --- GGUF -----------------------------------------------------------------------------------------------------------


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def gguf(*fields: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors) + bytes(64)


def entry(name: bytes, *dims: int, type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


STRING, ARRAY, UINT8 = 8, 9, 0
LLAMA = text(b"general.architecture") + struct.pack("<I", STRING) + text(b"llama")
GGUF: dict[str, bytes] = {
    "2^60-tensors": gguf(counts=(2**60, 0)),
    "2^60-fields": gguf(counts=(0, 2**60)),
    "more-fields-than-there-are": gguf(LLAMA, counts=(0, 5)),
    "name-of-2^63": gguf(text(b"a", 2**63)),
    "name-of-2^64-1": gguf(text(b"a", 2**64 - 1)),
    "string-of-2^62": gguf(text(b"a") + struct.pack("<I", STRING) + text(b"b", 2**62)),
    "array-of-2^61-bytes": gguf(text(b"a") + struct.pack("<IIQ", ARRAY, UINT8, 2**61)),
    "array-of-2^61-strings": gguf(text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 2**61)),
    "array-with-a-string-of-2^60": gguf(text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 2) + text(b"b", 2**60)),
    "arrays-in-arrays": gguf(text(b"a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 64),
    "unknown-value-type": gguf(text(b"a") + struct.pack("<I", 200)),
    "field-that-comes-twice": gguf(LLAMA, LLAMA),
    "alignment-of-zero": gguf(text(b"general.alignment") + struct.pack("<II", 4, 0), tensors=(entry(b"t", 8),)),
    "10^9-dimensions": gguf(tensors=(text(b"t") + struct.pack("<I", 10**9),)),
    "no-dimensions": gguf(tensors=(entry(b"t"),)),
    "dimension-of-zero": gguf(tensors=(entry(b"t", 0),)),
    "dimensions-that-overflow": gguf(tensors=(entry(b"t", 2**63, 2**63, 2**63),)),
    "offset-beyond-the-file": gguf(tensors=(entry(b"t", 8, offset=2**40),)),
    "offset-that-overflows": gguf(tensors=(entry(b"t", 8, offset=2**64 - 32),)),
    "tensor-longer-than-the-file": gguf(tensors=(entry(b"t", 2**40),)),
    "overlapping": gguf(tensors=(entry(b"t", 8), entry(b"u", 8))),
    "tensor-that-comes-twice": gguf(tensors=(entry(b"t", 8), entry(b"t", 8, offset=32))),
    "part-of-a-block": gguf(tensors=(entry(b"t", 33, type_id=2),)),
    "no-table-of-tokens": gguf(LLAMA),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF[name])
    with pytest.raises(CorruptModel, match=r"model\.gguf"):
        open_checkpoint(locate(str(path)))


def test_gguf_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    evil = text(b"general.architecture") + struct.pack("<I", STRING) + text(b"evil")
    for content, message in ((gguf(evil), "'evil'"), (gguf(tensors=(entry(b"t", 8, type_id=999),)), "type 999")):
        path.write_bytes(content)
        with pytest.raises(UnsupportedModel, match=message):
            open_checkpoint(locate(str(path)))


def test_gguf_with_rope_factors_of_any_size(tmp_path: Path) -> None:
    """Refused by its header: nothing of the tensor is read."""
    path = tmp_path / "model.gguf"
    tensors = (entry(b"token_embd.weight", 8, 8), entry(b"rope_freqs.weight", 2**25, offset=256))
    path.write_bytes(gguf(LLAMA, tensors=tensors))
    with path.open("r+b") as file:
        file.truncate(2**27 + 2**20)
    with pytest.raises(CorruptModel, match=r"rope_freqs\.weight .* has shape \(33554432,\)"):
        open_checkpoint(locate(str(path)))
