"""Six tasks that programs are written for, each in two forms: as a program of ours, and as calls to another library.

Owns the texts and the programs. Called by `sgl.bench.program_peers` (our form) and, in the peer's own process, by
`sgl.bench.program_drivers` (the other one, through a `Driver`): so no torch here. Both forms ask for the same: the same
prompts, options, schemas and budgets, greedily. A client of a library calls it with as many prompts at a time as its
task allows, which is what `by_calls` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.bench.program_requests import Driver

if TYPE_CHECKING:
    from sgl.lang.backend import Backend
    from sgl.runtime.engine import Engine


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task.

    Attributes:
        needs: of `sgl.bench.program_requests.ABILITIES`, what it takes of a peer.
        by_programs: run as programs of ours; the answers, in order.
        by_calls: the same through a driver.
    """

    name: str
    about: str
    needs: tuple[str, ...] = ()
    by_programs: Callable[[Any], list[str]]
    by_calls: Callable[[Driver], list[str]]

    def timed(self, engine: Engine, backend: Backend) -> tuple[float, list[str]]:
        """Seconds and answers of the programs on `backend`, with the cache of the engine behind it empty."""
        engine.flush_cache()
        start = time.perf_counter()
        answers = self.by_programs(backend)
        return time.perf_counter() - start, answers


# --- the texts ------------------------------------------------------------------------------------------------------

EXAMPLES = """Letter: The lamp in front of our house has been dark for a week.
Department: streets
Letter: My daughter would like to know when the swimming pool opens in summer.
Department: leisure
Letter: The bin was not emptied on Tuesday, and now it smells.
Department: waste
Letter: Our neighbour builds a wall without a permit.
Department: building
"""
LETTERS = [
    "There is a deep hole in the road behind the school.",
    "Can the football club use the hall on Sunday?",
    "Somebody left an old fridge in the park.",
    "We want to add a balcony to our flat.",
    "The traffic light at the bridge is always red.",
    "Is there a library card for children?",
    "Where can I bring broken glass and old paint?",
    "The new house next door is one floor too high.",
]
DEPARTMENTS = [" streets", " leisure", " waste", " building"]

NOTES = [
    "Anna Berg, born in 1961, came in with a cough that has lasted three weeks. She has a fever of 38.",
    "The patient Tom Reed is 45 years old. His left knee hurts after a fall. No fever.",
    "Mia Sand is a girl of nine. Her throat is red, and she has had a fever since yesterday.",
    "Mr Otto Lund, 72, feels dizzy in the morning. He takes tablets for his heart.",
]
RECORD = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "complaint": {"enum": ["cough", "knee", "throat", "dizziness"]},
            "fever": {"type": "boolean"},
            "urgent": {"enum": ["yes", "no"]},
        },
        "required": ["name", "complaint", "fever", "urgent"],
        "additionalProperties": False,
    }
)

ESSAYS = [
    "Cities should plant more trees. A street with trees is cooler in summer, holds back rain, and is a place where "
    "people like to walk. Trees cost money at first, yet they save it later, because houses need less cooling.",
    "Homework is bad. Nobody likes it. I did a lot of it and it was boring. Some people say that it helps, and they "
    "are wrong, as everybody knows. So homework should be forbidden in all schools.",
]
ASPECTS = ["clarity", "evidence", "style"]

QUESTIONS = ["In which country is Oslo?", "In which country is Kyoto?"]
FACTS = {"Oslo": "Oslo is the capital of Norway.", "Kyoto": "Kyoto is a city in Japan."}
STEPS = """Question: In which country is Lyon?
Act: look up[Lyon]
Seen: Lyon is a city in France.
Act: finish[France]

"""
ACTS = ["look up[", "finish["]
MOST_ACTS = 3

PLAN = """A small town has an empty school and wants people to use it again.
An idea for children: A playground in the yard.
For it: Families will come every day.
Against it: It costs a lot of money.

A small town has an empty market hall and wants people to use it again.
"""
WAYS = ["culture", "trade", "sport"]

