"""Explaining: predictions held against the engine's counters, and what they say about a program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.suite import SUITE, Case, few_shot, judge, measured, react, tree_of_thought

import sgl
from sgl.bench.stepped import SteppedEngine
from sgl.lang.explain import Plan, compute_prefix
from sgl.lang.rendering import PlainRenderer, RenderedState
from sgl.runtime.config import EngineConfig
from sgl.runtime.rendering import model_renderer

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine


@pytest.fixture(scope="module")
def stepped() -> Iterator[SteppedEngine]:
    """An engine in which programs that are handed over together begin in the same step."""
    with SteppedEngine(model_path="dummy", num_threads=1, max_total_tokens=4096) as engine:
        yield engine


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_the_suite_costs_what_was_predicted(case: Case, stepped: SteppedEngine, tmp_path: Path):
    plan = measured(case, stepped, model_renderer(EngineConfig(model_path="dummy")), tmp_path / "prediction.json")
    predicted = json.loads((tmp_path / "prediction.json").read_text())["predicted"]
    assert msgspec.to_builtins(plan.measured) == predicted
    assert plan.plan.complete
    assert plan.plan.plain_tokens > predicted["prefill_tokens"]
    assert sum(step.steps for step in plan.plan.critical_path) <= predicted["forwards"]


def test_a_plan_is_written_down_and_read(tmp_path: Path):
    plan = judge.explain("Tea.", backend=sgl.MockBackend())
    text = str(plan)
    assert "critical path" in text
    assert "note (12) -> grade (1)" in text
    assert "measured" not in text
    plan.measure(sgl.MockBackend({"note": "a b"}))
    assert "measured" in str(plan)
    assert plan.measured is not None
    assert plan.measured.forwards is None  # the mock has no steps to tell of


def test_a_body_that_needs_a_value_is_explained_up_to_there():
    plan = react.explain("How big?", backend=sgl.MockBackend())
    assert not plan.plan.complete
    (stopped,) = plan.plan.blockers
    assert "the value of 'tool0' is not known" in stopped.reason
    assert stopped.location is not None
    assert plan.predicted.requests == 3
    with_values = react.explain("How big?", assume={f"tool{i}": "calc" for i in range(3)}, backend=sgl.MockBackend())
    assert "value of 'input0'" in with_values.plan.blockers[0].reason


def test_what_blocks_sharing_is_said_with_its_line_and_cost():
    @sgl.function
    def late(s, name):
        s += "Dear " + name + ", "
        s += "these are our many, many rules. " * 4
        s += sgl.gen("answer", max_tokens=2)

    plan = late.explain(rows=[["Ada"], ["Bob"], ["Cyd"]], backend=sgl.MockBackend())
    (blocker,) = plan.plan.blockers
    assert "stands behind" in blocker.reason
    assert blocker.tokens == 2 * 26  # words, the comma after the name among them
    assert few_shot.explain(rows=[["a"], ["b"]], backend=sgl.MockBackend()).plan.blockers == ()

    @sgl.function
    def appending(s):
        s += "x "
        forks = s.fork(2)
        forks += sgl.gen("part", max_tokens=3)
        forks.join("concate_and_append")
        s += sgl.gen("end", max_tokens=1)

    (joined,) = appending.explain(backend=sgl.MockBackend()).plan.blockers
    assert (joined.tokens, "join appends" in joined.reason) == (6, True)
    open_argument = few_shot.explain(backend=sgl.MockBackend()).plan.blockers[0]
    assert "question" in open_argument.reason


def test_without_a_tokenizer_figures_are_an_estimate_and_say_so():
    plan = few_shot.explain("Why?", renderer=PlainRenderer("four characters"))
    assert not plan.plan.exact
    assert "not exact" in str(plan)


def test_the_default_model_counts_without_an_engine():
    plan = few_shot.explain("Why?")
    assert (plan.plan.counted_by, plan.plan.exact) == ("smollm2-135m", True)
    assert plan.predicted.prompt_tokens > 20


def test_a_renderer_has_the_ids_of_the_engine(dummy_engine: Engine):
    seen: list[tuple[str, tuple[int, ...]]] = []

    @sgl.function
    def program(s):
        s += sgl.system("Be brief.") + sgl.user("Hé <|im_end|>")
        s += sgl.assistant_begin() + "I say " + sgl.select("what", choices=["yes", "yellow"])
        s.sync()
        seen.append(("", tuple(s._program.read_state(0).token_ids)))
        s += sgl.gen("more", regex="[a-z]{3}", temperature=0) + sgl.assistant_end()

    state = program.run(backend=dummy_engine)

    def replay(state_of: RenderedState) -> RenderedState:
        state_of.begin("system"), state_of.add_text("Be brief."), state_of.end()
        state_of.begin("user"), state_of.add_text("Hé <|im_end|>"), state_of.end()
        state_of.begin("assistant"), state_of.add_text("I say ")
        options = state_of.options(["yes", "yellow"])
        state_of.choose(state["what"], options.paths[["yes", "yellow"].index(state["what"])])
        return state_of

    rendered = replay(dummy_engine.renderer().state())
    assert tuple(rendered.ids) == seen[0][1]
    rendered.add_generated(state["more"])
    rendered.end()
    rendered.flush()
    assert rendered.text == state.text()


def test_a_constant_beginning_is_computed_ahead(dummy_engine: Engine):
    dummy_engine.flush_cache(wait_s=10.0)
    constant = few_shot.cache(dummy_engine)
    assert (
        constant
        == compute_prefix(few_shot, dummy_engine)
        == len("Q: How many legs has a cat?\nA: four\nQ: What do bees make?\nA: honey\nQ: ")
    )
    state = few_shot.run("Why?", backend=dummy_engine)
    assert state.get_meta_info("answer")["cached_tokens"] == constant

    @sgl.function
    def nothing(s, x):
        s += x + sgl.gen("y")

    assert nothing.cache(dummy_engine) == 0


def test_tree_of_thought_takes_what_is_assumed():
    plan: Plan = tree_of_thought.explain("x", assume={"worth": ["1", "3", "2"] * 2}, backend=sgl.MockBackend()).plan
    assert (plan.complete, plan.branches) == (True, 7)
