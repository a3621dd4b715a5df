"""How an endpoint that scores no strings takes one of several options.

Owns the three ways, in this order: log-probabilities of the prompt with each option behind it (completion endpoints
that echo), the most probable first tokens (chat endpoints that name them, where these tell the options apart), and an
answer that is held to be one of the options (JSON schema). Without any of them a select is `Unsupported`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sgl.errors import GenerationError, Unsupported
from sgl.grammars.spec import JsonSchema
from sgl.lang.api.messages import Ask, Client, Reply
from sgl.lang.graph import ChoiceScore, Select, Usage, method_scores


class Taken(msgspec.Struct, frozen=True):
    """The option, with what is known of all, and what it cost."""

    choice: str
    scores: tuple[ChoiceScore, ...]
    usage: Usage


def take_option(client: Client, node: Select, ask: Ask) -> Taken:
    """Have an endpoint take an option.

    Args:
        ask: the prompt.

    Raises:
        Unsupported: it has none of the means.
        GenerationError: what it answered is none of the options.
    """
    able = client.capabilities
    if ask.prompt is not None and able.echo_logprobs:
        return _by_echo(client, node, ask.prompt)
    if able.top_logprobs and ask.prompt is None and node.method != "unconditional_likelihood_normalized":
        taken = _by_first_token(client, node, ask)
        if taken is not None:
            return taken
    if able.json_schema and ask.prompt is None and not ask.prefix:
        return _by_schema(client, node, ask)
    raise Unsupported(
        f"this endpoint cannot take one of the options of {node.name!r}: it gives no log-probabilities that tell them "
        "apart, and holds no answer to a schema here",
        hint="let it come first in its assistant turn, with options that begin differently, or use another backend",
        location=node.location,
    )


def _by_echo(client: Client, node: Select, prompt: str) -> Taken:
    scored = client.score([prompt + choice for choice in node.choices])
    logprobs = [_behind(tokens, len(prompt)) for tokens in scored]
    unconditional: list[list[float]] = []
    if node.method == "unconditional_likelihood_normalized":
        alone = [_behind(tokens, 0) for tokens in client.score(list(node.choices))]
        # Tokens may be cut differently without the prompt; the mean of those there stands in for one that is missing.
        unconditional = [_as_long(base, len(values)) for base, values in zip(alone, logprobs, strict=True)]
    scores = method_scores(node.method, logprobs, unconditional)
    num = sum(map(len, scored)) + sum(map(len, unconditional))
    return _decided(node, scores, logprobs, Usage(prompt_tokens=num, prefill_tokens=num))


def _behind(tokens: Sequence[tuple[int, float]], length: int) -> list[float]:
    """Log-probabilities of the tokens that end behind so many characters."""
    return [logprob for end, logprob in tokens if end > length] or [0.0]


def _as_long(values: list[float], length: int) -> list[float]:
    mean = sum(values) / len(values)
    return (values + [mean] * length)[:length]


def _by_first_token(client: Client, node: Select, ask: Ask) -> Taken | None:
    """By the most probable first tokens; `None` where they do not tell the options apart."""
    sampling = msgspec.structs.replace(ask.sampling, temperature=0.0, stop=(), stop_regex=())
    reply = client.ask(replace(ask, sampling=sampling, max_tokens=1, top_logprobs=client.capabilities.top_logprobs))
    if not reply.tokens:
        return None
    first = reply.tokens[0]
    weights = dict.fromkeys(node.choices, 0.0)
    for text, logprob in dict([*first.top, (first.text, first.logprob)]).items():
        begun = [choice for choice in node.choices if text.lstrip() and choice.lstrip().startswith(text.lstrip())]
        if len(begun) > 1:
            return None
        if begun:
            weights[begun[0]] += math.exp(logprob)
    if not any(weights.values()):
        return None
    floor = min(logprob for _, logprob in (*first.top, (first.text, first.logprob))) - 1.0
    scores = [math.log(weights[choice]) if weights[choice] else floor for choice in node.choices]
    return _decided(node, scores, [[score] for score in scores], reply.usage)


def _by_schema(client: Client, node: Select, ask: Ask) -> Taken:
    """By an answer that has to be one of them."""
    schema = {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(node.choices)}},
        "required": ["choice"],
        "additionalProperties": False,
    }
    constraint = JsonSchema(json.dumps(schema, separators=(",", ":")))
    sampling = msgspec.structs.replace(ask.sampling, temperature=node.temperature, stop=(), stop_regex=())
    longest = max(map(len, node.choices))
    reply: Reply = client.ask(replace(ask, sampling=sampling, max_tokens=64 + longest, constraint=constraint))
    try:
        choice = json.loads(reply.text)["choice"]
    except (ValueError, KeyError, TypeError):
        choice = None
    if choice not in node.choices:
        raise GenerationError(
            f"{reply.text!r} is none of the options of {node.name!r}",
            hint="the endpoint does not hold its answers to a schema; declare capabilities={'json_schema': False}",
            location=node.location,
        )
    # Nothing is known of the others, nor how probable this one was.
    scores = tuple(ChoiceScore(option, (), (), 0.0, float(option == choice), complete=False) for option in node.choices)
    return Taken(choice, scores, reply.usage)


def _decided(node: Select, scores: list[float], logprobs: Sequence[Sequence[float]], usage: Usage) -> Taken:
    scale = node.temperature if node.temperature > 0 else 1.0
    top = max(scores)
    weights = [math.exp((score - top) / scale) for score in scores]
    best = scores.index(top)
    if node.temperature > 0:
        best = random.Random(node.seed).choices(range(len(scores)), weights)[0]
    told = tuple(
        ChoiceScore(choice, (), tuple(values), score, weight / sum(weights))
        for choice, values, score, weight in zip(node.choices, logprobs, scores, weights, strict=True)
    )
    return Taken(node.choices[best], told, usage)
