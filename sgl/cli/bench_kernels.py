"""`sgl bench kernels`: the attention kernels against the ceilings of the GPU, and errors of all kernels.

Owns the command, its flags and its tables. Imported by `sgl.cli` for the command that it registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sgl.cli.bench import Save, bench, output
from sgl.cli.console import Json, guarded, say, show_table

if TYPE_CHECKING:
    from sgl.bench.kernels import KernelReport


@bench.command(short_help="Attention on a CUDA device, implementations compared.")
@guarded
def kernels(
    *,
    as_json: Json = False,
    save: Save = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds after which nothing more is begun.")] = 240.0,
    variants: Annotated[bool, typer.Option(help="Measure other ways to cut the work, too.")] = True,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences decoded together; may repeat. [default: 1 64 256]")
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a page; may repeat. [default: 1 16 64]")
    ] = None,
) -> None:
    """Attention of the Llama-3-8B shape on a CUDA device: time, share of the floor, and errors against float64."""
    from sgl.bench.kernels import Sizes, run

    sizes = Sizes()
    sizes = Sizes(rows=tuple(rows or sizes.rows), page_sizes=tuple(page_size or sizes.page_sizes))
    report = run(sizes=sizes, budget_s=budget, variants=variants, progress=say)
    if output(report, as_json, save):
        show(report)


def show(report: KernelReport) -> None:
    """The tables, and under them what is missing."""
    print(f"{report.card}: {report.ceilings or 'no ceilings'}, in this run\n")
    show_table(
        ("CASE", "WAY", "TIME", "BYTES", "PRODUCTS", "OF FLOOR"),
        [
            (
                time.case,
                f"{'* ' if time.in_use else '  '}{time.way}",
                f"{time.seconds * 1e6:.1f} us",
                f"{time.num_bytes / time.seconds / 1e12:.3g} TB/s",
                f"{time.flops / time.seconds / 1e12:.4g} TFLOP/s",
                f"{time.of_floor:.0%}",
            )
            for time in sorted(report.times, key=lambda time: (time.case, not time.in_use, time.seconds))
        ],
    )
    print("\n* in use. Bytes and products: those that have to be, over the time.\n")
    dtypes = list(dict.fromkeys(error.dtype for error in report.errors))
    found = {(error.kernel, error.dtype): f"{error.error:.1e}" for error in report.errors}
    show_table(
        ("KERNEL", *(dtype.upper() for dtype in dtypes)),
        [
            (kernel, *(found.get((kernel, dtype), "-") for dtype in dtypes))
            for kernel in dict.fromkeys(error.kernel for error in report.errors)
        ],
    )
    print("\nerror: norm of the difference to float64 over its norm")
    for what in report.missing:
        print(f"not measured: {what}")
