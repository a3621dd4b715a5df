"""The process in which xgrammar compiles: `python -m sgl.grammars.xgrammar_helper`.

Owns one xgrammar compiler. Started and watched by `sgl.grammars.xgrammar_backend`, which ends it when a compilation
takes too long; its memory is bounded by the operating system. So a hostile grammar costs this process at most.

Messages on standard input and output: 4 bytes of length, then JSON. First `{"tokenizer": text, "max_bytes": int}`,
answered by `{"ready": true}`; then one `{"kind": ..., ...}` at a time, answered by `{"grammar": text}` or
`{"error": text}`. The end of the input ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from typing import Any, BinaryIO


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; `None` at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    body = stream.read(struct.unpack("<I", head)[0])
    found: dict[str, Any] = json.loads(body)
    return found


def frame(message: dict[str, Any]) -> bytes:
    """A message as bytes.

    Example:
        >>> frame({})
        b'\\x02\\x00\\x00\\x00{}'
    """
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


def main() -> None:
    """Serve until the input ends."""
    import xgrammar

    first = read(sys.stdin.buffer)
    if first is None:
        return
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.deserialize_json(first["tokenizer"]), max_threads=1, cache_enabled=False
    )
    _bound_memory(int(first["max_bytes"]))
    _answer({"ready": True})
    while (request := read(sys.stdin.buffer)) is not None:
        try:
            _answer({"grammar": _compile(compiler, request).serialize_json()})
        except (RuntimeError, ValueError, MemoryError) as error:  # also what xgrammar raises
            _answer({"error": str(error) or type(error).__name__})
    os._exit(0)  # nothing to tidy up, and torch would take seconds to do it


def _compile(compiler: Any, request: dict[str, Any]) -> Any:
    kind = request.pop("kind")
    if kind == "schema":
        return compiler.compile_json_schema(request.pop("schema"), strict_mode=False, **request)
    if kind == "regex":
        return compiler.compile_regex(request["pattern"])
    if kind == "ebnf":
        return compiler.compile_grammar(request["grammar"])
    return compiler.compile_structural_tag(request["tag"])


def _bound_memory(max_bytes: int) -> None:
    """What is mapped now, and `max_bytes` more."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + max_bytes, mapped + max_bytes))


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
