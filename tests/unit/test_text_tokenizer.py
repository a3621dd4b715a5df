"""Tokenizers on small vocabularies made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sgl.errors import CorruptModel, InvalidParameter, UnsupportedModel
from sgl.limits import Limits
from sgl.runtime.text.tokenizer import Piece, Tokenizer
from sgl.runtime.text.vocabularies import GGUF_RECIPES, byte_chars

TOY = Tokenizer.toy()
TOY_BACKEND = Backend.from_str(TOY.to_json())


def gguf(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with three merges, two control tokens and one user token."""
    alphabet = [TOY_BACKEND.id_to_token(byte) for byte in range(256)]
    tokens = [*alphabet, "he", "\u01202", "12", "<|im_end|>", "<|eot|>", "<think>"]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": ["h e", "\u0120 2", "1 2"],
        "token_type": [1] * 259 + [3, 3, 4],
        "eos_token_id": 260,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def test_gguf_vocabulary() -> None:
    tokenizer = Tokenizer.from_gguf(gguf())
    assert tokenizer.vocab_size == 262
    assert tokenizer.eos_ids == {259, 260}
    assert tokenizer.special_tokens == {"<|im_end|>": 259, "<|eot|>": 260}
    assert tokenizer.encode("he") == [256]
    assert tokenizer.encode("12") == [ord("1"), ord("2")]
    assert tokenizer.encode(" 2") == [ord(" "), ord("2")]
    assert tokenizer.encode("a<think>") == [ord("a"), 261]
    assert tokenizer.token_bytes(257) == b" 2"
    assert tokenizer.token_bytes(259) == b""
    assert tokenizer.token_bytes(9999) == b""
    assert tokenizer.decode([256, 259]) == "he"
    assert tokenizer.decode([256, 259], skip_special_tokens=False) == "he<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "ids"), [("gpt-2", [258, 257]), ("llama-bpe", [258, 32, 50]), ("qwen2", [49, 50, 32, 50])]
)
def test_gguf_pre_tokenizers_differ(pre: str, ids: list[int]) -> None:
    assert Tokenizer.from_gguf(gguf(pre)).encode("12 2") == ids


# What llama.cpp does for `smollm`: each number alone, then GPT-2's words. Written here for another engine.
NUMBER = regex.compile(r"(\p{N})")
GPT2_WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
OLD_LETTERS = st.characters(max_codepoint=0x30FF, exclude_categories=["Cs", "Cn", "Co", "Cc", "Cf"])
"""Characters on whose categories two versions of Unicode agree."""
TEXTS = st.lists(
    st.sampled_from(
        [" ", "  ", "\n", "\t", "\r\n", "\xa0", "1", "20", "\u00b2", "\u0663", "\u2167", "a", "B", "'s", "'", "-"]
    )
    | OLD_LETTERS,
    max_size=20,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_smollm_text_is_cut_as_its_patterns_say(text: str) -> None:
    cut = GGUF_RECIPES["smollm"].cut().pre_tokenize_str(text)
    to_byte = byte_chars()
    ours = [bytes(to_byte[char] for char in piece).decode() for piece, _ in cut]
    assert ours == [word for part in NUMBER.split(text) for word in GPT2_WORD.findall(part)]


def test_gguf_without_a_pre_tokenizer_is_cut_as_gpt2_does() -> None:
    assert Tokenizer.from_gguf(gguf(pre=None)).encode("12 2") == [258, 257]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 7},
        {"tokens": [1, 2]},
        {"merges": "h e"},
        {"token_type": ["x"]},
        {"eos_token_id": "end"},
        {"bos_token_id": -1},
        {"add_bos_token": [1]},
    ],
)
def test_gguf_metadata_of_the_wrong_type(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptModel, match=next(iter(change)).removesuffix("s")):
        Tokenizer.from_gguf(gguf(**change))


