"""`sgl explain FILE.py`: what the program's runs will cost, before they are made.

Owns the command. The file runs as under `sgl run` until it makes its first run; that is explained with the rows that it
has, and the file ends there. With `--run` each run is explained, made, and measured. A file that makes no run has its
programs explained with their arguments open.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sgl.cli.console import Json, guarded, say, show_json
from sgl.cli.options import engine_options
from sgl.environment import export
from sgl.errors import ConfigError
from sgl.runtime.config import config_from_mapping

if TYPE_CHECKING:
    from sgl.lang.explain import CountingBackend, Explanation
    from sgl.lang.watching import Call

SAMPLING = frozenset(
    ("max_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p")
)
"""Options of a run that say how long its generations may become, and the like."""

OWN_FLAGS = frozenset(("--run", "--assume", "--html", "--output", "-o", "--save", "--json"))
"""What may be meant for this command where it stands behind the file."""


class _Explained(BaseException):
    """The file's first run is explained: it has done what it was executed for. No `Exception`, so that none of the
    file's handlers takes it."""


@guarded
@engine_options
def explain(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="The program.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    *,
    run: Annotated[bool, typer.Option("--run", help="Make the runs too, and show measured beside predicted.")] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="A value that a generation is taken to give; may repeat."),
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Write a page to look at.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="The page; one that exists is replaced.")] = "plan.html",
    save: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write predictions as JSON, each before its run.")
    ] = None,
    as_json: Json = False,
    engine: dict[str, Any],
) -> None:
    """What a program's run will cost: tokens with and without sharing, steps, critical path, what blocks sharing."""
    from sgl.cli.program import check_file, run_file
    from sgl.lang.watching import watching

    path = check_file(file)
    for flag in (each for each in args or () if each in OWN_FLAGS):
        say(f"{flag} behind {path.name} is an argument of the program; for sgl explain write it before the file")
    config_from_mapping(engine)
    export(engine)
    found: list[Explanation] = []
    values = _values(assume or [])

    def look(call: Call) -> Any:
        explained = _explain(call, values)
        found.append(explained)
        if save is not None:
            Path(save).write_bytes(msgspec.json.format(msgspec.json.encode([each.plan for each in found]), indent=2))
        if not run:
            raise _Explained
        return _measured(explained, call)

    names: dict[str, Any] = {}
    status = 0
    with watching(look):
        try:
            status = run_file(path, args or [], names)
        except _Explained:
            status = 0
    if not found:
        found = _open(names, values)
    if not found and not status:
        raise ConfigError(f"{file!r} has no program", hint="put @sgl.function above one")
    if as_json:
        show_json([explained.plan for explained in found])
    else:
        print("\n\n".join(map(str, found)))
    if html:
        from sgl.lang.view.plan import plans_page

        Path(output).write_text(plans_page(f"Plan of {path.name}", found), encoding="utf-8")
        say(f"page: {output}")
    raise typer.Exit(status)


def _values(assume: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for given in assume:
        name, is_pair, text = given.partition("=")
        if not is_pair or not name:
            raise ConfigError(f"--assume is {given!r}; expected NAME=TEXT", param="assume")
        values.setdefault(name, []).append(text)
    # One text holds for every generation of its name; several are taken in order.
    return {name: texts if len(texts) > 1 else _always(texts[0]) for name, texts in values.items()}


def _always(text: str) -> Any:
    return lambda node: text


def _explain(call: Call, values: dict[str, Any]) -> Explanation:
    sampling = {name: value for name, value in call.options.items() if name in SAMPLING and value is not None}
    explained: Explanation = call.function.explain(
        rows=call.rows, assume=values, sampling=sampling, backend=call.options.get("backend")
    )
    return explained


def _measured(explained: Explanation, call: Call) -> Any:
    """Make the run, count it, and give its result to the file."""
    from sgl.lang.defaults import default_backend
    from sgl.lang.explain import CountingBackend

    if call.way in ("start_async", "batch") or call.options.get("stream") or call.options.get("generator_style"):
        say(f"{call.function.__name__}: a run that goes on after the call is not measured")
        return call.go()
    counter = CountingBackend(call.options.get("backend") or default_backend())
    if call.way == "run_async":
        return _measured_async(explained, call, counter)
    result = call.go(backend=counter)
    explained.take(counter)
    return result


async def _measured_async(explained: Explanation, call: Call, counter: CountingBackend) -> Any:
    result = await call.go(backend=counter)
    explained.take(counter)
    return result


def _open(names: dict[str, Any], values: dict[str, Any]) -> list[Explanation]:
    """Every program that a file defines, explained with its arguments open."""
    from sgl.lang.function import SglFunction

    programs = dict.fromkeys(value for value in names.values() if isinstance(value, SglFunction))
    return [program.explain(assume=values) for program in programs]
