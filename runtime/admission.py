"""What a generation may ask for of this engine, checked before any of its program's work begins.

Owns the checks that need the model or the registry: `sgl.lang.sampling` has checked everything else at the door. Called
by a program run with each fragment; a failure ends that program, and nothing of the fragment was started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sgl.errors import InvalidParameter, SglError
from sgl.lang.graph import Gen, Graph, check_stop_pattern
from sgl.runtime.processors import LogitProcessor, check_params


def check_generations(graph: Graph, vocab_size: int, processors: Mapping[str, LogitProcessor]) -> None:
    """Check every generation in `graph`.

    Raises:
        InvalidParameter: a token id is outside of the vocabulary, a logit processor is not registered, or refuses its
            parameters; with the node's location.
        InvalidRegex, ConstraintTooComplex: a stop pattern.
    """
    for node in graph.nodes:
        if isinstance(node, Gen):
            try:
                _check(node, vocab_size, processors)
            except SglError as error:
                raise error.at(node.location)  # noqa: B904 - the same error, with its place


def _check(node: Gen, vocab_size: int, processors: Mapping[str, LogitProcessor]) -> None:
    sampling = node.sampling
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("token_ids_logprob", sampling.token_ids_logprob, vocab_size)
    _check_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias), vocab_size)
    for pattern in sampling.stop_regex:
        check_stop_pattern(pattern)  # a graph need not have come through the language's door
    name = sampling.custom_logit_processor
    if name is not None and name not in processors:
        raise InvalidParameter(
            f"custom_logit_processor is {name!r}; registered are {', '.join(sorted(processors))}",
            hint="the operator registers more with logit_processors when the engine is started",
            param="custom_logit_processor",
        )
    if name is not None:
        check_params(name, processors[name], sampling.custom_params, vocab_size)
    if node.constraint is not None and sampling.min_new_tokens:
        raise InvalidParameter(
            "min_new_tokens cannot be combined with a constraint: it may be complete earlier",
            hint="bound the length in the constraint itself",
            param="min_new_tokens",
        )


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidParameter(
                f"{param} has token id {token_id}, outside of the vocabulary of {vocab_size}",
                hint=f"ids are 0 to {vocab_size - 1}",
                param=param,
            )
