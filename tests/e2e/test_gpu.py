"""On a CUDA device: the same programs, the same greedy answers in float32, the same laws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    with ThreadPoolExecutor(2) as both:
        ours, theirs = both.map(run, ("cuda", "cpu"), ("float32", "float32"))
    assert ours == theirs


def complete(prompts: Sequence[Sequence[int]], **fields: Any) -> tuple[list[tuple[int, ...]], int]:
    """Greedy tokens by a core in this process, which starts at once, and what of prefixes its rows read together."""
    bench = StepBench({"model_path": "dummy", "dtype": "float32", "max_total_tokens": 8192, **fields})
    try:
        return bench.complete(prompts, 24), bench.core.snapshot().shared_prefix_tokens
    finally:
        bench.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str) -> None:
    tokens, _ = complete([range(3, 40 + 7 * i) for i in range(5)], device="cuda", dtype=dtype)
    assert [len(row) for row in tokens] == [24] * 5


def test_a_common_prefix_is_read_once_with_the_same_answers() -> None:
    """Nine requests behind one prompt of 640 tokens, in recorded steps and in those with a chunk beside them."""
    shape = '{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048}'
    prefix = [7 + i % 200 for i in range(640)]
    prompts = [[*prefix, *range(3 + i, 9 + 2 * i)] for i in range(9)]
    answers, saved = [], []
    for disabled in (False, True):
        tokens, together = complete(
            prompts, json_model_override_args=shape, device="cuda", disable_cascade_attention=disabled
        )
        answers.append(tokens)
        saved.append(together)
    assert answers[0] == answers[1]
    # Of 23 steps that decode, the first few of a size are recorded ones in which each row reads for itself.
    assert saved[0] >= 15 * 8 * 640
    assert saved[1] == 0


def test_norms_of_heads_give_the_answers_of_the_cpu() -> None:
    shape = '{"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": true}'
    prompts = [range(3, 40 + 7 * i) for i in range(4)]
    (ours, _), (theirs, _) = (
        complete(prompts, json_model_override_args=shape, device=device, kernels=kernels)
        for device, kernels in (("cuda", "auto"), ("cpu", "torch"))
    )
    assert ours == theirs


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
