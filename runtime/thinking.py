"""What holds the reasoning of one generation: its format, whether the prompt has opened it, and its budget.

Owns the step from a node's fields to `sgl.grammars.reasoning.Reasoning`, which a program run takes before a generation,
off the step loop; and the count of the tokens of a reasoning that nothing holds.
"""

from __future__ import annotations

import codecs

from sgl.errors import InvalidParameter
from sgl.grammars.formats import (
    ReasoningFormat,
    detect_reasoning_format,
    is_open,
    message_parser,
    reasoning_format,
)
from sgl.grammars.reasoning import Reasoning
from sgl.lang.graph import Gen
from sgl.runtime.text.detokenize import TokenBytes


def reasoning_section(node: Gen, prompt: str, template: str | None) -> Reasoning | None:
    """How the reasoning of `node` is held; `None` when it is not: no budget, and no constraint that begins behind it.

    Args:
        prompt: text of the state before the generation.
        template: source of the model's chat template.

    Raises:
        InvalidParameter: a budget where neither the node nor the template says how this model reasons.
    """
    budget = node.sampling.max_reasoning_tokens
    if budget is None and (node.reasoning is None or node.constraint is None):
        return None
    fmt = reasoning_format(node.reasoning) if node.reasoning is not None else detect_reasoning_format(template or "")
    if fmt is None:
        raise InvalidParameter(
            f"max_reasoning_tokens is {budget}, and this model's chat template has no reasoning",
            hint="name the format with reasoning, or leave the budget out",
            param="max_reasoning_tokens",
        )
    begin, end = _markers(fmt, template or "")
    return Reasoning(begin, end, is_open(fmt, prompt), budget, fmt.excludes)


def _markers(fmt: ReasoningFormat, template: str) -> tuple[str, str]:
    """The pair that the template speaks of, or the first."""
    pairs = list(zip(fmt.begin, fmt.end, strict=True))
    return next((pair for pair in pairs if any(marker in template for marker in pair)), pairs[0])


class ReasoningCount:
    """Counts the tokens of the reasoning in an output, as `ReasoningMatcher` does: without the token that opens it and
    the one that ends it.

    Args:
        prompt: text of the state before the output, which may have opened the reasoning.
    """

    def __init__(self, fmt: ReasoningFormat, prompt: str, tokenizer: TokenBytes) -> None:
        self.num_tokens = 0
        self._parser = message_parser(reasoning=fmt, prompt=prompt)
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> None:
        """One more token of the output."""
        was_inside = self._parser.in_reasoning
        text = self._tokenizer.token_bytes(token_id, skip_special_tokens=False)
        self._parser.feed(self._decoder.decode(text))
        self.num_tokens += was_inside and self._parser.in_reasoning
