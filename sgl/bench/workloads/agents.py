"""Workloads of programs with several generations: react, generative agents, tree of thought, skeleton of thought,
branch-solve-merge, several chains."""

from __future__ import annotations

from typing import Any

import sgl
from sgl.bench.workloads.base import Call, drawn, forced, workload
from sgl.bench.workloads.draw import Draw


@sgl.function
def react_trace(s: Any, examples: str, question: str, steps: list[dict[str, Any]]) -> None:
    """Each step is generated on a copy of the state, and the recorded step is what stays."""
    s += examples
    s += "Question:" + question + "\n"
    for number, step in enumerate(steps, start=1):
        s += f"Thought {number}:"
        with s.copy() as tried:
            tried += forced("step", step["output_len"])
        s += step["recorded"] + "\n"


@workload("react", "a growing prompt whose generations are thrown away")
def react(draw: Draw) -> list[Call]:
    """Random text; the source's stop string "Observation" is replaced by a drawn output length. Chain of 4 to 8 gens.

    Each gen is on a fork whose text is dropped; then the recorded thought, action and observation are appended.
    Scale 1.0: 100 questions; P 1,600, question 20, a step 60 to 120, out 60 to 200. Source: `benchmark/react`.
    """
    examples = draw.text(1600)

    def step() -> dict[str, Any]:
        return {"recorded": draw.text(60, 120), "output_len": draw.length(60, 200)}

    return [
        Call(
            react_trace,
            {
                "examples": examples,
                "question": draw.text(20),
                "steps": [step() for _ in range(draw.random.randint(4, 8))],
            },
        )
        for _ in range(draw.num(100, least=3))
    ]


@sgl.function
def agent_event(s: Any, template: str, event: str, output_len: int) -> None:
    """One call of a simulated person: a template around an event."""
    s += template
    s += event + "\nAnswer:"
    s += forced("action", output_len)


@workload("generative_agents", "short calls one after another: latency, and prefixes that come back later")
def generative_agents(draw: Draw) -> list[Call]:
    """Random text; the stops of the source are replaced by its output lengths. 1 call of one of 5 templates.

    Scale 1.0: 200 events, each a wave of its own; G = a template of 30, 120, 200, 300 or 450; U 30 to 300; out 2, 20,
    6, 10 or 5 by template. Source: `benchmark/generative_agents`.
    """
    templates = [(draw.text(length), out) for length, out in ((30, 2), (120, 20), (200, 6), (300, 10), (450, 5))]
    calls = []
    for wave in range(draw.num(200, least=10)):
        template, out = draw.random.choice(templates)
        event = {"template": template, "event": draw.text(30, 300), "output_len": out}
        calls.append(Call(agent_event, event, wave))
    return calls


@sgl.function
def think(s: Any, question: str, turns: list[str], output_len: int, seeds: list[int]) -> None:
    """A tree of thoughts: each state of a level is forked in two, each with its own thought and a user's turn."""
    fresh = iter(seeds)
    s += sgl.user(question)
    level = [s]
    for turn in turns:
        forks = [child for state in level for child in state.fork(2)]
        for child in forks:
            child += sgl.assistant(drawn("thought", output_len, next(fresh)))
            child += sgl.user(turn)
        level = forks


@workload("tree_of_thought", "a deep tree of forks inside one program, all of it wanted at once")
def tree_of_thought(draw: Draw) -> list[Call]:
    """Random text. 4 levels of 2 branches (2 + 4 + 8 + 16 = 30 gens), each level adds a user's turn.

    Sampled with a seed for each node: at the source's temperature of 0.001 siblings would be equal.
    Scale 1.0: 200 questions; root 130, a turn 40, out 128 to 256. Source: `benchmark/tree_of_thought_deep`.
    """
    return [
        Call(
            think,
            {
                "question": draw.text(110, 150),
                "turns": draw.texts(4, 40),
                "output_len": draw.length(128, 256),
                "seeds": [draw.seed() for _ in range(30)],
            },
        )
        for _ in range(draw.num(200))
    ]


