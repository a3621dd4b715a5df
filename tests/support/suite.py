"""The program suite: one small program of each kind that people write, with its rows.

Lengths are forced (`regex` of so many letters), so that what a run costs is known ahead to the token whatever the model
says, and a value that goes back into a prompt is as long as expected. Python code between generations is real: it
compares, chooses and calls tools; `assume` is what explaining takes those values to be.

`PYTHONPATH=tests python -m support.suite [FOLDER]` writes each program's prediction to a file, runs it on the toy
model, and prints both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import sgl

if TYPE_CHECKING:
    from sgl.bench.stepped import SteppedEngine
    from sgl.lang.explain import Explanation
    from sgl.lang.rendering import Renderer


def letters(name: str, num: int) -> Any:
    """A generation of that many letters."""
    return sgl.gen(name, regex=f"[a-z]{{{num}}}", max_tokens=num, temperature=0)


class Case(NamedTuple):
    """A program with its rows, and the values that its control flow needs."""

    name: str
    program: sgl.SglFunction
    rows: list[dict[str, Any]]
    assume: dict[str, Any] | None = None


@sgl.function
def few_shot(s, question):
    s += "Q: How many legs has a cat?\nA: four\nQ: What do bees make?\nA: honey\n"
    s += f"Q: {question}\nA: " + letters("answer", 8)


@sgl.function
def chat(s, first, second):
    s += sgl.system("You are brief.")
    s += sgl.user(first) + sgl.assistant(letters("one", 10))
    s += sgl.user(second) + sgl.assistant(letters("two", 10))


def find(word: str) -> str:
    """A tool."""
    return f"{len(word):>3} hits"


def calc(word: str) -> str:
    """Another tool, whose answers are as long."""
    return f"{sum(map(ord, word)):>4} sum"


@sgl.function
def react(s, question):
    s += "Use a tool, then answer.\nQuestion: " + question + "\n"
    tools: dict[str, Callable[[str], str]] = {"find": find, "calc": calc}
    for step in range(3):
        s += f"Step {step}: " + letters(f"thought{step}", 8) + "\nTool: "
        s += sgl.select(f"tool{step}", choices=list(tools)) + " " + letters(f"input{step}", 4)
        s += "\nResult: " + tools[s[f"tool{step}"]](s[f"input{step}"]) + "\n"
    s += "Answer: " + letters("answer", 6)


@sgl.function
def skeleton_of_thought(s, topic):
    s += f"Points about {topic}: " + letters("skeleton", 12)
    forks = s.fork(4)
    for index, fork in enumerate(forks):
        fork += f"\nPoint {index} in full: " + letters("detail", 10)
    forks.join()
    s += "\n" + "; ".join(s["detail"]) + "\nSummary: " + letters("summary", 9)


@sgl.function
def tree_of_thought(s, problem):
    s += f"Problem: {problem}\n"
    for level in range(2):
        forks = s.fork(3)
        for index, fork in enumerate(forks):
            fork += f"Idea {level}.{index}: " + letters("idea", 7)
            fork += " Worth: " + sgl.select("worth", choices=["1", "2", "3"])
        forks.join()
        best = max(range(3), key=lambda i: s["worth"][i])
        s += f"Idea {level}: " + s["idea"][best] + "\n"
    s += "Solution: " + letters("solution", 6)


@sgl.function
def judge(s, essay):
    s += sgl.system("You grade essays.") + sgl.user("Essay:\n" + essay)
    forks = s.fork(3)
    for fork, aspect in zip(forks, ["clarity", "evidence", "style"], strict=True):
        fork += sgl.assistant(f"On {aspect}: " + letters("note", 12))
    forks.join()
    s += sgl.user("\n".join(s["note"]) + "\nGrade:")
    s += sgl.assistant(sgl.select("grade", choices=["A", "B", "C"]))


@sgl.function
def extract(s, text):
    s += text + "\nAs JSON: "
    with s.var_scope("json"):
        s += '{"name": "' + letters("name", 6) + '", "year": ' + sgl.gen("year", regex="[1-9][0-9]{3}", max_tokens=4)
        s += ', "kind": "' + sgl.select("kind", choices=["person", "place", "thing"]) + '"}'


QUESTIONS = ("What is ice?", "Who is Ada?", "Why tea?", "What now?")
CHOSEN = {f"tool{i}": "find" for i in range(3)} | {f"input{i}": "abcd" for i in range(3)}

SUITE = [
    Case("few-shot batch", few_shot, [{"question": question} for question in QUESTIONS]),
    Case("chat", chat, [{"first": "What is tea?", "second": "And coffee?"}]),
    Case("react", react, [{"question": "How big is it?"}], CHOSEN),
    Case("skeleton of thought", skeleton_of_thought, [{"topic": "tea"}]),
    Case("tree of thought", tree_of_thought, [{"problem": "Sort three cups."}], {"worth": lambda node: "2"}),
    Case("judge", judge, [{"essay": "Tea is older than the cup it is drunk from. " * 3}]),
    Case("json extraction", extract, [{"text": "Ada Lovelace was born in London in 1815."}]),
]


def measured(case: Case, engine: SteppedEngine, renderer: Renderer, prediction: Path) -> Explanation:
    """Explain a program, write the prediction down, and then run it; rows begin in the same step of the engine."""
    plan = case.program.explain(rows=case.rows, assume=case.assume, renderer=renderer)
    plan.save(prediction)
    engine.flush_cache()
    with ThreadPoolExecutor(1) as pool:
        with engine.held():
            arrived = len(engine.messages)
            run = pool.submit(plan.measure, engine)
            run.add_done_callback(engine.notify)
            engine.wait_for_programs(arrived + len(case.rows), otherwise=run.done)
        return run.result()


def report(model: str, folder: Path) -> Iterator[str]:
    """A table of the suite: what each program was predicted to cost, and what it cost."""
    from sgl.bench.stepped import SteppedEngine
    from sgl.runtime.config import EngineConfig
    from sgl.runtime.rendering import model_renderer

    columns = ("requests", "prefill_tokens", "cached_tokens", "forwards")
    yield "| program (predicted / measured) | requests | prefilled | shared | forwards | prefilled as plain requests |"
    yield "|---|---|---|---|---|---|"
    renderer = model_renderer(EngineConfig(model_path=model))
    with SteppedEngine(model_path=model, num_threads=1, max_total_tokens=4096) as engine:
        for case in SUITE:
            plan = measured(case, engine, renderer, folder / f"{case.name}.json")
            before = json.loads((folder / f"{case.name}.json").read_text())["predicted"]
            after = msgspec.to_builtins(plan.measured)
            cells = [f"{before[name]:,} / {after[name]:,}" for name in columns]
            yield f"| {case.name} | {' | '.join(cells)} | {plan.plan.plain_tokens:,} |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for line in report("dummy", Path(sys.argv[1] if len(sys.argv) > 1 else made)):
            sys.stdout.write(line + "\n")
