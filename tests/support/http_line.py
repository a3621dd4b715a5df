"""One HTTP/1.1 connection without manners: writes whatever bytes it is given, and reads what comes back.

Owns reading an answer (by its length, by chunks, or to the end of the connection). A client library would refuse to
send most of what the tests of faults send.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        status: 0 where the connection ended before a head came.
        whole: the body came to its end.
        kept: the connection takes another request.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = True
    kept: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether it has server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        """The body; NaN and Infinity are no JSON."""

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is no JSON")

        return json.loads(self.body, parse_constant=refuse)

    def events(self) -> list[str]:
        """The data of each event."""
        text = self.body.decode()
        return [
            line.removeprefix("data: ") for part in text.split("\n\n") for line in part.split("\n") if "data: " in line
        ]


class Line:
    """A connection that is opened when it is needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, piece: bytes) -> None:
        """Write a piece.

        Raises:
            OSError: the server has closed.
        """
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        self._writer.write(piece)
        await self._writer.drain()

    async def answer(self, has_body: bool = True) -> Answer:
        """Read one answer; status 0 where none comes."""
        assert self._reader is not None
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, OSError):
            return Answer(0)
        first, *rest = head.decode("latin-1").split("\r\n")[:-2]
        status = int(first.split(" ", 2)[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        if status == 100:
            return await self.answer(has_body)
        try:
            body = await self._body(headers) if has_body and status not in (204, 304) else b""
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            return Answer(status, headers, getattr(error, "partial", b""), whole=False)
        return Answer(status, headers, body, kept=headers.get("connection", "").lower() != "close")

    async def _body(self, headers: dict[str, str]) -> bytes:
        assert self._reader is not None
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await self._reader.read()
        body = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readuntil(b"\r\n")
        return bytes(body)

    def close(self, *, abruptly: bool = False) -> None:
        """Hang up; `abruptly` by a reset."""
        if self._writer is not None:
            if abruptly:
                self._writer.transport.abort()
            self._writer.close()
        self._reader = self._writer = None


def talk(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What a raw connection answers; a server that stops listening is answered for by what it said before."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        try:
            for piece in pieces:
                line.sendall(piece)
                time.sleep(pause_s)
        except OSError:
            pass
        answer = b""
        try:
            while chunk := line.recv(65536):
                answer += chunk
        except OSError:
            pass
        return answer


def status_of(answer: bytes) -> int:
    """The status in the first line of an answer."""
    return int(answer.split(b" ", 2)[1])
