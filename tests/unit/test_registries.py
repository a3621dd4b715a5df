"""The two registries: which implementation of an op runs, and which class runs a checkpoint."""

from __future__ import annotations

import pytest

from sgl.errors import InternalError, UnsupportedModel
from sgl.kernels import registry
from sgl.kernels.registry import OpFacts
from sgl.runtime.models.registry import model_class


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_table", {op: list(rows) for op, rows in registry._table.items()})


def only_cuda(facts: OpFacts) -> str | None:
    return None if facts.device == "cuda" else "needs CUDA"


def test_the_best_that_supports_the_facts_runs_and_the_others_say_why() -> None:
    registry.register("twice", "plain")(lambda x: x + x)
    registry.register("twice", "fast", priority=5, supports=only_cuda)(lambda x: 2 * x)
    assert registry.get("twice").__code__ is registry.implementations("twice")[1].function.__code__
    assert registry.get("twice", OpFacts(device="cuda")) is registry.implementations("twice")[0].function
    assert registry.get("twice", name="plain")(2) == 4
    choice = next(choice for choice in registry.explain(OpFacts()) if choice.op == "twice")
    assert (choice.chosen, choice.rejected) == ("plain", (("fast", "needs CUDA"),))


def test_unknown_ops_and_names_are_refused() -> None:
    with pytest.raises(InternalError, match="unknown op 'fft'"):
        registry.get("fft")
    with pytest.raises(InternalError, match="called 'magic'"):
        registry.get("rms_norm", name="magic")
    with pytest.raises(InternalError, match="already has"):
        registry.register("rms_norm", "torch")(lambda: None)


def test_architectures() -> None:
    assert model_class("LlamaForCausalLM").__name__ == "LlamaForCausalLM"
    with pytest.raises(UnsupportedModel, match=r"supported are BertForSequenceClassification, .*LlamaForCausalLM"):
        model_class("NoSuchModel")
