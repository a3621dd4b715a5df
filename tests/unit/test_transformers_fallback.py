"""Models that sgl has no layers for, against transformers alone: five architectures and a window, each in chunks over
the cache, batched and token by token; a whole engine on one of them; and what is refused, with its reason."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_runner import differences, greedy, in_chunks, open_path, runner

from sgl.doctor import examine_model
from sgl.errors import ConfigError, CorruptModel, UnsupportedModel
from sgl.lang.graph import Event, Sampling, ValueEvent
from sgl.runtime.config import EngineConfig
from sgl.runtime.core import EngineCore
from sgl.runtime.engine_start import build_core
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.models.registry import architectures
from sgl.runtime.offline import generate_options, make_calls
from sgl.runtime.resolution import resolve
from sgl.runtime.text.tokenizer import Tokenizer

TOLERANCE = 1e-3
VOCAB_SIZE = 512
_PLAIN = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "OPTForCausalLM": {"ffn_dim": 128, "word_embed_proj_dim": 32},
    "Olmo2ForCausalLM": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "GraniteForCausalLM": {"attention_multiplier": 0.4, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "Starcoder2ForCausalLM": {"num_key_value_heads": 1, "sliding_window": 9},
}


def make(architecture: str, **changes: Any) -> Any:
    """A random model of transformers; its norms and biases are random, too."""
    model_class = getattr(transformers, architecture)
    shape = {**_PLAIN, **SHAPES.get(architecture, {}), **changes}
    if architecture.startswith("GPT2"):
        shape = {
            name: value for name, value in shape.items() if not name.endswith(("_heads", "_layers", "_embeddings"))
        }
        shape["n_inner"] = shape.pop("intermediate_size")
        del shape["hidden_size"]
    config = model_class.config_class(**shape)
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write(folder: Path, model: Any, **fields: Any) -> Path:
    """Saved as its makers would, with the toy tokenizer beside it; `fields` replace some of config.json."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(Tokenizer.toy().to_json())
    if fields:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def continued(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers goes on with."""
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
    return list(ids[len(prompt) :])


@pytest.mark.parametrize("architecture", SHAPES)
def test_computes_and_draws_as_transformers(tmp_path: Path, architecture: str) -> None:
    assert architecture not in architectures()
    model = make(architecture)
    checkpoint = open_path(write(tmp_path, model))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (44, 9)]
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    assert all(float(rows.std()) > 0.1 for rows in expected)
    ours = runner(checkpoint)
    assert differences(in_chunks(ours, prompts), expected) < TOLERANCE
    assert differences(in_chunks(ours, prompts[:1], size=100), expected[:1]) < TOLERANCE
    theirs = [continued(model, prompt, 8) for prompt in prompts]
    assert greedy(ours, prompts, 8) == theirs
    assert [greedy(ours, [prompt], 8)[0] for prompt in prompts] == theirs
    facts = checkpoint.facts()
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.num_layers, facts.head_dim) == (3, 16)


def test_an_architecture_of_our_own_computes_alike(tmp_path: Path) -> None:
    """`model_impl` forces it; without, ours is taken, and transformers' is not asked."""
    write(tmp_path, make("LlamaForCausalLM"))
    prompts = [list(range(5, 40))]
    ours, theirs = (in_chunks(runner(open_path(tmp_path, impl)), prompts) for impl in ("auto", "transformers"))
    assert differences(ours, theirs) < TOLERANCE
    with pytest.raises(UnsupportedModel, match="no folder"):
        open_checkpoint(locate("dummy"), model_impl="transformers")


# --- a whole engine -------------------------------------------------------------------------------------------------


class Engine:
    """An engine core on a folder, in this process; every step is followed by the check of both laws."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.events: list[tuple[int, Event]] = []
        config = EngineConfig(model_path=str(folder), device="cpu", **options)
        self.core: EngineCore
        self.core, self.info = build_core(config, emit=lambda program, event: self.events.append((program, event)))
        self._next = 0

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> list[list[ValueEvent]]:
        """The values of each prompt's generations."""
        first, self._next = self._next, self._next + len(prompts)
        self.events.clear()
        calls, _ = make_calls(None, prompts, params, {}, Sampling())
        for number, call in enumerate(calls, start=first):
            self.core.open(number, generate_options(stream=False, cache_salt=""))
            self.core.submit(number, call.graph(), finish=True)
        while self.core.has_work:
            self.core.step()
            self.core.snapshot().check()
        values = [[event for of, event in self.events if of == number] for number in range(first, self._next)]
        return [[event for event in events if isinstance(event, ValueEvent)] for events in values]


@pytest.mark.parametrize("architecture", SHAPES)
def test_an_engine_shares_forks_constrains_and_scores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str
) -> None:
    model = make(architecture)
    write(tmp_path, model)
    with caplog.at_level(logging.WARNING, "sgl.worker"):
        engine = Engine(tmp_path, max_total_tokens=220, chunked_prefill_size=16)
    assert f"transformers' layers compute {architecture}" in caplog.text
    assert (engine.info["model_impl"], engine.info["architecture"]) == ("transformers", architecture)
    shared = list(range(40, 70))
    prompts = [[*shared, tail, 7] for tail in (71, 72, 73, 74)] + [[99, 98, 97]]
    greedy_of = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    expected = [continued(model, prompt, 10) for prompt in prompts]
    for _ in range(2):  # computed, then out of the cache
        values = engine.generate(prompts, {**greedy_of, "return_logprob": True, "logprob_start_len": 0})
        assert [list(value.token_ids) for (value,) in values] == expected
    cached = sum(value.usage.cached_tokens for (value,) in engine.generate(prompts, greedy_of))
    assert cached >= 4 * 30

    (value,) = values[4]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompts[4], *expected[4]]])).logits[0].log_softmax(-1)
    given = [*prompts[4][1:], *expected[4]]
    theirs = [float(logits[at, token]) for at, token in enumerate(given)]
    ours = [entry.logprob for entry in (*value.prompt_logprobs, *value.logprobs) if entry.logprob is not None]
    assert ours[-len(given) :] == pytest.approx(theirs, abs=1e-3)

    (samples,) = engine.generate([prompts[0]], {**greedy_of, "n": 3})
    assert [list(sample.token_ids) for sample in samples] == [expected[0]] * 3
    for (value,) in engine.generate(prompts, {**greedy_of, "regex": "(ab|cd){2}x"}):
        assert value.value in ("ababx", "abcdx", "cdabx", "cdcdx")


