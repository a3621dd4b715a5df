"""The programs that the playground offers, and their graphs as the page gets them.

Owns real `@sgl.function` programs, each traced and compiled into `examples.json`, which is package data: the page needs
no Python to run them. `python -m sgl.server.playground.examples` writes that file again after a program has changed; a
test fails while the two differ.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import msgspec

import sgl
from sgl import ProgramState
from sgl.lang.compile import CompiledProgram
from sgl.lang.function import SglFunction

FILE = Path(__file__).with_name("examples.json")

ASPECTS = ("clarity", "evidence", "style")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["music", "chess", "food"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@sgl.function
def judge(s: ProgramState, essay: str) -> None:
    s += sgl.system("You grade essays. Answer in one short sentence.")
    s += sgl.user("Essay:\n" + essay)
    forks = s.fork(len(ASPECTS))
    for fork, aspect in zip(forks, ASPECTS, strict=True):
        fork += sgl.user(f"Judge the {aspect}.")
        fork += sgl.assistant(sgl.gen("note", max_tokens=40, stop="\n", temperature=0))
    forks.join()
    s += sgl.user("Notes:\n" + "\n".join(s["note"]) + "\nGrade from A to C:")
    s += sgl.assistant("Grade: " + sgl.select("grade", choices=["A", "B", "C"]))


@sgl.function
def two_turns(s: ProgramState, city: str) -> None:
    s += sgl.system("You are a helpful guide. Answer in one short sentence.")
    s += sgl.user(f"What is {city} famous for?")
    s += sgl.assistant(sgl.gen("fame", max_tokens=32, stop="\n", temperature=0))
    s += sgl.user("Name one thing to eat there.")
    s += sgl.assistant(sgl.gen("food", max_tokens=32, stop="\n", temperature=0))


@sgl.function
def person(s: ProgramState, where: str) -> None:
    s += sgl.user(f"Invent a person who lives in {where}. Answer with JSON.")
    s += sgl.assistant(sgl.gen("person", json_schema=json.dumps(PERSON), max_tokens=120, temperature=0))


@sgl.function
def mood(s: ProgramState, review: str) -> None:
    s += sgl.user("Review: " + review + "\nIs it positive, negative or mixed?")
    s += sgl.assistant("It is " + sgl.select("mood", choices=["positive", "negative", "mixed"]) + ".")
    s += sgl.user("How many stars of five?")
    s += sgl.assistant("It deserves " + sgl.gen("stars", regex="[1-5] stars?", temperature=0) + ".")


@sgl.function
def outline(s: ProgramState, topic: str) -> None:
    s += sgl.user(f"Give two points about {topic}.")
    s += sgl.assistant(
        "1. " + sgl.gen("first", max_tokens=16, stop="\n", temperature=0)
        + "\n2. " + sgl.gen("second", max_tokens=16, stop="\n", temperature=0)
    )  # fmt: skip
    forks = s.fork(2)
    for fork, point in zip(forks, (s["first"], s["second"]), strict=True):
        fork += sgl.user("Write two sentences about this point: " + point)
        fork += sgl.assistant(sgl.gen("text", max_tokens=64, temperature=0))
    forks.join()
    s += sgl.user("Sum it up in a title:\n" + "\n".join(s["text"]))
    s += sgl.assistant(sgl.gen("title", max_tokens=16, stop="\n", temperature=0))


class Example(msgspec.Struct, frozen=True):
    """A program as the page has it: what it shows, its Python, its graph, and values for its parameters."""

    title: str
    about: str
    source: str
    bindings: dict[str, str]
    program: CompiledProgram


SHOWN: tuple[tuple[SglFunction[..., Any], str, str, dict[str, str]], ...] = (
    (
        judge,
        "Judge: three forks and a grade",
        "The essay is prefilled once; three branches continue it at the same time; all grades are scored in one step.",
        {"essay": "Tea should be free in every office, because people who drink tea talk to each other."},
    ),
    (
        two_turns,
        "Two turns of a chat",
        "The second turn finds the first in the cache: only what is new is computed.",
        {"city": "Paris"},
    ),
    (
        person,
        "A person in JSON",
        "Where the schema leaves no choice, tokens are written without asking the model.",
        {"where": "Oslo"},
    ),
    (
        mood,
        "Choices with their probabilities",
        "A select scores all options; a regular expression bounds what follows.",
        {"review": "The room was lovely, but the breakfast was cold and late."},
    ),
    (
        outline,
        "Outline, then expand side by side",
        "Two points are written, then expanded in parallel, then summed up.",
        {"topic": "bicycles"},
    ),
)


def examples() -> list[Example]:
    """The programs, compiled now.

    Example:
        >>> examples()[1].program.parameters
        ('city',)
    """
    return [
        Example(title, about, _source(function), bindings, _without_places(function.compile()))
        for function, title, about, bindings in SHOWN
    ]


def as_json() -> bytes:
    """What `examples.json` has to hold."""
    return msgspec.json.format(msgspec.json.encode(examples()), indent=1) + b"\n"


def _source(function: SglFunction[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


def _without_places(program: CompiledProgram) -> CompiledProgram:
    """The program without the lines of this file, which say nothing elsewhere."""
    nodes = tuple(msgspec.structs.replace(node, location=None) for node in program.graph.nodes)
    return msgspec.structs.replace(program, graph=msgspec.structs.replace(program.graph, nodes=nodes))


if __name__ == "__main__":
    FILE.write_bytes(as_json())
