"""Text to token ids and back, the same for a GGUF file, a checkpoint folder and the toy vocabulary.

Owns the vocabulary, the special tokens, the end-of-generation set and the checkpoint's chat template. Used by both
halves of the engine: it needs neither torch nor transformers. A `Tokenizer` is immutable and may be shared by threads.

Invariants:

* Special tokens in text from users are plain characters. They are recognised only inside template pieces.
* A maximal run of ordinary text is encoded as one, however it was cut into pieces: ids equal those of the reference
  tokenizer for the whole rendered string.
* Ordinary decoding works on bytes: `decode` is the UTF-8 reading of the tokens' bytes, put together.

Fails with `UnsupportedModel` for a tokenizer that is not known, `CorruptModel` for one that contradicts itself, and
`InvalidParameter` for text that is too long or is not Unicode (lone surrogates).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import decoders, pre_tokenizers

from sgl.errors import CorruptModel, InvalidParameter, UnsupportedModel
from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.loading.folder import json_object, text_of
from sgl.runtime.text.template import ChatTemplate
from sgl.runtime.text.vocabularies import GGUF_RECIPES, GGUFVocabulary, added_token, byte_chars, byte_level_bpe

_TAIL_CHARS = 256
"""Characters at the end of a text that are encoded anew with each option of a select."""


class Piece(NamedTuple):
    """A stretch of prompt text. Special tokens are recognised only in template pieces."""

    text: str
    template: bool = False


class Run(NamedTuple):
    """Consecutive pieces that were encoded together: `num_pieces` of them became `ids`."""

    num_pieces: int
    ids: list[int]


class SavedTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer as data: `backend` is the `tokenizers` library's JSON, the rest is `Tokenizer`'s arguments."""

    backend: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    template: str | None
    template_tokens: dict[str, str]


