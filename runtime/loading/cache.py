"""The user's cache: where it lies, and what is said when it cannot be written.

Called by everything that fetches or converts: `wheels`, `hub`, `tokenizer_cache`. No torch here.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from sgl import environment
from sgl.errors import DiskFull, DownloadFailed

Progress = Callable[[int, int | None], None]
"""Called with bytes done and, where known, bytes in all."""


def cache_folder() -> Path:
    """Where fetched models lie: `SGL_CACHE`, else `XDG_CACHE_HOME/sgl`, else `~/.cache/sgl`. Need not exist yet."""
    if own := environment.read("SGL_CACHE"):
        return Path(own).expanduser()
    if shared := environment.read("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "sgl"
    return Path.home() / ".cache" / "sgl"


def check_space(folder: Path, needed_bytes: int, variable: str = "SGL_CACHE") -> None:
    """Refuse to begin what the disk cannot hold.

    Args:
        folder: where it will lie; need not exist yet.
        variable: the environment variable that moves the cache elsewhere.

    Raises:
        DiskFull: with `folder`, `needed_bytes` and `free_bytes`.
    """
    free = free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise _disk_full(folder, needed_bytes, free, variable)


def unwritable(folder: Path, error: OSError, needed_bytes: int | None, variable: str = "SGL_CACHE") -> DownloadFailed:
    """The error for a cache in which a file could not be written; `DiskFull` where that is the reason."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(folder, needed_bytes, free_bytes(folder), variable)
    return DownloadFailed(
        f"the model cache {folder} cannot be used ({error.strerror or error})",
        hint=f"set {variable} to a writable folder",
    )


def free_bytes(folder: Path) -> int | None:
    """Bytes that may still be written to `folder`, or to the nearest folder above it that exists."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def _disk_full(folder: Path, needed_bytes: int | None, free: int | None, variable: str) -> DiskFull:
    needed = "more" if needed_bytes is None else f"{needed_bytes} bytes"
    left = "an unknown number" if free is None else str(free)
    return DiskFull(
        f"the model cache {folder} has no space left: {needed} needed, {left} free",
        hint=f"free some space, or set {variable} to a folder on another disk",
        folder=str(folder),
        needed_bytes=needed_bytes,
        free_bytes=free,
    )
