"""How the command line speaks: results on standard output, everything else on standard error.

Owns the form of errors, tables and progress. A terminal gets colours and moving bars; a pipe gets plain text and no
bars. `guarded` is on every command: it turns an `SglError` into one message and exit status 1 (2 for a `ConfigError`,
which is a wrong flag), and adds `--debug`, which lets the traceback through.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import msgspec
import typer

from sgl.errors import ConfigError, SglError

FAILED = 1
USAGE = 2
INTERRUPTED = 130

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel="Output")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Output")]


def say(text: str = "") -> None:
    """A line for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def show_error(error: SglError) -> None:
    """The message, the program line and the hint of an error, on standard error."""
    red, plain = ("\x1b[1;31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    say(f"{red}error:{plain} {error.message}")
    if error.location is not None:
        say(f"  at {error.location}")
    if error.hint:
        say(f"  hint: {error.hint}")


def exit_status(error: SglError) -> int:
    """2 for what is wrong on the command line, else 1."""
    return USAGE if isinstance(error, ConfigError) else FAILED


def show_json(value: Any) -> None:
    """A value as indented JSON on standard output."""
    print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def bytes_text(number: int) -> str:
    """A size for people.

    Example:
        >>> bytes_text(92_871_040)
        '92.9 MB'
    """
    size = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Left-aligned columns on standard output, as wide as their content; nothing is cut."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def download_bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A callback (bytes done, bytes in all if known) that moves a bar on a terminal and is silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of every command: errors become messages, `--debug` is added."""
    signature = inspect.signature(command, eval_str=True)
    flag = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)

    @wraps(command)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SglError as error:
            if debug:
                raise
            show_error(error)
            raise typer.Exit(exit_status(error)) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None

    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])  # type: ignore[attr-defined]
    run.__annotations__ = {**{p.name: p.annotation for p in signature.parameters.values()}, "debug": Debug}
    return run
