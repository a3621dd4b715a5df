"""The folder in which an engine's client and its worker meet.

Owns where it is, that nobody else can enter it, and the names in it. The client makes it and removes it; when the
client was killed, the worker does. A unix socket's path may have 107 bytes, far fewer than a path of a file, so the
folder for temporary files is only the first of several places.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zmq

from sgl import environment
from sgl.errors import ConfigError

SOCKET = "worker"
STACKS = "stacks"
"""What a worker that hangs or crashes leaves."""

_LONGEST = 107
_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm")


def address(folder: str) -> str:
    """Of the socket."""
    return f"ipc://{folder}/{SOCKET}"


def bind(socket: zmq.Socket[bytes]) -> str:
    """Bind `socket` in a new folder of mode 0700 that belongs to this user; the folder.

    Raises:
        ConfigError: there is no place for it; the message names those that were tried, and why not.
    """
    refused = []
    for parent in _places():
        try:
            return _bind_below(parent, socket)
        except OSError as error:  # ZMQError is one
            refused.append(f"{parent} ({error.strerror})")
    raise ConfigError(
        f"no folder for the engine's socket: {', '.join(refused)}",
        hint="set TMPDIR to a folder of your own that can be written and has a short path",
    )


def shut(folder: str) -> None:
    """Take the socket's name away once the one who was expected has come: from then on nobody can connect.

    A connection of a stranger, even one that is never spoken to, would stay with libzmq as an open file.
    """
    (Path(folder) / SOCKET).unlink(missing_ok=True)


def _places() -> Iterator[str]:
    try:
        yield tempfile.gettempdir()
    except FileNotFoundError:  # none of Python's own choices can be written
        pass
    if runtime := environment.read("XDG_RUNTIME_DIR"):
        yield runtime
    yield from _ELSEWHERE


def _bind_below(parent: str, socket: zmq.Socket[bytes]) -> str:
    folder = tempfile.mkdtemp(prefix="sgl-", dir=parent)
    try:
        if len(os.fsencode(Path(folder) / SOCKET)) > _LONGEST:
            raise OSError(0, f"its path leaves no room in the {_LONGEST} bytes of a socket's")
        status = os.lstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise OSError(0, "its file system does not keep others out")
        socket.bind(address(folder))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
