"""Texts and pairs of texts as an encoder reads them: ids between special tokens, and of which of two texts each is.

Owns the tokenizer of encoders, of `tokenizer.json` or of the `vocab.txt` of older checkpoints (WordPiece). Used by the
worker, off its loop. What a user writes is plain text: `[SEP]` in it is no separator. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from sgl.errors import CorruptModel, EmptyPrompt, InvalidParameter, PromptTooLong, UnsupportedModel
from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.loading.folder import json_object, text_of
from sgl.runtime.text.tokenizer import check_text

_SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
_SAVE = "save the tokenizer with transformers' save_pretrained() first, which writes tokenizer.json"
_LONGEST_WORD = 100
"""Characters; longer ones are unknown (BERT's own rule)."""


class EncoderText(msgspec.Struct, frozen=True):
    """What an encoder reads at once. `type_ids` are 1 in the second of two texts."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]


class EncoderTokenizer:
    """Made from a checkpoint folder.

    Args:
        backend: with a post-processor that puts special tokens around one text and two.
        limits: on texts.
    """

    def __init__(self, backend: tokenizers.Tokenizer, limits: Limits = DEFAULT_LIMITS) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._limits = limits
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path) -> EncoderTokenizer:
        """Of `tokenizer.json`, else of `vocab.txt`.

        Raises:
            UnsupportedModel: there is neither, or tokenizer_config.json asks for what is not done here.
            CorruptModel: the file cannot be read.
        """
        config = json_object(folder, "tokenizer_config.json")
        _refuse(config, folder, {"truncation_side": ("right",)})
        try:
            if (text := text_of(folder, "tokenizer.json")) is not None:
                return cls(tokenizers.Tokenizer.from_str(text))
            if (text := text_of(folder, "vocab.txt")) is not None:
                _refuse(config, folder, _VOCABULARY_ONLY)
                return cls(_wordpiece(text.splitlines(), config))
        except (CorruptModel, UnsupportedModel):
            raise
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise CorruptModel(
                f"the tokenizer of {folder} cannot be read: {error}", hint="fetch the model again"
            ) from None
        raise UnsupportedModel(
            f"{folder} has neither tokenizer.json nor vocab.txt",
            hint=_SAVE,
        )

    def encode(self, text: str, pair: str | None, max_len: int, *, truncate: bool) -> EncoderText:
        """One text, or two read together.

        Args:
            truncate: cut what is beyond `max_len` (of two texts, the longer one) instead of refusing it.

        Raises:
            EmptyPrompt: there is no text.
            PromptTooLong: more than `max_len` tokens, with both numbers.
            InvalidParameter: longer than `limits.max_prompt_bytes`, or with lone surrogates.
        """
        if not text or pair == "":
            raise EmptyPrompt("a text is empty", hint="pass some text")
        parts = [text] if pair is None else [text, pair]
        for part in parts:
            check_text(part, self._limits.max_prompt_bytes)
        given = [self._backend.encode(part, add_special_tokens=False) for part in parts]
        room = max_len - self._backend.num_special_tokens_to_add(pair is not None)
        if (num_tokens := sum(map(len, given))) > room:
            if not truncate:
                raise too_long(num_tokens + max_len - room, max_len)
            _cut(given, room)
        whole = self._backend.post_process(given[0], given[1] if pair is not None else None)
        return EncoderText(tuple(whole.ids), tuple(whole.type_ids))

    def of_ids(self, ids: Sequence[int], max_len: int, *, truncate: bool) -> EncoderText:
        """Ids as they are, special ones among them.

        Raises:
            InvalidParameter: an id that the vocabulary does not have.
            EmptyPrompt, PromptTooLong: as `encode`.
        """
        if not ids:
            raise EmptyPrompt("input_ids are empty", hint="pass at least one token id")
        if (wrong := next((id for id in ids if not 0 <= id < self.vocab_size), None)) is not None:
            raise InvalidParameter(
                f"token id {wrong} is not in the vocabulary of {self.vocab_size}",
                hint="encode with the model's own tokenizer",
                param="input_ids",
            )
        if len(ids) > max_len and not truncate:
            raise too_long(len(ids), max_len)
        kept = tuple(ids[:max_len])
        return EncoderText(kept, (0,) * len(kept))


_VOCABULARY_ONLY = {
    "do_basic_tokenize": (True,),
    "never_split": ([],),
    "tokenizer_class": ("BertTokenizer", "BertTokenizerFast"),
}
"""Settings that a tokenizer.json has in itself, and what of them BERT's own rule is."""


def _refuse(config: dict[str, Any], folder: Path, known: dict[str, tuple[Any, ...]]) -> None:
    """Raise `UnsupportedModel` for a setting that would give other tokens than are given here."""
    for name, values in known.items():
        if (value := config.get(name)) is not None and value not in values:
            raise UnsupportedModel(
                f"{folder / 'tokenizer_config.json'}: {name} is {value!r}, which is not done here",
                hint=f"save the tokenizer with {name} {values[0]!r}" if name == "truncation_side" else _SAVE,
            )


def too_long(num_tokens: int, max_len: int) -> PromptTooLong:
    """The error of an input that the model does not take whole."""
    return PromptTooLong(
        f"the input has {num_tokens} tokens; the model takes {max_len}", hint="shorten it, or set truncate"
    )


def _cut(given: Sequence[tokenizers.Encoding], room: int) -> None:
    """Shorten, in place, the longest first; of two that are alike long the second one."""
    lengths = [len(encoding) for encoding in given]
    while sum(lengths) > room:
        longest = max(range(len(lengths)), key=lambda index: (lengths[index], index))
        others = sum(lengths) - lengths[longest]
        shorter = max((length for index, length in enumerate(lengths) if index != longest), default=0)
        # As far as it is the longest, at once; then one token at a time in turns.
        lengths[longest] = max(room - others, min(shorter, lengths[longest] - 1), 0)
    for encoding, length in zip(given, lengths, strict=True):
        encoding.truncate(length)


def _wordpiece(words: list[str], config: dict[str, Any]) -> tokenizers.Tokenizer:
    """BERT's tokenizer of a list of words."""
    vocabulary = {word: index for index, word in enumerate(words)}
    if lacking := [token for token in _SPECIAL[:3] if token not in vocabulary]:
        raise CorruptModel(f"vocab.txt has no {', '.join(lacking)}", hint="fetch the model again")
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    )
    backend.add_special_tokens([token for token in _SPECIAL if token in vocabulary])
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case") is not False,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return backend
