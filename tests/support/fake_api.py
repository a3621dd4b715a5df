"""An endpoint on the loopback that speaks as OpenAI's and Anthropic's do, as far as tests need it.

Its model is a function from the prompt (of a chat, its turns joined) to the text that it would write if nothing stopped
it; words with the space before them are its tokens. It stops, streams, names probable first tokens, scores prompts,
holds answers to a list of options, and fails when told to. Every request is kept.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sgl.lang.rendering import words

Model = Callable[[str], str]


class FakeApi:
    """The endpoint.

    Args:
        model: what it writes after a prompt.
        top: for a prompt, its most probable first tokens with their log-probabilities.

    Attributes:
        requests: (path, body) of each, in order; `failures`: status codes to answer the next ones with; `delay_s`.
    """

    def __init__(self, model: Model, top: Callable[[str], dict[str, float]] | None = None) -> None:
        self.model = model
        self.top = top or (lambda prompt: {words(model(prompt))[0]: -0.1})
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.failures: list[int] = []
        self.delay_s = 0.0
        self.url = ""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    @property
    def prompt_tokens(self) -> int:
        """Of all requests that were answered."""
        return sum(len(words(prompt_of(body))) for body in self.bodies)


def prompt_of(body: dict[str, Any]) -> str:
    """The text that the model is given."""
    if "prompt" in body:
        return body["prompt"] if isinstance(body["prompt"], str) else "\n".join(body["prompt"])
    parts = [body.get("system", "")]
    for message in body["messages"]:
        content = message["content"]
        parts.append(content if isinstance(content, str) else "".join(part.get("text", "<part>") for part in content))
    return "\n".join(part for part in parts if part)


@contextmanager
def serving(model: Model, top: Callable[[str], dict[str, float]] | None = None) -> Iterator[FakeApi]:
    """An endpoint that lives for the duration of the `with`."""
    api = FakeApi(model, top)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if api.delay_s:
                time.sleep(api.delay_s)
            if api.failures:
                self._send(api.failures.pop(0), {"error": {"message": "the fake says no", "type": "fake"}})
                return
            api.requests.append((self.path, body))
            if self.path.endswith("/chat/completions"):
                self._chat(body)
            elif self.path.endswith("/completions"):
                self._completion(body)
            else:
                self._messages(body)

        def _send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, chunks: list[Any], named: bool = False) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for chunk in chunks:
                name = f"event: {chunk['type']}\n" if named else ""
                self.wfile.write(f"{name}data: {json.dumps(chunk)}\n\n".encode())
            if not named:
                self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _chat(self, body: dict[str, Any]) -> None:
            prompt = prompt_of(body)
            text, finish = written(api.model(prompt), body)
            if "response_format" in body:
                options = body["response_format"]["json_schema"]["schema"]["properties"]["choice"]["enum"]
                text = json.dumps({"choice": next(option for option in options if option in api.model(prompt))})
            usage = used(prompt, text)
            if body.get("stream"):
                pieces = [{"index": 0, "delta": {"content": piece}, "finish_reason": None} for piece in words(text)]
                pieces.append({"index": 0, "delta": {}, "finish_reason": finish})
                chunks = [chunk(body, [piece]) for piece in pieces]
                self._stream([*chunks, chunk(body, []) | {"usage": usage}])
                return
            choice: dict[str, Any] = {
                "index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish, "logprobs": None
            }  # fmt: skip
            if body.get("logprobs"):
                top = [{"token": t, "logprob": p, "bytes": None} for t, p in api.top(prompt).items()]
                tokens = [{"token": t, "logprob": -0.1, "bytes": None, "top_logprobs": top} for t in words(text)]
                if body["max_tokens"] == 1 and top:
                    tokens = [top[0] | {"top_logprobs": top}]
                choice["logprobs"] = {"content": tokens, "refusal": None}
            for tool in body.get("tools", []) if body.get("tool_choice") != "none" else ():
                call = {"name": tool["function"]["name"], "arguments": text}
                choice["message"] = {"role": "assistant", "content": None}
                choice["message"]["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
            self._send(200, chunk(body, [choice], "chat.completion") | {"usage": usage})

        def _completion(self, body: dict[str, Any]) -> None:
            if body.get("echo"):
                choices = [scored(index, prompt) for index, prompt in enumerate(body["prompt"])]
                self._send(200, chunk(body, choices, "text_completion"))
                return
            text, finish = written(api.model(body["prompt"]), body)
            usage = used(body["prompt"], text)
            if body.get("stream"):
                pieces = [{"index": 0, "text": t, "finish_reason": None, "logprobs": None} for t in words(text)]
                pieces.append({"index": 0, "text": "", "finish_reason": finish, "logprobs": None})
                chunks = [chunk(body, [piece], "text_completion") for piece in pieces]
                self._stream([*chunks, chunk(body, [], "text_completion") | {"usage": usage}])
                return
            told = None
            if body.get("logprobs"):
                tokens = words(text)
                told = {"tokens": tokens, "token_logprobs": [-0.1] * len(tokens), "top_logprobs": None}
            choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": told}
            self._send(200, chunk(body, [choice], "text_completion") | {"usage": usage})

        def _messages(self, body: dict[str, Any]) -> None:
            prompt = prompt_of(body)
            text, finish = written(api.model(prompt), body)
            usage = {"input_tokens": len(words(prompt)), "output_tokens": len(words(text))}
            reason = "max_tokens" if finish == "length" else "end_turn"
            content: list[dict[str, Any]] = [{"type": "text", "text": text}]
            told = body.get("tool_choice", {"type": "none"})
            if told["type"] != "none" and told.get("name") != "answer":
                name = body["tools"][0]["name"]
                content = [{"type": "tool_use", "id": "1", "name": name, "input": json.loads(text)}]
                reason = "tool_use"
            elif told["type"] != "none":
                options = body["tools"][0]["input_schema"]["properties"]["choice"]["enum"]
                choice = next(option for option in options if option in api.model(prompt))
                content = [{"type": "tool_use", "id": "1", "name": "answer", "input": {"choice": choice}}]
            message = {
                "id": "m", "type": "message", "role": "assistant", "model": body["model"], "content": content,
                "stop_reason": reason, "stop_sequence": None, "usage": usage,
            }  # fmt: skip
            if not body.get("stream"):
                self._send(200, message)
                return
            events: list[dict[str, Any]] = [
                {"type": "message_start", "message": message | {"content": [], "stop_reason": None}},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            ]
            events += [
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
                for piece in words(text)
            ]
            events += [
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
                {"type": "message_stop"},
            ]
            self._stream(events, named=True)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chunk(body: dict[str, Any], choices: list[Any], kind: str = "chat.completion.chunk") -> dict[str, Any]:
    """The frame around choices."""
    return {"id": "1", "object": kind, "created": 0, "model": body["model"], "choices": choices, "usage": None}


def written(text: str, body: dict[str, Any]) -> tuple[str, str]:
    """What is left of a text after stops and budget, and how it ended."""
    stops = body.get("stop") or body.get("stop_sequences") or []
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    cut = text[: min(ends)] if ends else text
    spoken = words(cut)
    if len(spoken) > body["max_tokens"]:
        return "".join(spoken[: body["max_tokens"]]), "length"
    return cut, "stop"


def used(prompt: str, text: str) -> dict[str, Any]:
    """The count of tokens."""
    num_prompt, num_text = len(words(prompt)), len(words(text))
    details = {"cached_tokens": num_prompt // 2}
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_text, "total_tokens": num_prompt + num_text,
        "prompt_tokens_details": details, "completion_tokens_details": {"reasoning_tokens": num_text // 2},
    }  # fmt: skip


def scored(index: int, prompt: str) -> dict[str, Any]:
    """A prompt echoed, with the log-probabilities of its tokens, and one token more."""
    tokens = [*words(prompt), " and"]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    logprobs = [None, *(-len(token.strip()) / 10 for token in tokens[1:])]
    told = {"tokens": tokens, "token_logprobs": logprobs, "text_offset": offsets, "top_logprobs": None}
    return {"index": index, "text": prompt + " and", "finish_reason": "length", "logprobs": told}
