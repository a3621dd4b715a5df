"""`sgl bench gpu`: whether an engine is right on a GPU, and how near it comes to what the GPU can do.

Owns the command, its flags and its table. Imported by `sgl.cli` for the command that it registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl.cli.bench import Model, Save, bench, output
from sgl.cli.console import Json, guarded, say, show_table
from sgl.cli.options import engine_options

if TYPE_CHECKING:
    from sgl.bench.gpu import GpuReport


@bench.command()
@guarded
@engine_options
def gpu(
    model: Model = None,
    *,
    as_json: Json = False,
    save: Save = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Of these parts; may repeat: correct, logits, decode, prefill, decode-small, mixed, constrained, "
            "constrained-small, cache, deterministic, products, programs. [default: all]",
        ),
    ] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds after which nothing more is begun.")] = 480.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each variant.")] = 3,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences decoded together; may repeat. [default: 1 8 64 256]")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Programs of these workloads; may repeat. [default: all]")
    ] = None,
    scale: Annotated[float, typer.Option(help="Share of each workload's tokens.")] = 0.02,
    engine: dict[str, Any],
) -> None:
    """Check, measure and report in one go, on a CUDA device. Shapes have random weights; `correct` reads MODEL.

    With --save the report is written after each part, so that a run that is ended keeps what it had.
    """
    from sgl.bench.gpu import Sizes, run

    sizes = Sizes(rounds=rounds, scale=scale, workloads=tuple(workload or ()))
    if rows:
        sizes = Sizes(rounds=rounds, scale=scale, workloads=sizes.workloads, rows=tuple(rows))
    fields = dict(engine) if model is None else {**engine, "model_path": model}

    def partial(report: GpuReport) -> None:
        if save is not None:
            output(report, False, save)

    report = run(fields, parts=part or (), sizes=sizes, budget_s=budget, partial=partial, progress=say)
    if output(report, as_json, save):
        show(report)


def show(report: GpuReport) -> None:
    """The table, and under it what ended early."""
    print(f"{report.card}: {report.ceilings or 'no ceilings'}, in this run\n")
    show_table(
        ("FIGURE", "VALUE", "GOAL", "MET"),
        [
            (
                figure.what,
                f"{figure.value:.4g} {figure.unit}".rstrip(),
                "-" if figure.goal is None else f"{'<=' if figure.at_most else '>='} {figure.goal:g}",
                {None: "-", True: "yes", False: "no"}[figure.is_met],
            )
            for part in report.parts
            for figure in part.figures
        ],
    )
    print()
    for part in report.parts:
        print(f"{part.name}: {part.seconds:.0f} s{', ' + part.error if part.error else ''}")
