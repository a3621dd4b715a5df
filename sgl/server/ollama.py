"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and what its clients ask about models.

Owns the routes, the error shape (`{"error": text}`) and the objects; streams are lines of JSON, and streaming is the
default. What is asked and said is a dialogue as everywhere (`sgl.server.dialogue`). There is one model, which stays: it
may be called with the tag `:latest`, and what would pull, copy or remove models is not here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

import sgl
from sgl.errors import InvalidParameter, SglError, Unsupported
from sgl.lang.graph import Event, Graph, LiteralText, Text, ValueEvent
from sgl.server.call import Call, Server
from sgl.server.dialogue import Answer, Plan, Step, planned, reasoning_of, start, steps
from sgl.server.embeddings import embedded, inputs_of, num_tokens, vectors_of
from sgl.server.failures import error_message
from sgl.server.framing import LINES
from sgl.server.ollama_types import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
    ShowRequest,
)
from sgl.server.openai.prompts import no_images
from sgl.server.openai.types import (
    ChatRequest,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    Object,
    ResponseFormat,
    ToolCall,
)
from sgl.server.routes import Routes

_SAME = ("temperature", "seed", "stop", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_WORDS = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}
_WORDS |= {name: f"options.{name}" for name in _SAME} | {"response_format": "format"}
"""Fields of a chat request as they are called here."""
_NO_OPTIONS = {
    "typical_p": (None, 0.0, 1.0),
    "tfs_z": (None, 0.0, 1.0),
    "mirostat": (None, 0),
}
"""Options that are not served, with the values that ask for nothing."""
_NOT_HERE = {
    "logprobs": "log-probabilities are given by /v1/chat/completions",
    "top_logprobs": "log-probabilities are given by /v1/chat/completions",
    "suffix": "nothing is filled in before a text",
    "template": "templates in requests are not taken: they are code",
    "context": "send the conversation to /api/chat",
    "width": "there are no images",
    "height": "there are no images",
    "steps": "there are no images",
}


def error_body(error: SglError) -> Object:
    """`{"error": text}`."""
    return {"error": error_message(error)}


routes = Routes(error_body)


# --- generating -----------------------------------------------------------------------------------------------------


