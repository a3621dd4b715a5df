"""Requests that a fuzzer sends: each a function of a seed and a number, so that any of them can be made again.

Owns the valid bodies, what is done to them (values, fields, JSON text, bytes, heads, framing, leaving early), and
bodies made from the server's own description of its routes, so that a new route is fuzzed from its first day.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"


FOR_EVERYBODY = ("/abort_all_requests", "/start_profile", "/stop_profile")
"""Routes of administrators that end, or slow down, what others do: their being well is no fault of the server."""


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: `seed:number` and what kind it is.
        pieces: bytes as they are written, with a turn of the event loop between.
        is_framed: it is one whole HTTP request, so it has to be answered.
        has_body: the answer may have a body (HEAD has none).
        leaves: hang up without reading, gracefully or by a reset.
    """

    name: str
    pieces: tuple[bytes, ...]
    is_framed: bool = True
    has_body: bool = True
    leaves: bool = False


class Token(str):
    """Text that is written into JSON as it is."""


WORDS = ("", " ", "a", "Hi", "yes", "\n\n", "é", "😀", "\u202e", "\ufeff", "<|im_end|>", "<tool_call>",
"../../etc/passwd",
         "{{ 7*7 }}", "%s%n", "__class__", "' OR 1=1", "x" * 300, "ab" * 3000, "text", "user", "auto", "none",
         "required",
         "file:///etc/passwd", "data:image/png;base64,AAAA", "[a-z]{1,4}", "(a|b)*", "(", "(?<=a)b", "a{1,9999}",
         "root ::= \"a\"", '{"type": "object"}', "default", "dummy")  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 7, 16, 17, 255, 256, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0,
0.01,
           1.5, 1e-5, 1e308, 5e-324)  # fmt: skip
TOKENS = tuple(map(Token, (
    "NaN", "Infinity", "-Infinity", "1e999", "1" * 400, "00", "+1", "0x1", ".5", '"\\ud83d"', '"\\udc00\\ud800"',
    '"\\u0000"',
    "undefined", "'a'", "[", "}", "[1,]", '{"a":1,"a":2}', "/**/1", "\x00", '"\n"', '"\\x"', '"\xff"', "True",
    "[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70,
)))  # fmt: skip
SHAPES: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [None], [{}], {"": ""}, {"a": None}, ["a"] * 40, list(range(64)), [[1, 2], [3]],
    [[]] * 9,
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "string", "maxLength": 4},
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"anyOf": []}, {"type": "nope"},
    {"enum": []},
    {"oneOf": [{"type": "null"}, {"const": 1}]}, {"type": "function", "function": {"name": "f", "parameters": {}}},
    {"role": "user", "content": "x"}, {"type": "text", "text": "x"}, {"type": "json_schema",
    "json_schema": {"schema": {}}},
    {str(number): number for number in range(40)},
)  # fmt: skip

_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_GEN = {"type": "gen", "id": 1, "name": "x", "sampling": {"max_new_tokens": 4}}
_TEXT = {"type": "text", "id": 0, "segments": [{"type": "literal", "text": "Hi"}]}
_GRAPH = {"protocol": 1, "nodes": [_TEXT, _GEN]}
_SELECT = {"type": "select", "id": 1, "name": "x", "choices": ["yes", "no"]}
_HOLE = {"type": "var", "name": "a", "branch": -1}
_PROGRAM = {"protocol": 1, "name": "p", "parameters": ["a"], "outputs": {},
            "graph": {"nodes": [{**_TEXT, "segments": [_HOLE]}, _GEN]}}  # fmt: skip

