"""Choices and scores over HTTP: `/v1/score` and `/v1/decisions`.

Owns both bodies and the wording of decisions, which has a version. Each item or question is one token's distribution:
the log-probabilities of its labels after its prompt, in one program; prompts that begin alike are computed once by the
engine, as everywhere.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from sgl.errors import InvalidParameter
from sgl.lang.graph import (
    Gen,
    Graph,
    LiteralText,
    Node,
    ProgramOptions,
    Role,
    Sampling,
    Text,
    Tokens,
    ValueEvent,
)
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.rendering import ModelRenderer
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.server.bodies import check_count, check_expanded
from sgl.server.call import Call
from sgl.server.openai.usage import usage_of
from sgl.server.routes import Routes
from sgl.server.running import merged

routes = Routes()

MAX_ITEMS = 1024
"""Items or questions of one request: each is a program."""
PROMPT_FORMAT_VERSION = 1
"""Of the wording of `/v1/decisions`: an answer depends on it, so it changes under a new number only."""


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/score`: how probable each label token is after the query and each item.

    Attributes:
        query, items: texts, or token ids (then both are).
        label_token_ids: for all items, or a list of them for each.
        item_first: the item stands before the query.
        apply_softmax: probabilities among the labels alone, at `temperature`; else those among all tokens.
    """

    query: str | list[int] = ""
    items: str | list[Any]
    label_token_ids: list[Any]
    apply_softmax: bool = False
    item_first: bool = False
    temperature: float = 1.0
    return_token_logprobs: bool = False
    model: str | None = None
    cache_salt: str | None = None


class ChoiceQuestion(msgspec.Struct, tag="choice", tag_field="type", forbid_unknown_fields=True):
    """Which of the options."""

    id: str
    options: list[str]
    question: str = ""


class ScoreQuestion(msgspec.Struct, tag="score", tag_field="type", forbid_unknown_fields=True):
    """How much: one of the levels, lowest first; `score` in the answer is their mean position, 0 to 1."""

    id: str
    levels: list[str]
    question: str = ""


class YesNoQuestion(msgspec.Struct, tag="yes_no", tag_field="type", forbid_unknown_fields=True):
    """Whether."""

    id: str
    question: str = ""


Question: TypeAlias = ChoiceQuestion | ScoreQuestion | YesNoQuestion


class DecisionsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/decisions`: questions about one input, answered with probabilities."""

    input: Any
    questions: list[Question]
    temperature: float = 1.0
    prompt_format_version: Literal[1] = 1
    return_prompt_token_ids: bool = False
    model: str | None = None
    cache_salt: str | None = None


# --- /v1/score ------------------------------------------------------------------------------------------------------


@routes.post("/v1/score", "user", ScoreRequest)
async def score(call: Call, body: ScoreRequest) -> Any:
    """The probability of each label after each item."""
    call.server.check_model(body.model)
    call.server.check_generates()
    call.words.append({"token_ids_logprob": "label_token_ids"})
    items: list[Any] = [body.items] if isinstance(body.items, str) else body.items
    check_count("items", len(items), MAX_ITEMS)
    size = sum(len(item) for item in items if isinstance(item, str | list)) + len(items) * len(body.query)
    check_expanded("items", size)
    labels = _labels(body.label_token_ids, len(items))
    call.weigh(size + sum(map(len, labels)))
    _check_temperature(body.temperature)
    graphs = await call.apart(_score_graphs, body, items, labels)
    values = await call.while_connected(_read(call, graphs, body.cache_salt))
    found, scores = await call.apart(_scores, body, values, labels)
    answer: dict[str, Any] = {
        "object": "scoring",
        "model": call.server.model,
        "scores": scores,
        "usage": _usage(values),
    }
    if body.return_token_logprobs:
        answer["token_logprobs"] = found
    return answer


def _scores(
    body: ScoreRequest, values: Sequence[ValueEvent], labels: Sequence[tuple[int, ...]]
) -> tuple[list[list[float]], list[list[float]]]:
    """The log-probability of each label after each item, and what is asked for in its place."""
    found = [_logprobs(value, own) for value, own in zip(values, labels, strict=True)]
    if body.apply_softmax:
        return found, [softmax(each, body.temperature) for each in found]
    return found, [[math.exp(one) for one in each] for each in found]


def _score_graphs(body: ScoreRequest, items: Sequence[Any], labels: Sequence[tuple[int, ...]]) -> list[Graph]:
    """A program for each item."""
    if not isinstance(body.query, str):
        _check_ids("query", body.query)
    prompts = [_prompt(body, item, f"items[{index}]") for index, item in enumerate(items)]
    return [Graph(nodes=(prompt, _reader(1, own))) for prompt, own in zip(prompts, labels, strict=True)]


def _prompt(body: ScoreRequest, item: Any, place: str) -> Node:
    query = [] if body.query == "" and isinstance(item, list) else body.query
    if isinstance(item, str) and isinstance(query, str):
        text = item + query if body.item_first else query + item
        if text:
            return Text(id=0, segments=(LiteralText(text),))
    elif isinstance(item, list) and isinstance(query, list):
        _check_ids(place, item)
        ids = (*item, *query) if body.item_first else (*query, *item)
        if ids:
            return Tokens(id=0, token_ids=ids)
    else:
        raise InvalidParameter(
            f"{place} does not go with query", hint="give texts, or lists of token ids, for both", param=place
        )
    raise InvalidParameter(f"query and {place} are both empty", hint="give text, or token ids, in one", param=place)


def _check_ids(name: str, ids: list[Any]) -> None:
    wrong = [each for each in ids if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 2**31]
    if wrong:
        raise InvalidParameter(f"{name} has {wrong[0]!r}; expected token ids from 0 on", param=name)


def _labels(given: list[Any], num: int) -> list[tuple[int, ...]]:
    """The labels of each item."""
    if given and all(isinstance(each, list) for each in given):
        if len(given) != num:
            raise InvalidParameter(
                f"{len(given)} lists of labels for {num} items",
                hint="give one list for all, or one for each item",
                param="label_token_ids",
            )
        return [_label_ids(each) for each in given]
    return [_label_ids(given)] * num


def _label_ids(given: list[Any]) -> tuple[int, ...]:
    most = DEFAULT_LIMITS.max_logprob_ids
    if len(given) > most:
        raise InvalidParameter(f"{len(given)} labels; at most {most} are allowed", param="label_token_ids")
    if not given or any(isinstance(each, bool) or not isinstance(each, int) for each in given):
        raise InvalidParameter("label_token_ids has no token ids", param="label_token_ids")
    return tuple(given)


# --- /v1/decisions --------------------------------------------------------------------------------------------------


@routes.post("/v1/decisions", "user", DecisionsRequest)
async def decisions(call: Call, body: DecisionsRequest) -> Any:
    """Answer questions about an input with probabilities."""
    call.server.check_model(body.model)
    check_count("questions", len(body.questions), MAX_ITEMS)
    shown = await call.apart(_shown, body.input)
    check_expanded("questions", len(body.questions) * len(shown))
    _check_questions(body.questions)
    _check_temperature(body.temperature)
    renderer = await call.server.renderer()
    asked = await asyncio.to_thread(lambda: [_Asked(each, shown, renderer.tokenizer) for each in body.questions])
    values = await call.while_connected(_read(call, [each.graph for each in asked], body.cache_salt))
    answers = {
        each.question.id: each.answer(value, body.temperature) for each, value in zip(asked, values, strict=True)
    }
    answer: dict[str, Any] = {
        "object": "decisions",
        "model": call.server.model,
        "prompt_format_version": PROMPT_FORMAT_VERSION,
        "answers": answers,
        "usage": _usage(values),
    }
    if body.return_prompt_token_ids:
        prompts = await asyncio.to_thread(lambda: [each.prompt_ids(renderer) for each in asked])
        for each, ids in zip(asked, prompts, strict=True):
            answers[each.question.id].update(prompt_token_ids=ids, label_token_ids=list(each.labels))
    return answer


def _shown(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


class _Asked:
    """A question as a program that reads one token's distribution."""

    def __init__(self, question: Question, shown: str, tokenizer: Tokenizer) -> None:
        self.question = question
        self.names, letters, self.text = _wording(question, shown)
        self.labels = tuple(_label_token(tokenizer, letter) for letter in letters)
        if len(set(self.labels)) != len(self.labels):
            raise InvalidParameter(
                f"the model's vocabulary has no label of its own for each option of question {question.id!r}",
                hint="give fewer options",
                param="questions",
            )
        self.graph = Graph(
            nodes=(
                Role(id=0, role="user", begin=True),
                Text(id=1, segments=(LiteralText(self.text),)),
                Role(id=2, role="user", begin=False),
                Role(id=3, role="assistant", begin=True),
                _reader(4, self.labels),
            )
        )

    def prompt_ids(self, renderer: ModelRenderer) -> list[int]:
        """The prompt's tokens, as the engine has them."""
        state = renderer.state()
        state.begin("user")
        state.add_text(self.text)
        state.end()
        state.begin("assistant")
        state.flush()
        return state.ids

    def answer(self, value: ValueEvent, temperature: float) -> dict[str, Any]:
        """The probabilities of the options, and what follows from them."""
        logprobs = _logprobs(value, self.labels)
        shares = softmax(logprobs, temperature)
        found: dict[str, Any] = {
            "type": type(self.question).__struct_config__.tag,
            "probabilities": dict(zip(self.names, shares, strict=True)),
            "label_mass": min(sum(math.exp(each) for each in logprobs), 1.0),
        }
        if isinstance(self.question, ChoiceQuestion):
            found["choice"] = self.names[shares.index(max(shares))]
        if isinstance(self.question, ScoreQuestion):
            found["score"] = sum(share * index for index, share in enumerate(shares)) / (len(shares) - 1)
        return found


def _wording(question: Question, shown: str) -> tuple[list[str], list[str], str]:
    """Names of the options, their labels, and the text of the user's turn (version 1)."""
    asked = question.question or question.id
    if isinstance(question, YesNoQuestion):
        return ["yes", "no"], ["Yes", "No"], f"{shown}\n\nQuestion: {asked}\nAnswer with Yes or No only."
    names = question.options if isinstance(question, ChoiceQuestion) else question.levels
    letters = [_letter(index) for index in range(len(names))]
    listed = "\n".join(f"{letter}. {name}" for letter, name in zip(letters, names, strict=True))
    return list(names), letters, f"{shown}\n\nQuestion: {asked}\n{listed}\nAnswer with one letter only."


def _letter(index: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index]


def _label_token(tokenizer: Tokenizer, label: str) -> int:
    """The first token of a label where the answer begins."""
    return tokenizer.encode(label)[0]


def _check_questions(questions: Sequence[Question]) -> None:
    num_of = Counter(question.id for question in questions)
    for index, question in enumerate(questions):
        if num_of[question.id] > 1:
            raise InvalidParameter(f"two questions have the id {question.id!r}", hint="rename one", param="questions")
        if isinstance(question, YesNoQuestion):
            continue
        field = "options" if isinstance(question, ChoiceQuestion) else "levels"
        names = getattr(question, field)
        if not 2 <= len(names) <= 26 or len(set(names)) != len(names) or not all(names):
            raise InvalidParameter(
                f"questions[{index}].{field} has {len(names)} entries; expected 2 to 26 different texts",
                param=f"questions[{index}].{field}",
            )


# --- both -----------------------------------------------------------------------------------------------------------


def _reader(id: int, labels: tuple[int, ...]) -> Gen:
    """A generation that is asked for the log-probabilities of labels, and draws a token for nothing."""
    unique = tuple(dict.fromkeys(labels))
    sampling = Sampling(
        max_new_tokens=1, temperature=0.0, ignore_eos=True, return_logprob=True, token_ids_logprob=unique
    )
    return Gen(id=id, name="label", sampling=sampling)


async def _read(call: Call, graphs: Sequence[Graph], salt: str | None) -> list[ValueEvent]:
    options = ProgramOptions(name="score", want_text=False, cache_salt=call.salt(salt))
    programs = [call.start(graph, options) for graph in graphs]
    values: dict[int, ValueEvent] = {}
    async for index, event in merged(programs):
        if isinstance(event, ValueEvent):
            values[index] = event
    return [values[index] for index in range(len(graphs))]


def _logprobs(value: ValueEvent, labels: tuple[int, ...]) -> list[float]:
    given = dict(value.logprobs[0].given)
    return [given[label] for label in labels]


def softmax(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities among these alone.

    Example:
        >>> softmax([0.0, 0.0])
        [0.5, 0.5]
    """
    highest = max(logprobs)
    weights = [math.exp((each - highest) / temperature) for each in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


def _check_temperature(value: float) -> None:
    if not 0 < value <= 1000:
        raise InvalidParameter(f"temperature is {value}; expected more than 0, at most 1000", param="temperature")


def _usage(values: Sequence[ValueEvent]) -> dict[str, Any]:
    return usage_of(
        prompt=sum(value.usage.prompt_tokens for value in values),
        cached=sum(value.usage.cached_tokens for value in values),
        completion=0,
    )
