"""The requests that wait for the scheduler, in order of admission.

Owns the waiting requests, their order and their age, and knows which programs are at the door: they wait, and no step
has computed anything of theirs. The scheduler adds, admits, puts back and removes; what may be admitted is its own
decision. Requests of higher priority come first. Among equals, what was put back, and what was
passed over too often, comes before everything else in order of arrival, so that no policy starves anyone; the policy
orders the rest (see `policies`).

A request is sorted in once, by a key that stays: a step with ten thousand waiting requests costs what it takes from the
front. Only what changes a key moves a request: its age, or the start of its program. The two policies that look into
the prefix tree rank the front of the queue when it is asked for.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, groupby
from operator import itemgetter
from typing import TypeAlias

from sgl.runtime.policies import MAX_SKIPS, RANKED, TREE_WALKS, Match, QueuePolicyName
from sgl.runtime.sequence import ProgramInfo, Request

_Key: TypeAlias = tuple[float, ...]
"""(-priority, 0 for what comes first of its priority and else 1, what the policy looks at, number of arrival)"""

_key_of = itemgetter(0)


class WaitingQueue:
    """Waiting requests.

    Args:
        policy: which order.
        match: looks a request up in the prefix tree.
        seed: of the `random` order.
    """

    def __init__(self, policy: QueuePolicyName, match: Match, *, seed: int = 0) -> None:
        self._policy = policy
        self._match = match
        self._random = random.Random(seed)
        self._arrivals = count()
        self._num_admitted = 0
        self._last_due = 0
        self._sorted: list[tuple[_Key, Request]] = []
        self._keys: dict[Request, _Key] = {}
        self._fresh: OrderedDict[Request, int] = OrderedDict()  # not due yet -> admissions when it is; by arrival
        self._door: OrderedDict[ProgramInfo, dict[Request, None]] = OrderedDict()  # not started; by arrival

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._keys)

    def add(self, request: Request) -> None:
        """A request arrives."""
        request.arrival = next(self._arrivals)
        self._last_due = max(self._last_due, self._num_admitted + len(self) + MAX_SKIPS)
        self._fresh[request] = self._last_due
        if (program := request.program) is not None and not program.started:
            self._door.setdefault(program, {})[request] = None
        self._insert(request, self._policy_key(request))

    def put_back(self, request: Request) -> None:
        """A request that was admitted waits again, before what was not."""
        if (program := request.program) is not None and not program.started:
            self._door[program] = {request: None, **self._door.get(program, {})}
            self._door.move_to_end(program, last=False)
        self._insert(request, _front_key(request))

    def remove(self, request: Request) -> None:
        """A request waits no more."""
        del self._sorted[bisect_left(self._sorted, self._keys.pop(request), key=_key_of)]
        self._fresh.pop(request, None)
        program = request.program
        if program is not None and (at_door := self._door.get(program)) is not None:
            at_door.pop(request, None)
            if not at_door:
                del self._door[program]

    def admit(self, request: Request) -> None:
        """A request is about to run."""
        self.remove(request)
        self._num_admitted += 1

    def start(self, program: ProgramInfo, priority: int) -> None:
        """A step computes the first tokens of `program`, which has one priority: it is at the door no more, and its
        other requests come before those of programs that wait to start."""
        program.started = True
        self._door.pop(program, None)
        if self._policy != "program":
            return
        low, high = (
            bisect_left(self._sorted, (-priority, 1, True, number), key=_key_of)
            for number in (program.number, program.number + 1)
        )
        moved = [((*key[:2], False, *key[3:]), request) for key, request in self._sorted[low:high]]
        del self._sorted[low:high]
        if moved:
            self._keys.update((request, key) for key, request in moved)
            place = bisect_left(self._sorted, moved[0][0], key=_key_of)
            self._sorted[place:place] = moved

    def first(self, num: int) -> Iterator[Request]:
        """The `num` requests to admit first, in the order of now, whatever is admitted meanwhile."""
        self._promote()
        if self._policy in RANKED:
            return iter(self._ranked(num)[:num])
        return map(itemgetter(1), self._sorted[:num])

    @property
    def most_urgent(self) -> Request:
        """One of the highest priority; there must be one."""
        return self._sorted[0][1]

    @property
    def num_at_door(self) -> int:
        """Programs that wait, and that no step computed anything of: however many branches, each is one."""
        return len(self._door)

    def is_at_door(self, program: ProgramInfo) -> bool:
        """Whether a program waits for its first step."""
        return program in self._door

    @property
    def oldest_at_door(self) -> Request | None:
        """The first request of the program that has been at the door for longest."""
        return next((next(iter(requests)) for requests in self._door.values()), None)

    def _insert(self, request: Request, key: _Key) -> None:
        self._keys[request] = key
        insort(self._sorted, (key, request), key=_key_of)

    def _policy_key(self, request: Request) -> _Key:
        program = request.program
        of_policy: _Key = ()
        match self._policy:
            case "lof":
                of_policy = (-request.new_tokens,)
            case "random":
                of_policy = (self._random.random(),)
            case "program":
                is_new, number = (True, 0) if program is None else (not program.started, program.number)
                of_policy = (is_new, number, -request.path_len)
            case _:
                pass
        return (-request.priority, 1, *of_policy, request.arrival)

    def _promote(self) -> None:
        """Bring what was passed over too often to the front of its priority."""
        while self._fresh:
            request, due = next(iter(self._fresh.items()))
            if due > self._num_admitted:
                return
            del self._fresh[request]
            del self._sorted[bisect_left(self._sorted, self._keys[request], key=_key_of)]
            self._insert(request, _front_key(request))

    def _ranked(self, num: int) -> list[Request]:
        """The front in the order of a policy that looks into the tree; at most `TREE_WALKS` requests are looked up."""
        ordered: list[Request] = []
        walks = TREE_WALKS
        for (_, is_fresh), group in groupby(self._sorted[: num + TREE_WALKS], key=lambda entry: entry[0][:2]):
            requests = [request for _, request in group]
            if is_fresh:
                seen = requests[:walks]
                walks -= len(seen)
                requests = [*RANKED[self._policy](seen, self._match), *requests[len(seen) :]]
            ordered += requests
        return ordered


def _front_key(request: Request) -> _Key:
    return (-request.priority, 0, request.arrival)
