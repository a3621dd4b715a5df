"""Tokenizers of GGUF files, converted once and kept in the user's cache.

A file in `tokenizers/` of the cache is named by a key: SHA-256 over the file's `tokenizer.*` metadata as it lies there,
this converter's version, and the version of the `tokenizers` library, whose format is stored. It holds a checksum over
the key and its content, so that a damaged file, or one that was put under another name, is never used: it is
rewritten. A cache that cannot be read or written costs a line in the log, never the start. Called by the worker.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec
import tokenizers

from sgl.errors import CorruptModel
from sgl.runtime.loading.cache import cache_folder
from sgl.runtime.loading.gguf_reader import GGUFFile
from sgl.runtime.text.tokenizer import SavedTokenizer, Tokenizer

CONVERTER = 1
"""Raised with every change to how `Tokenizer.from_gguf` reads metadata, or to `SavedTokenizer`."""
_DIGEST_BYTES = 32
_MAX_BYTES = 256 * 2**20

log = logging.getLogger("sgl.loading")


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file, from the cache where it is there. Raises as `Tokenizer.from_gguf`."""
    key = cache_key(file)
    path = cache_folder() / "tokenizers" / key.hex()
    tokenizer = _read(path, key)
    if tokenizer is None:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        _write(path, key, tokenizer.save())
    return tokenizer


def cache_key(file: GGUFFile) -> bytes:
    """What determines the tokenizer of a file, as 32 bytes."""
    versions = f"sgl tokenizer {CONVERTER}, tokenizers {tokenizers.__version__}, ".encode()
    return hashlib.sha256(versions + file.digest("tokenizer.")).digest()


def _read(path: Path, key: bytes) -> Tokenizer | None:
    try:
        with path.open("rb") as file:
            content = file.read(min(_MAX_BYTES, os.fstat(file.fileno()).st_size))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.info("the tokenizer in %s cannot be read (%s); converting it again", path, error.strerror)
        return None
    digest, saved = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if digest != hashlib.sha256(key + saved).digest():
        log.info("the tokenizer in %s is damaged; converting it again", path)
        return None
    try:
        return Tokenizer.restore(msgspec.msgpack.decode(saved, type=SavedTokenizer))
    except (msgspec.MsgspecError, CorruptModel) as error:
        log.info("the tokenizer in %s is of another form (%s); converting it again", path, error)
        return None


def _write(path: Path, key: bytes, tokenizer: SavedTokenizer) -> None:
    """Beside its place first, then renamed: a reader sees a whole file or none."""
    saved = msgspec.msgpack.encode(tokenizer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(key + saved).digest() + saved)
            os.replace(scratch, path)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.warning("the tokenizer is not kept in %s: %s", path.parent, error.strerror or error)
