"""How many drafts pay: what a row of a step costs, what guesses were worth so far, how long chains may get.

Owns small estimators, which the drafter asks and feeds; they know neither requests nor models.

* `StepCosts`: seconds of a step by its number of tokens, learned from the steps that ran.
* `Trust`: how often a draft is right, by who proposed it and how much spoke for it.
* `AdaptiveSteps`: the longest chain worth trying at a batch size, from the accepted lengths there. This is the policy
  of SGLang's `--speculative-adaptive`: slots by batch size, an exponential mean, hysteresis.
* `Rounds`: where steps overlap, whether rows wait for their tokens in order to guess behind them.

A draft is computed when the chance that it is right is above what it costs: a row's seconds over the seconds that an
output token takes without it. So speculation ends by itself where steps are bound by arithmetic, or guesses are bad.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

import msgspec

from sgl.errors import ConfigError

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Steps of so many tokens are looked at together with those of a few more."""
_SHORTER, _LONGER = 0.3, 0.03
"""Weight of a step that took less than was usual, and more: what disturbs a step makes it longer, never shorter."""
_FAR_OFF = 3.0
"""A step that takes so many times as long as is usual tells no more than that."""


class StepCosts:
    """Seconds of steps that only decode, by their number of tokens.

    Args:
        slope: until something is known, what a row adds to a step, as a share of a step of one row.

    Example:
        >>> costs = StepCosts(slope=0.1)
        >>> for _ in range(50):
        ...     costs.add(1, 0.010); costs.add(4, 0.016)
        >>> round(costs.seconds(1), 4), round(costs.seconds(3), 4), round(costs.row(1, 3), 4)
        (0.01, 0.014, 0.002)
    """

    def __init__(self, slope: float = 0.1) -> None:
        self._slope = slope
        self._known: list[int] = []  # places in `_SIZES`, ascending
        self._seconds: dict[int, float] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took `seconds`."""
        if seconds <= 0 or num_tokens > _SIZES[-1]:
            return
        size = bisect_left(_SIZES, num_tokens)
        usual = self._seconds.get(size)
        if usual is None:
            self._known.insert(bisect_left(self._known, size), size)
            self._seconds[size] = seconds
        else:
            weight = _SHORTER if seconds < usual else _LONGER
            self._seconds[size] = usual + weight * (min(seconds, _FAR_OFF * usual) - usual)

    @property
    def is_known(self) -> bool:
        """Whether any step was timed."""
        return bool(self._known)

    def seconds(self, num_tokens: int) -> float:
        """What a step takes; 1 for a step of one token as long as nothing is known."""
        size = bisect_left(_SIZES, min(num_tokens, _SIZES[-1]))
        if not self._known:
            return 1 + self._slope * (num_tokens - 1)
        after = bisect_left(self._known, size)
        low = self._known[max(0, after - 1)] if after == len(self._known) or self._known[after] > size else size
        high = self._known[min(after, len(self._known) - 1)]
        if low == high:
            near = _SIZES[low]
            return self._seconds[low] * (1 + self._slope * (num_tokens - 1)) / (1 + self._slope * (near - 1))
        part = (num_tokens - _SIZES[low]) / (_SIZES[high] - _SIZES[low])
        return self._seconds[low] + part * (self._seconds[high] - self._seconds[low])

    def row(self, num_tokens: int, num_more: int) -> float:
        """What each of `num_more` tokens adds to a step of `num_tokens`."""
        more = self.seconds(num_tokens + num_more) - self.seconds(num_tokens)
        return max(0.0, more / num_more)


class Trust:
    """The share of drafts that were right, by kind. Kinds that nobody tried begin with a guess, and go back to it
    slowly when they are not tried, so that each gets another chance.

    Example:
        >>> trust = Trust()
        >>> before = trust.of("ngram", 2)
        >>> for _ in range(20):
        ...     trust.add("ngram", 2, right=False)
        >>> trust.of("ngram", 2) < before / 3
        True
    """

    _STRONGEST = 12
    _NEW = 0.06
    _FORGET = 0.002

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], float] = {}

    def of(self, source: str, strength: int) -> float:
        """The chance that the next draft of this kind is right."""
        key = source, min(strength, self._STRONGEST)
        share = self._shares.get(key)
        return _prior(*key) if share is None else share

    def add(self, source: str, strength: int, *, right: bool) -> None:
        """A draft of this kind was right, or was not."""
        key = source, min(strength, self._STRONGEST)
        share = self.of(source, strength)
        self._shares[key] = share + self._NEW * (right - share)

    def rest(self) -> None:
        """A row had no drafts that were worth trying: what is believed of them fades a little."""
        for key, share in self._shares.items():
            self._shares[key] = share + self._FORGET * (_prior(*key) - share)


def _prior(source: str, strength: int) -> float:
    """What a guess is worth before any was tried: a longer match is worth more."""
    if source in _PRIORS:
        return _PRIORS[source]
    return 1 - 0.6 / (1 + 0.6 * strength)


_PRIORS = {"forced": 0.98, "model": 0.7, "branch": 0.12}


class AdaptiveSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps that may be tried from a batch size on, and how reluctantly to change.

    Args:
        candidate_steps: lengths of chains, ascending.
        down_hysteresis, up_hysteresis: the mean has to be beyond the border by so much.
        ceiling_coeff: above 0, the longest candidate is used as soon as the mean reaches this times the next shorter.
    """

    candidate_steps: tuple[int, ...]
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0
    ceiling_coeff: float = 0.0


