"""Token masks of a step's constrained rows, filled beside the forward.

Owns the threads that fill and the bitmask of one step. The scheduler starts a `MaskJob` with each plan that draws under
a constraint, since what is drawn is known before anything is computed; the sampler waits for it. In between nobody
else touches the matchers of the plan: tokens are accepted when the step is processed.

Threads for masks and threads of the model are together no more than the cores (`config.resolve`). Where that leaves
none, the job runs in `wait`, in as many threads as the model has, which have nothing to do then. Rows that their engine
can compute together are one task, in threads of the engine's own (`sgl.grammars.matcher.prepare`). A matcher that
raises fails its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from sgl.grammars.matcher import Bitmask, MaskSource, bitmask_words, is_prepared_with_others, prepare
from sgl.runtime.failures import internal_error
from sgl.runtime.plan import Chunk

_ROWS_PER_TASK = 4
"""A mask takes tens of microseconds, about as long as waking a thread."""


class Masks(NamedTuple):
    """Allowed tokens, int32 `[constrained rows, words]` in the order of the plan, and by row why there are none."""

    words: Bitmask
    failures: dict[int, tuple[str, str]]


class MaskJob:
    """The masks of one step on their way.

    Args:
        matchers: one per constrained row.
        vocab_size: columns of a row.
        pool: fills while the model computes; `None` leaves it to `wait`.
        num_threads: that an engine may use for rows which it computes together.
    """

    def __init__(
        self, matchers: Sequence[MaskSource], vocab_size: int, pool: ThreadPoolExecutor | None, num_threads: int = 1
    ) -> None:
        self._matchers = matchers
        self._num_threads = num_threads
        self._words: Bitmask = np.zeros((len(matchers), bitmask_words(vocab_size)), dtype=np.int32)
        self._failures: dict[int, tuple[str, str]] = {}
        self._tasks: list[Future[None]] = []
        self._done = False
        if pool is not None:
            together = [row for row, matcher in enumerate(matchers) if is_prepared_with_others(matcher)]
            alone = sorted({*range(len(matchers))}.difference(together))
            tasks = [together] if together else []
            tasks += [alone[first : first + _ROWS_PER_TASK] for first in range(0, len(alone), _ROWS_PER_TASK)]
            self._tasks = [pool.submit(self._fill, rows) for rows in tasks]

    def wait(self) -> Masks:
        """The masks, once they are all there. A second call returns the same."""
        if not self._done:
            if self._tasks:
                for task in self._tasks:
                    task.result()
            else:
                self._fill(range(len(self._matchers)))
            self._done = True
        return Masks(self._words, self._failures)

    def rows(self, places: Sequence[int | None]) -> Bitmask:
        """Masks of the constrained rows at `places`, one after another; of `None`, one that allows everything, and of a
        row whose mask is missing, one that allows nothing."""
        words, failures = self.wait()
        if not failures and list(places) == list(range(len(words))):
            return words
        own: Bitmask = np.full((len(places), words.shape[1]), -1, dtype=np.int32)
        for row, place in enumerate(places):
            if place is not None:
                own[row] = 0 if place in failures else words[place]
        return own

    def _fill(self, rows: Sequence[int]) -> None:
        try:
            prepare([self._matchers[row] for row in rows], self._num_threads)
        except Exception as error:  # noqa: BLE001 - then each row is computed by itself, and fails by itself
            internal_error("masks could not be computed together", error)
        for row in rows:
            try:
                self._matchers[row].fill(self._words, row)
            except Exception as error:  # noqa: BLE001 - a constraint that breaks ends the row that has it
                failure = internal_error("a constraint's mask could not be computed", error)
                self._failures[row] = (failure.code, failure.message)


class MaskFiller:
    """Starts mask jobs.

    Args:
        vocab_size: ids that the tokenizer knows.
        num_threads: threads beside the model's; made when the first constraint comes.
        model_threads: of the model, which wait for the masks where there are no others.
    """

    def __init__(self, vocab_size: int, num_threads: int = 0, model_threads: int = 1) -> None:
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._model_threads = model_threads
        self._pool: ThreadPoolExecutor | None = None

    def start(self, chunks: Sequence[Chunk]) -> MaskJob | None:
        """Begin to fill the masks of the chunks that draw under a constraint; `None` when there are none."""
        specs = [chunk.sample for chunk in chunks if chunk.sample is not None]
        matchers = [spec.matcher for spec in specs if spec.matcher is not None]
        if not matchers:
            return None
        if self._pool is None and self._num_threads:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="sgl-masks")
        return MaskJob(matchers, self._vocab_size, self._pool, self._num_threads or self._model_threads)

    def close(self) -> None:
        """End the threads; a filler that is garbage ends them, too."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
