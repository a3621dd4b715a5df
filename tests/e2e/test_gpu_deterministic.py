"""Deterministic mode on a CUDA device: the bits of the logits after a context, and what is drawn from them, in every
way of computing it (`test_deterministic.py`); recorded steps and others, attention in one part and in several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from e2e import test_deterministic
from e2e.test_deterministic import KINDS, WAYS, Bench, Case, Way

from sgl.bench.prompts import Prompts
from sgl.bench.steps import StepBench
from sgl.grammars.spec import Regex
from sgl.lang.graph import Sampling
from sgl.runtime.device_sampler import DeviceSampler
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
OTHERS: dict[str, dict[str, Any]] = {
    "biases": {"architectures": ["Qwen2ForCausalLM"]},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
}
STEMS = (3, 70, 290, 700)
RETRACTED = Way(
    {"max_total_tokens": 1250, "schedule_conservativeness": 0.001},
    lambda s: s.retractions > 0 and s.recomputed_tokens > 0,
)


@pytest.fixture(autouse=True)
def _draws_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_deterministic, "Sampler", DeviceSampler)


def bench(dtype: str, *, deterministic: bool = True, shape: Mapping[str, Any] = SHAPE) -> Bench:
    numerics = {
        "device": "cuda",
        "dtype": dtype,
        "cuda_graph_max_bs_decode": 8,
        "disable_overlap_schedule": True,  # tokens are noted as the host sends them
    }
    checkpoint = open_checkpoint(locate("dummy"), msgspec.json.encode(shape).decode())
    return Bench(checkpoint, Tokenizer.toy(), deterministic=deterministic, numerics=numerics)


def cases(number: int, stems: Sequence[int] = STEMS, new_tokens: int = 4) -> list[Case]:
    """Prompts that begin with one of the stems; every kind of drawing, each with a seed of its own."""
    prompts = Prompts(256, seed="deterministic").take(number + len(stems), max(stems))
    found = []
    for index, own in enumerate(prompts[len(stems) :]):
        which = index % len(stems)
        options, regex = KINDS[index // len(stems) % len(KINDS)]
        sampling = Sampling(max_new_tokens=new_tokens, seed=index, ignore_eos=regex is None, **options)
        ids = (*prompts[which][: stems[which]], *own[: 1 + index % 7])
        found.append(Case(ids, stems[which], sampling, None if regex is None else Regex(regex)))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_way_gives_the_same_bits(dtype: str) -> None:
    ours, asked = bench(dtype), cases(32)
    outcomes = {name: ours.run(way, asked) for name, way in WAYS.items()}
    alone, _ = outcomes["alone"]
    assert outcomes == {name: (alone, []) for name in WAYS}
    long = [replace(case, sampling=msgspec.structs.replace(case.sampling, max_new_tokens=24)) for case in asked[:16]]
    expected, _ = ours.run(WAYS["alone"], long)
    assert ours.run(RETRACTED, long) == (expected, [])


def test_the_ordinary_path_is_told_apart() -> None:
    """The same check without deterministic mode finds differences, so it can."""
    ours, asked = bench("bfloat16", deterministic=False), cases(16)
    ours.run(WAYS["alone"], asked)
    assert ours.run(WAYS["batched"], asked)[1]


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_that_are_computed_op_by_op(kind: str) -> None:
    ours, asked = bench("bfloat16", shape={**SHAPE, **OTHERS[kind]}), cases(16, stems=(3, 40))
    outcomes = {name: ours.run(WAYS[name], asked) for name in ("alone", "batched", "chunked")}
    alone, _ = outcomes["alone"]
    assert outcomes == {name: (alone, []) for name in outcomes}


def test_float32_and_steps_that_overlap() -> None:
    """Greedy tokens of rows one by one, and together in recorded steps of which the host has not seen the tokens."""
    ours = StepBench(
        {
            "model_path": "dummy",
            "json_model_override_args": msgspec.json.encode(SHAPE).decode(),
            "dtype": "float32",
            "device": "cuda",
            "max_total_tokens": 8192,
            "enable_deterministic_inference": True,
        }
    )
    try:
        prompts = [case.ids for case in cases(12)]
        alone = [ours.complete([prompt], 16)[0] for prompt in prompts]
        ours.core.flush_cache()
        assert ours.complete(prompts, 16) == alone
    finally:
        ours.close()
