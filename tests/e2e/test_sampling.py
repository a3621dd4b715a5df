"""Sampling on a whole engine: logprobs against transformers, stop patterns in real text, recommended defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import transformers_smollm2
from support.tiny_llama import write_llama

import sgl
from sgl.errors import ConfigError
from sgl.runtime.engine import Engine
from sgl.runtime.text.tokenizer import Tokenizer

TOLERANCE = 1e-3
GIVEN = [0, 100, 30_000]
TEXT = "The capital of France is Paris. The capital of Italy is"


@pytest.mark.parametrize("start_len", [0, 5])
def test_prompt_logprobs_are_those_of_transformers(exact_smollm2: Engine, start_len: int) -> None:
    asked = {"max_new_tokens": 3, "temperature": 0, "logprob_start_len": start_len, "top_logprobs_num": 3}
    out = exact_smollm2.generate(TEXT, {**asked, "token_ids_logprob": GIVEN})
    meta = out["meta_info"]
    whole = exact_smollm2.generate(TEXT, {**asked, "logprob_start_len": 0})["meta_info"]
    prompt = [token_id for _, token_id, _ in whole["input_token_logprobs"]]
    ids = prompt + out["output_ids"]
    with torch.inference_mode():
        logits = transformers_smollm2()(torch.tensor([ids])).logits[0]
    want = torch.log_softmax(logits.double(), dim=-1)
    for side, first in (("input", start_len), ("output", len(prompt))):
        entries = meta[f"{side}_token_logprobs"]
        assert [token_id for _, token_id, _ in entries] == ids[first : first + len(entries)]
        for i, (logprob, token_id, _) in enumerate(entries):
            position = first + i
            if position == 0:
                assert logprob is None
                continue
            row = want[position - 1]
            assert logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            top = meta[f"{side}_top_logprobs"][i]
            assert [value for value, _, _ in top] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
            given = meta[f"{side}_token_ids_logprobs"][i]
            assert [value for value, _, _ in given] == pytest.approx(row[GIVEN].tolist(), abs=TOLERANCE)


def test_a_stop_pattern_in_real_text(smollm2: Engine) -> None:
    """Tokens are words here: the stop ends inside of one, and the program goes on from the text that is left."""

    @sgl.function
    def program(s: Any, stop: str | None) -> None:
        s += "Count: 1, 2, 3," + sgl.gen("numbers", max_tokens=24, stop_regex=stop, temperature=0)
        s += " and so on." + sgl.gen("rest", max_tokens=4, temperature=0)

    whole = program.run(None, backend=smollm2)["numbers"]
    assert "7, 8" in whole
    state = program.run(r"7,\s*8", backend=smollm2)
    assert state["numbers"] == whole[: whole.index("7, 8")]
    assert state.get_meta_info("numbers")["finish_reason"] == {"type": "stop", "matched": "7, 8"}
    assert state.text() == "Count: 1, 2, 3," + state["numbers"] + " and so on." + state["rest"]
    pieces = list(smollm2.generate(
        "Count: 1, 2, 3,", {"max_new_tokens": 24, "temperature": 0, "stop_regex": r"7,\s*8"}, stream=True
    ))  # fmt: skip
    assert all(state["numbers"].startswith(piece["text"]) for piece in pieces), "nothing of the stop is ever shown"
    assert pieces[-1]["text"] == state["numbers"]


def test_what_a_folder_recommends_holds_below_explicit_values(tmp_path: Path) -> None:
    write_llama(tmp_path, vocab_size=512)
    (tmp_path / "tokenizer.json").write_text(Tokenizer.toy().to_json())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 1}')
    with Engine(model_path=str(tmp_path), max_total_tokens=512) as engine:
        assert engine.server_info()["sampling_defaults"] == {"temperature": 0.0, "top_k": 1}
        greedy = engine.generate("Hello", {"max_new_tokens": 6})["output_ids"]
        assert greedy == engine.generate("Hello", {"max_new_tokens": 6, "temperature": 0})["output_ids"]
        drawn = engine.generate("Hello", {"max_new_tokens": 6, "temperature": 1, "top_k": -1, "n": 4})
        assert [each["output_ids"] for each in drawn] != [greedy] * 4


def test_processors_are_registered_when_the_engine_starts() -> None:
    with pytest.raises(ConfigError, match="no_such_module") as caught:
        Engine(model_path="dummy", logit_processors=["no_such_module:f"])
    assert caught.value.param == "logit_processors"
    with Engine(model_path="dummy", max_total_tokens=512, logit_processors=["support.processors:always"]) as engine:
        assert engine.server_info()["logit_processors"] == ["always", "disallowed_tokens"]
        asked = {"max_new_tokens": 3, "custom_logit_processor": "always", "custom_params": 72}
        assert engine.generate("Hello", asked)["text"] == "HHH"


def test_samples_of_several_prompts_come_in_order(dummy_engine: Engine) -> None:
    asked = {"max_new_tokens": 5, "seed": 4, "n": 3}
    outputs = dummy_engine.generate(["one", "two"], asked)
    assert len(outputs) == 6
    for first, prompt in ((0, "one"), (3, "two")):
        alone = dummy_engine.generate(prompt, {**asked, "n": 1})
        assert outputs[first]["output_ids"] == alone["output_ids"], "the first sample is what n=1 gives"
        assert len({tuple(each["output_ids"]) for each in outputs[first : first + 3]}) > 1
    last = {each["index"]: each for each in dummy_engine.generate(["one", "two"], asked, stream=True)}
    assert [last[i]["output_ids"] for i in range(6)] == [each["output_ids"] for each in outputs]
    mixed = dummy_engine.generate(["one", "two"], [{**asked, "n": 1}, {**asked, "n": 2}])
    assert [each["output_ids"] for each in mixed] == [outputs[i]["output_ids"] for i in (0, 3, 4)]
