"""An answer as a message of Anthropic's API, and as its stream of events.

Owns `MessageWriter`: steps of a dialogue in, events out, while the message grows beside them; a whole answer is the
message of a stream that nobody saw. Content blocks are numbered, opened by `content_block_start` and closed by
`content_block_stop`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sgl.lang.graph import Usage, ValueEvent
from sgl.server.blocks import BlockBegins, BlockEnds, BlockEvent, BlockGrows, Blocks
from sgl.server.call import new_id
from sgl.server.dialogue import Step

Event = dict[str, Any]


class MessageWriter:
    """Writes one message.

    Args:
        model: its name.
        prompt_tokens: for the stream's beginning; its end says what was read from the cache.
    """

    def __init__(self, model: str, prompt_tokens: int = 0) -> None:
        self.message: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(Usage(prompt_tokens=prompt_tokens)),
        }
        self._blocks = Blocks()
        self._texts: list[str] = []
        self._has_calls = False

    def begin(self) -> Iterator[Event]:
        """The events before any content."""
        yield {"type": "message_start", "message": self.message}
        yield {"type": "ping"}

    def step(self, step: Step) -> Iterator[Event]:
        """What a step adds; the last one ends the message."""
        for event in self._blocks.feed(step.pieces):
            yield self._block(event)
        if step.value is not None:
            for event in self._blocks.close():
                yield self._block(event)
            yield self._end(step.value, has_calls=self._has_calls and not step.breaks_off)
            yield {"type": "message_stop"}

    def _block(self, event: BlockEvent) -> Event:
        content = self.message["content"]
        match event:
            case BlockBegins(kind=kind, name=name):
                self._has_calls = self._has_calls or kind == "call"
                self._texts = []
                content.append(_BLANKS[kind](name))
                return {"type": "content_block_start", "index": len(content) - 1, "content_block": content[-1]}
            case BlockGrows(text=text):
                self._texts.append(text)
                delta, field = _DELTAS[content[-1]["type"]]
                return {"type": "content_block_delta", "index": len(content) - 1, "delta": {"type": delta, field: text}}
            case BlockEnds():
                _fill(content[-1], "".join(self._texts))
                return {"type": "content_block_stop", "index": len(content) - 1}

    def _end(self, value: ValueEvent, *, has_calls: bool) -> Event:
        reason = "max_tokens" if value.finish == "length" else "tool_use" if has_calls else "end_turn"
        if reason == "end_turn" and isinstance(value.matched, str):
            reason = "stop_sequence"
        ending = {
            "stop_reason": reason,
            "stop_sequence": value.matched if reason == "stop_sequence" else None,
        }
        self.message |= {**ending, "usage": usage_of(value.usage)}
        return {"type": "message_delta", "delta": ending, "usage": self.message["usage"]}


_BLANKS: dict[str, Any] = {
    "text": lambda name: {"type": "text", "text": ""},
    "reasoning": lambda name: {"type": "thinking", "thinking": "", "signature": ""},
    "call": lambda name: {"type": "tool_use", "id": new_id("toolu"), "name": name, "input": {}},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _fill(block: dict[str, Any], text: str) -> None:
    if block["type"] == "tool_use":
        try:
            block["input"] = json.loads(text or "{}")
        except ValueError:  # cut, as stop_reason says: there is no object
            block["input"] = {}
    else:
        block[block["type"]] = text


def usage_of(usage: Usage) -> dict[str, Any]:
    """`usage` in Anthropic's words: input tokens are those that were not read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
