"""Inputs of encoder calls that wait, and which of them are computed together.

Owns the order: calls take turns, and an input whose turn it is takes along those nearest to it in length, of whatever
call, because what fills texts up to the longest is computed for nothing. Used by the core of an encoder (`encoder.py`)
alone. An input is looked at when it comes and when it goes, however many others wait: a step costs what it takes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from sgl.runtime.text.wordpiece import EncoderText


class QueuedCall:
    """A message that is being computed.

    Args:
        request: its number.
        texts: its inputs.

    Attributes:
        rows: what came of them, by their place.
        waiting: those that wait, by their length, in order.
    """

    def __init__(self, request: int, texts: Sequence[EncoderText]) -> None:
        self.request = request
        self.texts = texts
        self.rows: dict[int, bytes] = {}
        self.waiting: dict[int, deque[int]] = {}
        for index, text in enumerate(texts):
            self.waiting.setdefault(len(text.ids), deque()).append(index)


class EncoderQueue:
    """The calls with inputs that wait."""

    def __init__(self) -> None:
        self._num_inputs = 0
        self._turns: OrderedDict[QueuedCall, None] = OrderedDict()
        self._by_length: dict[int, OrderedDict[QueuedCall, None]] = {}
        self._lengths: list[int] = []
        """Those that wait, in order; no more than the model takes tokens."""

    def __len__(self) -> int:
        return self._num_inputs

    def add(self, call: QueuedCall) -> None:
        """A call joins behind the others."""
        self._turns[call] = None
        for length, indexes in call.waiting.items():
            self._num_inputs += len(indexes)
            if length not in self._by_length:
                insort(self._lengths, length)
                self._by_length[length] = OrderedDict()
            self._by_length[length][call] = None

    def drop(self, call: QueuedCall) -> None:
        """Nothing of a call waits any more."""
        for length in list(call.waiting):
            self._num_inputs -= len(call.waiting[length])
            self._forget(call, length)

    def take(self, max_tokens: int) -> list[tuple[QueuedCall, int]]:
        """Inputs for one step: one of the call whose turn it is, and of all calls those nearest to it in length, its
        own first, while all of them filled up to the longest are at most `max_tokens`. At least one."""
        turn = next(iter(self._turns))
        self._turns.move_to_end(turn)
        taken: list[tuple[QueuedCall, int]] = []
        longest = 0
        for length in self._nearest(next(iter(turn.waiting))):
            longest = max(longest, length)
            while calls := self._by_length.get(length):
                if taken and longest * (len(taken) + 1) > max_tokens:
                    return taken
                call = turn if turn in calls else next(iter(calls))
                taken.append((call, self._pop(call, length)))
        return taken

    def _nearest(self, first: int) -> Iterator[int]:
        """The lengths that wait, the nearest to `first` first; they may go while this goes on."""
        low = high = first
        yield first
        while True:
            shorter, longer = bisect_left(self._lengths, low) - 1, bisect_right(self._lengths, high)
            if shorter < 0 and longer == len(self._lengths):
                return
            if longer == len(self._lengths) or (
                shorter >= 0 and first - self._lengths[shorter] <= self._lengths[longer] - first
            ):
                low = self._lengths[shorter]
                yield low
            else:
                high = self._lengths[longer]
                yield high

    def _pop(self, call: QueuedCall, length: int) -> int:
        """The first input of this length."""
        self._num_inputs -= 1
        index = call.waiting[length].popleft()
        if not call.waiting[length]:
            self._forget(call, length)
        return index

    def _forget(self, call: QueuedCall, length: int) -> None:
        """No input of this length waits in a call."""
        del call.waiting[length], self._by_length[length][call]
        if not self._by_length[length]:
            del self._by_length[length]
            self._lengths.remove(length)
        if not call.waiting:
            del self._turns[call]
