"""`/v1/messages`: Anthropic's API.

Owns the routes, the error shape and the translation of blocks to turns; what is asked and said is a dialogue as
everywhere (`sgl.server.dialogue`), and `anthropic_output` writes it down. `stop_reason` is `max_tokens`, `tool_use`,
`stop_sequence` or `end_turn`. Reasoning is in `thinking` blocks, without a signature, where the model's is told apart.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from sgl.errors import EmptyPrompt, InvalidParameter, SglError, Unsupported
from sgl.lang.graph import Event
from sgl.server.anthropic_output import MessageWriter
from sgl.server.anthropic_types import (
    Block,
    CountRequest,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from sgl.server.call import Call, Server
from sgl.server.dialogue import Plan, count_tokens, planned, reasoning_of, start, steps
from sgl.server.failures import error_message
from sgl.server.openai.prompts import no_images
from sgl.server.openai.turns import Turns, plain
from sgl.server.openai.types import (
    ChatRequest,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    Object,
    Part,
    ResponseFormat,
    TextPart,
    ToolCall,
)
from sgl.server.routes import Routes

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "stream", "rid", "priority", "cache_salt",
         "deadline_s", "unsupported")  # fmt: skip
_WORDS = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "max_reasoning_tokens": "thinking.budget_tokens",
    "response_format": "output_config.format",
}
"""Fields of a chat request as they are called here."""
_NOT_HERE = {
    "container": "nothing is executed here",
    "mcp_servers": "no other servers are asked",
    "context_management": "the context is the caller's",
}


def error_body(error: SglError) -> Object:
    """`{"type": "error", "error": {type, message}}`."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error_message(error)}}


routes = Routes(error_body)


@routes.post("/v1/messages", "user", MessagesRequest, query=("beta",))
async def messages(call: Call, body: MessagesRequest) -> Any:
    """Answer a conversation, in Anthropic's shapes."""
    for name, why in _NOT_HERE.items():
        if getattr(body, name):
            raise Unsupported(f"{name}: {why}", hint="leave it out", param=name)
    plan = await _planned(call, body)
    program = start(call, plan)
    prompt_tokens = await count_tokens(call.server, plan) if body.stream else 0  # the engine has them only at the end
    writer = MessageWriter(call.server.model, prompt_tokens)
    events = _events(writer, plan, program.events())
    if body.stream:
        return call.stream(events, done=False, named=lambda event: str(event["type"]))
    await call.while_connected(_spent(events))
    return writer.message


@routes.post("/v1/messages/count_tokens", "user", CountRequest, query=("beta",))
async def count(call: Call, body: CountRequest) -> Any:
    """Tokens of a prompt."""
    plan = await _planned(call, body)
    return {"input_tokens": await call.while_connected(count_tokens(call.server, plan))}


async def _events(
    writer: MessageWriter, plan: Plan, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Object, None]:
    has_begun = False
    async for step in steps(plan, events):
        if not has_begun:  # not sooner: what fails before has a status of its own
            has_begun = True
            for event in writer.begin():
                yield event
        for event in writer.step(step):
            yield event


async def _spent(events: AsyncGenerator[Object, None]) -> None:
    async for _ in events:
        pass


# --- requests -------------------------------------------------------------------------------------------------------


async def _planned(call: Call, body: CountRequest) -> Plan:
    if not body.messages:
        raise EmptyPrompt("messages is empty", hint="give at least one message", param="messages")
    request, places = await call.apart(_request, call.server, body)
    return await planned(call, request, name="messages", places=places, words=_WORDS)


def _request(server: Server, body: CountRequest) -> tuple[ChatRequest, list[str]]:
    """What a chat request of the same meaning would be, and the names of its messages in errors."""
    turns = Turns()
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        turns.add(Message(role="system", content=text), "system")
    for index, turn in enumerate(body.messages):
        _add(turns, turn, f"messages[{index}]")
    is_open = body.messages[-1].role == "assistant"  # the answer goes on with what the client has written of it
    fields: Object = {}
    if isinstance(body, MessagesRequest):
        fields = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    request = ChatRequest(
        messages=turns.messages,
        model=body.model,
        tools=[_tool(tool, index) for index, tool in enumerate(body.tools or ())] or None,
        continue_final_message=is_open,
        **_choice(body),
        **_format(body),
        **_thinking(server, body),
        reasoning_effort=_effort(body),
        **fields,
    )
    return request, turns.places


