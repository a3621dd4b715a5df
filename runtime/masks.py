"""Token masks of a step's constrained rows, filled beside the forward.

Owns the threads that fill and the bitmask of one step. The scheduler starts a `MaskJob` with each plan that draws under
a constraint, since what is drawn is known before anything is computed; the sampler waits for it. In between nobody
else touches the matchers of the plan: tokens are accepted when the step is processed.

Threads for masks and threads of the model are together no more than the cores (`resolution.resolve`). Where that leaves
none, the job runs in `wait`, in as many threads as the model has, which have nothing to do then. Rows that their engine
can compute together are one task, in threads of the engine's own (`sgl.grammars.matcher.prepare`). A matcher that
raises fails its row alone.

A chunk with drafts draws under one matcher at several places: the matcher goes along the drafts, filling a row at each
place, and back again, also between the branches of a tree. That is one task, since nobody else may touch the matcher
meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sgl.grammars.matcher import Bitmask, MaskSource, Matcher, bitmask_words, is_prepared_with_others, prepare
from sgl.runtime.failures import internal_error
from sgl.runtime.plan import Chunk

_SWITCH_S = 1e-4
"""A mask job is a millisecond, and Python's own interval, for which the step loop would keep its lock, is five."""
_ROWS_PER_TASK = 4
"""A mask takes tens of microseconds, about as long as waking a thread."""


class Masks(NamedTuple):
    """Allowed tokens, int32 `[constrained rows, words]` in the order of the plan, and by row why there are none."""

    words: Bitmask
    failures: dict[int, tuple[str, str]]


class MaskRun(NamedTuple):
    """The masks of one chunk: of what may come at `matcher`'s place, and after each of `drafts`, which may be a tree
    (see `Chunk.parents`)."""

    matcher: MaskSource
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


class MaskJob:
    """The masks of one step on their way.

    Args:
        runs: of the constrained chunks; a run has `1 + len(drafts)` rows, one after another.
        vocab_size: columns of a row.
        pool: fills while the model computes; `None` leaves it to `wait`.
        num_threads: that an engine may use for rows which it computes together.
    """

    def __init__(
        self, runs: Sequence[MaskRun], vocab_size: int, pool: ThreadPoolExecutor | None, num_threads: int = 1
    ) -> None:
        self._runs = runs
        self._rows = list(accumulate((1 + len(run.drafts) for run in runs), initial=0))  # where each run begins
        self._num_threads = num_threads
        self._words: Bitmask = np.zeros((self._rows[-1], bitmask_words(vocab_size)), dtype=np.int32)
        self._failures: dict[int, tuple[str, str]] = {}
        self._tasks: list[Future[None]] = []
        self._done = False
        if pool is not None:
            together: list[int] = []
            alone: list[int] = []
            for place, run in enumerate(runs):
                (together if is_prepared_with_others(run.matcher) else alone).append(place)
            tasks = [together] if together else []
            tasks += [alone[first : first + _ROWS_PER_TASK] for first in range(0, len(alone), _ROWS_PER_TASK)]
            self._tasks = [pool.submit(self._fill, places) for places in tasks]

    def wait(self) -> Masks:
        """The masks, once they are all there. A second call returns the same."""
        if not self._done:
            if self._tasks:
                for task in self._tasks:
                    task.result()
            else:
                self._fill(range(len(self._runs)))
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

    def _fill(self, places: Sequence[int]) -> None:
        """The runs at `places`."""
        try:
            prepare(
                [self._runs[place].matcher for place in places],
                self._num_threads,
                self._words,
                [self._rows[place] for place in places],
            )
        except Exception as error:  # noqa: BLE001 - then each row is computed by itself, and fails by itself
            internal_error("masks could not be computed together", error)
        for place in places:
            self._fill_run(self._runs[place], self._rows[place])

    def _fill_run(self, run: MaskRun, first: int) -> None:
        """Rows from `first` on; those behind a draft that the constraint refuses allow nothing."""
        row, taken = first, 0
        depths: list[int | None] = []  # of the drafts, as far as the constraint takes them
        try:
            run.matcher.fill(self._words, first)
            if not run.drafts or not isinstance(run.matcher, Matcher):
                return
            for place, draft in enumerate(run.drafts):
                parent = run.parents[place] if run.parents else place - 1
                depth = depths[parent] if parent >= 0 else 0
                depths.append(None)
                if depth is None:
                    continue
                if depth < taken:
                    run.matcher.rollback(taken - depth)
                    taken = depth
                if run.matcher.accept(draft):
                    depths[place] = taken = depth + 1
                    row = first + 1 + place
                    run.matcher.fill(self._words, row)
        except Exception as error:  # noqa: BLE001 - a constraint that breaks ends the row that has it
            failure = internal_error("a constraint's mask could not be computed", error)
            self._failures[row] = (failure.code, failure.message)
        if taken and isinstance(run.matcher, Matcher):
            run.matcher.rollback(taken)


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
        runs = [
            MaskRun(
                chunk.sample.matcher, tuple(chunk.drafts[: len(chunk.checks)]) if chunk.checks else (), chunk.parents
            )
            for chunk in chunks
            if chunk.sample is not None and chunk.sample.matcher is not None
        ]
        if not runs:
            return None
        if self._pool is None and self._num_threads:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="sgl-masks")
            # Engines fill without Python's lock; to begin and to end, a thread waits for it no longer than this.
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        return MaskJob(runs, self._vocab_size, self._pool, self._num_threads or self._model_threads)

    def close(self) -> None:
        """End the threads; a filler that is garbage ends them, too."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
