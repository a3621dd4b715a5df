"""How long a program may live: its deadline, and the lease of its state while nothing of it is submitted.

Owns the two moments and the error that each ends in. The program run asks whether its time is over and says when it
rests; the engine core keeps an alarm at `ends_at`.
"""

from __future__ import annotations

from sgl.errors import DeadlineExceeded, SglError, StateLost
from sgl.lang.graph import ProgramOptions


class Lifetime:
    """The time of one program, on the engine's clock.

    Args:
        options: its name and `deadline_s`.
        lease_s: how long the engine lets it rest, which its own `lease_s` may make shorter; `None` is for ever.
        now: when it begins.

    Example:
        >>> time = Lifetime(ProgramOptions(name="p", deadline_s=9.0), 2.0, now=1.0)
        >>> time.ends_at, time.rest(3.0), time.ends_at, time.go_on(), time.ends_at
        (10.0, None, 5.0, None, 10.0)
        >>> type(time.over(10.0)).__name__
        'DeadlineExceeded'
    """

    def __init__(self, options: ProgramOptions, lease_s: float | None, now: float) -> None:
        self._name = options.name
        self._deadline_s = options.deadline_s
        self._deadline = None if options.deadline_s is None else now + options.deadline_s
        self._lease_s = min((each for each in (lease_s, options.lease_s) if each is not None), default=None)
        self._rests_since: float | None = None

    def rest(self, now: float) -> None:
        """Everything submitted is done, and more may come."""
        self._rests_since = now

    def go_on(self) -> None:
        """A fragment came."""
        self._rests_since = None

    @property
    def ends_at(self) -> float | None:
        """When time ends the program if nothing happens before; `None` is never."""
        return min((end for end in (self._deadline, self._lease_end) if end is not None), default=None)

    @property
    def _lease_end(self) -> float | None:
        return None if self._lease_s is None or self._rests_since is None else self._rests_since + self._lease_s

    def over(self, now: float) -> SglError | None:
        """What ends the program now, if its time is over."""
        ends_at = self.ends_at
        if ends_at is None or now < ends_at:
            return None
        if ends_at == self._deadline:
            return DeadlineExceeded(
                f"program {self._name!r} ran longer than its deadline of {self._deadline_s} s",
                hint="raise deadline_s, or generate less",
            )
        return StateLost(
            f"program {self._name!r} waited longer than its lease of {self._lease_s:g} s for its next fragment",
            hint="go on sooner, or raise state_lease (of a server: --program-lease)",
        )