class AdaptiveParams(msgspec.Struct, frozen=True):
    """The policy of `AdaptiveSteps`; slots by the smallest batch size that they are for."""

    slots: Mapping[int, AdaptiveSlot]
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10


def adaptive_params(given: Mapping[str, Any] | None, longest: int) -> AdaptiveParams:
    """The policy from a user's mapping: the global fields by name, and slots under whole numbers as strings.

    Args:
        longest: drafts of a chain; the default has steps up to it, and none of the user's may be longer.

    Raises:
        ConfigError: an unknown field, or a slot without steps.

    Example:
        >>> params = adaptive_params({"1": {"candidate_steps": [1, 3]}, "ema_alpha": 0.5}, 8)
        >>> params.slots[1].candidate_steps, params.ema_alpha, adaptive_params(None, 8).slots[1].candidate_steps
        ((1, 3), 0.5, (1, 2, 4, 8))
    """
    numbers = {name: value for name, value in (given or {}).items() if not name.isdecimal()}
    slots = {name: value for name, value in (given or {}).items() if name.isdecimal()}
    try:
        read = {int(name): msgspec.convert(value, AdaptiveSlot) for name, value in slots.items()}
        if not read:
            steps = sorted({*(2**i for i in range(longest.bit_length()) if 2**i <= longest), longest})
            read = {1: AdaptiveSlot(tuple(steps))}
        for size, slot in read.items():
            steps = list(slot.candidate_steps)
            if not steps or steps != sorted(set(steps)) or steps[0] < 1 or steps[-1] > longest:
                raise ValueError(f"slot {size} has steps {steps}; they ascend from 1 at least to {longest} at most")
        params = msgspec.convert({"slots": {}, **numbers}, AdaptiveParams, strict=True)
        if numbers.keys() - set(AdaptiveParams.__struct_fields__) or "slots" in numbers:
            raise ValueError(f"it has fields {sorted(numbers)}")
        if not (0 < params.ema_alpha <= 1 and params.update_interval >= 1 and params.warmup_batches >= 0):
            raise ValueError("ema_alpha is in (0, 1], update_interval at least 1, warmup_batches at least 0")
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"speculative_adaptive_config cannot be used: {error}",
            hint='give it as {"1": {"candidate_steps": [1, 3, 7]}, "ema_alpha": 0.2, "update_interval": 5, '
            '"warmup_batches": 10}',
            param="speculative_adaptive_config",
        ) from None
    return msgspec.structs.replace(params, slots=read)


