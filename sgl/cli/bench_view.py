"""Reports of `sgl bench` as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from sgl.bench.comparison import CaseReport, ComparisonReport
from sgl.bench.pairs import Result
from sgl.bench.samples import Sampled
from sgl.cli.console import show_table


def show_samples(measured: Sequence[Sampled]) -> None:
    """Median and samples of each measurement."""
    show_table(
        ("MEASURED", "MEDIAN", "UNIT", "SAMPLES"),
        [
            (row.what, f"{row.median:.3g}", row.unit, " ".join(f"{sample:.3g}" for sample in row.samples))
            for row in measured
        ],
    )


def show_comparison(report: ComparisonReport) -> None:
    """Who was compared, the ratios, and how far the outputs agree."""
    record = report.provenance
    print(f"model {report.model.name} on {report.a.device}, {report.a.num_threads} threads")
    for name, side in (("sgl", report.a), (report.peer, report.b)):
        details = {"dtype": side.dtype, "quantization": side.quantization, **side.details, **side.versions}
        print(f"{name}: " + ", ".join(f"{what} {value}" for what, value in details.items()))
    print(f"{record.cpu}, cores {' '.join(map(str, record.cores))} of {record.usable_cores}")
    print(*(f"{name} {version}" for name, version in record.versions.items()), sep=", ")
    digests = set(report.weights_sha256.values())
    if len(digests) > 1 or None in digests:
        print("weights: " + ("kept differently on the two sides" if report.mixed else "not compared"))
    else:
        print(f"weights: identical on both sides ({digests.pop():.12})")
    print()
    show_table(
        ("MEASURED", "SGL", report.peer.upper(), "RATIO", "INTERVAL", "CLEAN PAIRS"),
        [_row(case, result) for case in report.cases for result in case.results],
    )
    print(f"\nratio: time of {report.peer} over time of sgl, median of the clean pairs; above 1 sgl is faster")
    rule = report.plan.rule
    print(f"clean: others used at most {rule.max_foreign:.1%} of the cores, the hypervisor {rule.max_steal:.1%}")
    for case in report.cases:
        _show_notes(case, report.peer)


def _row(case: CaseReport, result: Result) -> tuple[str, ...]:
    pairs = f"{result.clean} of {result.attempted}"
    name = result.metric if case.case is None else f"{case.name}: {result.metric}"
    if result.ratio is None:
        return (name, "-", "-", "not measured", f"needs {result.needed}", pairs)
    ratio = result.ratio
    return (
        name,
        f"{ratio.a_s:.3g} s",
        f"{ratio.b_s:.3g} s",
        f"{ratio.median:.2f}x",
        f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f} ({ratio.interval.confidence:.0%})",
        pairs,
    )


def _show_notes(case: CaseReport, peer: str) -> None:
    """What the table has no room for: settings, agreement, and what pairs were dropped for."""
    for side, choice in case.tuned.items():
        settings = ", ".join(f"{name} {value}" for name, value in choice.chosen.items())
        doubt = f"; doubtful, chosen under {', '.join(map(str, choice.dirty))}" if choice.dirty else ""
        print(f"{case.name}: fastest settings of {side}: {settings}{doubt}")
    if case.agreement is not None:
        said = f"first differences after {case.agreement.common_prefix:.0%} of the tokens"
        if case.agreement.preferred is not None:
            said = f"{peer} prefers {case.agreement.preferred:.1%} of our tokens, given our text; {said}"
        print(f"{case.name}: {said}")
    dropped = case.results[0].dirty
    if dropped:
        print(f"{case.name}: pairs dropped for " + ", ".join(f"{what} ({count})" for what, count in dropped.items()))
