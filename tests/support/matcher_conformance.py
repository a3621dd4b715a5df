"""What every `Matcher` must do, as checks that any implementation can be put through.

Owns the checks, a small tokenizer to run them on (`world`), and `ReferenceGrammar`: the naive matcher of a finite
language, written from the protocol's docstrings alone. It shows that the checks can be passed and, broken on purpose,
that they can fail. A test module loads this file and calls `check_walk(grammar, world, rng)` with many generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sgl.grammars.matcher import (
    Bitmask,
    CompiledGrammar,
    Matcher,
    StopReason,
    allocate_bitmask,
    bitmask_to_bool,
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PADDING = 40
"""Logits of the model past the tokenizer's vocabulary."""


@dataclass(frozen=True)
class World:
    """A tokenizer as the grammars see it, with what the checks need to know about it."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    token_bytes: dict[int, bytes]
    encode: Callable[[str], list[int]]

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of ordinary tokens; end of sequence has none."""
        return b"".join(self.token_bytes.get(token_id, b"") for token_id in token_ids).decode("utf-8")


@lru_cache(maxsize=1)
def world() -> World:
    """Byte vocabulary, a few merges, three special tokens of which two end a sequence, and padding."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    to_chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in ["tr", "tru", "true", "fa", "ab", "abc", "12", '":', " a"]:
        chars = to_chars.pre_tokenize_str(word)[0][0]
        merges.append((chars[:-1], chars[-1]))
        vocab[chars] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = to_chars
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    size = backend.get_vocab_size()
    plain = {char: byte for byte, char in _byte_chars().items()}
    token_bytes = {
        token_id: bytes(plain[char] for char in text)
        for text, token_id in backend.get_vocab().items()
        if text not in SPECIALS
    }
    return World(
        tokenizer_json=backend.to_str(),
        vocab_size=size + PADDING,
        eos_ids=(backend.token_to_id("<|endoftext|>"), backend.token_to_id("<|im_end|>")),
        token_bytes=token_bytes,
        encode=lambda text: list(backend.encode(text, add_special_tokens=False).ids),
    )


def _byte_chars() -> dict[int, str]:
    """Byte -> its character in byte-level BPE: printable Latin-1 stands for itself, the rest counts up from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(rest)}}


# --- the checks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Everything that a matcher shows of itself."""

    allowed: frozenset[int]
    complete: bool
    stop: StopReason
    forced: tuple[int, ...]


def allowed_ids(matcher: Matcher, facts: World) -> frozenset[int]:
    """The ids that `fill` allows; rows beside the filled one stay as they were."""
    bitmask = allocate_bitmask(3, facts.vocab_size)
    matcher.fill(bitmask, 1)
    assert (bitmask[[0, 2]] == -1).all(), "fill wrote into another row"
    bits = bitmask_to_bool(bitmask, bitmask.shape[1] * 32)[1]
    assert not bits[facts.vocab_size :].any(), "fill allows ids past the vocabulary"
    return frozenset(bits.nonzero()[0].tolist())


def state(matcher: Matcher, facts: World) -> State:
    """What a matcher shows, taken without changing it."""
    return State(
        allowed_ids(matcher, facts), matcher.is_complete(), matcher.stop_reason(), tuple(matcher.forced_tokens())
    )


def check_state(matcher: Matcher, facts: World, rng: random.Random, ended: bool) -> State:
    """Check one position; the matcher is left as it was."""
    before = state(matcher, facts)
    eos = frozenset(facts.eos_ids)
    for token_id in range(-1, facts.vocab_size + 3):
        valid = matcher.validate_tokens([token_id])
        assert valid == (token_id in before.allowed), f"fill and validate_tokens disagree about token {token_id}"
    assert before.allowed <= set(facts.token_bytes) | eos, "padding or a special token is allowed"
    assert before.allowed & eos == (eos if before.complete else frozenset()), "end of sequence and is_complete disagree"
    onward = before.allowed - eos
    assert bool(onward) == (before.stop is StopReason.NOT_STOPPED), "stop_reason and the mask disagree"
    if not onward and not ended:
        assert before.stop is (StopReason.COMPLETE if before.complete else StopReason.DEAD_END)
    if ended:
        assert before.stop is StopReason.EOS
    check_forced(matcher, facts, before)
    for token_id in rng.sample(range(facts.vocab_size), 8):
        if token_id not in before.allowed:
            assert not matcher.accept(token_id), f"accept takes token {token_id}, which the mask forbids"
    assert state(matcher, facts) == before, "a look, or a refused token, changed the matcher"
    return before


def check_forced(matcher: Matcher, facts: World, before: State) -> None:
    """Forced tokens are allowed, and nothing else could have been written."""
    if not before.forced:
        return
    forced = list(before.forced)
    assert not before.complete, "a token is forced where the text may end"
    assert matcher.validate_tokens(forced) == len(forced), "a forced token is not allowed"
    text = b"".join(facts.token_bytes[token_id] for token_id in forced)
    for token_id in before.allowed:
        other = facts.token_bytes[token_id]
        assert text.startswith(other) or other.startswith(text), f"token {token_id} contradicts the forced tokens"