def test_the_reasons_say_who_computes(tmp_path: Path) -> None:
    facts = open_path(write(tmp_path, make("GPT2LMHeadModel"))).facts()
    resolved = resolve(EngineConfig(device="cpu", dtype="bfloat16"), facts)
    why = {reason.field: (reason.value, reason.why) for reason in resolved.reasons}
    assert resolved.model_impl == "transformers"
    assert why["model_impl"] == ("transformers", "sgl has no layers for it")
    assert why["kernels"] == ("torch", "GPT2LMHeadModel is computed by transformers' layers")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is computed by transformers' layers"):
        resolve(EngineConfig(device="cpu", quantization="int8"), facts)


@pytest.mark.parametrize("architecture", SHAPES)
def test_sixteen_bits(tmp_path: Path, architecture: str) -> None:
    """As far from transformers' float32 as transformers' own bfloat16 is, alike; and what a step holds besides changes
    the rounding only."""
    model = make(architecture)
    checkpoint = open_path(write(tmp_path, model))
    prompts = [list(range(5, 30)), [8, 9, 10]]
    with torch.inference_mode():
        full, half = (
            torch.cat([of(torch.tensor([prompt])).logits[0].float() for prompt in prompts])
            for of in (model, copy.deepcopy(model).bfloat16())
        )
    ours = runner(checkpoint, dtype="bfloat16")
    together = torch.cat(in_chunks(ours, prompts, size=9))
    alone = torch.cat([in_chunks(ours, [prompt], size=100)[0] for prompt in prompts])
    theirs = float((half - full).norm())
    assert 0 < theirs < 0.1 * float(full.norm())
    assert float((together - full).norm()) < 1.5 * theirs
    assert float((alone - full).norm()) < 1.5 * theirs


def test_dummy_weights(tmp_path: Path) -> None:
    write(tmp_path, make("OPTForCausalLM"))
    prompts = [list(range(5, 30)), [8, 9]]
    dummy, again = (in_chunks(runner(open_path(tmp_path, load_format="dummy")), prompts)[0] for _ in range(2))
    assert torch.equal(dummy, again)
    assert float(dummy.std()) > 0


# --- what is refused ------------------------------------------------------------------------------------------------

_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "FalconForCausalLM": ({}, "does not attend through its attention interface"),
    "MambaForCausalLM": ({}, "keeps a state in place of keys and values"),
    "T5ForConditionalGeneration": ({}, "'T5ForConditionalGeneration' is not supported, and transformers"),
    "GptOssForCausalLM": ({"num_local_experts": 2, "head_dim": 16}, "is subject to s_aux"),
    "Llama4ForCausalLM": ({}, "a mask that is neither causal nor a window"),
    "DeepseekV3ForCausalLM": ({}, "queries, keys and values of different sizes"),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", "full_attention", "conv"]}, "1 of 3 layers"),
}


