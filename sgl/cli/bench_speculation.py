"""`sgl bench speculation`: decoding with guessed tokens against decoding without.

Owns the command, its flags and its table. Imported by `sgl.cli` for the command that it registers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl.cli.bench import Model, Save, bench, fetched, output
from sgl.cli.console import Json, guarded, say, show_table
from sgl.cli.options import engine_options

if TYPE_CHECKING:
    from sgl.bench.speculation import SpeculationReport


@bench.command(short_help="Decoding with guesses against decoding without.")
@guarded
@engine_options
def speculation(
    model: Model = None,
    *,
    as_json: Json = False,
    save: Save = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="copy, json, chain or random; may repeat. [default: all]")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Programs decoded together; may repeat. [default: 1 8 32]")
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="Of a generation of `copy` and `random`; fewer in batches.")
    ] = 96,
    pairs: Annotated[int, typer.Option(min=1, help="Clean pairs that a figure needs.")] = 5,
    attempts: Annotated[
        int | None, typer.Option(min=1, help="Pairs tried at most. [default: 4 * pairs]", show_default=False)
    ] = None,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for a quiet machine before a pair.")] = 10.0,
    turn: Annotated[float, typer.Option(min=0.2, help="Seconds that a side's turn lasts at least.")] = 2.0,
    most_seconds: Annotated[
        float | None, typer.Option(min=1, help="Begin no figure later than this.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of turns, and of the documents.")] = 0,
    engine: dict[str, Any],
) -> None:
    """Decoding with guessed tokens against decoding without: where text repeats, and where it does not."""
    from sgl.bench.harness import PairPlan
    from sgl.bench.speculation import run

    report = run(
        fetched(engine, model),
        plan=PairPlan(pairs=pairs, attempts=attempts, seed=seed, patience_s=patience, turn_s=turn),
        tasks=task or (),
        batches=batch or (),
        new_tokens=new_tokens,
        most_seconds=most_seconds or math.inf,
        progress=say,
    )
    if output(report, as_json, save):
        show(report)


def show(report: SpeculationReport) -> None:
    """The report as a table."""
    where = report.provenance.cpu if report.device == "cpu" else report.device
    print(f"model {report.model}; {where}")
    show_table(
        ("TASK", "BATCH", "OFF / ON", "CLEAN PAIRS", "ACCEPT LEN", "VERIFIED", "RECORDED", "FORWARDS", "EQUAL"),
        [
            (
                row.task,
                str(row.batch),
                row.result.verdict,
                f"{row.result.clean} of {row.result.attempted}",
                f"{row.accept_len:.2f}",
                f"{row.verified:.0%}",
                str(row.recorded),
                f"{row.forwards} / {row.forwards_off}",
                f"{row.equal:.0%}",
            )
            for row in report.figures
        ],
    )