class AdaptiveSteps:
    """The longest chain at a batch size, from the mean of what was accepted at such sizes.

    The mean plus one, rounded, is wanted; it changes every `update_interval` verifications, once it is beyond the
    border between two candidates by the slot's hysteresis, and not during the first `warmup_batches`.

    Example:
        >>> steps = AdaptiveSteps(adaptive_params({"1": {"candidate_steps": [1, 3, 7]}}, 8))
        >>> for _ in range(100):
        ...     steps.add(1, 0.0)
        >>> steps.of(1)
        1
        >>> for _ in range(100):
        ...     steps.add(1, 6.0)
        >>> steps.of(1)
        7
    """

    def __init__(self, params: AdaptiveParams) -> None:
        self._params = params
        self._sizes = sorted(params.slots)
        self._states = {size: _SlotState(params.slots[size].candidate_steps[-1]) for size in self._sizes}

    def of(self, batch_size: int) -> int:
        """Most drafts of a row in a batch of that size."""
        return self._states[self._size(batch_size)].steps

    def add(self, batch_size: int, num_accepted: float) -> None:
        """A batch was verified; `num_accepted` drafts per row that had some."""
        size = self._size(batch_size)
        state, slot = self._states[size], self._params.slots[size]
        state.mean += self._params.ema_alpha * (num_accepted - state.mean)
        state.num_batches += 1
        if state.num_batches > self._params.warmup_batches and state.num_batches % self._params.update_interval == 0:
            state.steps = _next_steps(slot, state.steps, state.mean)

    def _size(self, batch_size: int) -> int:
        return self._sizes[max(0, bisect_right(self._sizes, batch_size) - 1)]


class _SlotState:
    """Where one slot stands; it begins with the longest chain, believing in it."""

    def __init__(self, longest: int) -> None:
        self.steps = longest
        self.mean = float(longest)
        self.num_batches = 0


class Rounds:
    """Where steps overlap, guessing costs before anything is guessed: rows have to know their last tokens, so the
    device waits for the host. Whether that pays is said by what it brought lately; where it does not, it is tried again
    for `TRIES` steps, after `FIRST_PAUSE` others and then ever more rarely.

    Example:
        >>> rounds = Rounds()
        >>> sum(rounds.wait(hoped=0.1, needed=0.5) for _ in range(2000))
        18
        >>> rounds.wait(hoped=0.6, needed=0.5), rounds.is_trying
        (True, False)
    """

    FIRST_PAUSE, LONGEST_PAUSE, TRIES = 32, 256, 2

    def __init__(self) -> None:
        self.is_trying = False
        self._idle, self._pause = 0, self.FIRST_PAUSE

    def wait(self, hoped: float, needed: float) -> bool:
        """Whether the rows of a step wait.

        Args:
            hoped: tokens that all rows together will be spared; `needed`: what takes as long as waiting.
        """
        self.is_trying = False
        if hoped > needed:
            self._idle, self._pause = 0, max(self._pause // 2, self.FIRST_PAUSE)
            return True
        self._idle += 1
        if self._idle <= self._pause:
            return False
        self.is_trying = True
        if self._idle == self._pause + self.TRIES:
            self._idle, self._pause = 0, min(2 * self._pause, self.LONGEST_PAUSE)
        return True


def _next_steps(slot: AdaptiveSlot, steps: int, mean: float) -> int:
    """The candidate for a mean of accepted drafts, if it is far enough from the present one."""
    candidates = slot.candidate_steps
    if slot.ceiling_coeff and len(candidates) > 1 and mean >= slot.ceiling_coeff * candidates[-2]:
        return candidates[-1]
    wanted = max(candidates[0], min(candidates[-1], math.floor(mean + 0.5) + 1))
    target = candidates[bisect_left(candidates, wanted)]
    if target > steps and mean + 1 < steps + slot.up_hysteresis:
        return steps
    if target < steps and mean + 1 > target + 0.5 - slot.down_hysteresis:
        return steps
    return target
