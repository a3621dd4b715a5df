"""What matchers over a library's own matcher have in common.

Owns the base class of the matchers of llguidance and xgrammar: it counts tokens and ends, and keeps the bitmask row of
the position. End of sequence is kept here and never shown to the library; so is rolling back further than what was
accepted. A backend says how the library consumes, takes back, and computes a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sgl.grammars.choices import Vocabulary, write_row
from sgl.grammars.matcher import Bitmask, num_acceptable


class EngineMatcher(ABC):
    """Follows one sequence. `_num_tokens` counts what the library has consumed, `_num_eos` what came after."""

    def __init__(self, vocabulary: Vocabulary, num_tokens: int = 0, num_eos: int = 0) -> None:
        self._vocabulary = vocabulary
        self._num_tokens = num_tokens
        self._num_eos = num_eos
        self._row: Bitmask | None = None
        self._written: tuple[int, int] | None = None  # the bitmask (its id) and the row that `_row` is

    @abstractmethod
    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""

    @abstractmethod
    def _consume(self, token_id: int) -> bool:
        """Have the library take a token that is no end; False, and no change, when it is not allowed."""

    @abstractmethod
    def _take_back(self, num_tokens: int) -> None:
        """Have the library take back tokens that it has consumed."""

    @abstractmethod
    def _compute_row(self) -> Bitmask:
        """The library's bitmask row of this position, without ends; shape `[bitmask_words(vocab_size)]`."""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `Matcher.fill`."""
        if self._written is not None and self._written == (id(bitmask), row) and not self._num_eos:
            return
        write_row(bitmask, row, self._allowed())

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        if token_id in self._vocabulary.eos_ids:
            if not self.is_complete():
                return False
            self._num_eos += 1
            return True
        if self._num_eos or not self._consume(token_id):
            return False
        self._num_tokens += 1
        self._moved()
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """See `Matcher.validate_tokens`."""
        return num_acceptable(self, token_ids)

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher.rollback`.

        Raises:
            ValueError: more tokens than were accepted.
        """
        if not 0 <= num_tokens <= self._num_tokens + self._num_eos:
            raise ValueError(f"rollback of {num_tokens} tokens; {self._num_tokens + self._num_eos} were accepted")
        ends = min(num_tokens, self._num_eos)
        self._num_eos -= ends
        if num_tokens > ends:
            self._take_back(num_tokens - ends)
            self._num_tokens -= num_tokens - ends
            self._moved()

    def _moved(self) -> None:
        """The position is another one."""
        self._row = self._written = None

    def _allowed(self) -> Bitmask:
        """The bitmask row of this position, computed once; shape `[bitmask_words(vocab_size)]`."""
        if self._num_eos:
            return self._vocabulary.eos_row
        if self._row is None:
            self._row = self._with_ends(self._compute_row())
        return self._row

    def _with_ends(self, row: Bitmask) -> Bitmask:
        """The library's row with the ends where the text is complete, in place."""
        if self.is_complete():
            row |= self._vocabulary.eos_row
        return row
