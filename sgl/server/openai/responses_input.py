"""The input of `/v1/responses` as a chat request.

Owns the translation of items to turns: calls that follow each other, or the assistant's text, are one turn, as the
model wrote them; instructions are the system turn. Errors name the item, `input[3].content`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sgl.errors import EmptyPrompt, InvalidParameter, Unsupported
from sgl.server.bodies import decode_now
from sgl.server.call import Call
from sgl.server.openai.prompts import no_images
from sgl.server.openai.responses_types import (
    KINDS,
    CallItem,
    InputImage,
    Item,
    MessageItem,
    OutputItem,
    Part,
    ReasoningItem,
    Refusal,
    ResponseRequest,
    TextFormat,
)
from sgl.server.openai.turns import Turns, plain
from sgl.server.openai.types import (
    ChatRequest,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    Object,
    RefusalPart,
    ResponseFormat,
    TextPart,
    ToolCall,
)
from sgl.server.openai.types import Part as ChatPart

_SAME = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "unsupported",
    "max_reasoning_tokens",
    "chat_template_kwargs",
    "stream",
    "rid",
    "priority",
    "cache_salt",
    "deadline_s",
)
_NOT_HERE = {
    "background": "responses are answered while the client waits",
    "conversation": "conversations are not kept here; use previous_response_id, or send the items",
    "prompt": "prompt templates are not kept here; send instructions and input",
    "context_management": "the context is the caller's",
    "moderation": "there is no moderation here",
    "image": "no images are made here",
    "access_programs": "there are none here",
    "background_options": "responses are answered while the client waits",
}
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")


def refuse(body: ResponseRequest) -> None:
    """Raise `Unsupported` for fields that are known and not served."""
    for name, why in _NOT_HERE.items():
        if getattr(body, name):
            raise Unsupported(f"{name}: {why}", hint="leave it out", param=name)
    if body.reasoning is not None and body.reasoning.mode not in (None, "standard"):
        raise Unsupported(
            f"reasoning.mode is {body.reasoning.mode!r}; there is standard", hint="leave it out", param="reasoning.mode"
        )
    if body.truncation == "auto":
        raise Unsupported("truncation is 'auto'; nothing is cut here", hint="leave it out", param="truncation")
    for name in body.include or ():
        if name not in _INCLUDED:
            raise Unsupported(f"include has {name!r}", hint=f"expected some of {', '.join(_INCLUDED)}", param="include")


def input_items(body: ResponseRequest) -> list[Object]:
    """The request's own items; a text is one message.

    Raises:
        EmptyPrompt: there are none.
    """
    if not body.input:
        raise EmptyPrompt("input is empty", hint="give a text, or at least one item", param="input")
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input


def chat_request(call: Call, body: ResponseRequest, items: Sequence[Object], num_earlier: int = 0) -> _Chat:
    """What a chat request with this input would be, and the names of its messages in errors.

    Args:
        items: of the whole conversation.
        num_earlier: so many of them are those of the previous response.

    Raises:
        InvalidRequest: an item, a tool or a format that cannot be used.
    """
    turns = Turns()
    if body.instructions:
        turns.add(Message(role="system", content=body.instructions), "instructions")
    for index, raw in enumerate(items):
        place = f"input[{index - num_earlier}]" if index >= num_earlier else "previous_response_id"
        _add(turns, _item(call, raw, place), place)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools or ())] or None
    fields["tool_choice"] = _choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return _Chat(ChatRequest(messages=turns.messages, **fields), turns.places)


class _Chat(msgspec.Struct, frozen=True):
    request: ChatRequest
    places: list[str]


def _add(turns: Turns, item: Item, place: str) -> None:
    """Append an item, to the turn that is there if it belongs to it."""
    match item:
        case MessageItem(role=role, content=content):
            said = _content(content, place)
            turns.add(Message(role="system" if role == "developer" else role, content=said), place)
        case CallItem():
            turns.call(ToolCall(id=item.call_id, function=FunctionCall(item.name, item.arguments)), place)
        case OutputItem():
            output = _content(item.output, f"{place}.output")
            turns.add(Message(role="tool", content=output, tool_call_id=item.call_id, name=item.name), place)
        case ReasoningItem():
            pass


def _item(call: Call, raw: Object, place: str) -> Item:
    kind = "message" if raw.get("type") is None else raw["type"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise Unsupported(
            f"{place} is of type {kind!r}; expected {', '.join(KINDS)}", hint="leave it out", param=f"{place}.type"
        )
    given = {name: value for name, value in raw.items() if value is not None}  # clients write out what is not there
    try:
        item, warnings = decode_now(
            msgspec.json.encode({**given, "type": kind}), KINDS[kind], call.server.config.lenient
        )
    except InvalidParameter as error:
        param = error.details.get("param")
        raise InvalidParameter(
            f"{place}: {error.message}", hint=error.hint, param=f"{place}.{param}" if param else place
        ) from None
    call.warnings += [f"{place}: {warning}" for warning in warnings]
    return item


def _content(given: str | list[Part], place: str) -> str | list[ChatPart]:
    if isinstance(given, str):
        return given
    parts: list[ChatPart] = []
    for number, part in enumerate(given):
        match part:
            case InputImage():
                raise no_images(f"{place}.content[{number}]")
            case Refusal(refusal=text):
                parts.append(RefusalPart(text))
            case _:
                parts.append(TextPart(part.text))
    return plain(parts)


def _tool(tool: Object, index: int) -> Object:
    kind = tool.get("type", "function")
    if kind != "function":
        raise Unsupported(
            f"tools[{index}] is of type {kind!r}; only functions are served here",
            hint="leave it out, or offer it as a function",
            param=f"tools[{index}].type",
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(given: str | Object | None) -> str | Object | None:
    """A choice in the words of chat completions."""
    if not isinstance(given, dict) or given.get("type") == "function":
        return given
    if given.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": {name: given[name] for name in given if name != "type"}}
    raise Unsupported(
        f"tool_choice is of type {given.get('type')!r}; expected auto, none, required, a function or allowed_tools",
        hint='give {"type": "function", "name": ...}',
        param="tool_choice",
    )


def _format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    if given.schema_ is msgspec.UNSET:
        raise InvalidParameter(
            "text.format is of type json_schema and has no schema",
            hint='put the schema under "schema"',
            param="text.format.schema",
        )
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(given.name, given.schema_))