def _add(turns: Turns, turn: Turn, place: str) -> None:
    """Append a turn: results of tools are messages of their own, before its text."""
    if isinstance(turn.content, str):
        turns.add(Message(role=turn.role, content=turn.content), place)
        return
    parts: list[Part] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(turn.content):
        where = f"{place}.content[{number}]"
        _check(turn, block, where)
        match block:
            case TextBlock() | ImageBlock():
                parts.append(_part(block, where))
            case ToolUseBlock(id=id, name=name, input=input):
                calls.append(ToolCall(id=id, function=FunctionCall(name, json.dumps(input, ensure_ascii=False))))
            case ToolResultBlock():
                turns.add(_result(block, where), where)
            case ThinkingBlock() | RedactedThinkingBlock():
                pass
    if parts or calls:
        turns.add(Message(role=turn.role, content=plain(parts) or None, tool_calls=calls or None), place)
    elif not any(isinstance(block, ToolResultBlock) for block in turn.content):
        raise InvalidParameter(f"{place}.content is empty", hint="give text", param=f"{place}.content")


def _check(turn: Turn, block: Block, where: str) -> None:
    wanted = {ToolUseBlock: "assistant", ToolResultBlock: "user"}.get(type(block), turn.role)
    if turn.role != wanted:
        raise InvalidParameter(
            f"{where} is a block of the {wanted}'s in a turn of the {turn.role}'s", hint="move it", param=where
        )


def _part(block: TextBlock | ImageBlock, where: str) -> Part:
    if isinstance(block, ImageBlock):
        raise no_images(where)
    return TextPart(block.text)


def _result(block: ToolResultBlock, where: str) -> Message:
    given = block.content
    parts: list[Part] = (
        [_part(each, f"{where}.content[{number}]") for number, each in enumerate(given)]
        if isinstance(given, list)
        else [TextPart(given or "")]
    )
    if block.is_error:
        parts = [TextPart("error: "), *parts]
    return Message(role="tool", content=parts, tool_call_id=block.tool_use_id)


def _tool(tool: Object, index: int) -> Object:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise Unsupported(
            f"tools[{index}] is of type {kind!r}; only tools of the caller's own are served here",
            hint="leave it out, or offer it with a name and an input_schema",
            param=f"tools[{index}].type",
        )
    if "input_schema" not in tool:
        raise InvalidParameter(
            f"tools[{index}] has no input_schema", hint="give its JSON schema", param=f"tools[{index}].input_schema"
        )
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {names[name]: tool[name] for name in names if name in tool}}


def _choice(body: CountRequest) -> Object:
    choice = body.tool_choice
    if choice is None:
        return {}
    fields: Object = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {**fields, "tool_choice": "required" if choice.type == "any" else choice.type}


def _format(body: CountRequest) -> Object:
    wanted = body.output_config.format if body.output_config is not None else None
    wanted = wanted or body.output_format
    if wanted is None:
        return {}
    schema = JsonSchemaFormat(schema_=wanted.schema_)
    return {"response_format": ResponseFormat(type="json_schema", json_schema=schema)}


def _effort(body: CountRequest) -> str | None:
    effort = body.output_config.effort if body.output_config is not None else None
    return "xhigh" if effort == "max" else effort


def _thinking(server: Server, body: CountRequest) -> Object:
    """`thinking` as the budget and the template's variables; it is not asked of a model that does not reason."""
    given = body.thinking or Thinking("adaptive")
    if given.type == "adaptive":
        return {"chat_template_kwargs": body.chat_template_kwargs}
    is_on = given.type == "enabled"
    if is_on and reasoning_of(server) is None:
        raise Unsupported(f"{server.model} does not think", hint="leave thinking out", param="thinking")
    kwargs = {"enable_thinking": is_on, "thinking": is_on, **(body.chat_template_kwargs or {})}
    return {"chat_template_kwargs": kwargs, "max_reasoning_tokens": given.budget_tokens if is_on else None}