@routes.post("/api/chat", "user", OllamaChatRequest)
async def chat(call: Call, body: OllamaChatRequest) -> Any:
    """Answer a conversation, in Ollama's shapes."""
    head = _begin(call, body)
    if not body.messages:
        return {**head, "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "load"}
    request = ChatRequest(
        messages=[_message(each, index) for index, each in enumerate(body.messages)],
        tools=body.tools or None,
        **_fields(call.server, body),
    )
    plan = await planned(call, request, name="ollama", words=_WORDS)
    return await _answer(call, plan, body.stream, _Lines(head, _as_message))


@routes.post("/api/generate", "user", OllamaGenerateRequest)
async def generate(call: Call, body: OllamaGenerateRequest) -> Any:
    """Answer a prompt, or with `raw` continue it, in Ollama's shapes."""
    head = _begin(call, body)
    if body.images:
        raise no_images("images")
    if not body.prompt:
        return {**head, "response": "", "done": True, "done_reason": "load"}
    turns = [OllamaMessage("system", body.system)] if body.system else []
    turns.append(OllamaMessage("user", body.prompt))
    messages = [_message(each, index) for index, each in enumerate(turns)]
    request = ChatRequest(messages=messages, **_fields(call.server, body))
    plan = await planned(call, request, name="ollama", words=_WORDS)
    if body.raw:
        plan = _raw(plan, body.prompt)
    return await _answer(call, plan, body.stream, _Lines(head, _as_response))


def _as_message(shown: Object) -> Object:
    return {"message": {"role": "assistant", **shown}}


def _as_response(shown: Object) -> Object:
    return {"response": shown.pop("content"), **shown}


def _raw(plan: Plan, prompt: str) -> Plan:
    """The text as it is, without turns."""
    gen = msgspec.structs.replace(plan.graph.nodes[-1], id=1, reasoning=None)
    return replace(plan, graph=Graph(nodes=(Text(id=0, segments=(LiteralText(prompt),)), gen)), reasoning=None)


def _begin(call: Call, body: OllamaChatRequest | OllamaGenerateRequest) -> Object:
    """The fields that every object has, once it is known that the request can be served."""
    _check_model(call.server, body.model)
    for name, why in _NOT_HERE.items():
        if getattr(body, name, None):
            raise Unsupported(f"{name}: {why}", hint="leave it out", param=name)
    return {"model": body.model or call.server.model, "created_at": _now()}


class _Lines:
    """Answers as Ollama writes them: objects that add to each other, or one.

    Args:
        head: fields of each object.
        shown: puts what was said into place.
    """

    def __init__(self, head: Object, shown: Any) -> None:
        self._head = head
        self._shown = shown
        self._whole = Answer()
        self._told = 0
        self._began = time.monotonic_ns()
        self._first: int | None = None

    def more(self, step: Step) -> Object | None:
        """What a step adds, if anything that is shown: calls are, once they are whole."""
        self._first = self._first or time.monotonic_ns()
        before = len(self._whole.content), len(self._whole.reasoning)
        self._whole.take(step)
        content, reasoning = self._whole.content[before[0] :], self._whole.reasoning[before[1] :]
        whole = self._whole.calls if step.value is not None else self._whole.calls[:-1]
        if step.breaks_off and step.value is not None and step.value.finish == "stop":  # `done_reason` does not tell
            whole = self._whole.calls = whole[:-1]
        calls, self._told = whole[self._told :], max(self._told, len(whole))
        return self._line(content, reasoning, calls) if content or reasoning or calls else None

    def last(self, value: ValueEvent) -> Object:
        """The end of a stream."""
        return {**self._line("", "", []), **self._ending(value)}

    def whole(self, value: ValueEvent) -> Object:
        """The answer as one object."""
        found = self._whole
        return {**self._line(found.content, found.reasoning, found.calls), **self._ending(value)}

    def _line(self, content: str, reasoning: str, calls: list[Any]) -> Object:
        shown: Object = {"content": content}
        if reasoning:
            shown["thinking"] = reasoning
        if calls:
            shown["tool_calls"] = [
                {"function": {"name": each.name, "arguments": _arguments(each.arguments)}} for each in calls
            ]
        return {**self._head, "created_at": _now(), **self._shown(shown), "done": False}

    def _ending(self, value: ValueEvent) -> Object:
        end = time.monotonic_ns()
        first = self._first or end
        return {
            "done": True,
            "done_reason": value.finish,
            "total_duration": end - self._began,
            "load_duration": 0,
            "prompt_eval_count": value.usage.prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": value.usage.completion_tokens,
            "eval_duration": end - first,
        }


async def _answer(call: Call, plan: Plan, stream: bool, lines: _Lines) -> Any:
    if not stream:  # as one, so that it is known when the first token came
        plan = replace(plan, options=msgspec.structs.replace(plan.options, stream=True))
    events = start(call, plan).events()
    if stream:
        return call.framed(_streamed(plan, events, lines), LINES)
    return await call.while_connected(_whole(plan, events, lines))


async def _streamed(plan: Plan, events: AsyncGenerator[Event, None], lines: _Lines) -> AsyncGenerator[Object, None]:
    async for step in steps(plan, events):
        line = lines.more(step)
        if line is not None:
            yield line
        if step.value is not None:
            yield lines.last(step.value)


async def _whole(plan: Plan, events: AsyncGenerator[Event, None], lines: _Lines) -> Object:
    answer: Object = {}
    async for step in steps(plan, events):
        lines.more(step)
        if step.value is not None:
            answer = lines.whole(step.value)
    return answer


def _arguments(text: str) -> Object:
    try:
        found = json.loads(text or "{}")
    except ValueError:  # cut by num_predict, as done_reason says: there is no object
        return {}
    return found if isinstance(found, dict) else {}


def _message(given: OllamaMessage, index: int) -> Message:
    place = f"messages[{index}]"
    content: Any = given.content or ("" if given.role != "assistant" or not given.tool_calls else None)
    if given.images:
        raise no_images(f"{place}.images")
    if given.tool_calls and given.role != "assistant":
        raise InvalidParameter(
            f"{place} has tool_calls and its role is {given.role!r}",
            hint="calls are the assistant's",
            param=f"{place}.tool_calls",
        )
    calls = [
        ToolCall(FunctionCall(each.function.name, json.dumps(each.function.arguments, ensure_ascii=False)), each.id)
        for each in given.tool_calls or ()
    ]
    return Message(
        role=given.role,
        content=content,
        name=given.tool_name,
        tool_calls=calls or None,
        tool_call_id=given.tool_call_id,
    )


def _fields(server: Server, body: OllamaChatRequest | OllamaGenerateRequest) -> Object:
    """Sampling, format and thinking in the words of a chat request."""
    options = body.options or Options()
    for name, nothing in _NO_OPTIONS.items():
        if getattr(options, name) not in nothing:
            raise Unsupported(f"options.{name} is not served", hint="leave it out", param=f"options.{name}")
    fields: Object = {name: getattr(options, name) for name in _SAME if getattr(options, name) is not None}
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict not in (-1, -2):  # these are "all that fits"
        fields["max_tokens"] = options.num_predict
    if fields.get("top_k") == 0:
        del fields["top_k"]  # all of them, in Ollama's words
    return {
        **fields,
        **_format(body.format),
        **_thinking(server, body),
        "stream": body.stream,
        "unsupported": body.unsupported,
    }


def _format(given: str | Object | None) -> Object:
    if not given:
        return {}
    if isinstance(given, dict):
        schema = JsonSchemaFormat(schema_=given)
        return {"response_format": ResponseFormat(type="json_schema", json_schema=schema)}
    if given != "json":
        raise InvalidParameter(
            f"format is {given!r}; expected 'json' or a JSON schema",
            hint="give the schema as an object",
            param="format",
        )
    return {"response_format": ResponseFormat(type="json_object")}


def _thinking(server: Server, body: OllamaChatRequest | OllamaGenerateRequest) -> Object:
    if body.think is None:
        return {"chat_template_kwargs": body.chat_template_kwargs}
    if body.think and reasoning_of(server) is None:
        raise Unsupported(f"{server.model} does not think", hint="leave think out", param="think")
    is_on = body.think is not False
    kwargs = {"enable_thinking": is_on, "thinking": is_on, **(body.chat_template_kwargs or {})}
    effort = body.think if isinstance(body.think, str) else None
    return {"chat_template_kwargs": kwargs, "reasoning_effort": effort}


# --- embeddings -----------------------------------------------------------------------------------------------------


@routes.post("/api/embed", "user", EmbedRequest)
async def embed(call: Call, body: EmbedRequest) -> Any:
    """Embeddings of texts, in Ollama's shapes."""
    _check_model(call.server, body.model)
    began = time.monotonic_ns()
    outputs = await embedded(call, inputs_of("input", body.input), truncate=body.truncate)
    return {
        "model": body.model or call.server.model,
        "embeddings": await call.apart(vectors_of, outputs, body.dimensions),
        "total_duration": time.monotonic_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": num_tokens(outputs),
    }


@routes.post("/api/embeddings", "user", EmbeddingsRequest)
async def embeddings(call: Call, body: EmbeddingsRequest) -> Any:
    """The embedding of a text, in the shape that Ollama had first."""
    _check_model(call.server, body.model)
    outputs = await embedded(call, inputs_of("prompt", body.prompt), truncate=True)
    return {"embedding": outputs[0]["embedding"]}


# --- models ---------------------------------------------------------------------------------------------------------


@routes.get("/api/tags", "user")
async def tags(call: Call) -> Any:
    """The models that are served."""
    return {"models": [_card(call.server)]}


@routes.get("/api/ps", "user")
async def running(call: Call) -> Any:
    """The models that are loaded."""
    server = call.server
    loaded = {"expires_at": _at(2**31 - 1), "size_vram": 0, "context_length": server.context_len}
    return {"models": [{**_card(server), **loaded}]}


@routes.post("/api/show", "user", ShowRequest)
async def show(call: Call, body: ShowRequest) -> Any:
    """What the model is."""
    server = call.server
    _check_model(server, body.model or body.name)
    able = ["completion", "tools"] if server.is_generation else ["embedding"]
    if server.is_generation and reasoning_of(server) is not None:
        able.append("thinking")
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in server.info["sampling_defaults"].items()),
        "template": "",
        "details": _card(server)["details"],
        "model_info": {
            "general.architecture": str(server.info["architecture"]),
            "general.context_length": server.context_len,
        },
        "capabilities": able,
        "modified_at": _at(server.created),
    }


@routes.get("/api/version", "user")
async def version(call: Call) -> Any:
    """The version of sgl."""
    return {"version": sgl.__version__}


def _card(server: Server) -> Object:
    family = str(server.info["architecture"])
    return {
        "name": server.model,
        "model": server.model,
        "modified_at": _at(server.created),
        "size": int(server.info.get("step_weights_bytes") or 0),
        "digest": hashlib.sha256(server.model.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "sgl",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": str(server.info["resolved"].get("quantization") or ""),
        },
    }


def _check_model(server: Server, name: str | None) -> None:
    """Raise `ModelNotFound` unless it is the served model, with or without `:latest`."""
    server.check_model(name.removesuffix(":latest") if name else name)


def _now() -> str:
    return _at(time.time())


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
