"""On a CUDA device: the same programs, the same greedy answers in float32, the same laws."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import sgl
from sgl.bench.steps import StepBench
from sgl.kernels.triton.chaining import plain_launches
from sgl.runtime.decode_graphs import INTEGERS_PER_ROW
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


def test_a_common_prefix_is_read_once_with_the_same_answers() -> None:
    """Nine requests behind one prompt of 640 tokens, in recorded steps and in those with a chunk beside them."""
    shape = '{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048}'
    prefix = [7 + i % 200 for i in range(640)]
    prompts = [[*prefix, *range(3 + i, 9 + 2 * i)] for i in range(9)]
    answers, saved = [], []
    for disabled in (False, True):
        with Engine(
            model_path="dummy",
            json_model_override_args=shape,
            device="cuda",
            dtype="float32",
            max_total_tokens=8192,
            disable_cascade_attention=disabled,
        ) as engine:
            outputs = engine.generate(input_ids=prompts, sampling_params=GREEDY)
            answers.append([out["output_ids"] for out in outputs])
            saved.append(engine.stats()["shared_prefix_tokens"])
            engine.check()
    assert answers[0] == answers[1]
    # Of 23 steps that decode, the first few of a size are recorded ones in which each row reads for itself.
    assert saved[0] >= 15 * 8 * 640
    assert saved[1] == 0


def test_norms_of_heads_give_the_answers_of_the_cpu() -> None:
    shape = '{"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": true}'
    answers = []
    for device in ("cuda", "cpu"):
        with Engine(
            model_path="dummy",
            json_model_override_args=shape,
            device=device,
            dtype="float32",
            kernels="auto" if device == "cuda" else "torch",
            max_total_tokens=4096,
        ) as engine:
            answers.append([out["output_ids"] for out in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_decoding_step_sends_one_page_per_row(rows: int) -> None:
    bench = StepBench({"model_path": "dummy", "device": "cuda", "max_total_tokens": 8192, "max_running_requests": 8})
    steps = bench.core.runner._gpu_steps

    def sent(step: Callable[[], bool]) -> int:
        before = steps.num_sent
        for _ in range(5):
            step()
        return steps.num_sent - before

    try:
        assert bench.while_decoding(rows=rows, context=100, steps=8, act=sent) == 5 * rows * INTEGERS_PER_ROW
    finally:
        bench.close()


def test_chained_kernels_draw_what_plain_ones_do() -> None:
    bench = StepBench({"model_path": "dummy", "device": "cuda", "max_total_tokens": 8192})
    try:
        chained = bench.tokens(rows=3, context=40, new_tokens=24)
        with plain_launches():
            bench.record_anew()
            assert bench.tokens(rows=3, context=40, new_tokens=24) == chained
    finally:
        bench.close()
