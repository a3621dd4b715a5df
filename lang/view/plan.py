"""The page of an explanation: figures, the critical path, what blocks sharing, and each row's nodes.

Called by `sgl.lang.explain.Explanation`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sgl.lang.tracing import line_of
from sgl.lang.view.page import Markup, element, page, part, table

if TYPE_CHECKING:
    from sgl.lang.explain import Explanation

_ROWS_SHOWN = 20


def plan_page(explanation: Explanation) -> str:
    """A page that stands alone."""
    return plans_page(f"Plan of {explanation.plan.program}", [explanation])


def plans_page(title: str, explanations: Iterable[Explanation]) -> str:
    """Several on one page."""
    return page(title, *(each for explanation in explanations for each in _content(explanation)))


def plan_part(explanation: Explanation) -> str:
    """The same as part of another page."""
    return part(*_content(explanation))


def _content(explanation: Explanation) -> list[Markup]:
    from sgl.lang.explain import compared

    plan = explanation.plan
    counted = plan.counted_by if plan.exact else f"{plan.counted_by} (not exact)"
    facts = f"{plan.rows} rows, {plan.nodes} nodes on {plan.branches} branches; tokens of {counted}"
    columns = ["", "predicted", "measured"] if plan.measured is not None else ["", "predicted"]
    rows = [row[: len(columns)] for row in compared(plan)]
    rows.append(("prefilled as plain requests", f"{plan.plain_tokens:,}", "")[: len(columns)])
    found = [
        element("h1", f"Plan of {plan.program}"),
        element("p", facts, class_="note"),
        table(columns, rows),
    ]
    if plan.critical_path:
        steps = sum(step.steps for step in plan.critical_path)
        found.append(element("h2", f"Critical path: {steps} steps"))
        found.append(
            table(
                ["generation", "steps", "line"],
                [(step.name, str(step.steps), str(step.location or "")) for step in plan.critical_path],
            )
        )
    if plan.blockers:
        items = [
            element(
                "li",
                blocker.reason,
                f" ({blocker.tokens:,} tokens)" if blocker.tokens else "",
                _place(blocker.location),
            )
            for blocker in plan.blockers
        ]
        found += [element("h2", "What blocks sharing"), element("ul", *items)]
    found.append(element("h2", "Nodes"))
    found += [_row(explanation, index) for index in range(min(len(explanation.traces), _ROWS_SHOWN))]
    if len(explanation.traces) > _ROWS_SHOWN:
        found.append(element("p", f"and {len(explanation.traces) - _ROWS_SHOWN} rows more", class_="note"))
    return found


def _place(location: object) -> Markup:
    return element("div", f"at {location}", class_="place") if location is not None else Markup("")


def _row(explanation: Explanation, index: int) -> Markup:
    costs = {cost.node: cost for cost in explanation.nodes if cost.row == index}
    rows = []
    for node in explanation.traces[index].graph.nodes:
        cost = costs.get(node.id)
        numbers: list[int] = []
        if cost is not None:
            steps = cost.last - cost.first + 1
            numbers = [cost.cached_tokens, cost.prefill_tokens, cost.completion_tokens, steps]
        rows.append((line_of(node), *(f"{number:,}" for number in numbers)))
    head = element("summary", f"row {index}")
    return element("details", head, table(["node", "shared", "prefilled", "generated", "steps"], rows))
