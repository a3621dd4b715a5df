"""`sgl bench quality` and `sgl bench throughput`: the ways that our engine can compute a model, beside each other.

Owns the two commands, their flags and tables. Imported by `sgl.cli` for the commands that it registers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl.cli.bench import Model, Repeats, Save, bench, fetched, output
from sgl.cli.console import Json, guarded, say, show_table
from sgl.cli.options import engine_options

if TYPE_CHECKING:
    from sgl.bench.quality import QualityReport
    from sgl.bench.throughput import ThroughputReport

GB = 1e9

Paths = Annotated[
    list[str] | None,
    typer.Option("--path", metavar="NAME", help="Of these paths, as native-gguf; may repeat. [default: all]"),
]


@bench.command(short_help="Perplexity and agreement of each path.")
@guarded
@engine_options
def quality(
    model: Model = None,
    *,
    as_json: Json = False,
    save: Save = None,
    path: Paths = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read this text. [default: the one that comes with sgl]")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens read at once.")] = 1024,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Read only so much of the text.", show_default=False)
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Perplexity and agreement of each path through the engine with float32, on a fixed text."""
    from sgl.bench.quality import run

    report = run(
        fetched(engine, model),
        paths=path or (),
        text=text,
        window=window,
        max_tokens=max_tokens,
        progress=lambda what: say(f"reading: {what}"),
    )
    if output(report, as_json, save):
        _show_quality(report)


@bench.command(short_help="Tokens and bytes a second, by path, rows, context.")
@guarded
@engine_options
def throughput(
    model: Model = None,
    *,
    as_json: Json = False,
    save: Save = None,
    path: Paths = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences decoded together; may repeat. [default: 1 2 4 8 16 32]")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of each; may repeat. [default: 128 1024 4096]")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded in a call.")] = 64,
    repeats: Repeats = 3,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for a quiet machine before a sample.")] = 10.0,
    max_foreign: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the cores that others may use in a clean sample.")
    ] = 0.02,
    max_steal: Annotated[
        float, typer.Option(min=0, max=1, help="Share that the hypervisor may take in a clean sample.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    engine: dict[str, Any],
) -> None:
    """Tokens and bytes per second of decoding, by path, rows and context."""
    from sgl.bench.harness import PairPlan
    from sgl.bench.load import CleanRule
    from sgl.bench.throughput import CONTEXTS, ROWS, run

    rule = CleanRule(max_foreign=max_foreign, max_steal=max_steal)
    report = run(
        fetched(engine, model),
        plan=PairPlan(pairs=repeats, seed=seed, patience_s=patience, rule=rule),
        paths=path or (),
        rows=rows or ROWS,
        contexts=context or CONTEXTS,
        new_tokens=new_tokens,
        progress=lambda what: say(f"measuring: {what}"),
    )
    if output(report, as_json, save):
        _show_throughput(report)


def _show_quality(report: QualityReport) -> None:
    print(f"model {report.model.name}, {report.tokens} tokens of {report.text} in windows of {report.window}")
    exact = report.paths[0].perplexity or 1.0
    show_table(
        ("PATH", "PERPLEXITY", "RATIO", "SAME ARGMAX", "MEAN DIFFERENCE"),
        [
            (
                row.path,
                f"{row.perplexity:.4f}",
                f"{row.perplexity / exact:.4f}",
                f"{row.agreement:.2%}",
                f"{row.difference:.4f}",
            )
            if row.perplexity is not None
            else (row.path, "-", "-", "-", row.unavailable)
            for row in report.paths
        ],
    )
    print(f"\nratio, argmax and difference (of log-probabilities, in nats): against {report.reference}")


def _show_throughput(report: ThroughputReport) -> None:
    record = report.provenance
    print(f"model {report.model.name}; {record.cpu}, {record.usable_cores} cores")
    for way in report.paths:
        details = ", ".join(f"{name} {value}" for name, value in way.resolved.items())
        print(f"{way.path}: {way.unavailable and 'not measured, ' + way.unavailable}{details}")
    ceilings = report.ceilings
    if ceilings is not None:
        print(f"{ceilings.card}: {ceilings}, in this run")
    print()
    show_table(
        ("PATH", "ROWS", "CONTEXT", "STEP", "FLOOR", "GAP", "OVERLAP", "TOKENS/S", "WEIGHTS", "KEYS, VALUES", "CLEAN"),
        [
            (
                cell.path,
                str(cell.rows),
                str(cell.context),
                f"{cell.step_s * 1e3:.3g} ms",
                f"{(cell.weight_bytes_per_s + cell.kv_bytes_per_s) / ceilings.bytes_per_s:.1%}" if ceilings else "-",
                f"{cell.host_gap:.2%}" if cell.host_gap is not None else "-",
                f"{cell.plain_step_s / cell.step_s:.3f}x" if cell.plain_step_s is not None else "-",
                f"{cell.tokens_per_s:.4g}",
                f"{cell.weight_bytes_per_s / GB:.3g} GB/s",
                f"{cell.kv_bytes_per_s / GB:.3g} GB/s",
                f"{sum(not sample.dirty for sample in cell.samples)} of {len(cell.samples)}"
                + (" (dirty)" if cell.dirty else ""),
            )
            for cell in report.cells
        ],
    )
    print("\nmedians of the clean samples; dirty: of all, since none was clean. Bytes are those that a step must read;")
    print("floor: what reading them at the faster of both rates would take, of the step; gap: what the GPU waited for")
    print("the host; overlap: the step without it, as a multiple")
