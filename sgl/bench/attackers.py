"""Attackers for `sgl bench serve --attack`: what they send.

Owns one small client for each row of the table of faults that is about load from outside: heads and bodies that are
too large, nested or no JSON, senders and readers that crawl, constraints that explode. An attack runs in a process of
its own, at a low priority and at a bounded rate, since in life its own work is done on somebody else's machine; so this
module imports next to nothing.

Run as a module it is one attack: `python -m sgl.bench.attackers NAME URL RATE`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sgl.errors import InvalidParameter


class Target(msgspec.Struct, frozen=True):
    """The server that is attacked."""

    host: str
    port: int

    async def connect(self, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection, off which about `limit` bytes are taken before somebody reads them."""
        return await asyncio.open_connection(self.host, self.port, limit=limit)

    async def raw(self, *pieces: bytes, pause_s: float = 0.0, wait: bool = True) -> bytes:
        """What is answered to these bytes, up to 64 KiB of it; nothing, where nobody waits for it."""
        reader, writer = await self.connect()
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if pause_s:
                    await asyncio.sleep(pause_s)
            return await reader.read(65536) if wait else b""
        finally:
            writer.close()

    async def post(self, body: bytes | Mapping[str, Any], path: str = "/v1/completions") -> bytes:
        """A complete request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.raw(head_of(path, f"Content-Length: {len(data)}") + data)


class Attack(msgspec.Struct, frozen=True):
    """One kind of attacker.

    Attributes:
        row: in the table of faults.
        about: what it does.
        settle_s: how long after it what it has begun goes on: no part of the next calm round.
    """

    row: int
    about: str
    strike: Callable[[Target], Awaitable[None]]
    at_once: int = 1
    """Strikes that run beside each other."""
    settle_s: float = 0.5


def head_of(path: str, *lines: str, method: str = "POST") -> bytes:
    """The head of a request that closes its connection."""
    fixed = ("Host: localhost", "Content-Type: application/json", "Connection: close")
    return "\r\n".join((f"{method} {path} HTTP/1.1", *fixed, *lines, "", "")).encode()


# --- the attackers --------------------------------------------------------------------------------------------------

_TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}
_MEGABYTE = 2**20

BYTE_S = 1.0
"""Between two bytes of who sends slowly."""
HOLD_S = 5.0
"""How long a stream is not read."""
COMPILE_S = 3.0
"""After an attack on the compiler, which may take its two seconds."""


async def _huge_head(target: Target) -> None:
    await target.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ", *([b"a" * _MEGABYTE] * 64))


async def _endless_body(target: Target) -> None:
    await target.raw(
        head_of("/v1/completions", "Transfer-Encoding: chunked"), *([b"6\r\naaaaaa\r\n" * 5000] * 100), wait=False
    )


async def _nested_json(target: Target) -> None:
    await target.post(b"[" * 20_000)
    deep = b'{"a":' * 1000 + b"1" + b"}" * 1000
    await target.post(b'{"prompt": "Hi", "max_tokens": 2, "metadata": ' + deep + b"}")


async def _no_numbers(target: Target) -> None:
    for value in (b"NaN", b"Infinity", b'"NaN"', b"1e999"):
        await target.post(b'{"prompt": "a", "temperature": ' + value + b"}")


async def _no_text(target: Target) -> None:
    await target.post(b'{"prompt": "' + b"\\ud83d" * 10_000 + b'", "max_tokens": 1}')
    await target.post(b'{"prompt": "' + b"\\u0000" * 1000 + b'", "max_tokens": 1}')


async def _slow_sender(target: Target) -> None:
    with suppress(OSError):
        await target.raw(*(bytes([each]) for each in head_of("/v1/completions", "Content-Length: 9")), pause_s=BYTE_S)


async def _slow_reader(target: Target) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 5000, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await target.connect(1024)
    try:
        writer.write(head_of("/v1/completions", f"Content-Length: {len(body)}") + body)
        await reader.read(16)
        await asyncio.sleep(HOLD_S)
    finally:
        writer.close()


@cache
def _body(make: Callable[[], dict[str, Any]]) -> bytes:
    """A large body, made once: an attacker has cores of its own, and here it shares the server's."""
    return json.dumps({**_TEXT, **make()}).encode()


