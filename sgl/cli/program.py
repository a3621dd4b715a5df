"""`sgl run`: executes a user's program file as `__main__`.

The file sees `sys.argv` and `sys.path[0]` as under plain `python`. An `SglError` that reaches the top is shown as one
message; any other exception keeps its traceback, cut to the user's frames and below. The file is compiled once before
it runs, so that a syntax error in it is told apart from one in something that it imports. SIGTERM ends it as
`sys.exit(143)` would: its engine is closed and exit handlers run; a second one ends everything at once.
"""

from __future__ import annotations

import difflib
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from sgl.cli.console import FAILED, say
from sgl.errors import ConfigError, SglError, SourceLocation


def check_file(given: str) -> Path:
    """The program at `given`.

    Raises:
        ConfigError: nothing is there (with the nearest name), it is a folder, or cannot be read.
    """
    path = Path(given)
    if path.is_dir():
        programs = sorted(child.name for child in path.glob("*.py"))
        hint = f"name one of its files: {', '.join(programs[:5])}" if programs else "name a Python file"
        raise ConfigError(f"{given!r} is a folder; expected a Python file", hint=hint)
    if not path.exists():
        folder = path.parent
        names = [child.name for child in folder.glob("*.py")] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"did you mean {str(folder / near[0])!r}?" if near else "check the path"
        raise ConfigError(f"no file {given!r}", hint=hint)
    return path


def syntax_error(path: Path) -> str | None:
    """What Python says about a file that does not parse, without a traceback; None for one that does."""
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return "".join(traceback.format_exception_only(error)).rstrip()
    except (ValueError, OSError) as error:
        return f"{path}: {error}"
    return None


def run_file(path: Path, args: Sequence[str], names: dict[str, Any] | None = None) -> int:
    """Execute the program; the exit status. `SystemExit` of the program passes through.

    Args:
        names: filled with what the file defines, once it is through.

    Raises:
        SglError: the program let one escape; it points at the innermost line of the file.
    """
    if fault := syntax_error(path):
        say(fault)
        return FAILED
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with _ended_by_sigterm():
            defined = runpy.run_path(str(path), run_name="__main__")
    except SglError as error:
        error.at(_last_line_of(path, error.__traceback__))
        raise
    except Exception as error:  # noqa: BLE001 - the user's own: shown as Python would show it
        traceback.print_exception(type(error), error, _from_frame_of(path, error.__traceback__))
        return FAILED
    if names is not None:
        names.update(defined)
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _from_frame_of(path: Path, frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this command above the program."""
    inner = frames
    while inner is not None and inner.tb_frame.f_code.co_filename != str(path):
        inner = inner.tb_next
    return inner or frames


def _last_line_of(path: Path, frames: TracebackType | None) -> SourceLocation | None:
    """The innermost line of the program in a traceback."""
    found = None
    while frames is not None:
        code = frames.tb_frame.f_code
        if code.co_filename == str(path):
            found = SourceLocation(str(path), frames.tb_lineno, code.co_name)
        frames = frames.tb_next
    return found
