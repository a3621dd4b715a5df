"""Which pages each live sequence stands on: the page pool and the prefix tree as one memory.

Owns the pool, the tree, the page tables of the live sequences, and the order in which memory is given back. Does not
own requests, programs or the plan. The scheduler alone calls it, and it alone calls the pool and the tree.

A sequence is *running* while the scheduler may plan it, else it *rests*: on its pages as long as there is room, then
*parked*, when its pages are cache. Room is found in the order of the next use, as far as graphs tell it: see `reclaim`.

Pages are shared whole. Where two sequences part inside a page, the later one copies the slots that it shares (page
sizes above 1 only): copies of a plan are done before anything of it is computed, so the source may be given away in the
same plan, but nothing that the plan itself computes can be copied.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Set
from itertools import islice
from typing import NamedTuple

import numpy as np

from sgl.runtime.cache_key import CacheKey
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.eviction import make_policy
from sgl.runtime.page_table import PageTable
from sgl.runtime.plan import Move, PageCopy
from sgl.runtime.pool import PagePool
from sgl.runtime.radix import RadixNode, RadixTree
from sgl.runtime.sequence import Sequence
from sgl.runtime.stats import Stats


class Outlook(NamedTuple):
    """When the waiting requests are expected to run: the first in the step `first`, the others `apart` steps each."""

    first: float
    apart: float
    queue: list[Sequence]


_HORIZON = 256
"""Waiting requests whose prefixes are protected; those behind them want the same ones, or nothing soon."""

_LOOKS_PER_STEP = 256
"""States and waiting requests whose next use is looked up per step, on average; with fewer of them, in each step."""

_MOST_NEIGHBOURS = 64
"""Sequences at one node that are looked at for a page to copy from."""


class Paging:
    """Pages of sequences.

    Args:
        config: sizes, and the eviction policy.
        stats: counters to write.
        outlook: asked, at most once per step, when the waiting requests are expected to run.
    """

    def __init__(self, config: ResolvedConfig, stats: Stats, outlook: Callable[[], Outlook]) -> None:
        self.config = config
        self.stats = stats
        self.page_size = config.page_size
        self.step = 0
        self._outlook = outlook
        self._live: dict[int, Sequence] = {}
        self._next_id = 0
        self._empty()

    def _empty(self) -> None:
        """Begin with all pages free."""
        config = self.config
        self.pool = PagePool(config.num_pages)
        policy = make_policy(config.radix_eviction_policy, config.radix_eviction_policy_config)
        self.tree = RadixTree(config.page_size, policy)
        self._resting: dict[int, Sequence] = {}  # on pages; longest at rest first
        self._parked: dict[int, Sequence] = {}  # had pages
        self._standing: dict[RadixNode, dict[int, Sequence]] = {}  # by node; kept for page sizes above 1 only
        self._givers: deque[Sequence] = deque()  # resting ones, farthest use first
        self._looked_at = self._ranked_at = -1
        self._num_looked_at = 0
        self._copies: list[PageCopy] = []
        self._moves: list[Move] = []
        self._known_slots: dict[int, int] = {}  # page that the plan writes -> leading slots that were written before

    # --- sequences ---

    def new(self, namespace: CacheKey, token_ids: Iterable[int] = ()) -> Sequence:
        """A sequence without pages."""
        self._next_id += 1
        sequence = Sequence(self._next_id, namespace, list(token_ids))
        self._live[sequence.id] = sequence
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """A sequence with the same ids, standing on the same whole pages."""
        self.publish(parent, parent.num_computed)
        child = self.new(parent.namespace, parent.token_ids)
        child.owner, child.priority, child.forked_at = parent.owner, parent.priority, len(parent)
        if parent.node is not None:
            child.num_shared = child.num_computed = parent.num_shared
            child.pages = PageTable(parent.pages.view[: parent.num_shared // self.page_size])
            self._stand(child, parent.node)
            self.rest(child)
        return child

    def release(self, sequence: Sequence) -> None:
        """The sequence is used no more; what it computed becomes cache. Idempotent."""
        if self._live.pop(sequence.id, None) is not None:
            self.let_go(sequence, math.inf)

    def is_live(self, sequence: Sequence) -> bool:
        """Whether it was made here and not released."""
        return sequence.id in self._live

    def run(self, sequence: Sequence) -> None:
        """The sequence is planned from now on; it keeps its pages."""
        self._resting.pop(sequence.id, None)
        self._parked.pop(sequence.id, None)

    def rest(self, sequence: Sequence) -> None:
        """The sequence is not planned any more, but its program may go on with it."""
        if self.is_live(sequence) and sequence.pages:
            self.publish(sequence, sequence.num_computed)
            self._parked.pop(sequence.id, None)
            sequence.rested_at = self.step
            self._resting[sequence.id] = sequence

    @property
    def num_resting_pages(self) -> int:
        """Pages under resting sequences; one that several stand on counts for each."""
        return sum(len(sequence.pages) for sequence in self._resting.values())

    # --- growing ---

    def begin_step(self) -> None:
        """A new plan is made."""
        self.step += 1
        self._known_slots.clear()

    def take_copies(self) -> tuple[PageCopy, ...]:
        """The copies that the plan needs."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def find(self, sequence: Sequence, limit: int, *, again: bool) -> None:
        """Move a sequence along the tree, at most to `limit` tokens.

        Args:
            again: it was there before and lost its pages: what it finds is no sign that others need it.
        """
        own = sequence.num_computed - sequence.num_shared
        if 0 < own < self.page_size <= limit - sequence.num_shared and self.is_known(sequence):
            self._free_own(sequence)  # part of a page, and somebody has the whole one by now
            own = 0
        if own == 0:
            self._match(sequence, limit, again=again)

    def borrowable(self, sequence: Sequence, limit: int) -> tuple[int, int]:
        """A page that begins with what the sequence needs next, and for how many tokens; `(-1, 0)` if there is none."""
        start = sequence.num_shared
        if self.page_size == 1 or sequence.num_computed > start or limit <= start:
            return -1, 0
        node = self._node(sequence)
        tokens = np.array(sequence.token_ids[start : min(limit, start + self.page_size)], dtype=np.int32)
        page, same = self.tree.similar(node, tokens)
        best, most = page, min(same, self._known_slots.get(page, same))
        for other in islice(reversed(self._standing.get(node, {}).values()), _MOST_NEIGHBOURS):
            if other.num_computed > start and other is not sequence:
                page = other.pages[start // self.page_size]
                theirs = np.array(other.token_ids[start : min(other.num_computed, start + len(tokens))], dtype=np.int32)
                differing = np.flatnonzero(theirs != tokens[: len(theirs)])
                same = int(differing[0]) if len(differing) else len(theirs)
                same = min(same, self._known_slots.get(page, same))
                if same > most:
                    best, most = page, same
        return best, most

    def grow(self, sequence: Sequence, num_pages: int, source: int, num_copied: int) -> None:
        """Give a sequence `num_pages` pages, which are there, and copy what `borrowable` found into the first."""
        sequence.pages.extend(self.pool.allocate(num_pages))
        if num_copied:
            target = sequence.pages[sequence.num_shared // self.page_size]
            self._copies.append(PageCopy(source=source, target=target, num_tokens=num_copied))
            self._known_slots[target] = 0
            self.stats.copied_tokens += num_copied
            sequence.num_computed += num_copied

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """The plan computes positions `start .. end`."""
        if self.page_size > 1:
            for position in range(start - start % self.page_size, end, self.page_size):
                page = sequence.pages[position // self.page_size]
                known = max(0, start - position)
                self._known_slots[page] = min(known, self._known_slots.get(page, known))
        sequence.num_computed = end

    def advance(self, sequence: Sequence, end: int, ahead: list[int] | None = None) -> None:
        """Of the tokens that a step computed behind the known ones, those up to `end` were right: the pages of the
        others are free again, or cache.

        Args:
            ahead: the others, if somebody may soon go on with them. Pages of one token only: of larger ones the
                sequence would have to give up the one that it stands in.
        """
        sequence.num_computed = end
        if ahead and self.page_size == 1:
            known = sequence.token_ids
            sequence.token_ids = [*known[:end], *ahead]
            sequence.num_computed = end + len(ahead)
            self.publish(sequence, sequence.num_computed)
            sequence.token_ids = known
            self.forget(sequence, end)
        else:
            self.pool.free(sequence.pages.cut(-(-end // self.page_size)).tolist())

    def gather(self, sequence: Sequence, start: int, path: list[int]) -> None:
        """Of the guesses that a step computed from position `start` on, those at `path` turned out to be the text: they
        come to lie one after another. Pages of one token change places; of larger ones, slots move (`take_moves`)."""
        if path == list(range(len(path))):
            return
        if self.page_size == 1:
            guessed = sequence.pages.view[start:]
            others = sorted(set(range(len(guessed))).difference(path))
            sequence.pages.replace(start, guessed[[*path, *others]])
            return
        slots = [self._slot(sequence, start + place) for place in range(path[-1] + 1)]
        self._moves += [Move(slots[source], slots[target]) for target, source in enumerate(path) if target != source]

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.pages[position // self.page_size] * self.page_size + position % self.page_size

    def take_moves(self) -> tuple[Move, ...]:
        """What has to be moved in the pool now, before anything else is computed: as if all at once."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def spare(self, num_pages: int) -> int:
        """How many of `num_pages` pages there are for guesses: free ones, or cached ones, which give way."""
        missing = num_pages - self.pool.num_free
        if missing > 0:
            self._look_ahead()
            self.pool.free(self.tree.evict(missing))
        return max(0, min(num_pages, self.pool.num_free))

    def is_known(self, sequence: Sequence) -> bool:
        """Whether the tree goes on with the sequence's next page: then others may be reading that page, and a sequence
        that computes it again, for its logits, must write to a page of its own."""
        start = sequence.num_shared
        page = np.array(sequence.token_ids[start : start + self.page_size], dtype=np.int32)
        return self.tree.goes_on(self._node(sequence), page)

    def publish(self, sequence: Sequence, end: int) -> None:
        """Hand the whole pages up to `end` to the tree; where it has the tokens already, its pages are taken over."""
        start = sequence.num_shared
        end -= end % self.page_size
        if end <= start:
            return
        first, last = start // self.page_size, end // self.page_size
        tokens = np.array(sequence.token_ids[start:end], dtype=np.int32)
        own = sequence.pages.view[first:last]
        node, pages, spare = self.tree.extend(self._node(sequence), tokens, own)
        self._stand(sequence, node)
        sequence.num_shared = end
        sequence.pages.replace(first, pages)
        self.pool.free(spare)

    def cached_prefix(self, sequence: Sequence) -> tuple[RadixNode, int]:
        """Where the cached prefix of a sequence ends in the tree, and how many of its tokens are computed."""
        if sequence.num_computed > sequence.num_shared:
            return self._node(sequence), sequence.num_computed  # it stands on pages of its own
        node = self._locate(sequence)
        return node, node.end

    def num_cached_behind(self, sequence: Sequence, tails: Iterable[tuple[int, ...]]) -> list[int]:
        """How many tokens of each of `tails` are cached behind those of `sequence`; nothing moves, or is used."""
        node = self._locate(sequence)
        rest = sequence.token_ids[node.end :]
        if len(rest) > self.page_size:
            return [0 for _ in tails]
        ends = (self.tree.match(node, np.array([*rest, *tail], dtype=np.int32))[0].end for tail in tails)
        return [max(0, end - len(sequence)) for end in ends]

    # --- giving back ---

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens of a resting sequence from `length` on; pages up to there are kept."""
        del sequence.token_ids[length:]
        if sequence.seen is not None and sequence.seen.end > length:
            sequence.seen = None
        self.forget(sequence, length)
        self.rest(sequence)

    def forget(self, sequence: Sequence, length: int) -> None:
        """Give up the computed tokens from `length` on; the ids stay."""
        if sequence.num_computed <= length:
            return
        if sequence.num_shared <= length:
            keep = -(-length // self.page_size)
            self.pool.free(sequence.pages.cut(keep).tolist())
            sequence.num_computed = length
        else:
            self.let_go(sequence)
            sequence.seen = None
            self._match(sequence, length, again=True)

    def let_go(self, sequence: Sequence, next_use: float | None = None, *, keep: bool = True) -> None:
        """Give up a sequence's pages: whole ones become cache (unless not `keep`), the rest is free.

        Args:
            next_use: the step in which they are expected to be needed; infinite when never.
        """
        if keep:
            self.publish(sequence, sequence.num_computed)
        self._free_own(sequence)
        node = sequence.node
        if node is not None:
            self._leave(sequence)
            if keep and next_use is not None:
                self._mark(sequence, node, next_use)
        sequence.seen = node
        sequence.pages = PageTable()
        sequence.num_shared = sequence.num_computed = 0
        self._parked.pop(sequence.id, None)
        if self._resting.pop(sequence.id, None) is not None and self.is_live(sequence):
            self._parked[sequence.id] = sequence

    def take_back(self, sequence: Sequence, start: int) -> None:
        """A step that runs writes from `start` on, and nobody wants that any more: the sequence ends there. Its pages
        may be given away at once, as a later step writes after this one."""
        if sequence.num_shared > start:
            self.discard(sequence, start)
        else:
            self.forget(sequence, start)

    def discard(self, sequence: Sequence, start: int) -> None:
        """Keep nothing of what a failed row wrote from `start` on."""
        node, length = sequence.node, sequence.num_shared
        self.let_go(sequence, keep=False)
        if node is not None and length > start:
            self.pool.free(self.tree.discard(node, length - start))

    def drop(self, namespace: CacheKey) -> None:
        """Free what a private namespace cached."""
        self.pool.free(self.tree.drop(namespace))

    def flush(self) -> int:
        """Drop every cached page; how many there were."""
        pages = self.tree.evict(self.tree.num_cached)
        self.pool.free(pages)
        return len(pages)

    def reset(self) -> int:
        """Drop every page of every sequence and the whole cache; how many pages were cached then."""
        for sequence in self._live.values():
            self.let_go(sequence, keep=False)
        self._copies.clear()
        self._moves.clear()
        return self.flush()

    def rebuild(self, dead: Set[int]) -> None:
        """Forget the sequences `dead`, and begin with an empty pool and tree."""
        for id in dead:
            self._live.pop(id, None)
        self._empty()
        for sequence in self._live.values():
            sequence.node = sequence.seen = None
            sequence.pages = PageTable()
            sequence.num_shared = sequence.num_computed = 0

    def reclaim(self, num_pages: int) -> bool:
        """One step towards `num_pages` free pages, without touching what runs; False when nothing is left.

        The order: states that will never be read again give up their pages; then cached pages go, those that nothing
        is known to need in the policy's order. A state at rest gives up its pages (they become cache, and keep their
        place in the order) before cached pages that are needed sooner than it.
        """
        self._look_ahead()
        giver = self._giver()
        if giver is None or giver.next_use < math.inf:
            freed = self.tree.evict(num_pages, giver.next_use if giver is not None else -math.inf)
            if freed:
                self.pool.free(freed)
                return True
        if giver is None:
            return False
        self.let_go(giver, giver.next_use)
        return True

    def gauge(self, *, counted: bool = True) -> None:
        """Bring the gauges in `stats` up to date.

        Args:
            counted: count held pages from the sequences, which is what the memory law is checked with. Else they are
                what is neither free nor cached, without a look at each sequence.
        """
        stats = self.stats
        stats.pages_free, stats.pages_cached = self.pool.num_free, self.tree.num_cached
        if counted:
            own = sum(len(s.pages) - s.num_shared // self.page_size for s in self._live.values() if s.pages)
            stats.pages_held = self.tree.num_locked + own
        else:
            stats.pages_held = stats.pages_total - stats.pages_free - stats.pages_cached

    # --- the future ---

    def _look_ahead(self) -> None:
        """Bring up to date what is known of next uses: only when pages are missing; of many states not in each step."""
        age = self.step - self._looked_at
        if age == 0 or age * _LOOKS_PER_STEP < self._num_looked_at:
            return
        self._looked_at = self.step
        self._foresee(self._parked.values())
        first, apart, queue = self._outlook()
        queued: set[int] = set()
        for place, sequence in enumerate(queue):
            if place < _HORIZON or sequence.pages or sequence.id in self._parked:  # nobody asks about the others
                sequence.next_use = first + place * apart
                queued.add(sequence.id)
        self._rank_givers(queued)
        self._num_looked_at = len(queue) + len(self._parked) + len(self._resting)
        if self.tree.policy.looks_ahead:
            soon = sorted(self._parked.values(), key=lambda sequence: sequence.next_use)[:_HORIZON]
            soon += [sequence for sequence in queue[:_HORIZON] if not sequence.pages]
            self.tree.expect([(s.next_use, self._locate(s)) for s in soon if s.next_use < math.inf])

    def _foresee(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.next_use = self._next_use(sequence)

    def _rank_givers(self, queued: Set[int] = frozenset()) -> None:
        """Sort the resting sequences; when `queued` ones are needed is known already."""
        self._ranked_at = self.step
        self._foresee(sequence for sequence in self._resting.values() if sequence.id not in queued)
        # Stable: of equals, the one that rests longest comes first.
        self._givers = deque(sorted(self._resting.values(), key=lambda sequence: sequence.next_use, reverse=True))

    def _next_use(self, sequence: Sequence) -> float:
        """When the sequence's program needs it. Where no graph says so, it takes as long again as it has taken."""
        expected = sequence.owner.next_use(sequence) if sequence.owner is not None else None
        return expected if expected is not None else 2 * self.step - sequence.rested_at + 1

    def _giver(self) -> Sequence | None:
        """The resting sequence that is needed last."""
        if not self._givers and self._resting and self._ranked_at != self.step:
            self._rank_givers()  # those that came to rest since
        while self._givers:
            if self._givers[0].id in self._resting:
                return self._givers[0]
            self._givers.popleft()
        return None

    def _mark(self, sequence: Sequence, node: RadixNode, next_use: float) -> None:
        """Tell the tree when it will see the pages again that a sequence left."""
        if not self.tree.policy.looks_ahead:
            return
        if next_use < math.inf:
            self.tree.expect_also(node, next_use)
        elif sequence.forked_at:
            self.tree.retire(node, sequence.forked_at)

    # --- inside ---

    def _node(self, sequence: Sequence) -> RadixNode:
        return sequence.node or self.tree.root(sequence.namespace)

    def _locate(self, sequence: Sequence) -> RadixNode:
        """Where the cached prefix of a sequence ends; it does not move there. Goes on from where it was seen last."""
        node = sequence.node or sequence.seen
        if node is None or not self.tree.holds(node):
            node = self.tree.root(sequence.namespace)
        ids, last = sequence.token_ids, len(sequence) - 1
        next_page = np.array(ids[node.end : min(last, node.end + self.page_size)], dtype=np.int32)
        if len(next_page) == self.page_size and self.tree.goes_on(node, next_page):
            node, _ = self.tree.match(node, np.array(ids[node.end : last], dtype=np.int32))
        sequence.seen = node
        return node

    def _match(self, sequence: Sequence, limit: int, *, again: bool) -> None:
        """Move a sequence without own pages along the tree, at most to `limit` tokens."""
        start = sequence.num_shared
        if limit - start < self.page_size:
            return
        before = sequence.node
        tokens = np.array(sequence.token_ids[start:limit], dtype=np.int32)
        node, pages = self.tree.match(self._node(sequence), tokens)
        if len(pages) == 0:
            return
        self._stand(sequence, node)
        if not again:
            self.tree.hit(node, before)
        sequence.pages.extend(pages)
        sequence.num_shared += len(pages) * self.page_size
        sequence.num_computed = sequence.num_shared

    def _stand(self, sequence: Sequence, node: RadixNode) -> None:
        """Lock `node` for a sequence, in place of where it stood."""
        self.tree.lock(node, sequence.priority)
        self._leave(sequence)
        sequence.node = node
        if self.page_size > 1:
            self._standing.setdefault(node, {})[sequence.id] = sequence

    def _leave(self, sequence: Sequence) -> None:
        node = sequence.node
        if node is None:
            return
        self.tree.unlock(node)
        sequence.node = None
        if self.page_size > 1:
            neighbours = self._standing[node]
            del neighbours[sequence.id]
            if not neighbours:
                del self._standing[node]

    def _free_own(self, sequence: Sequence) -> None:
        """Free the pages that a sequence alone stands on."""
        first = sequence.num_shared // self.page_size
        self.pool.free(sequence.pages.cut(first).tolist())
        sequence.num_computed = sequence.num_shared
