"""The process in which llguidance tries what may take it minutes: `python -m sgl.grammars.llguidance_helper`.

Owns a compilation that comes to nothing: the library's own limits do not count what it spends on finding out whether
merged patterns leave anything, so a grammar with such is compiled here first, within a bound on time and memory. Bytes
stand for the vocabulary, since patterns are what costs. See `sgl.grammars.helper`; requests are `{"grammar": source}`,
answered by `{}`, whether it can be compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl.grammars.helper import serve


def make(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers requests, under the library's limits in `first`."""
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    limits = llguidance.LLParserLimits(**first["limits"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        matcher = llguidance.LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a first look may take longer than all that came before
        return {}

    return answer


if __name__ == "__main__":
    serve(make)
