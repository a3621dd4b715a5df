"""How a `select` turns the log-probabilities of its options into scores: the methods as named values.

Owns names only; backends compute. A method that is not one of these three is `InvalidParameter` at the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

from sgl.errors import InvalidParameter
from sgl.lang.graph import ChoicesMethod


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """What a backend of one's own (`sgl.BaseBackend`) takes: the option, and what it knows of all of them."""

    decision: str
    meta_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChoicesSamplingMethod:
    """A named way to score the options of a `select`.

    Example:
        >>> token_length_normalized.name
        'token_length_normalized'
    """

    name: ChoicesMethod


token_length_normalized = ChoicesSamplingMethod("token_length_normalized")
"""Highest mean log-probability per token. The default.

Example:
    >>> import sgl
    >>> sgl.select("x", ["a", "b"], choices_method=sgl.token_length_normalized).method
    'token_length_normalized'
"""

greedy_token_selection = ChoicesSamplingMethod("greedy_token_selection")
"""The option that wins token position by token position; short options are padded with their mean.

Example:
    >>> import sgl
    >>> sgl.select("x", ["a", "b"], choices_method=sgl.greedy_token_selection).method
    'greedy_token_selection'
"""

unconditional_likelihood_normalized = ChoicesSamplingMethod("unconditional_likelihood_normalized")
"""Mean of log-probability minus the log-probability without the prompt.

Example:
    >>> import sgl
    >>> sgl.select("x", ["a", "b"], choices_method=sgl.unconditional_likelihood_normalized).method
    'unconditional_likelihood_normalized'
"""


def method_name(method: ChoicesSamplingMethod | str | None) -> ChoicesMethod:
    """The graph's name of a method given as value or by name; the default for `None`.

    Raises:
        InvalidParameter: anything else.
    """
    if method is None:
        return token_length_normalized.name
    name = method.name if isinstance(method, ChoicesSamplingMethod) else method
    if not isinstance(name, str) or name not in get_args(ChoicesMethod):
        raise InvalidParameter(
            f"choices_method is {method!r}; expected one of {', '.join(get_args(ChoicesMethod))}",
            param="choices_method",
        )
    return cast(ChoicesMethod, name)
