"""`sgl bench grammar`: what constraints cost, and what forced tokens save.

Owns the command, its flags and its tables. Imported by `sgl.cli` for the command that it registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl.cli.bench import Model, Save, bench, fetched, output
from sgl.cli.console import Json, guarded, say, show_table
from sgl.cli.options import engine_options

if TYPE_CHECKING:
    from sgl.bench.grammar import GrammarReport


@bench.command(short_help="Masks, compilation, constrained against free.")
@guarded
@engine_options
def grammar(
    model: Model = None,
    *,
    as_json: Json = False,
    save: Save = None,
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="masks, throughput, forced or neighbours; may repeat. [default: all]"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of each generation of the throughput.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of the neighbours, of each kind.")] = 3,
    round_s: Annotated[float, typer.Option(min=1, help="Seconds of such a round.")] = 10.0,
    pairs: Annotated[int, typer.Option(min=1, help="Clean pairs that a figure needs.")] = 5,
    attempts: Annotated[
        int | None, typer.Option(min=1, help="Pairs tried at most. [default: 4 * pairs]", show_default=False)
    ] = None,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for a quiet machine before a pair.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the order of turns.")] = 0,
    engine: dict[str, Any],
) -> None:
    """Masks, compilation, constrained against free decoding, forced tokens, and what neighbours notice."""
    from sgl.bench.grammar import run
    from sgl.bench.harness import PairPlan

    report = run(
        fetched(engine, model),
        plan=PairPlan(pairs=pairs, attempts=attempts, seed=seed, patience_s=patience),
        parts=part or (),
        new_tokens=new_tokens,
        rounds=rounds,
        round_s=round_s,
        progress=say,
    )
    if output(report, as_json, save):
        show(report)


def show(report: GrammarReport) -> None:
    """The report as tables."""
    print(f"model {report.model}, {report.vocab_size} tokens; {report.provenance.cpu}")
    if report.masks:
        show_table(
            ("BACKEND", "FILL P50", "P99", "64 ROWS", "COMPILE P50", "P99"),
            [
                (
                    row.backend,
                    f"{row.fill_p50_us:.0f} us",
                    f"{row.fill_p99_us:.0f} us",
                    f"{row.together_us / 1e3:.2f} ms",
                    f"{row.compile_p50_ms:.2f} ms",
                    f"{row.compile_p99_ms:.2f} ms",
                )
                for row in report.masks
            ],
        )
    if report.comparisons:
        show_table(
            ("COMPARED", "RATIO", "CLEAN PAIRS", "COUNTS"),
            [
                (
                    row.what,
                    row.result.verdict,
                    f"{row.result.clean} of {row.result.attempted}",
                    ", ".join(f"{name} {value:.3g}" for name, value in row.counts.items()),
                )
                for row in report.comparisons
            ],
        )
    if (beside := report.neighbours) is not None:
        new, known = (" ".join(f"{each:.1f}" for each in side) for side in (beside.new_p99_ms, beside.known_p99_ms))
        print(
            f"neighbours: p99 between tokens {new} ms with {beside.arrivals_per_s:g} new schemas/s, {known} ms with a "
            f"known one: {beside.ratio:.2f}x; {beside.compiled} compiled"
        )
