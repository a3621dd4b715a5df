"""The report of `sgl bench program --peer` as one page: a plot of every pair, the answers, and the raw JSON.

Owns the page. It needs nothing from elsewhere, runs no script, and holds the whole report, so that the figures can be
computed again from it.
"""

from __future__ import annotations

import html
import math

import msgspec

from sgl.bench.program_peers import PeerReport, TaskComparison

_WIDTH, _ROW, _LEFT = 640, 34, 110
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1e21; }
table { border-collapse: collapse; font-size: 14px; } td, th { border: 1px solid #d7dae0; padding: .3rem .6rem; }
td, th { text-align: left; vertical-align: top; } pre { background: #f5f6f8; padding: 1rem; overflow: auto; }
svg text { font: 13px system-ui, sans-serif; } .quiet { color: #6a7079; }
"""


def peer_page(report: PeerReport) -> str:
    """The page of a report."""
    title = html.escape(f"Programs against {report.peer}")
    mean = "not measured" if report.geometric_mean is None else f"{report.geometric_mean:.2f}x"
    record = report.provenance
    versions = ", ".join(f"{name} {version}" for name, version in (record.versions | report.peer_versions).items())
    settings = "; ".join(f"{name}: {value}" for name, value in report.peer_settings.items())
    facts = [
        f"{report.model}, {report.dtype}, quantization {report.quantization}",
        f"the peer's weights: {report.peer_dtype or 'the same'}",
        f"{record.cpu}, cores {' '.join(map(str, record.cores))}",
        versions,
        f"{report.peer}: {settings}",
        record.command,
    ]
    raw = msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>Geometric mean <b>{mean}</b> over {report.measured} of {len(report.tasks)} tasks: "
        "the peer's time over ours, above 1 ours is faster. A dot is a clean pair, a ring one that does not count, "
        f"the line the interval of the median.</p>{_plot(report.tasks)}"
        + "".join(f'<p class="quiet">{html.escape(fact)}</p>' for fact in facts)
        + f"<h2>Tasks</h2>{_table(report.tasks)}<h2>Raw</h2><details><summary>JSON</summary>"
        f"<pre>{html.escape(raw)}</pre></details></html>\n"
    )


def _ratios(task: TaskComparison) -> list[tuple[float, bool]]:
    """Of every pair in which both sides had their turn: the ratio, and whether it counts."""
    return [
        (pair.b.seconds["wall"] / pair.a.seconds["wall"], pair.clean)
        for pair in task.pairs
        if pair.a is not None and pair.b is not None
    ]


def _plot(tasks: tuple[TaskComparison, ...]) -> str:
    """Ratios of all tasks on one logarithmic axis."""
    values = [ratio for task in tasks for ratio, _ in _ratios(task)] or [1.0]
    low, high = math.log2(min(0.5, *values)), math.log2(max(2.0, *values))

    def x(ratio: float) -> float:
        return _LEFT + (math.log2(ratio) - low) / (high - low) * (_WIDTH - _LEFT - 20)

    height = _ROW * len(tasks) + 30
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" aria-label="ratios by task">',
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="0" y2="{height - 24}" stroke="#888" stroke-dasharray="3 3"/>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = x(2.0**power)
        parts.append(f'<text x="{at:.1f}" y="{height - 8}" text-anchor="middle">{2.0**power:g}x</text>')
    for row, task in enumerate(tasks):
        y = _ROW * row + _ROW // 2
        parts.append(f'<text x="0" y="{y + 4}">{html.escape(task.task)}</text>')
        if task.result is not None and task.result.ratio is not None:
            interval = task.result.ratio.interval
            span = f'x1="{x(interval.low):.1f}" x2="{x(interval.high):.1f}"'
            parts.append(f'<line {span} y1="{y}" y2="{y}" stroke="#3b6fd4" stroke-width="3"/>')
        for ratio, clean in _ratios(task):
            fill = "#3b6fd4" if clean else "none"
            parts.append(f'<circle cx="{x(ratio):.1f}" cy="{y}" r="5" fill="{fill}" stroke="#3b6fd4"/>')
    return "".join(parts) + "</svg>"


def _table(tasks: tuple[TaskComparison, ...]) -> str:
    heads = ("task", "ratio", "ours", "peer", "the peer ran with", "equal answers", "answers")
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for task in tasks:
        ratio = task.result.ratio if task.result is not None else None
        cells = [
            f"<b>{html.escape(task.task)}</b><br>{html.escape(task.about)}",
            html.escape(task.why or (task.result.verdict if task.result is not None else "")),
            f"{ratio.a_s:.3f} s" if ratio is not None else "",
            f"{ratio.b_s:.3f} s" if ratio is not None else "",
            html.escape(", ".join(f"{name} {seconds:.3f} s" for name, seconds in task.tried.items() if name)),
            f"{task.equal} of {task.num_answers}" if task.num_answers else "",
            "<br>".join(
                f"{html.escape(ours)} <span class='quiet'>| {html.escape(theirs)}</span>"
                for ours, theirs in zip(task.ours, task.theirs, strict=False)
            ),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