@sgl.function
def suggest_tips(s: Any, topic: str, before: str, tip_len: int, paragraph_len: int) -> None:
    """Five short tips in sequence; each is expanded by a prompt of its own as soon as it exists; then all together."""
    expanded = s.fork(5)
    s += f"Give five short tips about{topic}.\n"
    for number, child in enumerate(expanded, start=1):
        s += f"{number}."
        s += sgl.gen(f"tip_{number}", max_tokens=tip_len, stop=[".", "\n"], temperature=0)
        s += ".\n"
        child += before + s[f"tip_{number}"] + "\nParagraph:"
        child += forced("paragraph", paragraph_len)  # submitted when the next tip is read
    expanded.join()
    s += "\n\n".join(s["paragraph"])


@workload("tip_suggestion", "skeleton of thought: children start while their parent goes on", static=False)
def tip_suggestion(draw: Draw) -> list[Call]:
    """Real stops ("." and a newline) behind random text. 5 gens in sequence, each starts a child prompt; then joined.

    The program reads each tip to write the child's prompt: a round trip each.
    Scale 1.0: 100 topics; parent 50, a tip at most 24, child P 330, out 64 to 128. Source: `benchmark/tip_suggestion`.
    """
    before = draw.text(330)
    return [
        Call(
            suggest_tips,
            {
                "topic": draw.text(40),
                "before": before,
                "tip_len": draw.length(24),
                "paragraph_len": draw.length(64, 128),
            },
        )
        for _ in range(draw.num(100, least=3))
    ]


@sgl.function
def judge(s: Any, essay: str, aspects: list[str], output_lens: list[int]) -> None:
    """Six judgements of an essay side by side, appended in order, then a grade."""
    s += essay
    forks = s.fork(len(aspects))
    for fork, aspect, output_len in zip(forks, aspects, output_lens, strict=True):
        fork += aspect + "\nJudgement:"
        fork += forced("judgement", output_len)
    forks.join("concate_and_append")
    s += "\nGrade:"
    s += forced("grade", 2)


@workload("llm_judge", "a wide fork over a long prefix, joined and computed again in one row")
def llm_judge(draw: Draw) -> list[Call]:
    """Random text; the source's stop string "END" is replaced by drawn output lengths. Branch, solve, merge.

    The branches are joined as text (`concate_and_append`), which needs no round trip and is prefilled again.
    Scale 1.0: 20 essays; G = essay 1,000 to 3,000, branch 90, out 64 to 256, grade 2. Source: `benchmark/llm_judge`.
    """
    aspects = draw.texts(6, 90)
    return [
        Call(
            judge,
            {
                "essay": draw.text(1000, 3000),
                "aspects": aspects,
                "output_lens": [draw.length(64, 256) for _ in aspects],
            },
        )
        for _ in range(draw.num(20, least=3))
    ]


@sgl.function
def vote(s: Any, question: str, output_lens: list[int], seeds: list[int]) -> None:
    """Several chains of reasoning, read and written behind each other, then the answer of most."""
    s += question + "\nAnswer:"
    forks = s.fork(len(seeds))
    for fork, output_len, seed in zip(forks, output_lens, seeds, strict=True):
        fork += drawn("chain", output_len, seed, temperature=0.3)
    forks.join()
    for number, chain in enumerate(s["chain"], start=1):
        s += f"\nAnswer {number}:" + chain
    s += "\nThe answer of most:"
    s += forced("answer", 16)


@workload("multi_chain_reasoning", "self-consistency: the join goes through Python", static=False)
def multi_chain_reasoning(draw: Draw) -> list[Call]:
    """Random text; drawn output lengths. `fork(5)` at temperature 0.3, joined by Python, majority gen.

    Scale 1.0: 50 questions; U 60 to 100, out 64 to 256 five times, answer 16.
    Source: `benchmark/multi_chain_reasoning`.
    """
    return [
        Call(
            vote,
            {
                "question": draw.text(60, 100),
                "output_lens": [draw.length(64, 256) for _ in range(5)],
                "seeds": [draw.seed() for _ in range(5)],
            },
        )
        for _ in range(draw.num(50, least=3))
    ]