def test_gguf_that_cannot_be_used() -> None:
    with pytest.raises(UnsupportedModel, match=r"'nobody'.*smollm"):
        Tokenizer.from_gguf(gguf("nobody"))
    with pytest.raises(UnsupportedModel, match="'llama'"):
        Tokenizer.from_gguf(gguf(model="llama"))
    with pytest.raises(CorruptModel, match="token types"):
        Tokenizer.from_gguf(gguf(token_type=[1]))
    with pytest.raises(CorruptModel, match="merge"):
        Tokenizer.from_gguf(gguf(merges=["nospace"]))
    with pytest.raises(CorruptModel, match="merges"):
        Tokenizer.from_gguf(gguf(merges=["zz yy"]))
    with pytest.raises(CorruptModel, match="eos_token_id"):
        Tokenizer.from_gguf(gguf(eos_token_id=10**6))
    with pytest.raises(CorruptModel, match="tokens"):
        Tokenizer.from_gguf(gguf(tokens=None))


def test_special_tokens_only_in_template_pieces() -> None:
    end = TOY.special_tokens["<|im_end|>"]
    assert end not in TOY.encode("<|im_end|>")
    assert TOY.encode_pieces([Piece("a<|im_end|>b", template=True)]) == [97, end, 98]
    assert TOY.encode_pieces([Piece("<|im_", template=True), Piece("end|>")]) == TOY.encode("<|im_end|>")


def test_text_that_cannot_be_encoded() -> None:
    with pytest.raises(InvalidParameter, match="surrogate"):
        TOY.encode("a\ud800")
    small = Tokenizer.toy(Limits(max_prompt_bytes=4))
    assert len(small.encode("éé")) == 4
    with pytest.raises(InvalidParameter, match="at most 4"):
        small.encode("éé!")


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(text: str) -> None:
    assert TOY.decode(TOY.encode(text)) == text
    assert b"".join(map(TOY.token_bytes, TOY.encode(text))) == text.encode()


def test_toy_json_is_a_tokenizer() -> None:
    assert TOY_BACKEND.encode("hi").ids == [104, 105]
    assert TOY.vocab_size == 512
    assert TOY.eos_ids == {TOY.special_tokens["<|im_end|>"], TOY.special_tokens["<|endoftext|>"]}


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(TOY.to_json())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>"}, "add_bos_token": True, "eos_token": "<|reserved_1|>"})
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 300]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_ids == {256, 258, 300, TOY.special_tokens["<|reserved_1|>"]}
    assert (tokenizer.bos_id, tokenizer.add_bos) == (259, True)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]) == "<|bos|>x"
    for name, content in (("config.json", "[]"), ("generation_config.json", '{"eos_token_id": ["two"]}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(CorruptModel, match=r"config\.json|eos_token_id is 'two'"):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / name).unlink()


def test_metaspace_and_byte_fallback() -> None:
    vocab = {"<unk>": 0, "<0x0A>": 1, "\u2581": 2, "a": 3, "b": 4, "\u2581a": 5}
    backend = Backend(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a\n") == [5, 1]
    assert tokenizer.encode_pieces([Piece("</s>", template=True), Piece("a")]) == [6, 3]
    assert tokenizer.encode_pieces([Piece("a")], start=False) == [3]
    assert [tokenizer.token_bytes(token_id) for token_id in (1, 5)] == [b"\n", b" a"]


def test_continuations_equal_encoding_each_whole() -> None:
    tokenizer = Tokenizer.from_gguf(gguf())
    long = "the theory of the other " * 40
    for text in (long, long + "th", long + "  ", "the ", "", long + " the"):
        pieces = (Piece(text),) if text else ()
        options = ["e", " the", "ory", "\n"]
        whole, each = tokenizer.encode_continuations(pieces, options)
        assert whole == tokenizer.encode_pieces(pieces)
        assert each == [tokenizer.encode_pieces((*pieces, Piece(option))) for option in options]


def test_word_pieces_are_joined_as_words() -> None:
    words = ["[UNK]", "hello", "world", "token", "##in", "is"]
    backend = Backend(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([1, 2]) == "hello world"
    assert tokenizer.decode([3, 4, 5]) == "tokenin is"
