"""Vocabularies of byte-level BPE: the alphabet, the ways of cutting text into words, and what GGUF metadata holds.

Called by `tokenizer`. Neither torch nor files here. Fails with `CorruptModel` for lists that contradict each other and
with `UnsupportedModel` for a kind of tokenizer that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from sgl.errors import CorruptModel, UnsupportedModel


@cache
def byte_chars() -> dict[str, int]:
    """Byte-level BPE's alphabet: one printable character for each byte (GPT-2's reversible mapping).

    Printable Latin-1 bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class Recipe(NamedTuple):
    """How a named pre-tokenizer cuts text before BPE."""

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2_cut() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_cut() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_cut()])


def _pattern_cut(numbers: str) -> pre_tokenizers.PreTokenizer:
    # Contractions, words with one leading sign, numbers, signs up to the line's end, line ends, other space.
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words + numbers + rest), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3 = Recipe(lambda: _pattern_cut(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = Recipe(lambda: _pattern_cut(r"\p{N}"), normalizer=normalizers.NFC)
_GPT2 = Recipe(_gpt2_cut)
_DIGITS = Recipe(_digits_cut)
GGUF_RECIPES: dict[str, Recipe] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], recipe: Recipe) -> tokenizers.Tokenizer:
    vocab = {text: token_id for token_id, text in reversed(list(enumerate(tokens)))}
    if any(" " not in merge for merge in merges):
        raise CorruptModel("a BPE merge in the GGUF metadata is not a pair of tokens")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=recipe.ignore_merges)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise CorruptModel(f"the BPE merges do not fit the vocabulary: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = recipe.cut()
    backend.decoder = decoders.ByteLevel()
    if recipe.normalizer is not None:
        backend.normalizer = recipe.normalizer()
    return backend


def added_token(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)


# --- GGUF -----------------------------------------------------------------------------------------------------------

_PLAIN = "gpt-2"
"""The pre-tokenizer of files that name none."""
_NORMAL, _CONTROL, _USER = 1, 3, 4
"""Token types of the format."""


class GGUFVocabulary(msgspec.Struct, kw_only=True):
    """Metadata `tokenizer.ggml.*` of a GGUF file, with its types checked.

    Attributes:
        model: kind of tokenizer; `gpt2` is byte-level BPE.
        pre: how text is cut into words.
    """

    model: str = ""
    pre: str = _PLAIN
    tokens: list[str]
    merges: list[str]
    token_type: list[int] = []
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unknown_token_id: int | None = None
    padding_token_id: int | None = None
    add_bos_token: bool | None = None

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> GGUFVocabulary:
        """The vocabulary in `metadata`.

        Raises:
            UnsupportedModel: a tokenizer model or pre-tokenizer that is not known here.
            CorruptModel: a list is missing, of the wrong type, or contradicts another.
        """
        prefix = "tokenizer.ggml."
        model, pre = metadata.get(prefix + "model"), metadata.get(prefix + "pre", _PLAIN)
        if model != "gpt2":
            raise UnsupportedModel(
                f"GGUF tokenizer model {model!r}; known: 'gpt2' (byte-level BPE)",
                hint="use the model's folder with tokenizer.json instead",
                tokenizer=str(model),
            )
        if not isinstance(pre, str) or pre not in GGUF_RECIPES:
            raise UnsupportedModel(
                f"GGUF pre-tokenizer {pre!r}; known: {', '.join(sorted(GGUF_RECIPES))}",
                hint="use the model's folder with tokenizer.json instead",
                pre_tokenizer=str(pre),
            )
        given = {name: metadata[prefix + name] for name in cls.__struct_fields__ if prefix + name in metadata}
        try:
            found = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise CorruptModel(f"GGUF tokenizer metadata: {error}", hint="fetch the file again") from None
        found._check()
        return found

    def _check(self) -> None:
        self.token_type = self.token_type or [_NORMAL] * len(self.tokens)
        if len(self.token_type) != len(self.tokens):
            raise CorruptModel(
                f"GGUF tokenizer has {len(self.tokens)} tokens but {len(self.token_type)} token types",
                hint="fetch the file again",
            )
        for key in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            token_id = getattr(self, f"{key}_token_id")
            if token_id is not None and not 0 <= token_id < len(self.tokens):
                raise CorruptModel(
                    f"GGUF {key}_token_id is {token_id}; the vocabulary has {len(self.tokens)} tokens",
                    hint="fetch the file again",
                )

    def control(self) -> list[str]:
        """Tokens that structure a text: never written by a user's text."""
        return self._of_type(_CONTROL)

    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer. Adding a token that is in the vocabulary keeps its id."""
        backend = byte_level_bpe(self.tokens, self.merges, GGUF_RECIPES[self.pre])
        backend.add_special_tokens([added_token(text, special=True) for text in self.control()])
        backend.add_tokens([added_token(text, special=False) for text in self._of_type(_USER)])
        return backend

    def named_tokens(self) -> dict[str, str]:
        """`bos_token` and the like, as a chat template names them, to their text."""
        named = {"bos": self.bos_token_id, "eos": self.eos_token_id}
        named |= {"unk": self.unknown_token_id, "pad": self.padding_token_id}
        return {f"{name}_token": self.tokens[token_id] for name, token_id in named.items() if token_id is not None}

    @property
    def writes_bos(self) -> bool:
        """Whether a prompt of plain text begins with the beginning-of-sequence token."""
        return GGUF_RECIPES[self.pre].add_bos if self.add_bos_token is None else self.add_bos_token

    def _of_type(self, kind: int) -> list[str]:
        return [text for text, own in zip(self.tokens, self.token_type, strict=True) if own == kind]
