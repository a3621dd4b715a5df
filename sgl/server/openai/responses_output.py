"""An answer as a response object and its typed events.

Owns `ResponseWriter`: steps of a dialogue in, events out, while the response object grows beside them; a whole answer
is the object of a stream that nobody saw. Items follow each other as the model wrote them: reasoning, message, calls,
each opened by `response.output_item.added` and closed by `response.output_item.done`. Every event has the next
`sequence_number`; the last one is `response.completed`, `response.incomplete` or `response.failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sgl.errors import SglError
from sgl.lang.graph import TokenLogprob, Usage, ValueEvent
from sgl.server.blocks import BlockBegins, BlockEnds, BlockEvent, BlockGrows, Blocks
from sgl.server.call import new_id
from sgl.server.dialogue import Step
from sgl.server.failures import error_message

Event = dict[str, Any]
Logprobs = Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]


class ResponseWriter:
    """Writes one response.

    Args:
        response: the object's fields that are known before there is an answer.
        logprobs: shows those of an answer's tokens; `None` where nobody asked.
    """

    def __init__(self, response: dict[str, Any], logprobs: Logprobs | None = None) -> None:
        self.response: dict[str, Any] = {
            **response, "status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None
        }  # fmt: skip
        self._logprobs = logprobs
        self._number = 0
        self._item: _Item | None = None
        self._blocks = Blocks()

    def begin(self) -> Iterator[Event]:
        """The events before any output."""
        yield self._event("response.created", response=dict(self.response))
        yield self._event("response.in_progress", response=dict(self.response))

    def step(self, step: Step) -> Iterator[Event]:
        """What a step adds; the last one closes the response."""
        for block in self._blocks.feed(step.pieces):
            yield from self._block(block, "completed")
        if step.value is not None:
            yield from self._end(step.value, breaks_off=step.breaks_off)

    def fail(self, error: SglError) -> Event:
        """The response failed."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": error.code, "message": error_message(error)}
        return self._event("response.failed", response=self.response)

    def _block(self, event: BlockEvent, status: str) -> Iterator[Event]:
        match event:
            case BlockBegins(kind=kind, name=name):
                self._item = _FunctionCall(name) if kind == "call" else _KINDS[kind]()
                self.response["output"].append(self._item.shown("in_progress"))
                yield from self._of_item(self._item, self._item.opened())
            case BlockGrows(text=text) if self._item is not None:
                self._item.texts.append(text)
                yield from self._of_item(self._item, [self._item.more(text)])
            case BlockEnds() if self._item is not None:
                self.response["output"][-1] = self._item.shown(status)
                yield from self._of_item(self._item, self._item.closed(status))

    def _end(self, value: ValueEvent, *, breaks_off: bool) -> Iterator[Event]:
        was_cut = value.finish == "length" or breaks_off
        status = "incomplete" if was_cut else "completed"
        for block in self._blocks.close():
            if isinstance(block, BlockEnds) and isinstance(self._item, _Message) and self._logprobs is not None:
                self._item.logprobs = self._logprobs(value.logprobs)
            yield from self._block(block, status)
        self.response["usage"] = usage_of(value.usage)
        self.response["status"] = status
        if was_cut:
            self.response["incomplete_details"] = {
                "reason": "max_output_tokens" if value.finish == "length" else "stop"
            }
        yield self._event(f"response.{status}", response=self.response)

    def _of_item(self, item: _Item, named: Iterable[_Named]) -> Iterator[Event]:
        index = len(self.response["output"]) - 1
        for name, fields in named:
            whose = {} if name.startswith("output_item.") else {"item_id": item.id}
            yield self._event(f"response.{name}", output_index=index, **whose, **fields)

    def _event(self, type: str, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": type, "sequence_number": number, **fields}


# --- items ----------------------------------------------------------------------------------------------------------

_Named = tuple[str, dict[str, Any]]


class _Item:
    """An item that grows: its events, and how it looks."""

    prefix = ""

    def __init__(self) -> None:
        self.id = new_id(self.prefix)
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def shown(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    def opened(self) -> Iterator[_Named]:
        yield "output_item.added", {"item": self.shown("in_progress")}

    def more(self, text: str) -> _Named:
        raise NotImplementedError

    def closed(self, status: str) -> Iterator[_Named]:
        yield "output_item.done", {"item": self.shown(status)}


class _WithPart(_Item):
    """An item with one content part."""

    name = ""
    """Of the events about its text."""

    def part(self) -> dict[str, Any]:
        raise NotImplementedError

    def content(self) -> list[dict[str, Any]]:
        return [self.part()] if self.texts else []

    def opened(self) -> Iterator[_Named]:
        yield from super().opened()
        yield "content_part.added", {"content_index": 0, "part": self.part()}

    def closed(self, status: str) -> Iterator[_Named]:
        part = self.part()
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield f"{self.name}.done", {"content_index": 0, "text": self.text, **more}
        yield "content_part.done", {"content_index": 0, "part": part}
        yield from super().closed(status)


class _Message(_WithPart):
    prefix = "msg"
    name = "output_text"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[dict[str, Any]] = []

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def shown(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def more(self, text: str) -> _Named:
        return "output_text.delta", {"content_index": 0, "delta": text, "logprobs": []}


class _Reasoning(_WithPart):
    prefix = "rs"
    name = "reasoning_text"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def shown(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": self.content(), "status": status}

    def more(self, text: str) -> _Named:
        return "reasoning_text.delta", {"content_index": 0, "delta": text}


class _FunctionCall(_Item):
    prefix = "fc"

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._call_id = new_id("call")

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }

    def more(self, text: str) -> _Named:
        return "function_call_arguments.delta", {"delta": text}

    def closed(self, status: str) -> Iterator[_Named]:
        yield "function_call_arguments.done", {"arguments": self.text, "name": self._name}
        yield from super().closed(status)


_KINDS: dict[str, type[_Item]] = {"text": _Message, "reasoning": _Reasoning}


def usage_of(usage: Usage) -> dict[str, Any]:
    """`usage` in the words of responses."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
