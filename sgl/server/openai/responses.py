"""`/v1/responses`: OpenAI's newer way to ask, with items in, items out and typed events.

Owns the routes and the response object. Input is translated by `responses_input`, output by `responses_output`; what is
asked and said in between is a dialogue as everywhere (`sgl.server.dialogue`). Responses are kept only on a server with
`--response-store-bytes` (`responses_store`); elsewhere `previous_response_id` and `store: true` are refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from sgl.errors import InvalidParameter, SglError, Unsupported
from sgl.lang.graph import Event
from sgl.runtime.rendering import ModelRenderer
from sgl.server.bodies import check_turns
from sgl.server.call import Call, Server, new_id
from sgl.server.dialogue import Plan, planned, start, steps
from sgl.server.failures import openai_errors
from sgl.server.openai.logprobs import chat_logprobs
from sgl.server.openai.responses_input import chat_request, input_items, refuse
from sgl.server.openai.responses_output import Logprobs, ResponseWriter
from sgl.server.openai.responses_store import ResponseStore
from sgl.server.openai.responses_types import ResponseRequest
from sgl.server.openai.types import Object
from sgl.server.routes import Routes

routes = Routes(openai_errors("input"))

_WORDS = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Fields of a chat request as they are called here."""
MAX_LISTED = 100
"""Items of one page."""


@routes.post("/v1/responses", "user", ResponseRequest)
async def create(call: Call, body: ResponseRequest) -> Any:
    """Answer items with items."""
    refuse(body)
    items = input_items(body)
    store = _store(call.server, body)
    earlier: list[Object] = []
    if body.previous_response_id is not None:
        kept = _needed(call.server, "previous_response_id")
        previous = kept.find(call.tenant, body.previous_response_id, "previous_response_id")
        earlier = previous.items
        call.weigh(previous.num_bytes)
    conversation = [*earlier, *items]
    check_turns("input", conversation)
    chat = await call.apart(chat_request, call, body, conversation, len(earlier))
    plan = await planned(call, chat.request, name="response", places=chat.places, words=_WORDS)
    logprobs = _shower(await call.server.renderer()) if plan.sampling.return_logprob else None
    writer = ResponseWriter(_response(call, body, plan, is_kept=store is not None), logprobs)
    events = _events(call, store, conversation, writer, plan, start(call, plan).events())
    if body.stream:
        return call.stream(events, done=False, named=lambda event: str(event["type"]))
    await call.while_connected(_spent(events))
    return writer.response


@routes.get("/v1/responses/{id}", "user", query=("stream", "include", "include_obfuscation", "starting_after"))
async def retrieve(call: Call) -> Any:
    """A response that is kept."""
    if call.request.query_params.get("stream") in ("true", "1"):
        raise Unsupported("responses are not streamed again", hint="leave stream out", param="stream")
    return _needed(call.server).find(call.tenant, call.request.path_params["id"]).response


@routes.get("/v1/responses/{id}/input_items", "user", query=("order", "limit", "after", "include"))
async def list_input_items(call: Call) -> Any:
    """What a kept response answers: the items of its conversation before its output, the newest first."""
    id = call.request.path_params["id"]
    kept = _needed(call.server).find(call.tenant, id)
    shown = [_shown_item(item, f"{id}_{index}") for index, item in enumerate(kept.input)]
    return _page(shown, call.request.query_params)


@routes.post("/v1/responses/{id}/cancel", "user")
async def cancel(call: Call) -> Any:
    """Refused: only a response in the background could be cancelled, and there are none."""
    _needed(call.server).find(call.tenant, call.request.path_params["id"])
    raise Unsupported(
        "the response has ended: there are none in the background", hint="close the connection of one that is running"
    )


@routes.delete("/v1/responses/{id}", "user")
async def delete(call: Call) -> Any:
    """Forget a response."""
    id = call.request.path_params["id"]
    _needed(call.server).delete(call.tenant, id)
    return {"id": id, "object": "response", "deleted": True}


def _shown_item(item: Object, id: str) -> Object:
    """An item as clients know it: with a type and an id, and its text in parts."""
    shown: Object = {"type": "message", **item, "id": item.get("id") or id}
    if shown["type"] == "message" and isinstance(shown["content"], str):
        kind = "output_text" if shown["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": shown["content"]}]
    return shown


def _page(items: list[Object], asked: Mapping[str, str]) -> Object:
    """A page of a list: `order` (`desc`), `after` (an id), `limit` (20).

    Raises:
        InvalidParameter: one of them is none of those that there are.
    """
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter(f"order is {order!r}", hint="expected asc or desc", param="order")
    limit = asked.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_LISTED):
        raise InvalidParameter(f"limit is {limit!r}", hint=f"expected 1 to {MAX_LISTED}", param="limit")
    listed = items if order == "asc" else items[::-1]
    if (after := asked.get("after")) is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise InvalidParameter(f"after is {after!r}", hint="expected the id of a listed item", param="after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > len(page),
    }


def _store(server: Server, body: ResponseRequest) -> ResponseStore | None:
    """Where the response will be kept; `None` where it will not."""
    if body.store is False or (body.store is None and server.responses is None):
        return None
    return _needed(server, "store")


def _needed(server: Server, param: str | None = None) -> ResponseStore:
    if server.responses is None:
        raise Unsupported(
            f"{f'{param} is given and ' if param else ''}this server keeps no responses",
            hint="send the whole conversation as input, or start the server with --response-store-bytes",
            param=param,
        )
    return server.responses


async def _spent(events: AsyncGenerator[Object, None]) -> None:
    async for _ in events:
        pass


async def _events(
    call: Call,
    store: ResponseStore | None,
    conversation: list[Object],
    writer: ResponseWriter,
    plan: Plan,
    events: AsyncGenerator[Event, None],
) -> AsyncGenerator[Object, None]:
    """The typed events; what fails before the first one is raised, so that it has a status of its own."""
    has_begun = False
    try:
        async for step in steps(plan, events):
            if not has_begun:
                has_begun = True
                for event in writer.begin():
                    yield event
            for event in writer.step(step):
                if step.value is not None and store is not None and event["type"] in _ENDINGS:
                    _keep(call, store, conversation, writer.response)
                yield event
    except SglError as error:
        if not (has_begun and plan.options.stream):
            raise
        yield writer.fail(call.told(error))


_ENDINGS = ("response.completed", "response.incomplete")


def _keep(call: Call, store: ResponseStore, conversation: list[Object], response: Object) -> None:
    """Before the client knows of its end, so that it can go on from it at once."""
    if not store.keep(call.tenant, response, [*conversation, *response["output"]]):
        response["store"] = False


def _response(call: Call, body: ResponseRequest, plan: Plan, *, is_kept: bool) -> Object:
    """The object's fields that are known before there is an answer."""
    text = body.text
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": call.server.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "store": is_kept,
        "temperature": plan.sampling.temperature,
        "text": {"format": text.format if text is not None and text.format is not None else {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": plan.sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _shower(renderer: ModelRenderer) -> Logprobs:
    def show(entries: Any) -> list[Object]:
        content: list[Object] = chat_logprobs(entries, renderer)["content"]
        return content

    return show
