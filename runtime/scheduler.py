"""Decides what each step computes, and owns every page while doing so.

Owns the waiting and running requests, the page pool, the radix tree and the set of live sequences. Does not own
programs, token ids or sampling. `schedule` builds the plan of one step, `process` takes its result; between the two
nothing here changes. All calls come from the engine core's thread.

Order of side effects in `schedule`, per request: match the tree from where the sequence stands -> find pages (evict
cached ones, then let go of idle states, then put back the request admitted last) -> publish the chunk's whole pages in
the tree -> add the chunk. Publishing before the forward is what makes two requests of one step share a prefix: a layer
writes all keys and values before any attention reads them. If the forward then fails, `reset` drops every page.

Progress: the request admitted first is never put back; a request that could not even run alone is refused by `add`.
Laws after each step: `free + cached + held == total`, and `prompt == cached + prefill` for each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set

import numpy as np

from sgl.errors import NeverFits, PromptTooLong, QueueFull
from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.estimate import OutputEstimate
from sgl.runtime.failures import internal_error
from sgl.runtime.plan import Chunk, ScoreSpec, StepPlan, StepResult
from sgl.runtime.policies import MAX_SKIPS, QueuePolicy, victim
from sgl.runtime.pool import PagePool
from sgl.runtime.radix import RadixNode, RadixTree
from sgl.runtime.sequence import Request, Sequence
from sgl.runtime.stats import Stats


class Scheduler:
    """Continuous batching with chunked prefill over a shared prefix tree.

    Args:
        config: page size, pool, batch and chunk bounds.
        stats: counters to write.
    """

    def __init__(self, config: ResolvedConfig, stats: Stats, limits: Limits = DEFAULT_LIMITS) -> None:
        self.config = config
        self.limits = limits
        self.stats = stats
        self.page_size = config.page_size
        self.pool = PagePool(config.num_pages)
        self.tree = RadixTree(config.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._live: dict[int, Sequence] = {}
        self._idle: dict[int, Sequence] = {}  # live, locked in the tree, and without a request; oldest first
        self._next_id = 0
        self._steps = 0
        self._num_admitted = 0
        self._policy = QueuePolicy(config.schedule_policy, self._cached_prefix, seed=config.random_seed)
        self._estimate = OutputEstimate(config.schedule_conservativeness)
        stats.pages_total = config.num_pages

    # --- sequences: the commands of a program run ---

    def new_sequence(self, namespace: str, token_ids: Iterable[int] = ()) -> Sequence:
        """A sequence without pages."""
        self._next_id += 1
        sequence = Sequence(self._next_id, namespace, list(token_ids))
        self._live[sequence.id] = sequence
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """A sequence with the same ids, standing on the same pages. Nothing is copied but ids and page numbers."""
        self._publish(parent, parent.num_computed)
        child = self.new_sequence(parent.namespace, parent.token_ids)
        if parent.node is not None:
            child.node = parent.node
            child.num_shared = child.num_computed = parent.num_shared
            child.pages = parent.pages[: parent.num_shared // self.page_size]
            self.tree.lock(child.node)
            self._idle[child.id] = child
        return child

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens from `length` on; pages up to there are kept."""
        del sequence.token_ids[length:]
        self._forget(sequence, length)
        if sequence.pages:
            self._idle[sequence.id] = sequence

    def release(self, sequence: Sequence) -> None:
        """The sequence is used no more; what it computed becomes cache."""
        if self._live.pop(sequence.id, None) is None:
            return
        self._let_go(sequence)

    def drop_namespace(self, namespace: str) -> None:
        """Free what a private namespace cached."""
        self.pool.free(self.tree.drop(namespace))

    # --- requests ---

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: the prompt leaves no room in the context.
            NeverFits: prompt and output need more tokens than the pool holds.
            QueueFull: too many requests are waiting.
        """
        config = self.config
        if len(self.waiting) >= self.limits.max_queue:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting, as many as the queue holds", hint="send again later"
            )
        room = 1 if request.generation is not None else 0
        if request.prompt_len + room > config.context_len:
            raise PromptTooLong(
                f"the prompt has {request.prompt_len} tokens; the context holds {config.context_len}, output included",
                hint="shorten the prompt, or use a model with a longer context",
                prompt_tokens=request.prompt_len,
                context_len=config.context_len,
            )
        needed = min(request.prompt_len + request.new_tokens, config.context_len)
        if -(-needed // self.page_size) > config.num_pages:
            raise NeverFits(
                f"{request.prompt_len} prompt and {request.new_tokens} new tokens need {needed} tokens of KV cache; "
                f"the whole pool holds {config.pool_tokens}",
                hint="lower max_new_tokens, or raise max_total_tokens",
                needed_tokens=needed,
                pool_tokens=config.pool_tokens,
            )
        self._idle.pop(request.sequence.id, None)
        request.account_found(0, min(request.sequence.num_computed, request.prompt_len - 1))
        request.due = self._num_admitted + len(self.waiting) + MAX_SKIPS
        self.waiting.append(request)
        request.queued = True
        self.stats.requests += 1

    def abort(self, requests: Iterable[Request]) -> None:
        """Take requests out, whatever phase they are in; their counters are kept."""
        for request in requests:
            if request.done or not request.queued:
                continue
            request.done = True
            if request in self.running:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self._settle(request)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.waiting or self.running)

    # --- the step ---

    def schedule(self) -> StepPlan:
        """The next step: running requests first, decoding ones before prefilling ones, then waiting ones."""
        budget = self.config.chunked_prefill_size
        planned: dict[int, Chunk] = {}
        self._steps += 1
        self._preempt()
        for request in sorted(self.running, key=_urgency):
            if budget <= 0:
                break
            if request in self.running:  # else it was put back, to make room for one before it
                budget -= self._plan(request, budget, planned)
        self._admit(budget, planned)
        return StepPlan(chunks=tuple(planned.values()))

    def _admit(self, budget: int, planned: dict[int, Chunk]) -> None:
        """Start waiting requests in the policy's order, until tokens, rows or pages of this step are used up."""
        if not self.waiting or budget <= 0 or len(self.running) >= self.config.max_running_requests:
            return
        for request in self._policy.order(self.waiting, self._num_admitted):
            if budget <= 0 or len(self.running) >= self.config.max_running_requests or not self._admissible(request):
                return
            self.waiting.remove(request)
            self.running.append(request)
            self._num_admitted += 1
            if request.program is not None:
                request.program.started = True
            num_tokens = self._plan(request, budget, planned)
            if num_tokens == 0:
                return
            budget -= num_tokens

    def _preempt(self) -> None:
        """Put running requests back for a waiting one whose priority is higher by the threshold and has no room."""
        threshold = self.config.preemption_threshold
        if threshold is None or not self.waiting:
            return
        urgent = max(self.waiting, key=lambda request: request.priority)
        while self.running:
            lowest = min(self.running, key=lambda request: request.priority)
            if urgent.priority - lowest.priority < threshold:
                return
            if len(self.running) < self.config.max_running_requests and self._admissible(urgent):
                return
            self._put_back(lowest)
            self.stats.preemptions += 1

    def process(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take a step's result; the requests that got something, in the plan's order."""
        self.stats.forwards += 1
        by_sequence = {request.sequence.id: request for request in self.running}
        touched = []
        for chunk, row in zip(plan.chunks, result.rows, strict=True):
            request = by_sequence.get(chunk.sequence)
            if request is None:
                continue  # aborted while the step ran
            touched.append(request)
            if row.failed is not None:
                request.failed = row.failed
                self._finish(request)
                self._discard(request.sequence, chunk.start)
                continue
            for score, values in zip(chunk.scores, row.scores, strict=True):
                request.logprobs[chunk.start + score.offset] = values
            if row.token_id is not None and request.generation is not None:
                request.completion_tokens += 1
                try:
                    token_id = request.generation.push(row)
                except Exception as error:  # noqa: BLE001 - a token that one row cannot take is not the others' concern
                    failure = internal_error("a drawn token could not be taken", error)
                    request.failed = (failure.code, failure.message)
                    self._finish(request)
                    continue
                if token_id is not None:
                    request.sequence.token_ids.append(token_id)
                if request.generation.finished:
                    request.failed = request.generation.failed
                    self._finish(request)
            elif request.sequence.num_computed >= request.prompt_len and request.generation is None:
                self._finish(request)
        return touched

    def reset(self) -> int:
        """Drop every page of every sequence and the whole cache: what a failed step may have left is not trusted."""
        for sequence in self._live.values():
            self._let_go(sequence, keep=False)
        return self.flush()

    def rebuild(self, dead: Set[int]) -> None:
        """Forget the sequences `dead` with their requests, and begin with an empty pool and tree: what keeps them did
        not work. Other requests compute again what they had."""
        for queue in (self.running, self.waiting):
            for request in [request for request in queue if request.sequence.id in dead]:
                request.done = True
                queue.remove(request)
        for id in dead:
            self._live.pop(id, None)
        self._idle.clear()
        self.pool = PagePool(self.config.num_pages)
        self.tree = RadixTree(self.page_size)
        for sequence in self._live.values():
            sequence.node = None
            sequence.pages = []
            sequence.num_shared = sequence.num_computed = 0

    def flush(self) -> int:
        """Drop every cached page that no live sequence stands on; how many there were."""
        pages = self.tree.evict(self.tree.num_cached)
        self.pool.free(pages)
        return len(pages)

    def gauge(self) -> None:
        """Bring the gauges in `stats` up to date. Held pages are counted from the sequences, not derived."""
        stats = self.stats
        own = sum(len(s.pages) - s.num_shared // self.page_size for s in self._live.values() if s.pages)
        stats.pages_free = self.pool.num_free
        stats.pages_cached = self.tree.num_cached
        stats.pages_held = self.tree.num_locked + own
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)

    # --- inside ---

    def _plan(self, request: Request, budget: int, planned: dict[int, Chunk]) -> int:
        """Add the request's next chunk, of at most `budget` tokens, to `planned`; its number of tokens.

        0 when there is no room: the request was put back, or keeps what it has until the next step.
        """
        sequence = request.sequence
        length = len(sequence)
        before = sequence.num_computed
        # What must be computed to get its logits may not be skipped by a match.
        limit = min([length - 1, *(position for position in request.scores if position not in request.logprobs)])
        if before > limit:
            self._forget(sequence, limit)
        if sequence.num_computed == sequence.num_shared:
            self._match(sequence, limit)
        request.account_found(before, sequence.num_computed)
        start = sequence.num_computed
        end = min(length, start + budget)
        missing = -(-end // self.page_size) - len(sequence.pages)
        if missing > 0 and not self._make_room(missing, request, planned):
            return 0
        if missing > 0:
            sequence.pages.extend(self.pool.allocate(missing))
        request.account_computed(start, end)
        request.last_step = self._steps
        sequence.num_computed = end
        if start < request.prompt_len and not self._is_known(sequence):
            self._publish(sequence, end)
        sample = request.generation.spec() if request.generation is not None and end == length else None
        scores = tuple(
            ScoreSpec(offset=position - start, token_ids=ids)
            for position, ids in sorted(request.scores.items())
            if start <= position < end
        )
        planned[sequence.id] = Chunk(
            sequence=sequence.id,
            token_ids=sequence.token_ids[start:end],
            start=start,
            page_table=np.array(sequence.pages, dtype=np.int32),
            sample=sample,
            scores=scores,
        )
        return end - start

    def _forget(self, sequence: Sequence, length: int) -> None:
        """Give up the computed tokens from `length` on; the ids stay."""
        if sequence.num_computed <= length:
            return
        if sequence.num_shared <= length:
            keep = -(-length // self.page_size)
            self.pool.free(sequence.pages[keep:])
            del sequence.pages[keep:]
            sequence.num_computed = length
        else:
            self._let_go(sequence)
            self._match(sequence, length)

    def _is_known(self, sequence: Sequence) -> bool:
        """Whether the tree goes on with the sequence's next page: then others may be reading that page, and this
        sequence, which computes it again for its logits, must write to a page of its own."""
        start = sequence.num_shared
        node = sequence.node or self.tree.root(sequence.namespace)
        page = np.array(sequence.token_ids[start : start + self.page_size], dtype=np.int32)
        return page.tobytes() in node.children

    def _match(self, sequence: Sequence, limit: int) -> None:
        """Move a sequence without own pages along the tree, at most to `limit` tokens."""
        start = sequence.num_shared
        if limit - start < self.page_size:
            return
        node = sequence.node or self.tree.root(sequence.namespace)
        tokens = np.array(sequence.token_ids[start:limit], dtype=np.int32)
        end, pages = self.tree.match(node, tokens)
        if len(pages) == 0:
            return
        self.tree.lock(end)
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
        sequence.node = end
        sequence.pages.extend(pages.tolist())
        sequence.num_shared += len(pages) * self.page_size
        sequence.num_computed = sequence.num_shared

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Hand the whole pages up to `end` to the tree; where it has the tokens already, its pages are taken over."""
        start = sequence.num_shared
        end -= end % self.page_size
        if end <= start:
            return
        first, last = start // self.page_size, end // self.page_size
        node = sequence.node or self.tree.root(sequence.namespace)
        tokens = np.array(sequence.token_ids[start:end], dtype=np.int32)
        own = np.array(sequence.pages[first:last], dtype=np.int32)
        end_node, pages, spare = self.tree.extend(node, tokens, own)
        self.tree.lock(end_node)
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
        sequence.node = end_node
        sequence.num_shared = end
        sequence.pages[first:last] = pages.tolist()
        self.pool.free(spare)

    def _let_go(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give up a sequence's pages: whole ones become cache (unless not `keep`), the rest is free."""
        if keep:
            self._publish(sequence, sequence.num_computed)
        self.pool.free(sequence.pages[sequence.num_shared // self.page_size :])
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
        sequence.node = None
        sequence.pages = []
        sequence.num_shared = sequence.num_computed = 0
        self._idle.pop(sequence.id, None)

    def _make_room(self, num_pages: int, request: Request, planned: dict[int, Chunk]) -> bool:
        """Free pages until `num_pages` can be allocated; False when `request` has to wait.

        A request that is in the plan keeps its pages: other chunks of the plan may read what it will write.
        """
        while True:
            missing = num_pages - self.pool.num_free
            if missing <= 0:
                return True
            freed = self.tree.evict(missing)
            self.pool.free(freed)
            if len(freed) >= missing:
                return True
            if self._idle:
                self._let_go(next(iter(self._idle.values())))
                continue
            queued = next((other.sequence for other in reversed(self.waiting) if other.sequence.pages), None)
            if queued is not None:
                self._let_go(queued)  # it was idle until its program went on; what it had is found or computed again
                continue
            loser = victim(self.config.retraction_policy, self.running, planned) or request
            if loser is request is self.running[0] and planned:
                return False  # the oldest keeps its pages and waits for the others
            self._put_back(loser)
            self._estimate.retracted()
            if loser is request:
                return False

    def _put_back(self, request: Request) -> None:
        """Retract: the request's pages become cache, and it waits at the head of the queue."""
        self.running.remove(request)
        self._let_go(request.sequence)
        self.waiting.appendleft(request)
        if request.prefill_tokens or request.completion_tokens:
            self.stats.retractions += 1

    def _admissible(self, request: Request) -> bool:
        """Whether there is room for the request, and for what everyone running is expected to grow by."""
        if not self.running:
            return True
        node, matched = self._cached_prefix(request)
        tokens = len(request.sequence) - matched + self._growth(request)
        for other in self.running:
            tokens += len(other.sequence) - other.sequence.num_computed + self._growth(other)
        missing = -(-tokens // self.page_size) + _unlocked_pages(node)
        missing -= self.pool.num_free + self.tree.num_cached
        if missing <= 0:
            return True
        queued = (other.sequence for other in self.waiting if other is not request)
        return missing <= sum(len(sequence.pages) for sequence in (*self._idle.values(), *queued))

    def _growth(self, request: Request) -> int:
        return self._estimate.remaining(request.completion_tokens, request.new_tokens)

    def _cached_prefix(self, request: Request) -> tuple[RadixNode, int]:
        """Where the request's cached prefix ends in the tree, and how many of its tokens are computed."""
        sequence = request.sequence
        node = sequence.node or self.tree.root(sequence.namespace)
        if sequence.num_computed > sequence.num_shared:
            return node, sequence.num_computed  # it stands on pages of its own
        tokens = np.array(sequence.token_ids[sequence.num_shared : -1], dtype=np.int32)
        node, pages = self.tree.match(node, tokens)
        return node, sequence.num_shared + len(pages) * self.page_size

    def _finish(self, request: Request) -> None:
        request.done = True
        self.running.remove(request)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Count a request that ended and leave its sequence idle, standing on shared pages."""
        self.stats.add(request.usage())
        if request.generation is not None and request.generation.finished:
            self._estimate.ended(request.completion_tokens)
        sequence = request.sequence
        if sequence.id in self._live and sequence.pages:
            self._publish(sequence, sequence.num_computed)
            self._idle[sequence.id] = sequence

    def _discard(self, sequence: Sequence, start: int) -> None:
        """Keep nothing of what a failed row wrote from `start` on."""
        node, length = sequence.node, sequence.num_shared
        self._let_go(sequence, keep=False)
        if node is not None and length > start:
            self.pool.free(self.tree.discard(node, length - start))


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
