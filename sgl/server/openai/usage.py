"""Why a generation ended and what it cost, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl.lang.graph import ValueEvent


def finish_reason(value: ValueEvent, *, has_calls: bool = False) -> str:
    """`stop`, `length`, or `tool_calls` when the message calls tools and was not cut off, which the caller knows."""
    return "tool_calls" if has_calls and value.finish == "stop" else value.finish


def usage_body(values: Sequence[ValueEvent]) -> dict[str, Any]:
    """Tokens of a request. Its samples share one prompt, which counts once."""
    if not values:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return usage_of(
        prompt=values[0].usage.prompt_tokens,
        cached=values[0].usage.cached_tokens,
        completion=sum(value.usage.completion_tokens for value in values),
        reasoning=sum(getattr(value.usage, "reasoning_tokens", 0) for value in values),
    )


class RunningUsage:
    """`usage` of a request whose stream goes on: its prompts, and what was generated so far."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens: dict[int, int] = {}

    def take(self, sample: int, num_tokens: int, value: ValueEvent | None = None) -> None:
        """More tokens of a sample; its value has them all."""
        before = self._completion_tokens.get(sample, 0)
        self._completion_tokens[sample] = value.usage.completion_tokens if value is not None else before + num_tokens

    def body(self) -> dict[str, Any]:
        """The object `usage`."""
        completion = sum(self._completion_tokens.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }


def usage_of(*, prompt: int, cached: int, completion: int, reasoning: int = 0) -> dict[str, Any]:
    """The object `usage`."""
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning:
        body["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return body
