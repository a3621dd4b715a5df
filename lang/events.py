"""Events: what an executor sends back while a program's graph runs, as data.

Owns the closed union `Event` and what events carry: usage, log-probabilities, scores of options, handles of states.
Every executor emits them, the interpreter and the server read them; frozen, and serializable as msgpack and JSON. The
runtime knows them under `graph`. `FailedEvent` or `DoneEvent` is the last of a program.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from sgl.errors import ErrorInfo


class StateHandle(msgspec.Struct, frozen=True, array_like=True):
    """A branch that lives on the server: `length` tokens in the engine whose run is `epoch`."""

    epoch: str
    branch: int
    length: int


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one node or program. `prompt_tokens == cached_tokens + prefill_tokens` always holds.

    Attributes:
        prompt_tokens: tokens that had to be in the KV cache before the first output.
        cached_tokens: of these, found there; `prefill_tokens`: of these, computed.
        completion_tokens: tokens generated.
        reasoning_tokens: of these, the model's reasoning, without the markers around it.
        scored_tokens: option tokens computed for a select (part of `prefill_tokens`).
        forced_tokens: output tokens appended without sampling.
        drafted_tokens: guesses that were computed with other tokens; `accepted_tokens`: of these, those that turned out
            to be what is drawn. Accepted ones are among the others (output, or prompt of what follows); the rest is
            none of them.
        healed_tokens: tokens rolled back and encoded again at a seam.
        rerendered_tokens: state tokens replaced because the chat template rewrote earlier turns.
        recomputed_tokens: computed again after their pages were taken away.
        joined_tokens: of a fork's branches, whose text a join appended to the parent. Keys and values depend on what
            stands before: the first branch's tokens are found in the cache, the others' are computed again.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    scored_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    healed_tokens: int = 0
    rerendered_tokens: int = 0
    recomputed_tokens: int = 0
    joined_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token; of the most probable ones at its position, and of those asked for by id, as pairs.

    `logprob` is `None` for the first token of a prompt, which nothing predicts.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    given: tuple[tuple[int, float], ...] = ()


class ChoiceScore(msgspec.Struct, frozen=True, array_like=True):
    """One option of a select: its tokens after the last stable token, their log-probabilities, the method's score.

    One that is not `complete` could not win any more (see `Select.all_scores`): `logprobs` are those of its first
    tokens, `score` is a bound that its score does not exceed, and its probability is given as 0.
    """

    choice: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    probability: float
    unconditional: tuple[float, ...] = ()
    complete: bool = True


class TextEvent(msgspec.Struct, frozen=True, tag="text"):
    """Literal or template text was appended to a branch (streaming programs only)."""

    branch: int
    text: str


class DeltaEvent(msgspec.Struct, frozen=True, tag="delta"):
    """More text of a running generation (streaming programs only).

    `token_ids` were drawn since the last delta: of what holds text back (half a character, the beginning of a stop)
    they come first and their text later. `logprobs` are theirs, where the generation asks for them; a forced token
    whose log-probability is not computed yet has none.
    """

    node: int
    branch: int
    name: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class ValueEvent(msgspec.Struct, frozen=True, tag="value", kw_only=True):
    """A generation or select is done.

    Attributes:
        value: its text; token ids in `token_ids`.
        finish: `stop` (a stop, or the constraint is complete), `length`; `matched` is the stop string or id, or the
            text that matched a stop pattern.
        logprobs: of the output tokens; `prompt_logprobs`: of the prompt's from `logprob_start_len` on.
        choices: the scores, for a select.
        forced: runs of tokens in `token_ids` that were appended without sampling, as (index, number).
        latency_s: seconds from when its turn came in the program to its end; `first_s`: to the first token, 0 without.
        truncated_at: where a JSON schema's value breaks off that `length` has ended, as a JSON pointer; `None` for
            a value that is valid as it is.
    """

    node: int
    branch: int
    name: str
    value: str
    token_ids: tuple[int, ...] = ()
    finish: str = "stop"
    matched: str | int | None = None
    usage: Usage = Usage()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    choices: tuple[ChoiceScore, ...] = ()
    latency_s: float = 0.0
    first_s: float = 0.0
    truncated_at: str | None = None
    forced: tuple[tuple[int, int], ...] = ()


class JoinedEvent(msgspec.Struct, frozen=True, tag="joined"):
    """A `Join` was passed."""

    node: int
    branch: int


class HandlesEvent(msgspec.Struct, frozen=True, tag="handles"):
    """Every node submitted so far is done; the live branches and their lengths."""

    handles: tuple[StateHandle, ...]


class FailedEvent(msgspec.Struct, frozen=True, tag="failed"):
    """The program failed: its other branches are cancelled and its state is gone. The last event."""

    error: ErrorInfo
    node: int | None = None
    branch: int | None = None


class DoneEvent(msgspec.Struct, frozen=True, tag="done"):
    """The program ended: everything submitted is done and its state released. The last event."""

    usage: Usage = Usage()
    text: str = ""


Event: TypeAlias = TextEvent | DeltaEvent | ValueEvent | JoinedEvent | HandlesEvent | FailedEvent | DoneEvent


class StateText(msgspec.Struct, frozen=True):
    """A branch as text: everything in its state (template text and special tokens included), and its token ids."""

    text: str
    token_ids: tuple[int, ...] = ()