def check_walk(grammar: CompiledGrammar, facts: World, rng: random.Random, max_steps: int = 24) -> list[int]:
    """A random walk with a check at each position, then rollbacks, clones and a replay along it.

    Returns:
        The accepted ids; the walk ends early where nothing but the end can follow.
    """
    matcher = grammar.matcher()
    states = [check_state(matcher, facts, rng, ended=False)]
    path: list[int] = []
    ended = False
    while len(path) < max_steps and states[-1].allowed:
        # The sparse ids (end, merges) are taken more often than a uniform draw would.
        choice = sorted(states[-1].allowed)
        token_id = choice[-1 - rng.randrange(min(4, len(choice)))] if rng.random() < 0.5 else rng.choice(choice)
        assert matcher.accept(token_id), f"accept refuses token {token_id}, which the mask allows"
        path.append(token_id)
        ended = ended or token_id in facts.eos_ids
        states.append(check_state(matcher, facts, rng, ended))
        if ended and rng.random() < 0.7:
            break
    fresh = grammar.matcher()
    assert fresh.validate_tokens(path) == len(path), "validate_tokens refuses an accepted path"
    assert fresh.validate_tokens([*path, -1]) == len(path), "validate_tokens goes past a token that does not exist"
    assert state(fresh, facts) == states[0], "validate_tokens changed the matcher"
    at = len(path)
    for _ in range(4):
        back = rng.randint(0, at)
        matcher.rollback(back)
        at -= back
        assert state(matcher, facts) == states[at], f"rollback({back}) does not restore position {at}"
        twin = matcher.clone()
        onward = rng.randint(at, len(path))
        for token_id in path[at:onward]:
            assert twin.accept(token_id), "a clone refuses what its original accepted"
        assert state(twin, facts) == states[onward], "a clone goes another way"
        assert state(matcher, facts) == states[at], "a clone moved its original"
        for token_id in path[at:onward]:
            assert matcher.accept(token_id), "after rollback an accepted token is refused"
        at = onward
        assert state(twin, facts) == states[at], "the original moved its clone"
    matcher.rollback(at)
    try:
        matcher.rollback(1)
    except ValueError:
        pass
    else:
        raise AssertionError("rollback past the start raises no ValueError")
    assert state(matcher, facts) == states[0], "a refused rollback changed the matcher"
    return path


def check_language(grammar: CompiledGrammar, facts: World, words: Sequence[str], others: Sequence[str]) -> None:
    """Each of `words` is accepted in its canonical tokens and complete, none of `others` is."""
    for word in [*words, *others]:
        token_ids = facts.encode(word)
        matcher = grammar.matcher()
        taken = matcher.validate_tokens([*token_ids, facts.eos_ids[0]])
        assert (taken > len(token_ids)) == (word in words), f"{word!r}: {taken} of {len(token_ids)} tokens and the end"


# --- the reference ----------------------------------------------------------------------------------------------------


class ReferenceGrammar:
    """A finite language by its list of words."""

    def __init__(self, words: Sequence[str], facts: World, kind: type[ReferenceMatcher] | None = None) -> None:
        self.words = [word.encode("utf-8") for word in words]
        self.facts = facts
        self.kind = kind or ReferenceMatcher

    def matcher(self) -> ReferenceMatcher:
        return self.kind(self, [])


class ReferenceMatcher:
    """Keeps the accepted ids and works everything out from them, each time."""

    def __init__(self, grammar: ReferenceGrammar, accepted: list[int]) -> None:
        self.grammar = grammar
        self.accepted = accepted

    def text(self) -> bytes:
        return b"".join(self.grammar.facts.token_bytes.get(token_id, b"") for token_id in self.accepted)

    def follows(self, token_id: int) -> bool:
        if token_id in self.grammar.facts.eos_ids:
            return self.is_complete()
        more = self.grammar.facts.token_bytes.get(token_id)
        if more is None or any(token_id in self.grammar.facts.eos_ids for token_id in self.accepted):
            return False
        return any(word.startswith(self.text() + more) for word in self.grammar.words)

    def fill(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = 0
        for token_id in range(self.grammar.facts.vocab_size):
            if self.follows(token_id):
                word, bit = divmod(token_id, 32)
                bitmask[row].view("uint32")[word] |= 1 << bit

    def accept(self, token_id: int) -> bool:
        if not self.follows(token_id):
            return False
        self.accepted.append(token_id)
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        scout = type(self)(self.grammar, list(self.accepted))
        taken = 0
        while taken < len(token_ids) and scout.accept(token_ids[taken]):
            taken += 1
        return taken

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > len(self.accepted):
            raise ValueError(num_tokens)
        del self.accepted[len(self.accepted) - num_tokens :]

    def clone(self) -> Matcher:
        return type(self)(self.grammar, list(self.accepted))

    def forced_tokens(self) -> list[int]:
        rest = [word[len(self.text()) :] for word in self.grammar.words if word.startswith(self.text())]
        if self.is_complete() or len(rest) != 1:
            return []
        try:
            return self.grammar.facts.encode(rest[0].decode("utf-8"))
        except UnicodeDecodeError:
            return []

    def is_complete(self) -> bool:
        return self.text() in self.grammar.words

    def stop_reason(self) -> StopReason:
        if any(token_id in self.grammar.facts.eos_ids for token_id in self.accepted):
            return StopReason.EOS
        if any(self.follows(token_id) for token_id in self.grammar.facts.token_bytes):
            return StopReason.NOT_STOPPED
        return StopReason.COMPLETE if self.is_complete() else StopReason.DEAD_END