PAGES = [
    [
        "The bridge was opened in 1932.",
        "It is made of steel and carries two tracks.",
        "Every ten years it is painted anew, which takes eighteen months.",
        "About forty trains cross it each day.",
    ],
    [
        "The museum has three floors.",
        "On the first there are tools, on the second boats.",
        "It is closed on Mondays and in January.",
        "Children pay nothing until they are twelve.",
    ],
]
ASKED = [["How old is the bridge?", "How often is it painted?"], ["When is it closed?", "What do children pay?"]]


# --- both forms -----------------------------------------------------------------------------------------------------


def _judge_prompt(essay: str) -> str:
    return f"An essay is judged by its clarity, its evidence and its style.\nEssay: {essay}\n"


def _page_prompt(page: Sequence[str]) -> str:
    return "Text: " + " ".join(page) + "\nQuestions are answered with a sentence of the text.\n"


def _classify(backend: Backend) -> list[str]:
    import sgl

    @sgl.function
    def sort(s: Any, letter: str) -> None:
        s += EXAMPLES + f"Letter: {letter}\nDepartment:" + sgl.select("department", DEPARTMENTS)

    states = sort.run_batch([[letter] for letter in LETTERS], backend=backend)
    return [str(state["department"]) for state in states]


def _classify_by_calls(driver: Driver) -> list[str]:
    return driver.choose([f"{EXAMPLES}Letter: {letter}\nDepartment:" for letter in LETTERS], DEPARTMENTS)


def _extract(backend: Backend) -> list[str]:
    import sgl

    @sgl.function
    def record(s: Any, note: str) -> None:
        s += f"Note: {note}\nAs JSON: " + sgl.gen("record", json_schema=RECORD, max_tokens=64, temperature=0)

    states = record.run_batch([[note] for note in NOTES], backend=backend)
    return [str(state["record"]) for state in states]


def _extract_by_calls(driver: Driver) -> list[str]:
    return driver.fill([f"Note: {note}\nAs JSON: " for note in NOTES], RECORD, 64)


def _judge(backend: Backend) -> list[str]:
    import sgl

    @sgl.function
    def judge(s: Any, essay: str) -> None:
        s += _judge_prompt(essay)
        branches = s.fork(len(ASPECTS))
        branches += [f"Its {aspect}:" for aspect in ASPECTS]
        branches += sgl.gen("note", max_tokens=16, stop="\n", temperature=0)
        branches.join()
        s += "".join(f"Its {aspect}:{note}\n" for aspect, note in zip(ASPECTS, s["note"], strict=True))
        s += "Grade:" + sgl.select("grade", [" A", " B", " C"])

    return [str(state["grade"]) for state in judge.run_batch([[essay] for essay in ESSAYS], backend=backend)]


def _judge_by_calls(driver: Driver) -> list[str]:
    beginnings = [_judge_prompt(essay) for essay in ESSAYS]
    asked = [f"{beginning}Its {aspect}:" for beginning in beginnings for aspect in ASPECTS]
    notes = iter(driver.generate(asked, 16, "\n"))
    prompts = [
        beginning + "".join(f"Its {aspect}:{next(notes)}\n" for aspect in ASPECTS) + "Grade:"
        for beginning in beginnings
    ]
    return driver.choose(prompts, [" A", " B", " C"])


def _react(backend: Backend) -> list[str]:
    import sgl

    @sgl.function
    def react(s: Any, question: str) -> str:
        s += STEPS + f"Question: {question}\n"
        for step in range(MOST_ACTS):
            s += "Act: " + sgl.select("act", ACTS if step < MOST_ACTS - 1 else ACTS[1:])
            s += sgl.gen("argument", max_tokens=6, stop="]", temperature=0) + "]\n"
            if s["act"] == ACTS[1]:
                break
            s += f"Seen: {FACTS.get(s['argument'], 'nothing')}\n"
        return str(s["argument"])

    states = react.run_batch([[question] for question in QUESTIONS], backend=backend)
    return [str(state.ret_value) for state in states]


