"""Files of a model folder, which may come from anyone: only regular files of bounded size inside the folder are read.

Called by `sources`, `shapes`, `checkpoint` and the tokenizer. A link may lead out of the folder only where the hub's
cache makes it so (`snapshots/COMMIT/NAME -> ../../blobs/HASH`); any other that leaves it, a pipe or a device is refused
as `CorruptModel` before it is opened: it would hang, or read a file that the model's author does not own.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from sgl.errors import CorruptModel

TEXT_BYTES = 256 * 2**20
"""The largest tokenizer.json in use has about 35 MB."""


def model_file(folder: Path, name: str) -> Path | None:
    """The path of `name` in `folder`, or `None` where there is no such file.

    Raises:
        CorruptModel: it lies elsewhere, or is not a regular file.
    """
    path = folder / name
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise CorruptModel(f"{path} is a link to nothing", hint="fetch the model again") from None
        return None
    except OSError as error:  # a loop of links, a folder that may not be entered
        raise CorruptModel(f"{path} cannot be read: {error.strerror}", hint="fetch the model again") from None
    if not stat.S_ISREG(mode):
        raise CorruptModel(f"{path} is not a regular file", hint="replace it by the file itself")
    real, root = path.resolve(), folder.resolve()
    if not (
        real.is_relative_to(root) or (root.parent.name == "snapshots" and real.parent == root.parents[1] / "blobs")
    ):
        raise CorruptModel(f"{path} is a link out of its folder, to {real}", hint="put the file itself into the folder")
    return path


def text_of(folder: Path, name: str) -> str | None:
    """Text of a file, or `None` where there is none.

    Raises:
        CorruptModel: it is not UTF-8, larger than `TEXT_BYTES`, or not a file that `model_file` lets through.
    """
    path = model_file(folder, name)
    if path is None:
        return None
    try:
        if (size := path.stat().st_size) > TEXT_BYTES:
            raise CorruptModel(f"{path} has {size} bytes; at most {TEXT_BYTES} are read", hint="fetch the model again")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptModel(f"{path} cannot be read: {error}", hint="fetch the model again") from None


def json_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file.

    Raises:
        CorruptModel: as `text_of`, or it is not a JSON object.
    """
    text = text_of(folder, name)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{folder / name} is not JSON: {error}", hint="fetch the model again") from None
    if not isinstance(value, dict):
        raise CorruptModel(
            f"{folder / name} holds a {type(value).__name__}; expected an object", hint="fetch the model again"
        )
    return value