class Tokenizer:
    """A vocabulary with its special tokens and chat template.

    Attributes:
        vocab_size: ids known; a model's embedding may be padded beyond it, and such ids have no text.
        special_tokens: text of each special token to its id.
        eos_ids: tokens that end a generation (end of sequence, of turn, of text).
        bos_id: beginning-of-sequence token, if the vocabulary has one; `bos_token` is its text.
        add_bos: a prompt of plain text begins with `bos_id`. A chat template writes it itself where it wants it.
        chat_template: the checkpoint's own, or `None`.

    Example:
        >>> toy = Tokenizer.toy()
        >>> toy.encode("Hé")
        [72, 195, 169]
        >>> toy.encode_pieces([Piece("<|im_end|>", template=True), Piece("<|")])
        [258, 60, 124]
        >>> toy.decode([72, 195, 169, 258])
        'Hé'
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: ChatTemplate | None = None,
        vocab_size: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        # Recognising special tokens is this class's work (`split_template`); the backend never does it.
        backend.encode_special_tokens = True
        self._backend = backend
        self._limits = limits
        added = backend.get_added_tokens_decoder()
        specials = {token_id: token for token_id, token in added.items() if token.special}
        self.special_tokens: dict[str, int] = {token.content: token_id for token_id, token in specials.items()}
        if vocab_size is None:
            vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.bos_token = "" if bos_id is None else str(backend.id_to_token(bos_id))
        self.add_bos = add_bos and bos_id is not None
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self.special_pattern = _alternation(self.special_tokens)
        self._strips_left = frozenset(token.content for token in specials.values() if token.lstrip)
        self._strips_right = frozenset(token.content for token in specials.values() if token.rstrip)
        known = _TokenBytes(backend, {token_id: token.content for token_id, token in added.items()})
        self._token_bytes: Callable[[int], bytes] = known.__getitem__
        self._special_ids = frozenset(specials)
        self._inner = _without_first_space(backend)
        self._joins_words = isinstance(backend.decoder, decoders.WordPiece)

    # --- where tokenizers come from ---------------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], limits: Limits = DEFAULT_LIMITS) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata (keys `tokenizer.ggml.*` and `tokenizer.chat_template`).

        Raises:
            UnsupportedModel: a tokenizer model or pre-tokenizer that is not known here.
            CorruptModel: lists that contradict each other.
        """
        vocabulary = GGUFVocabulary.read(metadata)
        backend = vocabulary.backend()
        source = metadata.get("tokenizer.chat_template")
        ends = (vocabulary.eos_token_id, vocabulary.eot_token_id, vocabulary.eom_token_id)
        return cls(
            backend,
            eos_ids=_end_ids(backend, vocabulary.control(), ends),
            bos_id=vocabulary.bos_token_id,
            add_bos=vocabulary.writes_bos,
            chat_template=ChatTemplate(str(source), vocabulary.named_tokens()) if source else None,
            limits=limits,
        )

    def save(self) -> SavedTokenizer:
        """All that it takes to make this tokenizer again, faster than from where it came."""
        template = self.chat_template
        return SavedTokenizer(
            backend=self.to_json(),
            vocab_size=self.vocab_size,
            eos_ids=tuple(sorted(self.eos_ids)),
            bos_id=self.bos_id,
            add_bos=self.add_bos,
            template=None if template is None else template.source,
            template_tokens={} if template is None else template.special_tokens,
        )

    @classmethod
    def restore(cls, saved: SavedTokenizer, limits: Limits = DEFAULT_LIMITS) -> Tokenizer:
        """The tokenizer that was saved.

        Raises:
            CorruptModel: it was saved by a version that wrote it differently.
        """
        try:
            backend = tokenizers.Tokenizer.from_str(saved.backend)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise CorruptModel(f"a saved tokenizer cannot be read: {error}") from None
        template = None if saved.template is None else ChatTemplate(saved.template, saved.template_tokens)
        return cls(
            backend,
            eos_ids=saved.eos_ids,
            bos_id=saved.bos_id,
            add_bos=saved.add_bos,
            chat_template=template,
            vocab_size=saved.vocab_size,
            limits=limits,
        )

    @classmethod
    def from_folder(cls, path: str | Path, limits: Limits = DEFAULT_LIMITS) -> Tokenizer:
        """The tokenizer of a checkpoint folder (`tokenizer.json` and the files beside it).

        Raises:
            UnsupportedModel: the folder has no `tokenizer.json`.
            CorruptModel: one of the files cannot be read.
        """
        folder = Path(path)
        text = text_of(folder, "tokenizer.json")
        if text is None:
            raise UnsupportedModel(
                f"{folder} has no tokenizer.json",
                hint="save the tokenizer with transformers' save_pretrained() first",
            )
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise CorruptModel(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        config = json_object(folder, "tokenizer_config.json")
        texts = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
            if (text := _token_text(config.get(name))) is not None
        }
        ends: list[Any] = [backend.token_to_id(texts["eos_token"])] if "eos_token" in texts else []
        for settings in (json_object(folder, "generation_config.json"), json_object(folder, "config.json")):
            given = settings.get("eos_token_id")
            ends.extend(given if isinstance(given, list) else [given])
        specials = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        bos_id = backend.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
        add_bos = config.get("add_bos_token")
        if add_bos is None:  # then the post-processor says
            add_bos = bos_id is not None and bos_id in backend.encode("", add_special_tokens=True).ids
        source = _folder_template(folder, config)
        return cls(
            backend,
            eos_ids=_end_ids(backend, specials, ends),
            bos_id=bos_id,
            add_bos=bool(add_bos),
            chat_template=ChatTemplate(source, texts) if source else None,
            limits=limits,
        )

    @classmethod
    def toy(cls, limits: Limits = DEFAULT_LIMITS, *, vocab_size: int = 512) -> Tokenizer:
        """The byte vocabulary of the toy model: ids 0 to 255 are bytes, then special tokens, 512 in all; ChatML.

        Args:
            vocab_size: above 512, words that no text is encoded with follow, so that a shape is drawn from as a whole.
        """
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"]
        specials += [f"<|reserved_{index}|>" for index in range(512 - 256 - len(specials))]
        chars = {byte: char for char, byte in byte_chars().items()}
        words = [*specials, *(f"_{index}" for index in range(512, vocab_size))] if vocab_size > 512 else []
        backend = byte_level_bpe([*(chars[byte] for byte in range(256)), *words], [], GGUF_RECIPES["gpt-2"])
        backend.add_special_tokens([added_token(text, special=True) for text in specials])
        texts = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
        return cls(
            backend,
            eos_ids=_end_ids(backend, specials, []),
            bos_id=backend.token_to_id("<|bos|>"),
            chat_template=ChatTemplate(_CHATML, texts),
            limits=limits,
        )

    # --- encoding ---------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text, without BOS; special tokens in it are plain characters.

        Raises:
            InvalidParameter: longer than `limits.max_prompt_bytes`, or with lone surrogates.
        """
        return self.encode_pieces((Piece(text),))

    def encode_pieces(self, pieces: Sequence[Piece], start: bool = True) -> list[int]:
        """Ids of pieces put together.

        Args:
            start: they begin a state (some vocabularies write a space before the first word of a text).

        Raises:
            InvalidParameter: longer than `limits.max_prompt_bytes`, or with lone surrogates.
        """
        atoms = [atom for piece in pieces for atom in (self.split_template(piece.text) if piece.template else (piece,))]
        return [token_id for run in self.encode_runs(atoms, start) for token_id in run.ids]

    def encode_continuations(
        self, pieces: Sequence[Piece], options: Sequence[str], start: bool = True
    ) -> tuple[list[int], list[list[int]]]:
        """Ids of `pieces` alone, and of `pieces` with each option behind them.

        Equal to `encode_pieces` for each, but a long text is encoded once: an option can change the tokens of the last
        word only, so each is encoded with the end of the text, from a space on that is a token boundary there.
        """
        whole = self.encode_pieces(pieces, start)
        head, tail = self._cut(pieces, whole)
        return whole, [head + self.encode_pieces((*tail, Piece(option)), start and not head) for option in options]

    def _cut(self, pieces: Sequence[Piece], whole: list[int]) -> tuple[list[int], Sequence[Piece]]:
        """Ids of the beginning of `pieces`, and the end that may change with what follows."""
        if not pieces or pieces[-1].template or len(pieces[-1].text) < 2 * _TAIL_CHARS:
            return [], pieces
        text = pieces[-1].text
        space = text.rfind(" ", 0, len(text) - _TAIL_CHARS)
        if space <= 0 or text[space - 1].isspace() or text[space + 1].isspace():
            return [], pieces
        tail = (Piece(text[space:]),)
        ids = self.encode_pieces(tail, start=False)
        if whole[len(whole) - len(ids) :] != ids:
            return [], pieces
        return whole[: len(whole) - len(ids)], tail

    def split_template(self, text: str) -> list[Piece]:
        """Template text as pieces: each special token alone (`template=True`), ordinary text between them."""
        pieces: list[Piece] = []
        position = 0
        for match in self.special_pattern.finditer(text):
            if match.start() > position:
                pieces.append(Piece(text[position : match.start()]))
            pieces.append(Piece(match.group(), template=True))
            position = match.end()
        if position < len(text):
            pieces.append(Piece(text[position:]))
        return pieces

    def encode_runs(self, atoms: Sequence[Piece], start: bool = True) -> list[Run]:
        """Encode pieces whose template pieces are single special tokens, as runs that do not depend on each other."""
        check_text("".join(atom.text for atom in atoms), self._limits.max_prompt_bytes)
        runs: list[Run] = []
        position = 0
        while position < len(atoms):
            first = atoms[position]
            if first.template:
                runs.append(Run(1, [self.special_tokens[first.text]]))
                position += 1
                continue
            end = position
            while end < len(atoms) and not atoms[end].template:
                end += 1
            text = "".join(atom.text for atom in atoms[position:end])
            if position > 0 and atoms[position - 1].text in self._strips_right:
                text = text.lstrip()
            if end < len(atoms) and atoms[end].text in self._strips_left:
                text = text.rstrip()
            backend = self._backend if start and position == 0 else self._inner
            runs.append(Run(end - position, list(backend.encode(text, add_special_tokens=False).ids) if text else []))
            position = end
        return runs

    # --- decoding ---------------------------------------------------------------------------------------------------

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Raw bytes of a token; empty for ids past the vocabulary, and for special tokens unless not skipped."""
        return b"" if skip_special_tokens and token_id in self._special_ids else self._token_bytes(token_id)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are not UTF-8 become U+FFFD. Where tokens are words and their parts (WordPiece),
        none has its space in itself, and the text is that of all of them together."""
        if self._joins_words:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        read = self.token_bytes if skip_special_tokens else self._token_bytes
        return b"".join(map(read, ids)).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The tokenizer in the `tokenizers` library's JSON form."""
        return str(self._backend.to_str())


