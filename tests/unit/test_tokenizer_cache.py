"""The cache of converted tokenizers: used, never wrong, never in the way."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from sgl.runtime.loading import tokenizer_cache
from sgl.runtime.loading.gguf_reader import GGUFFile
from sgl.runtime.loading.tokenizer_cache import cache_key, gguf_tokenizer
from sgl.runtime.text.tokenizer import Tokenizer

ALPHABET = [chr(code) for code in range(ord("!"), ord("~") + 1)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each conversion from metadata."""
    counted: list[int] = []
    convert = Tokenizer.from_gguf

    def counting(metadata: Any) -> Tokenizer:
        counted.append(1)
        return convert(metadata)

    monkeypatch.setattr(Tokenizer, "from_gguf", counting)
    return counted


def write(path: Path, *, merges: list[str] | None = None, name: str = "a", eos: int = 94) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*ALPHABET, "<|im_end|>", "he", "lo"])
    writer.add_token_types([1] * 94 + [3, 1, 1])
    writer.add_token_merges(merges if merges is not None else ["h e", "l o"])
    writer.add_eos_token_id(eos)
    writer.add_chat_template("{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def test_converted_once_and_then_the_same(tmp_path: Path, cache: Path, conversions: list[int]) -> None:
    file = write(tmp_path / "a.gguf")
    first, second = gguf_tokenizer(file), gguf_tokenizer(GGUFFile(tmp_path / "a.gguf"))
    assert len(conversions) == 1
    assert [path.name for path in cache.iterdir()] == [cache_key(file).hex()]
    assert first.save() == second.save()
    assert second.encode("hello") == [95, ALPHABET.index("l"), 96]
    assert second.eos_ids == {94}
    assert second.chat_template is not None
    assert second.chat_template.render([{"role": "user", "content": "x"}]) == "x<|im_end|>"


def test_another_tokenizer_has_another_key(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        cache_key(write(tmp_path / "a.gguf")),
        cache_key(write(tmp_path / "b.gguf", merges=["l o"])),
        cache_key(write(tmp_path / "c.gguf", eos=95)),
    }
    assert len(keys) == 3
    assert cache_key(write(tmp_path / "d.gguf", name="another model, the same tokenizer")) in keys
    monkeypatch.setattr(tokenizer_cache, "CONVERTER", 0)
    assert cache_key(write(tmp_path / "a.gguf")) not in keys


def test_a_file_under_another_tokenizers_name_is_not_served(
    tmp_path: Path, cache: Path, conversions: list[int]
) -> None:
    one, other = write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf", merges=["l o"])
    gguf_tokenizer(one)
    (cache / cache_key(one).hex()).rename(cache / cache_key(other).hex())
    assert gguf_tokenizer(other).encode("he") == [ALPHABET.index("h"), ALPHABET.index("e")]
    assert len(conversions) == 2


@pytest.mark.parametrize("keep", [0, 10, 40, -1])
def test_a_damaged_file_is_written_again(tmp_path: Path, cache: Path, conversions: list[int], keep: int) -> None:
    file = write(tmp_path / "a.gguf")
    good = gguf_tokenizer(file).save()
    path = cache / cache_key(file).hex()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert gguf_tokenizer(file).save() == good
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    assert gguf_tokenizer(file).save() == good
    assert len(conversions) == 3


def test_a_full_disk_costs_a_line_in_the_log(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING, "sgl.loading"):
        assert gguf_tokenizer(write(tmp_path / "a.gguf")).vocab_size == 97
    assert [record.getMessage() for record in caplog.records] == [
        f"the tokenizer is not kept in {cache}: No space left on device"
    ]
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGL_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, "sgl.loading"):
        assert gguf_tokenizer(write(tmp_path / "a.gguf")).vocab_size == 97
    assert len([record for record in caplog.records if "is not kept" in record.getMessage()]) == 1
