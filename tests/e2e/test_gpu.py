"""On a CUDA device: the same programs, the same greedy answers in float32, the same laws."""

from __future__ import annotations

import pytest

import sgl
from sgl.runtime.engine import Engine

pytestmark = pytest.mark.gpu

GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
PROMPTS = ["Hello", "A somewhat longer prompt, " * 8, "x", "the last of four"]


@sgl.function
def program(s, topic):
    s += sgl.user(f"Tell me about {topic}.")
    for branch in s.fork(3):
        branch += sgl.assistant(sgl.gen("note", max_tokens=12, temperature=0, ignore_eos=True))
    s += sgl.assistant("Grade: " + sgl.select("grade", ["good", "bad", "fair"]))
    s += sgl.user("A number: ") + sgl.assistant(sgl.gen("number", regex="[0-9]{3}", temperature=0))


def run(device: str, dtype: str) -> tuple[list[list[int]], list[str]]:
    with Engine(model_path="dummy", device=device, dtype=dtype, max_total_tokens=4096) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        sampled = engine.generate(PROMPTS, {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.9, "top_k": 20})
        state = program.run("rain", backend=engine)
        engine.check()
        assert engine.stats()["pages_held"] == 0
        assert all(out["meta_info"]["completion_tokens"] for out in sampled)
        return [out["output_ids"] for out in outputs], [state["grade"], state["number"]]


def test_float32_gives_the_answers_of_the_cpu() -> None:
    assert run("cuda", "float32") == run("cpu", "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str) -> None:
    ids, (grade, number) = run("cuda", dtype)
    assert [len(row) for row in ids] == [24] * 4
    assert grade in ("good", "bad", "fair")
    assert number.isdigit()