def _long_prompt() -> dict[str, Any]:
    return {"prompt": "a" * (27 * _MEGABYTE)}


async def _oversized_text(target: Target) -> None:
    await target.post(_body(_long_prompt))


def _choices(depth: int) -> dict[str, Any]:
    """A schema with twice as many ways to be read at each level."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


_BOMBS: tuple[Callable[[], dict[str, Any]], ...] = (
    lambda: {"regex": "(" * 30_000},
    lambda: {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    lambda: {"json_schema": _choices(8)},
    lambda: {"json_schema": _choices(14)},
)


async def _grammar_bomb(target: Target) -> None:
    for make in _BOMBS:
        await target.post(_body(make))


async def _regex_explosion(target: Target) -> None:
    await target.post({**_TEXT, "regex": "(a|aa){1,5000}"})
    await target.post({**_TEXT, "json_schema": {"type": "string", "maxLength": 65_536}})


async def _slow_compile(target: Target) -> None:
    """A new schema each time, whose merged patterns take as long as they are let."""
    factors = [{"multipleOf": number} for number in (7, 11, 13, 17, 19, 23, 29)]
    await target.post({**_TEXT, "json_schema": {"type": "integer", "minimum": time.monotonic_ns(), "allOf": factors}})


ATTACKS: dict[str, Attack] = {
    "huge-head": Attack(1, "a head of 64 MB", _huge_head),
    "endless-body": Attack(2, "a body in chunks of six bytes, 3 MB of it", _endless_body),
    "nested-json": Attack(3, "JSON 20,000 deep", _nested_json),
    "no-numbers": Attack(4, "NaN and infinity for numbers", _no_numbers),
    "no-text": Attack(5, "lone surrogates and NUL", _no_text),
    "slow-sender": Attack(6, "200 connections that send a byte per second", _slow_sender, 200),
    "slow-reader": Attack(7, "a stream of 5,000 tokens that is not read", _slow_reader),
    "oversized-text": Attack(8, "a prompt of 27 MB", _oversized_text),
    "grammar-bomb": Attack(27, "nested schemas and references to themselves", _grammar_bomb, settle_s=COMPILE_S),
    "regex-explosion": Attack(28, "patterns with millions of states", _regex_explosion, settle_s=COMPILE_S),
    "slow-compile": Attack(
        29, "grammars that compile as long as they may, each a new one", _slow_compile, 1, COMPILE_S
    ),
    "compile-flood": Attack(30, "eight at a time: what was timed out must not go on", _slow_compile, 8, COMPILE_S),
}


def attack_of(name: str) -> Attack:
    """The attack with this name.

    Raises:
        InvalidParameter: there is none.
    """
    if name not in ATTACKS:
        raise InvalidParameter(f"there is no attack {name!r}", hint=f"they are {', '.join(ATTACKS)}", param="attack")
    return ATTACKS[name]


async def run_attack(name: str, url: str, rate: float) -> None:
    """Attack until cancelled: each attacker begins at most `rate` strikes a second, and one after the other."""
    chosen = attack_of(name)
    parts = urlsplit(url)
    target = Target(parts.hostname or "127.0.0.1", parts.port or 80)
    sys.stdout.write("attacking\n")
    sys.stdout.flush()

    async def again() -> None:
        while True:
            begun = time.monotonic()
            with suppress(OSError, EOFError):  # being let go is what the server is for
                await chosen.strike(target)
            await asyncio.sleep(max(0.0, begun + 1 / rate - time.monotonic()))

    await asyncio.gather(*(again() for _ in range(chosen.at_once)))


def main() -> None:
    """`python -m sgl.bench.attackers NAME URL RATE`."""
    os.nice(10)
    name, url, rate = sys.argv[1:]
    asyncio.run(run_attack(name, url, float(rate)))


if __name__ == "__main__":
    main()
