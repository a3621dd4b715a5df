"""`POST /v1/completions`: prompts in, texts out, with the log-probabilities that evaluation harnesses read.

Owns the translation of prompts (texts or token ids, one or many) into programs, one for each prompt, and of their
events into OpenAI's objects. Choices are numbered prompt by prompt, sample by sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl.errors import EmptyPrompt, InvalidParameter, Unsupported
from sgl.lang.graph import (
    DeltaEvent,
    Gen,
    Graph,
    LiteralText,
    ProgramOptions,
    Sampling,
    Text,
    Tokens,
    ValueEvent,
    lower_samples,
)
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.rendering import ModelRenderer
from sgl.server.call import Call, Server, new_id
from sgl.server.failures import openai_errors
from sgl.server.openai.logprobs import Offsets, check_logprobs, most_logprobs, num_logprobs, text_logprobs
from sgl.server.openai.sampling import constraint_field, constraint_in, sampling_of, words_of
from sgl.server.openai.types import CompletionRequest, StreamOptions
from sgl.server.openai.usage import RunningUsage, finish_reason, usage_of
from sgl.server.routes import Routes
from sgl.server.running import Running, merged

routes = Routes(openai_errors("prompt"))

MAX_PROMPTS = 1024
"""Prompts of one request: each is a program."""


@dataclass
class Sample:
    """One choice: where it comes from, and its value once it is there."""

    index: int
    prompt: str
    value: ValueEvent | None = None
    length: int = 0
    told: bool = False

    def __post_init__(self) -> None:
        self.places = Offsets(len(self.prompt))


@routes.post("/v1/completions", "user", CompletionRequest)
async def completions(call: Call, body: CompletionRequest) -> Any:
    """Continue texts."""
    call.server.check_model(body.model)
    call.name(body.rid)
    if body.suffix:
        raise Unsupported("suffix is not served", hint="leave it out", param="suffix")
    prompts = await call.apart(prompts_of, body.prompt)
    call.words.append(words_of(body))
    call.constraint = constraint_field(body)
    sampling = sampling_of(call, body)
    if body.echo and sampling.return_logprob:
        sampling = msgspec.structs.replace(sampling, logprob_start_len=0)
    if len(prompts) * sampling.n > MAX_PROMPTS:
        raise InvalidParameter(
            f"{len(prompts)} prompts with n={sampling.n}; at most {MAX_PROMPTS} samples are allowed",
            hint="send several requests",
            param="prompt",
        )
    context_len = call.server.context_len
    check_logprobs(sum(most_logprobs(sampling, len(prompt), context_len) for prompt in prompts))
    renderer = await call.server.renderer() if body.echo or sampling.return_logprob else None
    constraint = await call.apart(constraint_in, body)
    options = ProgramOptions(
        name="completion",
        stream=body.stream,
        want_text=False,
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        cache_salt=call.salt(body.cache_salt),
    )
    if body.echo and sampling.return_logprob:  # the prompt's come with the value: in one chunk
        options = msgspec.structs.replace(options, stream=False)
    graphs = [_graph(prompt, sampling, constraint) for prompt in prompts]
    programs = [call.start(graph, options) for graph in graphs]
    samples = _samples(prompts, graphs, renderer if body.echo else None)
    if body.stream:
        wanted = body.stream_options or StreamOptions()
        running = None
        if wanted.continuous_usage_stats:
            running = RunningUsage(await asyncio.to_thread(_num_tokens, await call.server.renderer(), prompts))
        return call.stream(
            _chunks(call.server, programs, samples, renderer, wanted.include_usage, running, not options.stream)
        )
    call.weigh(await call.while_connected(_filled(programs, samples)))
    return await call.apart(_whole, call.server, samples, renderer if sampling.return_logprob else None)


def prompts_of(given: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a request.

    Raises:
        EmptyPrompt: none, or an empty one.
        InvalidParameter: something that is no text and no token id.

    Example:
        >>> prompts_of("a"), prompts_of([1, 2]), prompts_of(["a", "b"])
        (['a'], [(1, 2)], ['a', 'b'])
    """
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    prompts: list[str | tuple[int, ...]] = []
    for each in given:
        if not isinstance(each, (str, list)):
            raise InvalidParameter(
                "prompt mixes texts, token ids and lists of them", hint="give one kind", param="prompt"
            )
        prompts.append(each if isinstance(each, str) else tuple(each))
    if not prompts or any(len(each) == 0 for each in prompts):
        raise EmptyPrompt("a prompt is empty", hint="pass some text, or at least one token id", param="prompt")
    for prompt in prompts:
        wrong = () if isinstance(prompt, str) else [each for each in prompt if not _is_id(each)]
        if wrong:
            raise InvalidParameter(f"prompt has {wrong[0]!r}; expected token ids from 0 on", param="prompt")
    size = sum(len(each) for each in prompts)
    if size > DEFAULT_LIMITS.max_call_tokens:
        raise InvalidParameter(f"prompts of {size} tokens or characters in one request", param="prompt")
    return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _graph(prompt: str | tuple[int, ...], sampling: Sampling, constraint: Any) -> Graph:
    first = Text(id=0, segments=(LiteralText(prompt),)) if isinstance(prompt, str) else Tokens(id=0, token_ids=prompt)
    gen = Gen(id=1, name="text", sampling=sampling, constraint=constraint)
    return Graph(nodes=(first, *([gen] if sampling.n == 1 else lower_samples(gen, range(1, sampling.n + 1)))))


