"""Workloads of one call per question behind examples: mmlu, hellaswag, gsm8k, DSPy RAG, in-batch prefixes."""

from __future__ import annotations

from typing import Any

import sgl
from sgl.bench.workloads.base import Call, Workload, forced, workload
from sgl.bench.workloads.draw import Draw


@sgl.function
def answer(s: Any, before: str, question: str, output_len: int) -> None:
    """Examples, a question, an answer of a forced length."""
    s += before
    s += question + "\nAnswer:"
    s += forced("answer", output_len)


@sgl.function
def choose_ending(s: Any, examples: str, context: str, endings: list[str]) -> None:
    """Which of the endings follows the context."""
    s += examples
    s += context
    s += sgl.select("ending", choices=endings)


@workload("mmlu", "one token per call behind few-shot prefixes of many groups")
def mmlu(draw: Draw) -> list[Call]:
    """Random text. 1 call of one output token; G = 5 shots of a subject.

    Scale 1.0: 57 subjects x 25 questions (the source has up to 14,000 questions; 25 keep the shape). G 1,024 to 1,536,
    U 60 to 150, out 1. Source: `benchmark/mmlu`.
    """
    calls = []
    for _ in range(draw.num(57)):
        shots = draw.text(1024, 1536)
        calls += [
            Call(answer, {"before": shots, "question": draw.text(60, 150), "output_len": 1})
            for _ in range(draw.num(25, least=3))
        ]
    return calls


@workload("hellaswag", "select: the prompt once, each option scored, nothing sampled")
def hellaswag(draw: Draw) -> list[Call]:
    """Random text. 1 `select` of 4 endings; P = 20 shots.

    Scale 1.0: 200 questions; P 1,600, U 40, an ending about 25. Source: `benchmark/hellaswag`.
    """
    shots = draw.text(1600)
    return [
        Call(choose_ending, {"examples": shots, "context": draw.text(40), "endings": _distinct(draw, 4, 25)})
        for _ in range(draw.num(200, least=4))
    ]


def _distinct(draw: Draw, count: int, length: int) -> list[str]:
    """Texts that differ even when they are a few bytes long."""
    return [f" {letter}{draw.text(length)}" for letter in "ABCDEFGH"[:count]]


@workload("gsm8k", "one shared prefix, long outputs")
def gsm8k(draw: Draw) -> list[Call]:
    """Random text; the source's stop string "Question" is replaced by a drawn output length. 1 call; P = 5 shots.

    Scale 1.0: 200 questions; P 800, U 60, out 128 to 512. Source: `benchmark/gsm8k`.
    """
    shots = draw.text(800)
    return [
        Call(answer, {"before": shots, "question": draw.text(50, 70), "output_len": draw.length(128, 512)})
        for _ in range(draw.num(200, least=4))
    ]


@workload("dspy_rag", "a prefix that changes between two phases, long own prompts")
def dspy_rag(draw: Draw) -> list[Call]:
    """Random text. Chain of thought over 3 passages; P = instructions, then instructions and bootstrapped demos.

    Scale 1.0: compile on 20 questions with the bare instructions (150), then, as a second wave, 150 questions behind
    the demos (P 1,000 in all); U 300 to 500, out 75 to 150. Source: `benchmark/dspy`.
    """
    instructions = draw.text(150)
    demos = instructions + draw.text(850)

    def ask(before: str, wave: int) -> Call:
        question = draw.text(300, 500)
        return Call(answer, {"before": before, "question": question, "output_len": draw.length(75, 150)}, wave)

    compiling = [ask(instructions, 0) for _ in range(draw.num(20))]
    return compiling + [ask(demos, 1) for _ in range(draw.num(150, least=4))]


@workload("in_batch_prefix", "many requests of few prefixes that arrive at once, in three orders")
def in_batch_prefix(draw: Draw) -> list[Call]:
    """Random text. 1 call of one output token; G = a prefix of each group; a third of the prefixes for each order.

    Scale 1.0: 3 orders x 10 prefixes x 32 questions; G 1,024, U 128, out 1. Orders: a prefix after the other in waves;
    one question of each prefix first, then all others at once; all at once, shuffled.
    Source: `benchmark/bench_in_batch_prefix`.
    """
    num_prefixes, num_questions = draw.num(10), draw.num(32, least=3)

    def group() -> list[dict[str, Any]]:
        prefix = draw.text(1024)
        return [{"before": prefix, "question": draw.text(128), "output_len": 1} for _ in range(num_questions)]

    by_prefix, warmed, shuffled = ([group() for _ in range(num_prefixes)] for _ in range(3))
    waves = list(by_prefix)
    waves.append([rows[0] for rows in warmed])
    waves.append([row for rows in warmed for row in rows[1:]])
    together = [row for rows in shuffled for row in rows]
    draw.random.shuffle(together)
    waves.append(together)
    return [Call(answer, row, wave) for wave, rows in enumerate(waves) for row in rows]


def _no_reuse(draw: Draw) -> list[Call]:
    """Random text. 1 call; nothing is shared, so a prefix cache has all of its work and none of its use.

    Scale 1.0: 256 prompts of 512; out 16. Not one of the 17.
    """
    return [
        Call(answer, {"before": f"{number}{draw.text(512)}", "question": "", "output_len": draw.length(16)})
        for number in range(draw.num(256, least=8))
    ]


def apart(num_prompts: int, prompt_len: int, output_len: int) -> Workload:
    """As `NO_REUSE`, of other sizes, which no scale changes: so many outputs of such a length are as many steps."""

    def make(draw: Draw) -> list[Call]:
        return [
            Call(answer, {"before": f"{number}{draw.exactly(prompt_len)}", "question": "", "output_len": output_len})
            for number in range(num_prompts)
        ]

    return Workload(NO_REUSE.name, NO_REUSE.stresses, static=True, make=make)


NO_REUSE = Workload("no_reuse", "what the cache costs when it finds nothing", True, _no_reuse)
