"""The scheduler with its real tree, pool and pins, on a memory that remembers which token each slot holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.machines import walks
from support.scripted import small_config

from sgl.errors import InvalidParameter, NeverFits, PinBudgetExceeded, PromptTooLong, SglError
from sgl.lang.graph import Sampling
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.eviction import POLICIES
from sgl.runtime.plan import RowResult, SampleSpec, StepPlan, StepResult
from sgl.runtime.radix import RadixNode
from sgl.runtime.scheduler import Scheduler
from sgl.runtime.sequence import NOTHING_FORCED, ForcedRun, Request, Sequence
from sgl.runtime.stats import Stats

CONTEXT = 200
pick = st.integers(0, 1000)
ids_of = st.builds(
    lambda heads, tail: [id for head in heads for id in [head] * 7] + tail,
    st.lists(st.integers(0, 1), max_size=8),
    st.lists(st.integers(2, 4), max_size=10),
)


class Drawn:
    """A generation that draws a fixed token so often, and knows which is the last unless its length is odd."""

    failed: tuple[str, str] | None = None
    num_reasoning_tokens = 0

    def __init__(self, length: int) -> None:
        self.left = length
        self.is_foreseen = length % 2 == 0

    def spec(self) -> SampleSpec:
        return SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[])

    def push(self, row: RowResult) -> int | None:
        self.left -= 1
        return row.token_id

    def force(self) -> ForcedRun:
        return NOTHING_FORCED

    @property
    def finished(self) -> bool:
        return self.left == 0

    @property
    def ends_next(self) -> bool:
        return self.left == 1 and self.is_foreseen


class Foretold:
    """An owner that says what it was told to say."""

    def __init__(self, when: float | None) -> None:
        self.when = when

    def next_use(self, sequence: Sequence) -> float | None:
        return self.when


class SchedulerMachine(RuleBasedStateMachine):
    """Every command in any order; after each, both laws, the locks, and what the slots hold."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.requests: list[Request] = []
        self.pins: set[int] = set()
        self.num_pins = 0
        self.time = 0.0
        self.flight: tuple[StepPlan, list[RowResult]] | None = None

    @initialize(
        page_size=st.sampled_from([1, 16, 64]),
        eviction=st.sampled_from(["program"] * 5 + list(POLICIES)),
        conservativeness=st.sampled_from([1.0, 0.01, 0.01]),
        queue=st.sampled_from(["program", "fcfs", "lpm", "dfs-weight", "lof"]),
        retraction=st.sampled_from(["latest", "length", "priority"]),
        chunk=st.sampled_from([3, 16, 100]),
        tokens=st.sampled_from([256, 256, 512]),
        ahead=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        eviction: str,
        conservativeness: float,
        queue: str,
        retraction: str,
        chunk: int,
        tokens: int,
        ahead: bool,
    ) -> None:
        config = small_config(
            page_size=page_size,
            num_pages=tokens // page_size,
            context_len=CONTEXT,
            chunked_prefill_size=chunk,
            max_running_requests=6,
            schedule_policy=queue,
            schedule_conservativeness=conservativeness,
            retraction_policy=retraction,
            radix_eviction_policy=eviction,
            radix_eviction_policy_config={"threshold": 40, "next_prompt_estimate": 8} if eviction == "tlru" else {},
            max_pinned_tokens=tokens // 2,
        )
        self.stats = Stats()
        self.scheduler = Scheduler(config, self.stats)
        self.slots = np.full(tokens, -1, dtype=np.int64)
        self.page_size = page_size
        self.ahead = ahead

    # --- commands ---

    @precondition(lambda self: len(self.live) < 12)
    @rule(
        several=st.lists(ids_of, min_size=1, max_size=4),
        salt=st.sampled_from(["", "", "a"]),
        when=st.sampled_from([None, 3.0, 40.0, math.inf]),
        new_tokens=st.integers(0, 110),
    )
    def submit(self, several: list[list[int]], salt: str, when: float | None, new_tokens: int) -> None:
        for ids in several:
            sequence = self.scheduler.new_sequence(CacheKey(salt=salt), ids, owner=Foretold(when))
            self.live.append(sequence)
            self._request(sequence, new_tokens)

    @rule(at=pick, ids=ids_of.map(lambda ids: ids[:20]))
    def append(self, at: int, ids: list[int]) -> None:
        for sequence in self._resting(at):
            sequence.token_ids.extend(ids)

    @rule(
        at=pick,
        new_tokens=st.integers(0, 30),
        priority=st.sampled_from([0, 0, 0, 1, 20]),
        score=st.booleans(),
    )
    def request(self, at: int, new_tokens: int, priority: int, score: bool) -> None:
        for sequence in self._resting(at):
            self._request(sequence, new_tokens, priority, score=score)

    def _request(self, sequence: Sequence, new_tokens: int, priority: int = 0, *, score: bool = False) -> None:
        if not sequence.token_ids:
            return
        request = Request(
            sequence,
            generation=Drawn(new_tokens) if new_tokens else None,
            scores={len(sequence) // 2: (1, 2)} if score else None,
            new_tokens=new_tokens,
            priority=priority,
        )
        try:
            self.scheduler.add(request)
        except (NeverFits, PromptTooLong):
            assert not request.queued
        else:
            self.requests.append(request)

    @precondition(lambda self: len(self.live) < 12)
    @rule(at=pick)
    def fork(self, at: int) -> None:
        for sequence in self._resting(at):
            self.live.append(self.scheduler.fork(sequence))
            assert self.live[-1].token_ids == sequence.token_ids

    @rule(at=pick, length=st.integers(0, 100))
    def truncate(self, at: int, length: int) -> None:
        for sequence in self._resting(at):
            self.scheduler.truncate(sequence, length)

    @rule(at=pick)
    def release(self, at: int) -> None:
        for sequence in self._resting(at):
            self.live.remove(sequence)
            self.scheduler.release(sequence)
            self.scheduler.release(sequence)  # twice is no error

    @rule(at=pick)
    def abort(self, at: int) -> None:
        if self.requests:
            request = self.requests.pop(at % len(self.requests))
            self.scheduler.abort([request])
            self.scheduler.abort([request])
            assert request.done

    @rule(ids=ids_of, salt=st.sampled_from(["", "a"]), ttl=st.sampled_from([2.0, math.inf]))
    def pin(self, ids: list[int], salt: str, ttl: float) -> None:
        self.num_pins += 1
        number = self.num_pins
        try:
            self.scheduler.pins.pin(number, CacheKey(salt=salt), ids, self._pin_done(number), self.time + ttl)
        except (PinBudgetExceeded, NeverFits, PromptTooLong, InvalidParameter):
            assert len(self.scheduler.pins) <= len(self.pins)
        else:
            self.pins.add(number)

    @rule(at=pick)
    def unpin(self, at: int) -> None:
        if self.pins:
            self.scheduler.pins.unpin(sorted(self.pins)[at % len(self.pins)])

    @rule()
    def expire(self) -> None:
        self.time += 1
        self.scheduler.pins.expire(self.time)

    @rule(num=st.integers(1, 20), fail=st.sampled_from([None, None, None, None, 0, 1]))
    def steps(self, num: int, fail: int | None) -> None:
        for _ in range(num - 1):
            self._step(None)
            self.both_laws()
        self._step(fail)

    def _step(self, fail: int | None) -> None:
        if self.flight is not None and not self.scheduler.foresees():
            self._land()
        plan = self.scheduler.schedule()
        if not plan.chunks:
            assert self.flight or not self.scheduler.has_work, "there is work, and nothing is planned"
        self._compute(plan)
        if self.flight is not None:
            self._land()
            plan = self.scheduler.settle(plan)
        if plan.chunks:
            self.flight = plan, [self._row(plan, i, failed=i == fail) for i in range(len(plan.chunks))]
            if not self.ahead:
                self._land()

    def _land(self) -> None:
        """Process what flies."""
        assert self.flight is not None
        plan, rows = self.flight
        self.flight = None
        for request in self.scheduler.process(plan, StepResult(rows=tuple(rows))):
            if request.done:
                self._ended(request)

    @rule(really=st.integers(0, 7))
    def fail_step(self, really: int) -> None:
        """What the core does when a forward raises: those in it end, and nothing of the cache is trusted."""
        if really:
            return
        if self.flight is not None:
            self._land()
        plan = self.scheduler.schedule()
        planned = {chunk.sequence for chunk in plan.chunks}
        failed = [request for request in self.requests if request.sequence.id in planned]
        self.scheduler.abort(failed)
        self.requests = [request for request in self.requests if request not in failed]
        self.scheduler.reset()
        self.slots[:] = -1
        self.scheduler.gauge()
        assert self.stats.pages_held == self.stats.pages_cached == 0

    @rule(really=st.integers(0, 7))
    def flush(self, really: int) -> None:
        if really:
            return
        self.scheduler.flush()
        self.scheduler.gauge()
        assert self.stats.pages_cached == 0

    # --- what must hold ---

    @invariant()
    def both_laws(self) -> None:
        self.scheduler.gauge()
        self.stats.check()
        for request in self.requests:
            assert request.cached_tokens + request.prefill_tokens == min(request.accounted, request.prompt_len)

    @invariant()
    def locks_are_the_sequences(self) -> None:
        tree, locks = self.scheduler.paging.tree, dict[RadixNode, int]()
        standing = [sequence.node for sequence in self._all_sequences() if sequence.node is not None]
        for walk in standing:
            while walk is not None:
                locks[walk] = locks.get(walk, 0) + 1
                walk = walk.parent
        for node in tree.nodes():
            assert node.lock - node.pins == locks.get(node, 0)

    @invariant()
    def pages_hold_what_their_sequences_say(self) -> None:
        for sequence in self._all_sequences():
            length = sequence.num_computed
            assert len(sequence.pages) * self.page_size >= length >= sequence.num_shared
            assert sequence.num_shared % self.page_size == 0
            if length:
                assert self._held(sequence.pages.view, 0, length) == sequence.token_ids[:length]

    @invariant()
    def pins_keep_their_budget(self) -> None:
        assert self.scheduler.paging.tree.num_pinned * self.page_size <= self.scheduler.config.max_pinned_tokens

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work and self.flight is None:
                break
            self._step(None)
        assert not self.scheduler.has_work, "everything ends"
        for sequence in self.live:
            self.scheduler.release(sequence)
        for number in sorted(self.pins):
            self.scheduler.pins.unpin(number)
        self.both_laws()
        assert self.stats.pages_held == self.stats.pages_pinned == 0

    # --- inside ---

    def _resting(self, at: int) -> list[Sequence]:
        """One sequence without a request, if there is one."""
        busy = {request.sequence.id for request in self.requests}
        free = [sequence for sequence in self.live if sequence.id not in busy]
        return [free[at % len(free)]] if free else []

    def _all_sequences(self) -> list[Sequence]:
        return list(self.scheduler.paging._live.values())

    def _pin_done(self, number: int) -> Callable[[int, SglError | None], None]:
        def done(num_tokens: int, error: SglError | None) -> None:
            assert (num_tokens > 0) != (error is not None)
            if error is not None:
                self.pins.discard(number)

        return done

    def _ended(self, request: Request) -> None:
        if request in self.requests:
            self.requests.remove(request)
        usage = request.usage()
        assert usage.prompt_tokens == usage.cached_tokens + usage.prefill_tokens
        if request.failed is None:
            assert usage.prompt_tokens == request.prompt_len
            assert set(request.logprobs) == set(request.scores)

    def _compute(self, plan: StepPlan) -> None:
        size = self.page_size
        sources = [copy.source * size + i for copy in plan.copies for i in range(copy.num_tokens)]
        targets = [copy.target * size + i for copy in plan.copies for i in range(copy.num_tokens)]
        assert len(set(targets)) == len(targets)
        self.slots[targets] = self.slots[sources]
        written: dict[int, int] = {}
        by_id = {sequence.id: sequence for sequence in self._all_sequences()}
        for chunk in plan.chunks:
            token_ids = [self._drawn()[chunk.follows]] if chunk.follows is not None else chunk.token_ids
            for position, token in zip(range(chunk.start, chunk.end), token_ids, strict=True):
                slot = int(chunk.page_table[position // size]) * size + position % size
                assert written.setdefault(slot, token) == token, "two chunks write different tokens to one slot"
                self.slots[slot] = token
        for chunk in plan.chunks:
            expected = by_id[chunk.sequence].token_ids[: chunk.end]
            if chunk.follows is not None:
                expected = [*expected, self._drawn()[chunk.follows]]
            assert self._held(chunk.page_table, 0, chunk.end) == expected, "a chunk reads what is not its own"

    def _drawn(self) -> list[int]:
        """What the step that flies draws."""
        assert self.flight is not None
        plan, rows = self.flight
        return [row.token_id or 0 for chunk, row in zip(plan.chunks, rows, strict=True) if chunk.sample is not None]

    def _held(self, pages: np.ndarray, start: int, end: int) -> list[int]:
        positions = np.arange(start, end)
        held: list[int] = self.slots[
            pages[positions // self.page_size] * self.page_size + positions % self.page_size
        ].tolist()
        return held

    def _row(self, plan: StepPlan, i: int, *, failed: bool) -> RowResult:
        chunk = plan.chunks[i]
        if failed:
            return RowResult(sequence=chunk.sequence, failed=("invalid_logits", "NaN"))
        token = 5 + chunk.end % 3 if chunk.sample is not None else None
        return RowResult(
            sequence=chunk.sequence, token_id=token, scores=tuple((0.0,) * len(s.token_ids) for s in chunk.scores)
        )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = walks(50, 50)