# --- token bytes ----------------------------------------------------------------------------------------------------


def check_text(text: str, max_bytes: int) -> None:
    """What is asked of a text before it is tokenized.

    Raises:
        InvalidParameter: it is longer than `max_bytes`, or has lone surrogates.
    """
    size = len(text)
    if size <= max_bytes:
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"text has a lone surrogate {text[error.start]!r} at character {error.start}",
                hint="decode the input with errors='replace' before passing it on",
                param="text",
            ) from None
    if size > max_bytes:
        raise InvalidParameter(
            f"text has {size} bytes; at most {max_bytes} are allowed",
            hint="shorten it",
            param="text",
        )


class _TokenBytes(dict[int, bytes]):
    """Bytes of each id, worked out on first use: byte-level characters, `<0x0A>` byte tokens, or plain text."""

    def __init__(self, backend: tokenizers.Tokenizer, added: dict[int, str]) -> None:
        shape = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        kinds = {part.get("type") for part in shape.get("decoders", [shape])}
        self._to_bytes: Callable[[str], bytes] = _byte_level_bytes if "ByteLevel" in kinds else _plain_bytes
        self._backend = backend
        super().__init__({token_id: text.encode("utf-8") for token_id, text in added.items()})

    def __missing__(self, token_id: int) -> bytes:
        text = self._backend.id_to_token(token_id) if token_id >= 0 else None
        found = self[token_id] = b"" if text is None else self._to_bytes(text)
        return found


