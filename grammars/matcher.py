"""The interface between a compiled constraint and the sampler.

Owns the two protocols that every backend implements and every test double too; `tests/support/matcher_conformance.py`
is the suite that an implementation must pass. A `Matcher` follows one sequence and has one owner, the scheduler's
process; only `fill` may run in a thread, and never while another call on the same matcher does.

Bitmask layout: int32 words, bit `i % 32` of word `i // 32` is 1 when token `i` is allowed; one row per sequence,
shape `[rows, ceil(vocab_size / 32)]`. An all-ones row allows everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Bitmask: TypeAlias = npt.NDArray[np.int32]


class StopReason(Enum):
    """Why a matcher accepts no further token."""

    NOT_STOPPED = "not_stopped"
    COMPLETE = "complete"  # the text is a full match and nothing can follow
    EOS = "eos"  # an end-of-sequence token was accepted where the grammar allowed it
    DEAD_END = "dead_end"  # no token of the vocabulary can follow, and the text is no full match
    LIMIT = "limit"  # a limit of the backend was hit


class MaskSource(Protocol):
    """What says which tokens may come next."""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the allowed next tokens into `bitmask[row]`. End-of-sequence ids are allowed when `is_complete`."""


@runtime_checkable
class Matcher(MaskSource, Protocol):
    """The state of one constraint along one sequence."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False, and no change, when the token is not allowed."""

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` from here would be accepted, one after another. No change."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""

    def clone(self) -> Matcher:
        """An independent matcher in the same state."""

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next in the canonical tokenization, the first of them where there are very many; empty
        when there is a choice. No change."""

    def is_complete(self) -> bool:
        """Whether the accepted text is a full match (more may still follow)."""

    def stop_reason(self) -> StopReason:
        """`NOT_STOPPED` while some token other than end-of-sequence may follow."""


@runtime_checkable
class CompiledGrammar(Protocol):
    """A constraint compiled for one tokenizer; immutable, shared by sequences and threads."""

    def matcher(self) -> Matcher:
        """A new matcher at the start."""


def prepare(matchers: Sequence[MaskSource], num_threads: int, bitmask: Bitmask, rows: Sequence[int]) -> None:
    """Have engines that can compute many rows at once do that, in up to `num_threads` threads, in `bitmask` where each
    matcher's row is one of `rows`; `fill` of that row has nothing left to do then.

    Nothing changes that a matcher shows. A matcher's class takes part by a static method `prepare` of this signature; a
    matcher around another one, which its attribute `inner` names, leaves it to that one. Unless it says that the row is
    the same (`has_row_of_inner`), the inner one's row is -1: it is computed elsewhere, since `fill` writes another.
    """
    groups: dict[Any, tuple[list[MaskSource], list[int]]] = {}
    for matcher, row in zip(matchers, rows, strict=True):
        inner, is_same = _innermost(matcher)
        if hasattr(type(inner), "prepare"):
            members, places = groups.setdefault(type(inner), ([], []))
            members.append(inner)
            places.append(row if is_same else -1)
    for kind, (members, places) in groups.items():
        kind.prepare(members, num_threads, bitmask, places)


def is_prepared_with_others(matcher: MaskSource) -> bool:
    """Whether `prepare` does anything for a matcher."""
    return hasattr(type(_innermost(matcher)[0]), "prepare")


def _innermost(matcher: MaskSource) -> tuple[MaskSource, bool]:
    """The matcher at the bottom, and whether its row is that of the one on top."""
    is_same = True
    while (inner := getattr(matcher, "inner", None)) is not None:
        is_same = is_same and getattr(matcher, "has_row_of_inner", False)
        matcher = inner
    return matcher, is_same


class _Stepping(Protocol):
    """The part of a matcher that `num_acceptable` needs."""

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...


def num_acceptable(matcher: _Stepping, token_ids: Sequence[int]) -> int:
    """`Matcher.validate_tokens` by trying: what was accepted is taken back, also when `accept` raises."""
    taken = 0
    try:
        for token_id in token_ids:
            if not matcher.accept(token_id):
                break
            taken += 1
    finally:
        matcher.rollback(taken)
    return taken


def bitmask_words(vocab_size: int) -> int:
    """Words in a bitmask row.

    Example:
        >>> bitmask_words(33)
        2
    """
    return (vocab_size + 31) // 32


def allocate_bitmask(rows: int, vocab_size: int) -> Bitmask:
    """An all-ones bitmask of shape `[rows, bitmask_words(vocab_size)]`."""
    return np.full((rows, bitmask_words(vocab_size)), -1, dtype=np.int32)


def bitmask_to_bool(bitmask: Bitmask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """The same mask as booleans, shape `[rows, vocab_size]`.

    Example:
        >>> bitmask_to_bool(np.array([[5]], dtype=np.int32), 3).tolist()
        [[True, False, True]]
    """
    bits = np.unpackbits(bitmask.view(np.uint8), axis=-1, bitorder="little")
    return bits[:, :vocab_size].astype(np.bool_)
