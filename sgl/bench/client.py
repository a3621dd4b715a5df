"""The client of `sgl bench serve`: as little work as HTTP/1.1 allows, because it runs on the cores that it measures.

Owns connections that are kept and used again, and the reading of OpenAI's completions, whole or as server-sent events.
It knows what servers of this API answer (a length or chunks), not all of HTTP. What goes wrong is a `ConnectionError`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec


class Usage(msgspec.Struct):
    """How many tokens an answer had."""

    completion_tokens: int = 0


class Failure(msgspec.Struct):
    """An error in a stream."""

    code: str | int | None = None
    message: str = ""


class Chunk(msgspec.Struct):
    """An answer, or a piece of one, as far as it is looked at."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: Failure | None = None


class Answer(msgspec.Struct, frozen=True):
    """One request: when its pieces came (seconds from sending), how many tokens it had, or what was wrong and what
    the server said of it."""

    pieces_s: tuple[float, ...]
    end_s: float
    tokens: int
    error: str = ""
    said: str = ""


class Client:
    """Connections to one server, for as many requests at a time as are made.

    Args:
        url: of the server, with `http` or `https`.
        headers: of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._base = parts.path.rstrip("/")
        sent = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def complete(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST a completion request and read its answer to the end; what fails is in `Answer.error`."""
        data = msgspec.json.encode(body)
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(data)}\r\n\r\n".encode()
        start = time.perf_counter()
        pieces: list[float] = []
        connection = None
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            status = await connection.send(head + data)
            tokens, error, said = 0, "" if status == 200 else f"status {status}", ""
            if status == 200 and body.get("stream"):
                async for chunk in connection.events():
                    if chunk.error is not None:
                        error, said = str(chunk.error.code), chunk.error.message
                    if chunk.usage is not None:
                        tokens = chunk.usage.completion_tokens
                    if chunk.choices:
                        pieces.append(time.perf_counter() - start)
            else:
                whole = b"".join([each async for each in connection.body()])
                if error:
                    said = _message(whole)
                else:
                    tokens = msgspec.json.decode(whole, type=_Whole).usage.completion_tokens
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as failed:
            if connection is not None:
                connection.close()
            return Answer(tuple(pieces), time.perf_counter() - start, 0, type(failed).__name__)
        if connection.is_kept:
            self._idle.append(connection)
        else:
            connection.close()
        return Answer(tuple(pieces), time.perf_counter() - start, 0 if error else tokens, error, said)

    async def _connect(self) -> _Connection:
        return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._ssl))


def _message(body: bytes) -> str:
    """What an answer says of its error."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        return ""


class _Told(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Told


class _Whole(msgspec.Struct):
    usage: Usage


class _Connection:
    """One connection, with one answer at a time on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._length: int | None = None
        self.is_kept = True

    def close(self) -> None:
        self._writer.close()

    async def send(self, request: bytes) -> int:
        """Send a request and read the head of its answer; the status."""
        self._writer.write(request)
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        first, *lines = head.split("\r\n")
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._length = (
            None if "chunked" in fields.get("transfer-encoding", "") else int(fields.get("content-length", ""))
        )
        self.is_kept = fields.get("connection") != "close"
        return int(first.split(" ", 2)[1])

    async def body(self) -> AsyncIterator[bytes]:
        """The bytes of the answer as they come, to its end."""
        if self._length is not None:
            yield await self._reader.readexactly(self._length)
            return
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")

    async def events(self) -> AsyncIterator[Chunk]:
        """The data of server-sent events."""
        rest = b""
        async for data in self.body():
            *frames, rest = (rest + data).split(b"\n\n")
            for frame in frames:
                _, found, text = frame.partition(b"data: ")
                if found and text != b"[DONE]":
                    yield msgspec.json.decode(text, type=Chunk)