def _byte_level_bytes(text: str) -> bytes:
    table = byte_chars()
    return b"".join(bytes((table[char],)) if char in table else char.encode("utf-8") for char in text)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _plain_bytes(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes((int(byte.group(1), 16),)) if byte else text.replace("\u2581", " ").encode("utf-8")


def _without_first_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The encoder for text that does not begin a state; only metaspace vocabularies of scheme "first" need another."""
    part = backend.pre_tokenizer
    if not isinstance(part, pre_tokenizers.Metaspace) or part.prepend_scheme != "first":
        return backend
    inner = tokenizers.Tokenizer.from_str(backend.to_str())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=part.replacement, prepend_scheme="never", split=part.split
    )
    inner.encode_special_tokens = True
    return inner


# --- special tokens -------------------------------------------------------------------------------------------------

_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "</s>",
)
"""Names under which checkpoints keep their end tokens; many list only one of theirs in the configuration."""


def _end_ids(backend: tokenizers.Tokenizer, specials: Iterable[str], given: Iterable[Any]) -> frozenset[int]:
    known = set(specials)
    named = [backend.token_to_id(text) for text in _END_TOKENS if text in known]
    ids = [token_id for token_id in (*named, *given) if token_id is not None]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise CorruptModel(f"eos_token_id is {token_id!r}; expected a number or a list of them")
    return frozenset(ids)


def _alternation(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`, the longest first; of none, it matches nothing."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


# --- checkpoint folders ---------------------------------------------------------------------------------------------


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    text = text_of(folder, "chat_template.jinja")
    if text is not None:
        return text
    value = config.get("chat_template")
    if isinstance(value, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