VALID: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        _CHAT,
        {**_CHAT, "stream": True, "stream_options": {"include_usage": True}},
        {**_CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 0.7, "seed": 3},
        {**_CHAT, "tools": [_TOOL], "tool_choice": "auto"},
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
         "max_tokens": 3, "stop": ["x"]},
    ],
    "/v1/completions": [
        {"prompt": "Hi", "max_tokens": 4},
        {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1},
        {"prompt": [1, 2, 3], "max_tokens": 3, "stream": True, "temperature": 0},
        {"prompt": "a", "max_tokens": 6, "regex": "[ab]{2}"},
        {"prompt": "a", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}, "logit_bias": {"7": -3}},
    ],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 4, "stream": True},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                   {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "b"}], "max_output_tokens": 3},
        {"input": "Hi", "max_output_tokens": 9, "text": {"format": {"type": "json_schema", "name": "a",
                                                                    "schema": _SCHEMA}}},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "b"}]}],
         "tools": [{"name": "f", "input_schema": _SCHEMA}], "max_tokens": 3, "system": "S"},
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "Hi"}]}],
    "/api/chat": [
        {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 4}},
        {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 9}, "format": _SCHEMA,
         "stream": False},
    ],
    "/api/generate": [
        {"prompt": "Hi", "options": {"num_predict": 4, "stop": ["x"]}},
        {"prompt": "Hi", "raw": True, "options": {"num_predict": 2}, "stream": False},
    ],
    "/generate": [
        {"text": "Hi", "sampling_params": {"max_new_tokens": 4}},
        {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 1, "n": 2}]},
        {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "stream": True},
    ],
    "/v1/score": [
        {"query": "Is it?", "items": ["a", "b"], "label_token_ids": [1, 2], "apply_softmax": True},
        {"query": [1], "items": [[2], [3]], "label_token_ids": [[1], [2]]},
    ],
    "/v1/decisions": [
        {"input": "a", "questions": [{"type": "yes_no", "id": "q"}]},
        {"input": {"a": 1}, "questions": [{"type": "score", "id": "s", "levels": ["low", "high"]}]},
    ],
    "/v1/programs": [
        {"graph": _GRAPH},
        {"graph": {"protocol": 1, "nodes": [_TEXT, _SELECT]}},
        {"graph": _GRAPH, "stream": True},
        {"graph": _GRAPH, "stream": True, "finish": False},
        {"graph": {"protocol": 1, "nodes": [_TEXT, {"type": "fork", "id": 1, "children": [1, 2]},
                                            {**_GEN, "id": 2, "branch": 1}]}},
        {"program": _PROGRAM, "bindings": {"a": "Hi"}},
        {"program": _PROGRAM, "bindings": [{"a": "Hi"}, {"a": "Ho"}], "options": {"lease_s": 1.0, "now": 1.0}},
    ],
    "/v1/programs/{id}/fragments": [{"graph": {"protocol": 1, "nodes": [_GEN]}, "finish": True}],
    "/v1/embeddings": [{"input": "a"}],
    "/v1/rerank": [{"query": "a", "documents": ["b"]}],
    "/encode": [{"text": "a"}],
    "/classify": [{"text": "a"}],
    "/tokenize": [{"text": "Hi"}, {"prompt": ["a", "b"]}],
    "/detokenize": [{"tokens": [1, 2]}, {"tokens": [[1], [2]]}],
    "/abort_request": [{"rid": "none"}],
}  # fmt: skip
"""Bodies that are taken; routes without one here have bodies made from their schemas."""


