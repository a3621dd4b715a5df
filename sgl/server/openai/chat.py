"""`POST /v1/chat/completions`: messages in, a message (or its pieces) out.

Owns the translation of one program's events into OpenAI's chat objects. Each sample has a parser that takes its text
apart into answer, reasoning and tool calls (`sgl.grammars.formats`); whole answers and streams go through the same one,
so that both say the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl.errors import InvalidParameter, Unsupported
from sgl.grammars.formats import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Message,
    ReasoningDelta,
    ReasoningFormat,
    StreamParser,
    Tool,
    ToolFormat,
    choice_of,
    message_of,
    message_parser,
    reasoning_format,
    tool_format,
    tools_of,
)
from sgl.grammars.formats import Event as ParsedEvent
from sgl.grammars.spec import Constraint
from sgl.lang.graph import DeltaEvent, DoneEvent, Gen, Graph, ProgramOptions, Sampling, ValueEvent, lower_samples
from sgl.runtime.rendering import ModelRenderer
from sgl.server.call import Call, Server, new_id
from sgl.server.openai.logprobs import chat_logprobs
from sgl.server.openai.prompts import ChatPrompt
from sgl.server.openai.sampling import constraint_in, sampling_of
from sgl.server.openai.types import ChatRequest
from sgl.server.openai.usage import finish_reason, usage_body
from sgl.server.routes import Routes

routes = Routes()


@dataclass
class Plan:
    """A request, understood.

    Attributes:
        tools: that the model may call; empty when there are none or `tool_choice` is none.
        answers_inside: text of the assistant's turn that the client has opened, which is part of no answer.
    """

    graph: Graph
    sampling: Sampling
    tools: tuple[Tool, ...]
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    one_call: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))
    renderer: ModelRenderer | None = None

    @property
    def samples(self) -> list[int]:
        """Ids of the generations, in the order of the choices."""
        return [node.id for node in self.graph.nodes if isinstance(node, Gen)]

    def parser(self) -> StreamParser:
        """A parser for one sample."""
        return message_parser(self.tool_format if self.tools else None, self.reasoning, self.tools or None)


@routes.post("/v1/chat/completions", "user", ChatRequest)
async def chat_completions(call: Call, body: ChatRequest) -> Any:
    """Answer a conversation."""
    call.server.check_model(body.model)
    call.name(body.rid)
    plan = plan_chat(call, body)
    if plan.sampling.return_logprob:
        plan.renderer = await call.server.renderer()
    options = ProgramOptions(
        name="chat",
        stream=body.stream,
        want_text=False,
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        cache_salt=call.salt(body.cache_salt),
    )
    program = call.start(plan.graph, options)
    if body.stream:
        include = body.stream_options
        return call.stream(_chunks(call, plan, program.events(), usage=include is not None and include.include_usage))
    return await call.while_connected(_whole(call.server, plan, program.events()))


def plan_chat(call: Call, body: ChatRequest) -> Plan:
    """What a request asks for, as a graph.

    Raises:
        InvalidRequest: it cannot be served as it is.
    """
    server = call.server
    fmt = tool_format(server.config.tool_call_parser or server.formats.get("tool") or "hermes")
    reasoning = _reasoning(server, body)
    tools = tools_of(body.tools or ())
    choice = choice_of(body.tool_choice, tools)
    parallel = body.parallel_tool_calls is not False
    sampling = sampling_of(call, body)
    constraint = _constraint(body, fmt, tools, choice, parallel)
    told = tools if choice.mode != "none" else ()
    prompt = ChatPrompt(fmt, fmt.tool_prompt(told).system if told else "")
    if body.continue_final_message and (not body.messages or body.messages[-1].role != "assistant"):
        raise InvalidParameter(
            "continue_final_message is given and the last message is not the assistant's",
            hint="append the beginning of the answer as an assistant message",
            param="continue_final_message",
        )
    if body.chat_template_kwargs:
        raise Unsupported(
            f"chat_template_kwargs {', '.join(sorted(body.chat_template_kwargs))} are not served yet",
            hint="leave them out",
            param="chat_template_kwargs",
        )
    prompt.add(body.messages, open_last=body.continue_final_message)
    if not body.continue_final_message:
        prompt.begin_answer()
    gen = Gen(
        id=prompt.next_id,
        name="answer",
        sampling=sampling,
        constraint=constraint,
        reasoning=reasoning.name if reasoning is not None else None,
    )
    samples = [gen] if sampling.n == 1 else lower_samples(gen, range(1, sampling.n + 1))
    return Plan(
        graph=Graph(nodes=(*prompt.nodes, *samples)),
        sampling=sampling,
        tools=told,
        tool_format=fmt,
        reasoning=reasoning if body.separate_reasoning and body.include_reasoning is not False else None,
        one_call=not parallel,
    )


def _reasoning(server: Server, body: ChatRequest) -> ReasoningFormat | None:
    name = server.config.reasoning_parser or server.formats.get("reasoning")
    if body.reasoning_effort not in (None, "none", "minimal", "low", "medium", "high", "xhigh"):
        raise InvalidParameter(
            f"reasoning_effort is {body.reasoning_effort!r}; expected none, minimal, low, medium, high or xhigh",
            param="reasoning_effort",
        )
    return reasoning_format(name) if name is not None else None


def _constraint(
    body: ChatRequest, fmt: ToolFormat, tools: Sequence[Tool], choice: Any, parallel: bool
) -> Constraint | None:
    asked = constraint_in(body)
    if not tools:
        return asked
    calls = fmt.constraint(tools, choice, parallel=parallel)
    if asked is None:
        return calls
    if choice.mode == "required":
        raise InvalidParameter(
            "response_format and a tool_choice that wants a call are both given; one must go",
            hint="set tool_choice to auto or none",
            param="response_format",
        )
    return asked


# --- whole answers --------------------------------------------------------------------------------------------------


async def _whole(server: Server, plan: Plan, events: AsyncGenerator[Any, None]) -> dict[str, Any]:
    values: dict[int, ValueEvent] = {}
    async for event in events:
        if isinstance(event, ValueEvent):
            values[event.node] = event
    samples = [values[node] for node in plan.samples]
    return {
        "id": plan.id,
        "object": "chat.completion",
        "created": plan.created,
        "model": server.model,
        "choices": [_choice(plan, index, value) for index, value in enumerate(samples)],
        "usage": usage_body(samples),
    }


def _choice(plan: Plan, index: int, value: ValueEvent) -> dict[str, Any]:
    parser = plan.parser()
    message = message_of([*parser.feed(value.value), *parser.close()])
    calls = message.calls[:1] if plan.one_call else message.calls
    choice: dict[str, Any] = {
        "index": index,
        "message": _message(message, calls),
        "logprobs": chat_logprobs(value.logprobs, plan.renderer) if plan.renderer is not None else None,
        "finish_reason": finish_reason(value, has_calls=bool(calls)),
    }
    if value.matched is not None:
        choice["matched_stop"] = value.matched
    if value.truncated_at is not None:
        choice["truncated_at"] = value.truncated_at
    return choice


def _message(message: Message, calls: Sequence[Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": message.content or (None if calls else "")}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if calls:
        shown["tool_calls"] = [
            {
                "id": new_id("call"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    shown["refusal"] = None
    return shown


# --- streams --------------------------------------------------------------------------------------------------------


class _Sample:
    """A sample that streams: its parser, and what was told of it."""

    def __init__(self, plan: Plan, index: int) -> None:
        self.index = index
        self.parser = plan.parser()
        self.num_calls = 0
        self.value: ValueEvent | None = None
        self.length = 0
        self._plan = plan
        self._hidden: set[int] = set()

    def deltas(self, text: str) -> list[dict[str, Any]]:
        """What more text adds to the message."""
        return [delta for event in self.parser.feed(text) if (delta := self._delta(event)) is not None]

    def rest(self) -> list[dict[str, Any]]:
        """What the end of the text adds."""
        return [delta for event in self.parser.close() if (delta := self._delta(event)) is not None]

    def _delta(self, event: ParsedEvent) -> dict[str, Any] | None:
        match event:
            case ContentDelta(text=text):
                return {"content": text}
            case ReasoningDelta(text=text):
                return {"reasoning_content": text}
            case CallStart(index=index, name=name):
                if self._plan.one_call and self.num_calls:
                    self._hidden.add(index)
                    return None
                self.num_calls += 1
                function = {"name": name, "arguments": ""}
                call = {"index": self.num_calls - 1, "id": new_id("call"), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case ArgumentsDelta(index=index, text=text) if index not in self._hidden:
                return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]}
            case CallEnd(status="malformed", text=text):
                return {"content": text} if text else None
            case _:
                return None


async def _chunks(
    call: Call, plan: Plan, events: AsyncGenerator[Any, None], *, usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    server = call.server
    samples = {node: _Sample(plan, index) for index, node in enumerate(plan.samples)}
    told: set[int] = set()

    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": plan.id, "object": "chat.completion.chunk", "created": plan.created, "model": server.model}
        return {**head, "choices": choices, **({"usage": None} if usage else {}), **more}

    def choice(sample: _Sample, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        if sample.index not in told:
            told.add(sample.index)
            delta = {"role": "assistant", "content": "", **delta}
        return {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    async for event in events:
        match event:
            case DeltaEvent():
                sample = samples[event.node]
                sample.length += len(event.text)
                deltas = sample.deltas(event.text)
                logprobs = None
                if plan.renderer is not None and event.logprobs:
                    logprobs = chat_logprobs(event.logprobs, plan.renderer)
                    deltas = deltas or [{}]
                for number, delta in enumerate(deltas):
                    yield chunk([choice(sample, delta, logprobs=logprobs if number == 0 else None)])
            case ValueEvent():
                sample = samples[event.node]
                sample.value = event
                rest = [*sample.deltas(event.value[sample.length :]), *sample.rest()]
                for delta in rest:
                    yield chunk([choice(sample, delta)])
                ending: dict[str, Any] = {"finish_reason": finish_reason(event, has_calls=sample.num_calls > 0)}
                if event.matched is not None:
                    ending["matched_stop"] = event.matched
                yield chunk([choice(sample, {}, **ending)])
            case DoneEvent() if usage:
                values = [sample.value for sample in samples.values() if sample.value is not None]
                yield chunk([], usage=usage_body(values))
            case _:
                pass