def _samples(
    prompts: Sequence[str | tuple[int, ...]], graphs: Sequence[Graph], echo: ModelRenderer | None
) -> list[dict[int, Sample]]:
    """Of each program, its samples by node."""
    found: list[dict[int, Sample]] = []
    index = 0
    for prompt, graph in zip(prompts, graphs, strict=True):
        text = ""
        if echo is not None:
            text = prompt if isinstance(prompt, str) else echo.tokenizer.decode(prompt, skip_special_tokens=False)
        own: dict[int, Sample] = {}
        for node in graph.nodes:
            if isinstance(node, Gen):
                own[node.id] = Sample(index, text)
                index += 1
        found.append(own)
    return found


async def _filled(programs: Sequence[Running], samples: Sequence[dict[int, Sample]]) -> int:
    """Wait for all values; how many log-probabilities they have."""
    num = 0
    async for index, event in merged(programs):
        if isinstance(event, ValueEvent):
            samples[index][event.node].value = event
            num += num_logprobs(event)
    return num


def _whole(server: Server, samples: Sequence[dict[int, Sample]], renderer: ModelRenderer | None) -> dict[str, Any]:
    choices = [
        _choice(sample, sample.value, renderer)
        for own in samples
        for sample in own.values()
        if sample.value is not None
    ]
    return {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": server.model,
        "choices": choices,
        "usage": _usage(samples),
    }


def _choice(sample: Sample, value: ValueEvent, renderer: ModelRenderer | None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": sample.index,
        "text": sample.prompt + value.value,
        "logprobs": None,
        "finish_reason": finish_reason(value),
    }
    if renderer is not None:
        choice["logprobs"] = _logprobs(sample, value, renderer)
    if value.matched is not None:
        choice["matched_stop"] = value.matched
    return choice


def _logprobs(sample: Sample, value: ValueEvent, renderer: ModelRenderer) -> dict[str, Any]:
    """Of the echoed prompt and the text behind it."""
    places = Offsets(0 if value.prompt_logprobs else len(sample.prompt))
    return text_logprobs([*value.prompt_logprobs, *value.logprobs], renderer, places)


def _num_tokens(renderer: ModelRenderer, prompts: Sequence[str | tuple[int, ...]]) -> int:
    """Tokens of all prompts, as the engine counts them."""
    total = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            state = renderer.state()
            state.add_text(prompt)
            state.flush()
            total += len(state.ids)
        else:
            total += len(prompt)
    return total


def _usage(samples: Sequence[dict[int, Sample]]) -> dict[str, Any]:
    """Of all programs; the samples of one share its prompt."""
    values = [[sample.value for sample in own.values() if sample.value is not None] for own in samples]
    firsts = [own[0].usage for own in values if own]
    return usage_of(
        prompt=sum(usage.prompt_tokens for usage in firsts),
        cached=sum(usage.cached_tokens for usage in firsts),
        completion=sum(value.usage.completion_tokens for own in values for value in own),
    )


async def _chunks(
    server: Server,
    programs: Sequence[Running],
    samples: Sequence[dict[int, Sample]],
    renderer: ModelRenderer | None,
    include_usage: bool,
    running: RunningUsage | None,
    is_whole: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": server.model}

    def chunk(sample: Sample, text: str, logprobs: Any = None, **more: Any) -> dict[str, Any]:
        if not sample.told:
            sample.told = True
            text = sample.prompt + text
        choice = {"index": sample.index, "text": text, "logprobs": logprobs, "finish_reason": None, **more}
        so_far = running.body() if running is not None else None
        return {**head, "choices": [choice], **({"usage": so_far} if include_usage or running is not None else {})}

    async for index, event in merged(programs):
        match event:
            case DeltaEvent():
                sample = samples[index][event.node]
                sample.length += len(event.text)
                if running is not None:
                    running.take(sample.index, len(event.token_ids))
                logprobs = (
                    text_logprobs(event.logprobs, renderer, sample.places)
                    if renderer is not None and event.logprobs
                    else None
                )
                if event.text or logprobs is not None:
                    yield chunk(sample, event.text, logprobs)
            case ValueEvent():
                sample = samples[index][event.node]
                sample.value = event
                if running is not None:
                    running.take(sample.index, 0, event)
                ending = {"finish_reason": finish_reason(event)}
                if event.matched is not None:
                    ending["matched_stop"] = str(event.matched)
                logprobs = None
                if renderer is not None and is_whole:  # those of the prompt, too: there are many
                    logprobs = await asyncio.to_thread(_logprobs, sample, event, renderer)
                yield chunk(sample, event.value[sample.length :], logprobs, **ending)
            case _:
                pass
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(samples)}