@pytest.mark.parametrize("architecture", _REFUSED)
def test_what_pages_cannot_give_is_refused(tmp_path: Path, architecture: str) -> None:
    """By the engine, and by `sgl doctor`, which has no weights, in the same words."""
    changes, reason = _REFUSED[architecture]
    write(tmp_path, make(architecture, **changes))
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        open_path(tmp_path).build_model()
    assert caught.value.hint
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    report = examine_model({"model_path": str(tmp_path), "device": "cpu", "load_format": "dummy"})
    assert report.resolved is None
    assert report.error == caught.value.to_info()


def test_what_options_refuse_shows_before_the_model_is_loaded(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    write(tmp_path, make("Olmo2ForCausalLM", rope_parameters=scaling))
    given = {"model_path": str(tmp_path), "device": "cpu"}
    assert examine_model(given).error is None
    for options, reason in (
        ({"context_length": 300, "allow_longer_context": True}, "changes beyond 256 tokens"),
        ({"enable_deterministic_inference": True}, "whose bits depend on what else is in a step"),
    ):
        error = examine_model({**given, **options}).error
        assert error is not None
        assert reason in error.message


def _room_for_three(x_BTN: torch.Tensor) -> torch.Tensor:
    """Zeros for what occurs more often than that, as experts that are full leave tokens out."""
    before = (x_BTN[:, :, None] == x_BTN[:, None]).all(-1).tril().sum(-1)
    return x_BTN * (before <= 3)[..., None]


def _the_largest_half(x_BTN: torch.Tensor) -> torch.Tensor:
    """Zeros for the others, as a router does that chooses among tokens: a choice swallows what is no number."""
    chosen = x_BTN.float().norm(dim=-1, keepdim=True).topk(max(x_BTN.shape[1] // 2, 1), dim=1).indices
    return x_BTN * torch.zeros_like(x_BTN[..., :1]).scatter(1, chosen, 1.0)


def _by_blocks_of_32(x_BTN: torch.Tensor) -> torch.Tensor:
    """Where a block is full, its mean is added to its tokens."""
    whole = x_BTN.shape[1] // 32 * 32
    blocks = x_BTN[:, :whole].unflatten(1, (-1, 32)) if whole else x_BTN[:, None, :0]
    mixed = (blocks + 0.01 * blocks.mean(2, keepdim=True)).flatten(1, 2)
    return torch.cat([mixed, x_BTN[:, whole:]], dim=1)


def _before(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A module's forward with its input changed."""
    return lambda plain: lambda self, x, *rest, **given: plain(self, change(x), *rest, **given)


def _after(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Attention's forward with its output changed."""

    def changed(plain: Any) -> Any:
        def forward(self: Any, *given: Any, **named: Any) -> Any:
            mixed, weights = plain(self, *given, **named)
            return change(mixed), weights

        return forward

    return changed


_MIXED: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a neighbour": ("MLP", _before(lambda x: x + 0.02 * x.roll(1, dims=1)), "the query of a token"),
    "the one behind": ("MLP", _before(lambda x: x + 0.02 * x.roll(-1, dims=1)), "the query of a token"),
    "the mean": ("MLP", _before(lambda x: x + 0.001 * x.mean(1, keepdim=True)), "the query of a token"),
    "what comes to attention": ("Attention", _before(lambda x: x + 0.02 * x.roll(1, dims=1)), "the query of a token"),
    "what attention gives": ("Attention", _after(lambda x: x + 0.02 * x.roll(1, dims=1)), "the query of a token"),
    "twenty tokens off": ("MLP", _before(lambda x: x + 0.01 * x.roll(20, dims=1)), "the query of a token"),
    "blocks": ("MLP", _before(_by_blocks_of_32), "the query of a token"),
    "capacity": ("MLP", _before(_room_for_three), "other tokens move the logits"),
    "a choice": ("MLP", _before(_the_largest_half), "other tokens move the logits"),
    "a maximum": (
        "MLP",
        _before(lambda x: x + 0.002 * torch.fmax(x, x.roll(1, dims=1))),
        "(the query of a token|other tokens move the logits)",
    ),
    "what is made a number": (
        "MLP",
        _before(lambda x: x + 0.002 * x.roll(1, dims=1).nan_to_num()),
        "other tokens move the logits",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", _MIXED)
def test_a_model_that_mixes_tokens_elsewhere_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, dtype: str
) -> None:
    """Nothing declares it: every layer attends as it should, and a feed-forward, or what comes before attention, looks
    at others; however little, and in whatever dtype."""
    from transformers.models.gpt_neox import modeling_gpt_neox

    write(tmp_path, make("GPTNeoXForCausalLM"))
    open_path(tmp_path).build_model(dtype)
    part, change, said = _MIXED[how]
    module = getattr(modeling_gpt_neox, f"GPTNeoX{part}")
    monkeypatch.setattr(module, "forward", change(module.forward))
    with pytest.raises(UnsupportedModel, match=f"lets its tokens meet in other ways than attention: {said}"):
        open_path(tmp_path).build_model(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_keeps_something_of_a_call_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The last token of a call is part of the first of the next, however little."""
    from transformers.models.gpt_neox import modeling_gpt_neox

    write(tmp_path, make("GPTNeoXForCausalLM"))
    plain, kept = modeling_gpt_neox.GPTNeoXMLP.forward, {}

    def forward(self: Any, x_BTN: torch.Tensor) -> torch.Tensor:
        before = kept.get(self)
        kept[self] = x_BTN[:, -1:].clone()
        result: torch.Tensor = plain(self, x_BTN if before is None else x_BTN + 0.001 * before)
        return result

    monkeypatch.setattr(modeling_gpt_neox.GPTNeoXMLP, "forward", forward)
    with pytest.raises(UnsupportedModel, match="keeps something of a call for the next one"):
        open_path(tmp_path).build_model(dtype)


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    """They are called what they are, not tokens that meet."""
    model = make("GPTNeoXForCausalLM")
    with torch.no_grad():
        model.gpt_neox.final_layer_norm.bias[3] = torch.inf
    with pytest.raises(UnsupportedModel, match="gives logits that are not finite in bfloat16"):
        open_path(write(tmp_path, model)).build_model("bfloat16")


_EXPERTS: dict[str, dict[str, Any]] = {
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", _EXPERTS)
def test_tokens_that_share_experts_are_not_taken_for_mixed(tmp_path: Path, architecture: str, dtype: str) -> None:
    """A token that is no number is routed somewhere, and the rows of a product are others: that alone is no fault."""
    open_path(write(tmp_path, make(architecture, **_EXPERTS[architecture]))).build_model(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_of_several_tokens_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    write(tmp_path, make("GPTNeoXForCausalLM"))
    plain = torch.nn.Embedding.forward
    monkeypatch.setattr(
        torch.nn.Embedding, "forward", lambda self, ids: plain(self, ids) + 0.02 * plain(self, ids.roll(1, dims=-1))
    )
    with pytest.raises(UnsupportedModel, match="the embedding of a token depends on others"):
        open_path(tmp_path).build_model(dtype)


def test_tables_that_would_change_are_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    write(tmp_path, make("Olmo2ForCausalLM", rope_parameters=scaling))
    open_path(tmp_path).build_model(context_len=256)
    with pytest.raises(UnsupportedModel, match=r"changes beyond 256 tokens.*set context_length to at most 256"):
        open_path(tmp_path).build_model(context_len=257)
    with pytest.raises(UnsupportedModel, match="leave out enable_deterministic_inference"):
        open_path(tmp_path).build_model(deterministic=True)


def test_damaged_and_foreign_folders(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write(tmp_path, make("GPTNeoXForCausalLM"), auto_map={"AutoModelForCausalLM": "evil.Model"})
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a repository was run')")
    open_path(tmp_path).build_model()
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    old = {**tensors, "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    save_file(old, path, {"format": "pt"})  # a mask, as old versions stored it
    open_path(tmp_path).build_model()
    for changed, reason in (
        ({name: tensors[name] for name in list(tensors)[1:]}, "1 missing keys"),
        ({**tensors, "more": torch.zeros(2)}, "1 unexpected keys: more"),
        ({**tensors, "gpt_neox.embed_in.weight": torch.zeros(3, 4)}, "gpt_neox.embed_in.weight"),
    ):
        save_file(changed, path, {"format": "pt"})
        with pytest.raises(CorruptModel, match=reason):
            open_path(tmp_path).build_model()
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, kind, reason in (
        ({"model_type": "evil"}, UnsupportedModel, "code that a repository brings along is never run"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModel, "quantized"),
        ({"hidden_size": "many"}, CorruptModel, "transformers refuses it"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(kind, match=reason):
            open_path(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for these models only."""
    write(tmp_path, make("GPTNeoXForCausalLM"))
    (tmp_path / "llama").mkdir()
    write(tmp_path / "llama", make("LlamaForCausalLM"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    open_path(tmp_path / "llama").build_model()
    with pytest.raises(UnsupportedModel, match="cannot be imported"):
        open_path(tmp_path)
    with pytest.raises(UnsupportedModel, match="'GPTNeoXForCausalLM' is not supported"):
        open_path(tmp_path, "sgl")
