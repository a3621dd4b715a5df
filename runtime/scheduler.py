"""Decides what each step computes.

Owns the waiting and running requests, and through `paging` and `pins`, which nobody else calls, every page and every
live sequence. Does not own programs, token ids or sampling. `schedule` builds the plan of one step, `process` takes its
result. All calls come from the engine core's thread.

Order of side effects in `schedule`, per request: match the tree from where the sequence stands -> find pages (from what
does not run, then from a running request that is put back) -> publish the chunk's whole pages in the tree -> add the
chunk. Publishing before the forward is what makes two requests of one step share a prefix: a layer
writes all keys and values before any attention reads them. If the forward then fails, `reset` drops every page.

A plan *flies* from `schedule` to `process`. While one does, the next may be planned (`foresees`): a row that draws then
goes on with a token that is `UNKNOWN` as yet, which the plan takes from where the step before draws it
(`Chunk.follows`); a row whose request may be over with what flies (its last token, scores) is left out. Between the two
calls, once the plan before is processed, `settle` says how each row draws by what is known then. What a row computed
for nothing, since its request ended or took another token than the drawn one, is taken back: the slot is free, and
counters are as if it had not been planned. Nothing is put back while a plan flies: `foresees` denies the next one then.

Rows that decode may carry drafts (`sgl.runtime.speculation`): guesses behind their known tokens, on pages that are
free again unless the guess was right. A row with drafts is left out of the next plan while its own flies. Drafts take
what a step has left, and pages that nobody needs: they never put a request back.

Progress: the request admitted first is never put back; a request that could not even run alone is refused by `add`.
Laws after each step: `free + cached + held == total`, and `prompt == cached + prefill` for each request.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Set

import msgspec

from sgl.errors import NeverFits, PromptTooLong, QueueFull
from sgl.lang.graph import Sampling
from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.estimate import OutputEstimate
from sgl.runtime.failures import internal_error
from sgl.runtime.masks import MaskFiller
from sgl.runtime.paging import Outlook, Paging
from sgl.runtime.pins import Pins
from sgl.runtime.plan import NOBODY, UNKNOWN, Chunk, SampleSpec, ScoreSpec, StepPlan, StepResult
from sgl.runtime.policies import victim
from sgl.runtime.radix import RadixNode
from sgl.runtime.sequence import Owner, Request, Sequence
from sgl.runtime.speculation.carry import Tail, Tails, goes_on
from sgl.runtime.speculation.drafter import Draft, Drafter
from sgl.runtime.speculation.verify import right_path, take
from sgl.runtime.stats import Stats
from sgl.runtime.waiting import WaitingQueue

_ANY = SampleSpec(sampling=Sampling(temperature=0.0), seed=0, position=0, output_ids=[])
"""How a row draws that is not known yet, and one that nobody wants any more."""


class _Flight:
    """A plan whose result is not here: its requests by sequence, as far as they still want it."""

    def __init__(self, plan: StepPlan, requests: dict[int, Request]) -> None:
        self.plan = plan
        self.requests = requests
        self.starts = {chunk.sequence: chunk.start for chunk in plan.chunks}
        self.settled: StepPlan | None = None
        """The plan with how its rows draw, once that is known; then `num_settled` rows are wanted."""
        self.num_settled = 0


class Scheduler:
    """Continuous batching with chunked prefill over a shared prefix tree.

    Args:
        config: page size, pool, batch and chunk bounds.
        stats: counters to write.
        masks: fills the token masks of a plan while it is computed; none are filled without.
        on_end: told of each request that ended, however it did.
        drafter: guesses tokens of rows that decode.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        stats: Stats,
        limits: Limits = DEFAULT_LIMITS,
        *,
        masks: MaskFiller | None = None,
        on_end: Callable[[Request], None] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.stats = stats
        self.page_size = config.page_size
        self.paging = Paging(config, stats, self._outlook)
        self.pins = Pins(self.paging, self, max_tokens=config.max_pinned_tokens, num_pages=config.num_pages)
        self.waiting = WaitingQueue(config.schedule_policy, self._cached_prefix, seed=config.random_seed)
        self.running: list[Request] = []
        self._on_end = on_end
        self._masks = masks
        self.drafter = drafter
        self._estimate = OutputEstimate(config.schedule_conservativeness)
        self._rows_left: dict[bool, int] = {}
        self._flights: list[_Flight] = []  # oldest first; at most two
        self._follows: dict[int, int] = {}  # by sequence, while a plan is made: see `Chunk.follows`
        self._held: set[int] = set()  # sequences that the plan leaves out until the one before it is processed
        self._tails = Tails()
        self._is_short = False  # a row of the last plan found no page, and nothing could be put back
        stats.pages_total = config.num_pages

    # --- sequences: the commands of a program run ---

    def new_sequence(
        self, namespace: CacheKey, token_ids: Iterable[int] = (), *, owner: Owner | None = None, shared_len: int = 0
    ) -> Sequence:
        """A sequence without pages.

        Args:
            owner: knows when it will be used again.
            shared_len: how many of its tokens it has from another sequence; what follows is of no use to others.
        """
        sequence = self.paging.new(namespace, token_ids)
        sequence.owner, sequence.forked_at = owner, shared_len
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """A sequence with the same ids, standing on the same pages. Nothing is copied but ids and page numbers."""
        return self.paging.fork(parent)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens from `length` on; pages up to there are kept."""
        self.paging.truncate(sequence, length)

    def release(self, sequence: Sequence) -> None:
        """The sequence is used no more; what it computed becomes cache."""
        self.paging.release(sequence)

    def num_cached_behind(self, sequence: Sequence, tails: Iterable[tuple[int, ...]]) -> list[int]:
        """How many tokens of each of `tails` are cached behind those of `sequence`."""
        return self.paging.num_cached_behind(sequence, tails)

    def drop_namespace(self, namespace: CacheKey) -> None:
        """Free what a private namespace cached."""
        self.paging.drop(namespace)

    @property
    def step(self) -> int:
        """How many steps were scheduled so far."""
        return self.paging.step

    # --- requests ---

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: the prompt leaves no room in the context.
            NeverFits: prompt and output need more tokens than the pool holds.
            QueueFull: as many programs as `max_queue` wait for their first step, and this one is not among them.
        """
        config = self.config
        self._check_queue(request)
        room = 1 if request.generation is not None else 0
        if request.prompt_len + room > config.context_len:
            raise PromptTooLong(
                f"the prompt has {request.prompt_len} tokens; the context holds {config.context_len}, output included",
                hint="shorten the prompt, or use a model with a longer context",
                prompt_tokens=request.prompt_len,
                context_len=config.context_len,
            )
        self._check_fits(request)
        request.sequence.priority = max(request.sequence.priority, request.priority)
        if request.generation is not None:
            request.take_forced(request.generation.force())
        request.account_found(0, min(request.sequence.num_computed, request.reusable_len))
        self.waiting.add(request)
        self._tails.came(request)
        request.queued = True
        self.stats.requests += 1

    def largest_need(self) -> int:
        """Pages that the largest request that runs or waits needs, alone."""
        return max((self._needed_pages(request) for request in (*self.running, *self.waiting)), default=0)

    def abort(self, requests: Iterable[Request]) -> None:
        """Take requests out, whatever phase they are in; their counters are kept."""
        for request in requests:
            if request.done or not request.queued:
                continue
            request.done = True
            self._take_out(request)
            self._settle(request)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.waiting or self.running)

    # --- the step ---

    def foresees(self) -> bool:
        """Whether the next step can be planned while one flies: not where requests may have to be put back."""
        return not self._is_short and self._preempting() is None

    def schedule(self) -> StepPlan:
        """The next step: running requests first, decoding ones before prefilling ones, then waiting ones."""
        budget = self.config.chunked_prefill_size
        planned: dict[int, Chunk] = {}
        self._tails.clear()
        self._look_past_flight()
        # Scored rows that this step may still have: of prompts (False), and of options of selects (True).
        self._rows_left = {False: self.limits.max_logit_rows, True: self.limits.max_choices}
        self.paging.begin_step()
        if self.drafter is not None:
            self.drafter.begin_step(sum(request.decodes for request in self.running))
        self._preempt()
        for request in sorted(self.running, key=_urgency):
            if budget <= 0:
                break
            # Else it was put back, to make room for one before it.
            if request.running and request.sequence.id not in self._held:
                budget -= self._plan(request, budget, planned)
        self._admit(budget, planned)
        if self.drafter is not None:
            self._add_drafts(self.drafter, planned)
        chunks = tuple(planned.values())
        masks = self._masks.start(chunks) if self._masks is not None and not self._flights else None
        plan = StepPlan(chunks=chunks, copies=self.paging.take_copies(), masks=masks)
        self._take_off(plan)
        return plan

    def _look_past_flight(self) -> None:
        """Let the rows of the plan that flies go on with the tokens that it draws, or wait for it."""
        self._follows, self._held = {}, set()
        self._is_short = False
        if not self._flights:
            return
        flight = self._flights[-1]
        waits = self._waits_to_draft(flight)
        num_drawn = 0
        for chunk in flight.plan.chunks:
            draws = num_drawn
            num_drawn += 0 if chunk.sample is None else 1 + len(chunk.checks)
            request = flight.requests.get(chunk.sequence)
            if request is None:
                continue
            sequence = request.sequence
            generation = request.generation if chunk.sample is not None else None
            if chunk.scores or chunk.num_drafts or request.has_scores_left or (waits and generation is not None):
                self._held.add(sequence.id)
            elif generation is not None and not generation.ends_next:
                self._follows[sequence.id] = draws
                sequence.token_ids.append(UNKNOWN)
            elif chunk.end == len(sequence):  # it may be over
                self._held.add(sequence.id)

    def _waits_to_draft(self, flight: _Flight) -> bool:
        """Whether all rows had better know their last tokens before they go on, since guesses begin behind them. All or
        none: a step of half the rows takes about as long as one of all. A step that prefills is not waited for."""
        chunks = flight.plan.chunks
        if self.drafter is None:
            return False
        if any(chunk.num_drafts for chunk in chunks):
            return True  # some rows wait in any case
        if any(chunk.sample is None for chunk in chunks):
            return False
        return self.drafter.waits([request for request in flight.requests.values() if request.generation is not None])

    def _take_off(self, plan: StepPlan) -> None:
        """The plan flies from now on. Tokens that are not known are in it, and in no sequence any more."""
        for request in self._flights[-1].requests.values() if self._follows else ():
            if request.sequence.id in self._follows:
                request.sequence.token_ids.pop()
        self._follows = {}
        if plan.chunks:
            planned = {chunk.sequence for chunk in plan.chunks}
            running = {request.sequence.id: request for request in self.running if request.sequence.id in planned}
            self._flights.append(_Flight(plan, running))

    def _admit(self, budget: int, planned: dict[int, Chunk]) -> None:
        """Start waiting requests in the policy's order, until tokens, rows or pages of this step are used up."""
        if not self.waiting or budget <= 0:
            return
        num_running, awaited = -1, 0
        for request in self.waiting.first(budget):  # each takes a token at least
            if num_running != len(self.running):  # the first time, or something was put back
                num_running, awaited = len(self.running), sum(map(self._awaited, self.running))
            if budget <= 0 or self._is_full(request) or not self._admissible(request, awaited):
                return
            self.waiting.admit(request)
            self.running.append(request)
            request.running = True
            self.paging.run(request.sequence)
            num_tokens = self._plan(request, budget, planned)
            if num_tokens == 0:
                return
            budget -= num_tokens
            num_running += 1
            awaited += self._awaited(request)

    def _preempt(self) -> None:
        """Put running requests back for a waiting one whose priority is higher by the threshold and has no room."""
        while not self._flights and (lowest := self._preempting()) is not None:
            self._put_back(lowest)
            self.stats.preemptions += 1

    def _preempting(self) -> Request | None:
        """The running request that gives way to a waiting one, if one does."""
        threshold = self.config.preemption_threshold
        if threshold is None or not self.waiting or not self.running:
            return None
        urgent = self.waiting.most_urgent
        lowest = min(self.running, key=lambda request: request.priority)
        if urgent.priority - lowest.priority < threshold:
            return None
        if not self._is_full(urgent) and self._admissible(urgent, sum(map(self._awaited, self.running))):
            return None
        return lowest

    def settle(self, plan: StepPlan) -> StepPlan:
        """The plan that flies, now that the one before it is processed: with how its rows draw, and the masks that
        `process` has begun.

        Rows of logits stay what they were; a chunk whose result nobody wants belongs to `NOBODY`. Without any chunk
        when that holds for all.
        """
        flight = next((flight for flight in self._flights if flight.plan is plan), None)
        if flight is None:
            return StepPlan(chunks=())
        if not flight.requests:
            self._flights.remove(flight)
            return StepPlan(chunks=())
        settled = flight.settled or self._settle_rows(flight)
        if len(flight.requests) < flight.num_settled:  # some ended by what their programs did since
            wanted = {*flight.requests, NOBODY}
            chunks = tuple(
                chunk if chunk.sequence in wanted else msgspec.structs.replace(chunk, sequence=NOBODY)
                for chunk in settled.chunks
            )
            settled = msgspec.structs.replace(settled, chunks=chunks)
        flight.plan = settled
        return settled

    def _settle_rows(self, flight: _Flight) -> StepPlan:
        """How the rows of a plan that flies draw, by what is known now; their masks are begun."""
        chunks = tuple(self._settled(chunk, flight) for chunk in flight.plan.chunks)
        masks = self._masks.start(chunks) if self._masks is not None else None
        flight.settled = StepPlan(chunks=chunks, copies=flight.plan.copies, masks=masks)
        flight.num_settled = len(flight.requests)
        return flight.settled

    def _settled(self, chunk: Chunk, flight: _Flight) -> Chunk:
        request = flight.requests.get(chunk.sequence)
        if request is None:
            sample = _ANY if chunk.sample is not None else None
            checks = (_ANY,) * len(chunk.checks)
            return msgspec.structs.replace(chunk, sequence=NOBODY, sample=sample, checks=checks, proposed=None)
        if chunk.follows is None or request.generation is None:
            return chunk
        return Chunk(
            sequence=chunk.sequence,
            token_ids=request.sequence.token_ids[chunk.start :],
            start=chunk.start,
            page_table=chunk.page_table,
            sample=request.generation.spec(),
            follows=chunk.follows,
        )

    def process(self, plan: StepPlan, result: StepResult, seconds: float = 0.0) -> list[Request]:
        """Take the result of the plan that has flown longest; the requests that got something, in the plan's order.

        Args:
            seconds: that it took, where that was measured.
        """
        if plan.carried is None:
            self.stats.forwards += 1
            if self.drafter is not None:
                self.drafter.timed(plan, seconds)
        requests: dict[int, Request] = {}  # none when everything was reset meanwhile
        if self._flights and self._flights[0].plan is plan:
            requests = self._flights.pop(0).requests
        touched = []
        first = 0  # row of logits
        for chunk, row in zip(plan.chunks, result.rows, strict=True):
            request = requests.get(chunk.sequence)
            rows = range(first, first := first + len(chunk.logit_offsets))
            if request is None:
                continue  # nobody wants it, see `_drop`
            touched.append(request)
            if row.failed is not None:
                request.failed = row.failed
                self._finish(request)
                self.paging.discard(request.sequence, chunk.start)
                continue
            for i, (score, values) in enumerate(zip(chunk.scores, row.scores, strict=True)):
                request.take_scores(chunk.start + score.offset, values, row.tops[i] if row.tops else ())
            if row.token_id is not None and request.generation is not None:
                try:
                    take(request, request.generation, chunk, row)
                except Exception as error:  # noqa: BLE001 - a token that one row cannot take is not the others' concern
                    failure = internal_error("a drawn token could not be taken", error)
                    request.failed = (failure.code, failure.message)
            if chunk.num_drafts:
                rows_of = rows if plan.carried is None else plan.carried[rows.start : rows.stop]
                self._land_drafts(request, chunk, rows_of, is_carried=plan.carried is not None)
            if request.failed is None and request.generation is not None:
                request.failed = request.generation.failed
            # More than this chunk may be planned already.
            if request.failed is not None or (chunk.end >= request.prompt_len and request.complete):
                self._finish(request)
            elif row.token_id is not None and not _is_foreseen(request, chunk, row.token_id):
                self._drop(request)
        self.running = [request for request in self.running if request.running]
        if self._flights and self._flights[0].requests:
            self._settle_rows(self._flights[0])  # masks are filled while programs go on
        return touched

    def _land_drafts(self, request: Request, chunk: Chunk, rows: abc.Sequence[int], *, is_carried: bool) -> None:
        """Keep what was computed for the drafts that were right, and what a generation that ended has left over."""
        sequence, generation = request.sequence, request.generation
        path = right_path(chunk, sequence.token_ids)
        num_right = len(path)
        end = chunk.known_end + num_right
        self.paging.gather(sequence, chunk.known_end, path)
        left_over = chunk.drafts[num_right:] if not chunk.parents else []
        goes_on = generation is not None and generation.finished and request.failed is None
        if not goes_on or request.following is None or self.page_size > 1:
            left_over = []
        if is_carried:
            self.paging.find(sequence, end, again=True)  # `advance` has put it there
        else:
            self.paging.advance(sequence, end, left_over)
            request.drafted_tokens += chunk.num_drafts
            self.stats.verifications += 1
        request.account_computed(chunk.known_end, end)
        request.accepted_tokens += num_right
        if self.drafter is not None:
            self.drafter.verified(request, path)
        if left_over:
            self._tails.leave(Tail(chunk, rows, end))

    def carry(self) -> StepPlan:
        """What can be drawn from the logits of the step that was just processed: by requests that came since and begin
        where its drafts led, as if they had been in it. They take the rows of those that ended there."""
        chunks: list[Chunk] = []
        rows: list[int] = []
        requests: dict[int, Request] = {}
        for request, tail in self._tails.take():
            sequence, generation = request.sequence, request.generation
            if generation is None or self._is_full(request):
                continue
            self.waiting.admit(request)
            self.running.append(request)
            request.running = True
            request.last_step = self.step
            self.paging.run(sequence)
            self.paging.find(sequence, len(sequence), again=True)
            request.account_computed(request.accounted, sequence.num_computed)
            if sequence.num_computed < len(sequence):
                continue  # the cache has lost some of it: an ordinary step computes the rest
            request.accepted_tokens += max(0, len(sequence) - tail.end)
            chunk, own = goes_on(request, generation, tail)
            chunks.append(chunk)
            rows.extend(own)
            requests[sequence.id] = request
        masks = self._masks.start(chunks) if self._masks is not None else None
        plan = StepPlan(chunks=tuple(chunks), masks=masks, carried=tuple(rows))
        if chunks:
            self._flights.append(_Flight(plan, requests))
        return plan

    def reset(self) -> int:
        """Drop every page of every sequence and the whole cache: what a failed step may have left is not trusted."""
        self._flights.clear()
        self.pins.lose(unpin=True)
        num_pages = self.paging.reset()
        self.pins.recompute()
        return num_pages

    def rebuild(self, dead: Set[int]) -> None:
        """Forget the sequences `dead` with their requests, and begin with an empty pool and tree: what keeps them did
        not work. Other requests compute again what they had."""
        for request in [request for request in (*self.running, *self.waiting) if request.sequence.id in dead]:
            request.done = True
            self._take_out(request)
        self._flights.clear()
        self.pins.lose(unpin=False)
        self.paging.rebuild(dead)
        self.pins.recompute()

    def flush(self) -> int:
        """Drop every cached page that no live sequence stands on; how many there were."""
        return self.paging.flush()

    def gauge(self, *, counted: bool = True) -> None:
        """Bring the gauges in `stats` up to date (see `Paging.gauge`)."""
        self.paging.gauge(counted=counted)
        stats = self.stats
        stats.pages_pinned = self.paging.tree.num_pinned
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)

    # --- inside ---

    def _check_queue(self, request: Request) -> None:
        """Refuse what comes to a full door. A program that is let in has all its branches let in."""
        program, num_waiting = request.program, self.waiting.num_at_door
        if num_waiting < self.limits.max_queue:
            return
        if program is None or not (program.started or self.waiting.is_at_door(program)):
            raise QueueFull(
                f"{num_waiting} programs wait for their first step, as many as the queue holds",
                hint="send again later, or raise max_queue",
            )

    def _check_fits(self, request: Request) -> None:
        """Refuse a request for which there would be too little room even if nothing else ran."""
        pinned = 0
        if self.pins:
            sequence = request.sequence
            pinned = self.pins.num_pages - self.pins.shared_pages(sequence.namespace, sequence.token_ids)
        if self._needed_pages(request) > self.config.num_pages - pinned:
            needed = min(request.prompt_len + request.new_tokens, self.config.context_len)
            what, shorter = (
                f"{request.prompt_len} prompt and {request.new_tokens} new tokens need",
                "lower max_new_tokens",
            )
            if not request.new_tokens:  # a prefix, a prompt that is only scored, or a select with its options
                what, shorter = f"a prompt of {request.prompt_len} tokens needs", "shorten the prompt"
            raise NeverFits(
                f"{what} {needed} tokens of KV cache; the whole pool holds {self.config.pool_tokens}"
                + (f", of which {pinned * self.page_size} are pinned" if pinned else ""),
                hint=f"{shorter}, or raise max_total_tokens",
                needed_tokens=needed,
                pool_tokens=self.config.pool_tokens,
            )

    def _needed_pages(self, request: Request) -> int:
        """Pages of the request's prompt and of all that it may generate."""
        return -(-min(request.prompt_len + request.new_tokens, self.config.context_len) // self.page_size)

    def _plan(self, request: Request, budget: int, planned: dict[int, Chunk]) -> int:
        """Add the request's next chunk, of at most `budget` tokens, to `planned`; its number of tokens.

        0 when there is no room: the request was put back, or keeps what it has until the next step.
        """
        if request.decodes:
            return self._plan_token(request, planned)
        sequence = request.sequence
        length = len(sequence)
        source, num_copied = self._find(request)
        found = sequence.num_computed
        start = found + num_copied
        end = min(length, start + budget)
        scored: list[int] = []
        if request.has_scores_left:
            scored = request.unscored(start, end)
            rows_left = self._rows_left[request.score_only]
            if len(scored) > rows_left:
                end = scored[rows_left]
                scored = scored[:rows_left]
                if end == start:
                    return 0
        missing = -(-end // self.page_size) - len(sequence.pages)
        if missing > 0:
            if not self._make_room(missing, request, planned):
                return 0
            self.paging.grow(sequence, missing, source, num_copied)
            request.account_found(found, start)
        self._rows_left[request.score_only] -= len(scored)
        request.account_computed(start, end)
        request.last_step = self.step
        if (program := request.program) is not None and not program.started:
            self.waiting.start(program, request.priority)
        self.paging.write(sequence, start, end)
        if start < request.prompt_len and not self.paging.is_known(sequence):
            self.paging.publish(sequence, end)
        follows = self._follows.get(sequence.id)
        generation = request.generation if end == length else None
        sample = _ANY if follows is not None else None
        if generation is not None and not generation.finished and follows is None:
            sample = generation.spec()
        scores = tuple(
            ScoreSpec(offset=position - start, token_ids=request.scores[position], top=request.top)
            for position in scored
        )
        planned[sequence.id] = Chunk(
            sequence=sequence.id,
            token_ids=sequence.token_ids[start:end],
            start=start,
            page_table=sequence.pages.view,
            sample=sample,
            scores=scores,
            follows=follows,
        )
        return end - start

    def _plan_token(self, request: Request, planned: dict[int, Chunk]) -> int:
        """As `_plan`, of a request that decodes: its last token, for which nothing has to be looked up."""
        sequence = request.sequence
        start = sequence.num_computed
        if len(sequence.pages) * self.page_size <= start:
            if not self._make_room(1, request, planned):
                return 0
            self.paging.grow(sequence, 1, -1, 0)
        request.account_computed(start, start + 1)
        request.last_step = self.step
        self.paging.write(sequence, start, start + 1)
        follows, generation = self._follows.get(sequence.id), request.generation
        sample = _ANY if follows is not None else None
        if follows is None and generation is not None and not generation.finished:
            sample = generation.spec()
        planned[sequence.id] = Chunk(
            sequence=sequence.id,
            token_ids=[sequence.token_ids[start]],
            start=start,
            page_table=sequence.pages.view,
            sample=sample,
            follows=follows,
        )
        return 1

    def _add_drafts(self, drafter: Drafter, planned: dict[int, Chunk]) -> None:
        """Give rows that decode guesses behind their known tokens, out of what the step has left."""
        left = self.config.chunked_prefill_size - sum(len(chunk.token_ids) for chunk in planned.values())
        rows = [
            (request, request.generation)
            for request in self.running
            if (chunk := planned.get(request.sequence.id)) is not None
            and request.generation is not None
            and chunk.sample is not None
            and chunk.follows is None
            and chunk.start >= request.prompt_len
        ]
        drafter.prepare(rows)
        drafts: list[tuple[Request, Draft]] = []
        for request, generation in rows:
            if left <= 0:
                break
            sequence = request.sequence
            length, num_pages = len(sequence), len(sequence.pages)
            most = min(left, drafter.most_of_row, self.config.context_len - length)
            spare = self.paging.spare(-(-(length + most) // self.page_size) - num_pages)
            draft = drafter.draft(request, generation, min(most, (num_pages + spare) * self.page_size - length))
            if draft.token_ids:
                drafts.append((request, draft))
                left -= len(draft.token_ids)
        if not drafter.pays():
            return
        for request, draft in drafts:
            sequence, num_drafts = request.sequence, len(draft.token_ids)
            chunk = planned[sequence.id]
            missing = -(-(len(sequence) + num_drafts) // self.page_size) - len(sequence.pages)
            if missing > 0:
                if self.paging.spare(missing) < missing:  # others have taken them
                    continue
                self.paging.grow(sequence, missing, -1, 0)
            planned[sequence.id] = msgspec.structs.replace(
                chunk,
                token_ids=[*chunk.token_ids, *draft.token_ids],
                page_table=sequence.pages.view,
                num_drafts=num_drafts,
                checks=draft.checks,
                num_ahead=draft.num_ahead,
                parents=draft.parents,
                proposed=draft.proposed,
            )

    def _find(self, request: Request) -> tuple[int, int]:
        """Move the request's sequence along the tree; the page that it can copy from then (see `Paging.borrowable`)."""
        sequence, limit = request.sequence, request.reusable_len
        before = sequence.num_computed
        if before > limit:
            self.paging.forget(sequence, limit)
        self.paging.find(sequence, limit, again=request.accounted > before)
        request.account_found(before, sequence.num_computed)
        return self.paging.borrowable(sequence, limit)

    def _make_room(self, num_pages: int, request: Request, planned: dict[int, Chunk]) -> bool:
        """Free pages until `num_pages` can be allocated; False when `request` has to wait.

        A request that is in the plan keeps its pages: other chunks of the plan may read what it will write.
        """
        while True:
            missing = num_pages - self.paging.pool.num_free
            if missing <= 0:
                return True
            if self.paging.reclaim(missing):
                continue
            if self._flights:
                self._is_short = True
                return False
            loser = victim(self.config.retraction_policy, self.running, planned) or request
            if loser is request is self.running[0] and planned:
                return False  # the oldest keeps its pages and waits for the others
            self._put_back(loser)
            self._estimate.retracted()
            if loser is request:
                return False

    def _put_back(self, request: Request) -> None:
        """Retract: the request's pages become cache, and it waits at the head of the queue."""
        self._drop(request)
        self.running.remove(request)
        request.running = False
        if self.drafter is not None:
            self.drafter.ended(request)
        self.paging.let_go(request.sequence, self.step)
        self.waiting.put_back(request)
        if request.prefill_tokens or request.completion_tokens:
            self.stats.retractions += 1

    def _is_full(self, request: Request) -> bool:
        """Whether the batch has no row for the request. Options of a select take none: they are gone with the step."""
        most = self.config.max_running_requests
        if request.score_only or len(self.running) < most:
            return False
        held = self._held if self._flights else ()
        return sum(not (other.score_only or other.sequence.id in held) for other in self.running) >= most

    def _admissible(self, request: Request, awaited: int) -> bool:
        """Whether there is room for the request, and for what everyone running is expected to grow by (`awaited`)."""
        if not self.running:
            return True
        node, matched = self._cached_prefix(request)
        tokens = len(request.sequence) - matched + self._growth(request) + awaited
        missing = -(-tokens // self.page_size) + _unlocked_pages(node)
        missing -= self.paging.pool.num_free + self.paging.tree.num_cached
        return missing <= 0 or missing <= self.paging.num_resting_pages - len(request.sequence.pages)

    def _awaited(self, request: Request) -> int:
        """Tokens that a running request has yet to compute, as far as can be told."""
        return len(request.sequence) - request.sequence.num_computed + self._growth(request)

    def _growth(self, request: Request) -> int:
        return self._estimate.remaining(request.completion_tokens, request.new_tokens)

    def _cached_prefix(self, request: Request) -> tuple[RadixNode, int]:
        """Where the request's cached prefix ends in the tree, and how many of its tokens are computed."""
        return self.paging.cached_prefix(request.sequence)

    def _outlook(self) -> Outlook:
        """When the waiting requests are expected to run: one takes the place of another as running ones end."""
        growth = [self._growth(request) for request in self.running]
        apart = sum(growth) / len(growth) ** 2 if growth else 1.0
        return Outlook(self.step + 1, apart, [each.sequence for each in self.waiting.first(len(self.waiting))])

    def _take_out(self, request: Request) -> None:
        """Of the queue that it is in."""
        if request.running:
            self.running.remove(request)
            request.running = False
        else:
            self.waiting.remove(request)

    def _drop(self, request: Request) -> None:
        """What flies for a request is not wanted any more: it stands where it stood before."""
        id = request.sequence.id
        for flight in self._flights:
            if flight.requests.get(id) is request:
                del flight.requests[id]
                self.paging.take_back(request.sequence, flight.starts[id])
                request.take_back(max(flight.starts[id], request.prompt_len))

    def _finish(self, request: Request) -> None:
        """End a request; `process` takes all that ended out of `running` together."""
        request.done, request.running = True, False
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Count a request that ended and leave its sequence idle, standing on shared pages."""
        self._drop(request)
        if self.drafter is not None:
            self.drafter.ended(request)
        self.stats.add(request.usage())
        if self._on_end is not None:
            self._on_end(request)
        if request.generation is not None and request.generation.finished:
            self._estimate.ended(request.completion_tokens)
        self.paging.rest(request.sequence)
        self.pins.ended(request)


def _is_foreseen(request: Request, chunk: Chunk, token_id: int) -> bool:
    """Whether a request goes on behind a chunk as was planned before its token was known: with that token alone."""
    sequence = request.sequence
    return len(sequence) == chunk.end + 1 and sequence.token_ids[-1] == token_id and not request.has_scores_left


def _unlocked_pages(node: RadixNode) -> int:
    """Cached pages on the path to `node` that would be held, and no longer evictable, if a sequence stood there."""
    pages = 0
    walk: RadixNode | None = node
    while walk is not None and walk.lock == 0:
        pages += len(walk.pages)
        walk = walk.parent
    return pages


def _urgency(request: Request) -> tuple[int, int]:
    """Fewest tokens to compute first (1 while decoding), and of equals whoever was served longest ago."""
    return len(request.sequence) - request.sequence.num_computed, request.last_step
