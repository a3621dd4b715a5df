"""API speculative execution: a request runs on past the end of its generation, and the surplus answers later ones.

Owns the rule by which a value is taken from what a model has already written. Only generations that end at a stop can
be: where one would have ended by its budget, nobody here can count the endpoint's tokens. The program's text between
two generations has to be word for word what the model wrote, or the surplus is dropped (`ApiPrompt.add_text`). So with
greedy sampling a value is what it would have been without.
"""

from __future__ import annotations

from sgl.lang.api.messages import ApiPrompt
from sgl.lang.graph import Gen
from sgl.lang.stops import Cut, first_stop


def can_speculate(node: Gen) -> bool:
    """Whether a generation may run on past its end, or be answered by surplus."""
    sampling = node.sampling
    return bool(sampling.stop or sampling.stop_regex) and node.constraint is None and not node.tools


def take_ahead(prompt: ApiPrompt, node: Gen) -> Cut | None:
    """The value of a generation, if what the model wrote ahead holds it whole."""
    if not prompt.ahead or not can_speculate(node):
        return None
    cut = first_stop(prompt.ahead, node.sampling)
    if cut is None and prompt.ahead_ended:
        return Cut(prompt.ahead, "", len(prompt.ahead))
    return cut


def keep_ahead(prompt: ApiPrompt, surplus: str, ended: bool) -> None:
    """Remember what the model wrote beyond the prompt."""
    prompt.ahead, prompt.ahead_ended = surplus, ended