class Fuzzer:
    """Makes cases.

    Args:
        seed: of all of them.
        description: the server's OpenAPI document.

    Example:
        >>> fuzzer = Fuzzer(0, {"paths": {"/health": {"get": {}}}, "components": {"schemas": {}}})
        >>> fuzzer.case(7) == fuzzer.case(7)
        True
    """

    def __init__(self, seed: int, description: Mapping[str, Any]) -> None:
        self.seed = seed
        self._schemas = description["components"]["schemas"]
        self._routes: list[tuple[str, str]] = []
        self._bodies: dict[str, Any] = {}
        for path, operations in sorted(description["paths"].items()):
            for method, operation in operations.items():
                self._routes.append((method.upper(), path))
                if "requestBody" in operation and path not in FOR_EVERYBODY:
                    self._bodies[path] = operation["requestBody"]["content"]["application/json"]["schema"]
        self._kinds: list[tuple[Callable[[random.Random], Case], int]] = [
            (self._valid, 8), (self._varied, 22), (self._changed, 36), (self._sampled, 10), (self._bytes, 8),
            (self._heads, 6), (self._places, 5), (self._framing, 4), (self._leaving, 3), (self._garbage, 2),
            (self._large, 1),
        ]  # fmt: skip

    def case(self, number: int) -> Case:
        """Case `number` of this seed."""
        rng = random.Random(f"{self.seed}:{number}")
        (make,) = rng.choices([kind for kind, _ in self._kinds], [weight for _, weight in self._kinds])
        made = make(rng)
        return Case(
            f"{self.seed}:{number} {make.__name__.strip('_')}", made.pieces, made.is_framed, made.has_body, made.leaves
        )

    # --- kinds ---

    def _valid(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        return self._posted(rng, path, json.dumps(body).encode())

    def _varied(self, rng: random.Random) -> Case:
        """Fields that the schema knows, with values that it allows: most of these get through the door."""
        path, body = self._body(rng)
        body = copy.deepcopy(body)
        known = self._fields(path)
        for name in (
            rng.sample(sorted(known), min(len(known), rng.choice((1, 1, 2, 3)))) if isinstance(body, dict) else ()
        ):
            body[name] = self._sample(rng, known[name], 1)
        return self._posted(rng, path, _written(body))

    def _changed(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        body = json.loads(json.dumps(body))
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
            body = self._mutate(rng, path, body)
        return self._posted(rng, path, _written(body))

    def _sampled(self, rng: random.Random) -> Case:
        path = rng.choice(sorted(self._bodies) or ["/v1/completions"])
        return self._posted(rng, path, _written(self._sample(rng, self._bodies.get(path, {}), 0)))

    def _bytes(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        data = bytearray(json.dumps(body).encode())
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            at = rng.randrange(len(data)) if data else 0
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = rng.choice((b'"', b"{", b"\x00", b"\xff\xfe", b"\\u", b"\xed\xa0\x80", b","))
                case _:
                    data += data[at : at + 20]
        return self._posted(rng, path, bytes(data))

    def _heads(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        data = json.dumps(body).encode()
        odd = rng.choice((
            b"Content-Type: text/plain", b"Content-Type: application/x-www-form-urlencoded", b"Content-Type: \xff",
            b"Content-Type: multipart/form-data; boundary=x", b"Content-Encoding: gzip", b"Accept: text/html;q=NaN",
            b"Authorization: Bearer " + b"k" * 500, b"Authorization: Bearer \xff\xfe", b"Authorization: Basic !!!",
            b"x-api-key: \xe9\xe9", b"X-Request-Id: " + b"a" * 4000, b"X-Request-Id: a b\x7f", b"Expect: 100-continue",
            b"Connection: close", b"Connection: Upgrade\r\nUpgrade: websocket", b"Connection: Upgrade\r\nUpgrade: h2c",
            b"Cookie: " + b"a=b; " * 300, b"X-Forwarded-For: 1.2.3.4", b"X-A: " + b"b" * 20_000,
            b"X-A: " + b"b" * 60_000,
            b"Range: bytes=0-", b"Accept-Encoding: \x00".replace(b"\x00", b"\xff"), b"Host: evil.example",
            b"Origin: null", b"Origin: https://evil.example", b"Origin: http://127.0.0.1",
            b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Site: same-origin",
            b"Sec-Fetch-Site: same-site\r\nContent-Type: application/x-www-form-urlencoded",
            b"\r\n".join(b"X-%d: y" % number for number in range(300)),
            b"Content-Type: application/json; charset=utf-7",
        ))  # fmt: skip
        framed = not odd.startswith(b"Host") and len(odd) < 20_000
        return Case("", (_request(b"POST", path.encode(), data, odd),), is_framed=framed)

    def _places(self, rng: random.Random) -> Case:
        method, path = rng.choice(self._routes)
        method = rng.choice(
            (method, method, "GET", "POST", "PUT", "HEAD", "OPTIONS", "PATCH", "DELETE", "TRACE", "BREW")
        )
        path = _filled(rng, path)
        path = rng.choice((
            path, path, path + "/", path.upper(), path + "?timeout=0", path + "?timeout=nan", path + "?timeout=-1",
            path + "?a=%ff&a=%00", "/" + path, path + "/../..", "/%2e%2e/%2e%2e/etc/passwd", path + "%00", path + "#x",
            "/" + "a" * 3000, path + "?" + "a=b&" * 900, "/v1/models/" + "%f0%9f%98%80", "http://evil.example" + path,
        ))  # fmt: skip
        if method == "POST" and path.startswith(FOR_EVERYBODY):
            method = "GET"
        return Case("", (_request(method.encode(), path.encode(), b""),), has_body=method != "HEAD")

    def _framing(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        data = json.dumps(body).encode()
        place = path.encode()
        size = len(data)
        whole = _request(b"POST", place, data)
        match rng.randrange(9):
            case 0:  # chunks of any size, each a piece
                cut = rng.choice((1, 3, 7, 50))
                chunks = [data[at : at + cut] for at in range(0, size, cut)]
                pieces = [b"%x\r\n%s\r\n" % (len(each), each) for each in chunks]
                return Case("", (_head(b"POST", place, b"Transfer-Encoding: chunked"), *pieces, b"0\r\n\r\n"))
            case 1:
                return Case("", tuple(whole[at : at + 40] for at in range(0, len(whole), 40)))
            case 2:
                return Case("", (_head(b"POST", place, b"Content-Length: %d" % (size + 9)), data), is_framed=False)
            case 3:
                return Case("", (_head(b"POST", place, b"Content-Length: %d" % (size // 2)), data), is_framed=False)
            case 4:
                both = b"Content-Length: %d\r\nTransfer-Encoding: chunked" % size
                return Case("", (_head(b"POST", place, both), b"%x\r\n%s\r\n0\r\n\r\n" % (size, data)), is_framed=False)
            case 5:
                length = rng.choice((b"-1", b"+5", b"1e3", b"0x10", b"9" * 30, b"", b"5, 5", b"\xb2"))
                return Case("", (_head(b"POST", place, b"Content-Length: " + length), data), is_framed=False)
            case 6:
                size_line = rng.choice((b"-1", b"zz", b"fffffffff", b"", b"5;ext=\x00", b"5" + b";x" * 9000))
                head = _head(b"POST", place, b"Transfer-Encoding: chunked")
                return Case("", (head, size_line + b"\r\n" + data + b"\r\n"), is_framed=False)
            case 7:
                old = whole.replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"HTP")), 1)
                return Case("", (old,), is_framed=False)
            case _:  # two at once; the second is answered or not
                return Case("", (whole + whole,), is_framed=False)

    def _leaving(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        whole = _request(b"POST", path.encode(), json.dumps(body).encode())
        return Case("", (whole[: rng.choice((20, 60, len(whole) - 3, len(whole)))],), is_framed=False, leaves=True)

    def _large(self, rng: random.Random) -> Case:
        """Bodies with more of something than is taken, or as much: turns, parts, ids, prompts, bindings, variables."""
        num = rng.choice((300, 300, 3000, 6000))
        turn = {"role": "user", "content": "a"}
        parts = {"role": "user", "content": [{"type": "text", "text": "a"}] * num}
        hole = {**_PROGRAM, "graph": {"nodes": [{**_TEXT, "segments": [_HOLE] * num}, _GEN]}}
        path, body = rng.choice((
            ("/v1/chat/completions", {"messages": [turn] * num, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [parts], "max_tokens": 1}),
            ("/v1/messages", {"messages": [turn] * num, "max_tokens": 1}),
            ("/v1/responses", {"input": [turn] * num, "max_output_tokens": 1}),
            ("/api/chat", {"messages": [turn] * num, "options": {"num_predict": 1}}),
            ("/v1/chat/completions", {**_CHAT, "chat_template_kwargs": {"a": "b" * 8 * num}}),
            ("/v1/chat/completions", {**_CHAT, "tools": [_TOOL] * num}),
            ("/v1/completions", {"prompt": [1] * 20 * num, "max_tokens": 1}),
            ("/v1/completions", {"prompt": ["a"] * num, "max_tokens": 1}),
            ("/generate", {"input_ids": [1] * 20 * num, "sampling_params": {"max_new_tokens": 1}}),
            ("/generate", {"text": ["a"] * num, "sampling_params": {"max_new_tokens": 1}}),
            ("/v1/score", {"query": [1] * num, "items": [[2]] * 300, "label_token_ids": [1]}),
            ("/v1/programs", {"program": hole, "bindings": [{"a": "b" * 40}] * (num // 3)}),
            ("/v1/programs", {"program": hole, "bindings": [{"a": "b" * 400_000}] * 3}),
            ("/detokenize", {"tokens": [1] * 20 * num}),
        ))  # fmt: skip
        return self._posted(rng, path, json.dumps(body).encode())

    def _garbage(self, rng: random.Random) -> Case:
        data = rng.choice((
            rng.randbytes(rng.choice((1, 10, 300, 5000))), b"\r\n" * 200, b"GET", b"GET / HTTP/1.1\r\nHost",
            b"\x16\x03\x01\x02\x00",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /v1/completions\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
            b"\x80\x04\x95.",
            b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /health HTTP/1.1\r\n: x\r\n\r\n",
            b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n", b"GET /health HTTP/1.1\r\n folded\r\n\r\n", b"\x00" * 70_000,
        ))  # fmt: skip
        return Case("", (data,), is_framed=False, leaves=rng.random() < 0.7)

    # --- parts ---

    def _body(self, rng: random.Random) -> tuple[str, Any]:
        """A route that takes a body, and a valid one for it."""
        path = rng.choice(sorted(self._bodies) or ["/v1/completions"])
        if rng.random() < 0.4:
            path = rng.choice(("/v1/chat/completions", "/v1/completions", "/generate", "/v1/programs"))
        bodies = VALID.get(path)
        return _filled(rng, path), rng.choice(bodies) if bodies else self._sample(rng, self._bodies.get(path, {}), 0)

    @staticmethod
    def _posted(rng: random.Random, path: str, body: bytes) -> Case:
        return Case("", (_request(b"POST", path.encode(), body),))

    def _mutate(self, rng: random.Random, path: str, body: Any) -> Any:
        """The body with one change, at any depth."""
        places = list(_places(body))
        if not places:
            return _odd(rng)
        holder, key = rng.choice(places)
        match rng.randrange(10):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice((*WORDS, "temprature", str(key) + "x"))] = _odd(rng)
            case 2 | 3 | 4:
                known = sorted(self._fields(path))
                if isinstance(body, dict) and known:
                    body[rng.choice(known)] = _odd(rng)
            case 5:
                holder[key] = [holder[key]] * rng.choice((1, 2, 9))
            case 6:
                holder[key] = {"a": holder[key]}
            case _:
                holder[key] = _odd(rng)
        return body

    def _fields(self, path: str) -> Mapping[str, Any]:
        return dict(self._resolved(self._bodies.get(path, {})).get("properties", {}))

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _sample(self, rng: random.Random, schema: Mapping[str, Any], depth: int) -> Any:
        """A value of a schema, mostly."""
        schema = self._resolved(schema)
        if depth > 5 or rng.random() < 0.03:
            return _odd(rng)
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self._sample(rng, rng.choice(options), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                found = schema.get("properties", {})
                wanted = [name for name in found if name in schema.get("required", ()) or rng.random() < 0.12]
                return {name: self._sample(rng, found[name], depth + 1) for name in wanted}
            case "array":
                items = schema.get("items", {})
                return [self._sample(rng, items, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
            case "string":
                return rng.choice(WORDS)
            case "integer":
                return rng.choice((0, 1, 2, 3, 8, -1, 2**40))
            case "number":
                return rng.choice((0, 0.5, 1, 2.5, -1))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case _:
                return _odd(rng)


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(rng.choice((WORDS, NUMBERS, TOKENS, SHAPES))))


def _places(value: Any) -> Any:
    """Every (holder, key) below a value."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value, index
            yield from _places(value[index])


def _written(value: Any) -> bytes:
    """JSON with its `Token`s as they are."""
    tokens: list[str] = []

    def marked(each: Any) -> Any:
        if isinstance(each, Token):
            tokens.append(each)
            return f"@@{len(tokens) - 1}@@"
        if isinstance(each, dict):
            return {key: marked(inner) for key, inner in each.items()}
        if isinstance(each, list):
            return [marked(inner) for inner in each]
        return each

    text = json.dumps(marked(value))
    for index, token in enumerate(tokens):
        text = text.replace(f'"@@{index}@@"', token)
    return text.encode("utf-8", "surrogatepass")


def _filled(rng: random.Random, path: str) -> str:
    """A path with something for its parameters."""
    for name, value in (("{id}", rng.choice(("x", "0" * 32, "%00"))), ("{model}", rng.choice(("dummy", "a/b", "..")))):
        path = path.replace(name, value)
    while "{" in path:
        start, end = path.index("{"), path.index("}")
        path = path[:start] + rng.choice(("0", "1", "99999999999999999999", "x")) + path[end + 1 :]
    return path


def _head(method: bytes, path: bytes, *more: bytes) -> bytes:
    lines = (b"%s %s HTTP/1.1" % (method, path), b"Host: " + HOST.encode(), *more)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _request(method: bytes, path: bytes, body: bytes, *more: bytes) -> bytes:
    if body:
        more = (*more, b"Content-Length: %d" % len(body))
    return _head(method, path, *more) + body
