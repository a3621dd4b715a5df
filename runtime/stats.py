"""What the engine counts.

Owns the counters of an engine's life and the gauges of its present, and the two laws that hold between them. The
scheduler writes the counters; everyone else reads snapshots.

* Counter law: `prompt_tokens == cached_tokens + prefill_tokens`, for every request and so for their sum.
* Memory law: `pages_free + pages_cached + pages_held == pages_total`, whenever no step is running.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgl.errors import InternalError
from sgl.lang.graph import Usage


class Stats(msgspec.Struct, kw_only=True):
    """Counters since the start (tokens unless named otherwise) and gauges of now.

    Attributes:
        prompt_tokens, cached_tokens, prefill_tokens: as in `Usage`, over all requests.
        decode_tokens: output tokens that came from a forward; `forced_tokens` were appended without one.
        reasoning_tokens: of both, those of reasoning (see `Usage`).
        drafted_tokens, accepted_tokens: as in `Usage`; `verifications`: rows of steps that had drafts. So one gives
            `accepted_tokens / verifications + 1` tokens (`accept_len`) and keeps `accept_rate` of its drafts.
        healed_tokens, rerendered_tokens, recomputed_tokens, joined_tokens, scored_tokens: as in `Usage`.
        copied_tokens: of the cached ones, those whose page was shared in part and copied (page sizes above 1).
        tokenized_bytes: UTF-8 bytes of program text encoded by the engine.
        forwards: model steps; `programs`, `requests`: opened programs, generations and selects in them.
        retractions: running sequences put back because the pool was full; `preemptions`: for one of higher priority.
        shared_prefix_tokens: keys that rows of decoding steps on a GPU did not read, in each layer, because another row
            of theirs read them for all (`shared_prefixes.py`).
        device_busy_s, device_idle_s: seconds that a GPU computed steps, and that it waited for the host between and
            within them while there was something to do; 0 where nobody measures (`device_clock.py`).
        num_running, num_waiting: sequences in the batch, and before it.
        num_programs: open programs.
        pages_total, pages_free, pages_cached, pages_held: the pool. Held pages belong to live states, running
            sequences or pins; cached ones may be evicted. `pages_pinned` are those of the held ones that pins hold.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    healed_tokens: int = 0
    rerendered_tokens: int = 0
    recomputed_tokens: int = 0
    joined_tokens: int = 0
    scored_tokens: int = 0
    copied_tokens: int = 0
    tokenized_bytes: int = 0
    forwards: int = 0
    programs: int = 0
    requests: int = 0
    retractions: int = 0
    preemptions: int = 0
    shared_prefix_tokens: int = 0
    device_busy_s: float = 0.0
    device_idle_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_programs: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    pages_pinned: int = 0

    @property
    def accept_len(self) -> float:
        """Tokens that a verification gives on average, the one that needs no draft included; 1 before the first."""
        return 1 + self.accepted_tokens / max(1, self.verifications)

    @property
    def accept_rate(self) -> float:
        """Share of the drafted tokens that were kept; 0 before the first."""
        return self.accepted_tokens / max(1, self.drafted_tokens)

    def add(self, usage: Usage) -> None:
        """Count one finished (or cancelled) node."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.prefill_tokens += usage.prefill_tokens
        self.decode_tokens += usage.completion_tokens - usage.forced_tokens
        self.forced_tokens += usage.forced_tokens
        self.reasoning_tokens += usage.reasoning_tokens
        self.drafted_tokens += usage.drafted_tokens
        self.accepted_tokens += usage.accepted_tokens
        self.healed_tokens += usage.healed_tokens
        self.rerendered_tokens += usage.rerendered_tokens
        self.recomputed_tokens += usage.recomputed_tokens
        self.joined_tokens += usage.joined_tokens
        self.scored_tokens += usage.scored_tokens

    def check(self) -> None:
        """Raise `InternalError` when a law is broken, with the numbers."""
        if self.prompt_tokens != self.cached_tokens + self.prefill_tokens:
            raise InternalError(
                f"counter law broken: {self.prompt_tokens} prompt tokens, "
                f"{self.cached_tokens} cached + {self.prefill_tokens} prefilled"
            )
        if self.pages_free + self.pages_cached + self.pages_held != self.pages_total:
            raise InternalError(
                f"memory law broken: {self.pages_free} free + {self.pages_cached} cached + {self.pages_held} held "
                f"is not {self.pages_total} pages"
            )

    def as_dict(self) -> dict[str, Any]:
        """A plain mapping, as `Engine.stats()` returns it."""
        return msgspec.structs.asdict(self)