def _react_by_calls(driver: Driver) -> list[str]:
    prompts = [f"{STEPS}Question: {question}\n" for question in QUESTIONS]
    answers = [""] * len(prompts)
    open_ones = list(range(len(prompts)))
    for step in range(MOST_ACTS):
        if not open_ones:
            break
        options = ACTS if step < MOST_ACTS - 1 else ACTS[1:]
        chosen = driver.choose([prompts[index] + "Act: " for index in open_ones], options)
        asked = [f"{prompts[index]}Act: {act}" for index, act in zip(open_ones, chosen, strict=True)]
        arguments = driver.generate(asked, 6, "]")
        for index, act, argument in zip(tuple(open_ones), chosen, arguments, strict=True):
            answers[index] = argument
            prompts[index] += f"Act: {act}{argument}]\nSeen: {FACTS.get(argument, 'nothing')}\n"
            if act == ACTS[1]:
                open_ones.remove(index)
    return answers


def _tree(backend: Backend) -> list[str]:
    import sgl

    @sgl.function
    def tree(s: Any) -> list[str]:
        s += PLAN
        ways = s.fork(len(WAYS))
        ways += [f"An idea for {way}:" for way in WAYS]
        ways += sgl.gen("idea", max_tokens=12, stop="\n", temperature=0)
        for way in ways:
            sides = way.fork(2)
            sides += ["\nFor it:", "\nAgainst it:"]
            sides += sgl.gen("side", max_tokens=12, stop="\n", temperature=0)
            sides.join()
        ways.join()
        s += "The best idea is for" + sgl.select("best", [f" {way}" for way in WAYS])
        return [*(text for pair in s["side"] for text in pair), str(s["best"])]

    return list(tree.run(backend=backend).ret_value)


def _tree_by_calls(driver: Driver) -> list[str]:
    asked = [f"{PLAN}An idea for {way}:" for way in WAYS]
    ideas = [prompt + idea for prompt, idea in zip(asked, driver.generate(asked, 12, "\n"), strict=True)]
    sides = driver.generate([f"{idea}\n{side}:" for idea in ideas for side in ("For it", "Against it")], 12, "\n")
    [best] = driver.choose([f"{PLAN}The best idea is for"], [f" {way}" for way in WAYS])
    return [*sides, best]


def _quotes(backend: Backend) -> list[str]:
    import sgl

    @sgl.function
    def quotes(s: Any, page: list[str], asked: list[str]) -> list[str]:
        s += _page_prompt(page)
        branches = s.fork(len(asked))
        branches += [f"Question: {question}\nAnswer:" for question in asked]
        branches += sgl.select("quote", [f" {sentence}" for sentence in page])
        branches.join()
        return list(s["quote"])

    states = quotes.run_batch([list(row) for row in zip(PAGES, ASKED, strict=True)], backend=backend)
    return [quote for state in states for quote in state.ret_value]


def _quotes_by_calls(driver: Driver) -> list[str]:
    found: list[str] = []
    for page, asked in zip(PAGES, ASKED, strict=True):
        prompts = [f"{_page_prompt(page)}Question: {question}\nAnswer:" for question in asked]
        found += driver.choose(prompts, [f" {sentence}" for sentence in page])
    return found


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="classify",
            about="eight letters behind four examples, one of four departments each",
            by_programs=_classify,
            by_calls=_classify_by_calls,
        ),
        Task(
            name="extract",
            about="four notes as JSON under a schema",
            needs=("fill",),
            by_programs=_extract,
            by_calls=_extract_by_calls,
        ),
        Task(
            name="judge",
            about="two essays, three aspects each side by side, then a grade",
            by_programs=_judge,
            by_calls=_judge_by_calls,
        ),
        Task(
            name="react",
            about="two questions, up to three steps of act and look",
            by_programs=_react,
            by_calls=_react_by_calls,
        ),
        Task(
            name="tree",
            about="three ideas, two sides of each, then the best",
            by_programs=_tree,
            by_calls=_tree_by_calls,
        ),
        Task(
            name="quotes",
            about="two questions to each of two texts, answered with one of its sentences",
            by_programs=_quotes,
            by_calls=_quotes_by_calls,
        ),
    )
}
