"""`POST /v1/chat/completions`: messages in, a message (or its pieces) out.

Owns OpenAI's chat objects. What a request asks for and what a model's text says is `sgl.server.dialogue`'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sgl.errors import InternalError
from sgl.lang.graph import Event, ValueEvent
from sgl.runtime.rendering import ModelRenderer
from sgl.server.call import Call, new_id
from sgl.server.dialogue import (
    Answer,
    CallArguments,
    CallBegins,
    Piece,
    Plan,
    Said,
    Thought,
    ToolCall,
    answers,
    count_tokens,
    planned,
    start,
    steps,
)
from sgl.server.failures import openai_errors
from sgl.server.openai.logprobs import chat_logprobs, num_logprobs
from sgl.server.openai.sampling import check_tools
from sgl.server.openai.types import ChatRequest, StreamOptions
from sgl.server.openai.usage import RunningUsage, finish_reason, usage_body
from sgl.server.routes import Routes

routes = Routes(openai_errors("messages"))


@routes.post("/v1/chat/completions", "user", ChatRequest)
async def chat_completions(call: Call, body: ChatRequest) -> Any:
    """Answer a conversation."""
    call.warnings += check_tools(body.tools or (), call.server.config.lenient)
    plan = await planned(call, body)
    renderer = await call.server.renderer() if plan.sampling.return_logprob else None
    head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": call.server.model}
    events = start(call, plan).events()
    if body.stream:
        wanted = body.stream_options or StreamOptions()
        running = None
        if wanted.continuous_usage_stats:
            running = RunningUsage(await count_tokens(call.server, plan))
        return call.stream(_chunks(head, plan, events, renderer, usage=wanted.include_usage, running=running))
    found = await call.while_connected(answers(plan, events))
    call.weigh(sum(num_logprobs(answer.value) for answer in found if answer.value is not None))
    return await call.apart(_whole, head, found, renderer)


# --- whole answers --------------------------------------------------------------------------------------------------


def _whole(head: dict[str, Any], found: Sequence[Answer], renderer: ModelRenderer | None) -> dict[str, Any]:
    return {
        **head,
        "object": "chat.completion",
        "choices": [_choice(index, answer, renderer) for index, answer in enumerate(found)],
        "usage": usage_body([answer.value for answer in found if answer.value is not None]),
    }


def _choice(index: int, answer: Answer, renderer: ModelRenderer | None) -> dict[str, Any]:
    if (value := answer.value) is None:
        raise InternalError(f"the events of a call ended before sample {index} did")
    return {
        "index": index,
        "message": _message(answer),
        "logprobs": chat_logprobs(value.logprobs, renderer) if renderer is not None else None,
        **_ending(value, bool(answer.calls) and not answer.breaks_off),
        **({"truncated_at": value.truncated_at} if value.truncated_at is not None else {}),
    }


def _message(answer: Answer) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
    if answer.reasoning:
        shown["reasoning_content"] = answer.reasoning
    if answer.calls:
        shown["tool_calls"] = [_call(each) for each in answer.calls]
    shown["refusal"] = None
    return shown


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": new_id("call"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _ending(value: ValueEvent, has_calls: bool) -> dict[str, Any]:
    matched = {"matched_stop": value.matched} if value.matched is not None else {}
    return {"finish_reason": finish_reason(value, has_calls=has_calls), **matched}


# --- streams --------------------------------------------------------------------------------------------------------


async def _chunks(
    head: dict[str, Any],
    plan: Plan,
    events: AsyncGenerator[Event, None],
    renderer: ModelRenderer | None,
    *,
    usage: bool,
    running: RunningUsage | None,
) -> AsyncGenerator[dict[str, Any], None]:
    told: set[int] = set()
    callers: set[int] = set()
    values: dict[int, ValueEvent] = {}

    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        so_far = {"usage": running.body() if running is not None else None} if usage or running is not None else {}
        return {**head, "object": "chat.completion.chunk", "choices": choices, **so_far, **more}

    def choice(sample: int, delta: dict[str, Any], logprobs: Any = None, **more: Any) -> dict[str, Any]:
        if sample not in told:
            told.add(sample)
            delta = {"role": "assistant", "content": "", **delta}
        return chunk([{"index": sample, "delta": delta, "logprobs": logprobs, "finish_reason": None, **more}])

    async for step in steps(plan, events):
        if running is not None:
            running.take(step.sample, step.num_tokens, step.value)
        if any(isinstance(piece, CallBegins) for piece in step.pieces):
            callers.add(step.sample)
        deltas = _deltas(step.pieces)
        logprobs = None
        if renderer is not None and step.logprobs:
            logprobs = chat_logprobs(step.logprobs, renderer)
            deltas = deltas or [{}]
        for number, delta in enumerate(deltas):
            yield choice(step.sample, delta, logprobs if number == 0 else None)
        if step.value is not None:
            values[step.sample] = step.value
            yield choice(step.sample, {}, **_ending(step.value, step.sample in callers and not step.breaks_off))
    if usage:
        yield chunk([], usage=usage_body(list(values.values())))


def _deltas(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    return [delta for piece in pieces if (delta := _delta(piece)) is not None]


def _delta(piece: Piece) -> dict[str, Any] | None:
    match piece:
        case Said(text=text):
            return {"content": text}
        case Thought(text=text):
            return {"reasoning_content": text}
        case CallBegins(number=number, name=name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": number, "id": new_id("call"), "type": "function", "function": function}]}
        case CallArguments(number=number, text=text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
        case _:
            return None
