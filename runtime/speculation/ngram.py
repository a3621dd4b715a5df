"""Guesses from text that occurred before: the longest match of what stands last, and what came after it there.

Owns `TokenIndex`, which finds earlier places of a few tokens, and `NgramProposer`, which keeps one per scope and fills
it. A scope is the programs of one name under one cache key: a request, its branches, the rows of a batch, and earlier
runs of the same program, never those of another salt. A corpus of the user's stands beside all scopes.

A place is found as in LZ77: a dictionary holds the last place of each pair of tokens, each place the one before it
with the same pair. Appending a token is O(1), looking up is O(looks x depth), memory is bounded by `capacity` tokens;
the oldest streams go first. An index that is wrong (a state was cut and went on otherwise) gives bad guesses, nothing
worse.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from sgl.runtime.cache_key import CacheKey
from sgl.runtime.sequence import Request, Sampled
from sgl.runtime.speculation.options import MatchType
from sgl.runtime.speculation.proposer import NOTHING, Proposal

_LOOKS = 12
"""Places that are compared."""
_NOWHERE = -1
_SHIFT = 32
_OVERLAP = 8
"""Tokens of a prefix that others have indexed which are indexed again, so that what follows has a context."""
_Scope: TypeAlias = tuple[CacheKey, str]


class Match(NamedTuple):
    """Where what stands last stood before: in `stream`, up to and with the token at `place`, `length` tokens of it."""

    stream: int
    place: int
    length: int


class _Stream:
    """Tokens in their order, and for each the place before with the same pair that ends there, and the same token."""

    __slots__ = ("last_one", "last_pair", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.last_pair: list[int] = []
        self.last_one: list[int] = []


class TokenIndex:
    """Streams of tokens, and where what stands in them.

    Args:
        depth: tokens of a match that are told apart.
        match_type: which of several places that match equally well.

    Example:
        >>> index = TokenIndex()
        >>> index.append(0, [5, 6, 7, 8, 9])
        >>> index.find([1, 6, 7])
        Match(stream=0, place=2, length=2)
        >>> index.after(index.find([1, 6, 7]), 5)
        [8, 9]
    """

    def __init__(self, depth: int = 18, match_type: MatchType = "BFS") -> None:
        self._depth = depth
        self._match_type = match_type
        self._streams: dict[int, _Stream] = {}  # oldest first
        self._pairs: dict[int, int] = {}
        self._ones: dict[int, int] = {}
        self.num_tokens = 0

    def append(self, stream: int, token_ids: Sequence[int]) -> None:
        """Tokens at the end of a stream, which begins with its first ones."""
        kept = self._streams.get(stream)
        if kept is None:
            kept = self._streams[stream] = _Stream()
        ids, pairs, ones = kept.token_ids, self._pairs, self._ones
        place = (stream << _SHIFT) + len(ids)
        before = ids[-1] if ids else _NOWHERE
        for token_id in token_ids:
            pair = (before << _SHIFT) ^ token_id
            kept.last_pair.append(pairs.get(pair, _NOWHERE))
            kept.last_one.append(ones.get(token_id, _NOWHERE))
            pairs[pair] = ones[token_id] = place
            ids.append(token_id)
            before = token_id
            place += 1
        self.num_tokens += len(token_ids)

    def drop_oldest(self) -> tuple[int, int]:
        """Forget the stream that began first; its number, and how many tokens it had."""
        stream = next(iter(self._streams))
        num_tokens = len(self._streams.pop(stream).token_ids)
        self.num_tokens -= num_tokens
        if len(self._pairs) > 2 * self.num_tokens + 1024:  # places in streams that are gone
            self._pairs = {pair: place for pair, place in self._pairs.items() if place >> _SHIFT in self._streams}
            self._ones = {one: place for one, place in self._ones.items() if place >> _SHIFT in self._streams}
        return stream, num_tokens

    def find(self, tail: Sequence[int]) -> Match | None:
        """Where the last tokens of `tail` stood before: the longest match of those looked at. The end of a stream is
        none, since nothing came after it yet."""
        found = self._places(tail, only_longest=self._match_type == "BFS")
        if not found:
            return None
        longest = max(match.length for match in found)
        best = [match for match in found if match.length == longest]  # the latest first
        return best[0] if self._match_type == "BFS" else self._most_frequent(best)

    def find_all(self, tail: Sequence[int]) -> list[Match]:
        """All places that were looked at, the best first: of those that match equally well, the latest (`BFS`), or the
        one that goes on as most do (`PROB`).

        Example:
            >>> index = TokenIndex()
            >>> index.append(0, [5, 6, 7, 8, 5, 6, 9])
            >>> [index.after(match, 2) for match in index.find_all([5, 6])]
            [[9], [7, 8]]
        """
        found = self._places(tail, only_longest=False)
        if self._match_type == "BFS":
            return sorted(found, key=lambda match: -match.length)
        following = [self._streams[match.stream].token_ids[match.place + 1] for match in found]
        counts = Counter(following)
        ranked = sorted(zip(found, following, strict=True), key=lambda pair: (-pair[0].length, -counts[pair[1]]))
        return [match for match, _ in ranked]

    def after(self, match: Match, num: int, drafts: Sequence[int] | None = None) -> list[int]:
        """Up to `num` tokens that came after a match.

        Args:
            drafts: what stands behind the match's stream, if it is this stream that goes on. A text that repeats itself
                goes on, then, with what was just guessed.
        """
        ids, first = self._streams[match.stream].token_ids, match.place + 1
        following = ids[first : first + num]
        if drafts is not None:
            following += drafts[: num - len(following)]
            while len(following) < num:
                following.append(following[len(following) + first - len(ids) - len(drafts)])
        return following

    def _places(self, tail: Sequence[int], *, only_longest: bool) -> list[Match]:
        """Where the last two tokens of `tail` stood, or the last one if those never did; the latest first."""
        found: list[Match] = []
        if len(tail) > 1:
            pair = self._pairs.get((tail[-2] << _SHIFT) ^ tail[-1], _NOWHERE)
            found = self._walk(pair, tail, of_pairs=True, only_longest=only_longest)
        if tail and not found:
            one = self._ones.get(tail[-1], _NOWHERE)
            found = self._walk(one, tail, of_pairs=False, only_longest=only_longest)
        return found

    def _walk(self, place: int, tail: Sequence[int], *, of_pairs: bool, only_longest: bool) -> list[Match]:
        """Places along a chain, latest first, with how far they match; with `only_longest`, up to one that matches as
        far as any can."""
        found = []
        for _ in range(_LOOKS):
            stream = self._streams.get(place >> _SHIFT) if place != _NOWHERE else None
            if stream is None:
                break
            at = place & ((1 << _SHIFT) - 1)
            if at + 1 < len(stream.token_ids):
                found.append(Match(place >> _SHIFT, at, self._length(stream.token_ids, at, tail)))
                if only_longest and found[-1].length == self._depth:
                    break
            place = (stream.last_pair if of_pairs else stream.last_one)[at]
        return found

    def _length(self, ids: Sequence[int], at: int, tail: Sequence[int]) -> int:
        most = min(self._depth, at + 1, len(tail))
        length = 1
        while length < most and ids[at - length] == tail[-1 - length]:
            length += 1
        return length

    def _most_frequent(self, matches: Sequence[Match]) -> Match:
        """Of places that match equally well, the latest of those that go on as most do."""
        following = [self._streams[match.stream].token_ids[match.place + 1] for match in matches]
        ((token_id, _),) = Counter(following).most_common(1)
        return matches[following.index(token_id)]


class NgramProposer:
    """Proposes what came after the same tokens before.

    Args:
        capacity: tokens that are kept, of all scopes together.
        depth: see `TokenIndex`.
        corpus: the user's.
        breadth: ways to go on that are proposed at most; with 1 there are no branches.
    """

    def __init__(
        self,
        capacity: int = 1_000_000,
        depth: int = 18,
        match_type: MatchType = "BFS",
        corpus: TokenIndex | None = None,
        breadth: int = 1,
    ) -> None:
        self._capacity = capacity
        self._depth = depth
        self._match_type: MatchType = match_type
        self._corpus = corpus
        self._breadth = breadth
        self._scopes: OrderedDict[_Scope, _Texts] = OrderedDict()  # the one that was used last at the end
        self.num_tokens = 0

    def propose(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
        """See `Proposer.propose`. The strength is the length of the match."""
        sequence = request.sequence
        scope = _scope_of(request)
        texts = self._scopes.get(scope)
        if texts is None:
            texts = self._scopes[scope] = _Texts(TokenIndex(self._depth, self._match_type))
        if not drafts:
            self._scopes.move_to_end(scope)
            self.num_tokens += texts.follow(sequence.id, sequence.token_ids)
            self._bound()
        tail = [*sequence.token_ids[-self._depth :], *drafts][-self._depth :]
        match = texts.index.find(tail)
        if self._corpus is not None:
            other = self._corpus.find(tail)
            if other is not None and (match is None or other.length > match.length):
                return Proposal(self._corpus.after(other, room), "ngram", other.length)
        if match is None:
            return NOTHING
        is_own = match.stream == sequence.id
        return Proposal(texts.index.after(match, room, drafts if is_own else None), "ngram", match.length)

    def branches(self, request: Request, room: int) -> Sequence[Proposal]:
        """See `Proposer.branches`: what came after each of the places that match, while they go on differently."""
        texts = self._scopes.get(_scope_of(request))
        if self._breadth == 1 or texts is None:
            return ()
        sequence = request.sequence
        tail = sequence.token_ids[-self._depth :]
        found = [(match, texts.index) for match in texts.index.find_all(tail)]
        if self._corpus is not None:
            found += [(match, self._corpus) for match in self._corpus.find_all(tail)]
            found.sort(key=lambda pair: -pair[0].length)
        proposals: list[Proposal] = []
        for match, index in found:
            is_own = index is texts.index and match.stream == sequence.id
            token_ids = index.after(match, room, () if is_own else None)
            if not any(token_ids == proposal.token_ids[: len(token_ids)] for proposal in proposals):
                proposals.append(Proposal(token_ids, "ngram", match.length))
            if len(proposals) == self._breadth:
                break
        return proposals

    def prepare(self, rows: Sequence[tuple[Request, Sampled]], num_drafts: int) -> None:
        """Nothing: one look costs microseconds."""

    def ended(self, request: Request) -> None:
        """See `Proposer.ended`: what was generated since it was asked last is of use to others."""
        texts = self._scopes.get(_scope_of(request))
        if texts is not None and texts.knows(request.sequence.id):
            self.num_tokens += texts.follow(request.sequence.id, request.sequence.token_ids)
            self._bound()

    def _bound(self) -> None:
        """Keep to the capacity: the scope that was used longest ago loses its oldest stream."""
        while self.num_tokens > self._capacity:
            texts = next(iter(self._scopes.values()))
            self.num_tokens -= texts.drop_oldest()
            if not texts.index.num_tokens and len(self._scopes) > 1:
                self._scopes.popitem(last=False)


class _Texts:
    """The texts of one scope: an index that follows sequences as they grow."""

    def __init__(self, index: TokenIndex) -> None:
        self.index = index
        self._lengths: dict[int, int] = {}  # of each sequence, as far as it is indexed
        self._latest: list[int] = []  # the prompt that came last

    def knows(self, sequence: int) -> bool:
        """Whether a sequence was followed."""
        return sequence in self._lengths

    def follow(self, sequence: int, token_ids: list[int]) -> int:
        """A sequence has grown to `token_ids`; how many of them are new. Of a new sequence, what it has in common with
        the one before is known."""
        done = self._lengths.get(sequence)
        if done is None:
            done = max(0, common_length(self._latest, token_ids) - _OVERLAP)
            self._latest = token_ids.copy()
        if done > len(token_ids):  # it was cut: what was beyond stays, as text that could have been
            done = len(token_ids)
        self.index.append(sequence, token_ids[done:])
        self._lengths[sequence] = len(token_ids)
        return len(token_ids) - done

    def drop_oldest(self) -> int:
        """Forget the stream that began first; how many tokens it had."""
        sequence, num_tokens = self.index.drop_oldest()
        self._lengths.pop(sequence, None)
        return num_tokens


def _scope_of(request: Request) -> _Scope:
    return request.sequence.namespace, request.program.name if request.program is not None else ""


def common_length(a: list[int], b: list[int]) -> int:
    """Length of the beginning that two lists share; long equal parts are compared at once."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
