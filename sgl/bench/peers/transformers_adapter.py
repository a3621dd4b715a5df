"""Hugging Face transformers as a side, at its best: the same weights and dtype, SDPA attention, inference mode, and the
fastest of its ways to decode on this machine (`tune`).

A GGUF file is read by transformers' own reader, a folder by `from_pretrained`; only the built-in random model takes its
weights from our loader. torch and transformers are imported when the adapter is built, in the side's own process.
"""

from __future__ import annotations

import inspect
import itertools
import time
from typing import Any

from sgl.bench.peers.adapter import Adapter
from sgl.bench.peers.messages import Load, Loaded, Tuned
from sgl.bench.peers.weights import digest
from sgl.errors import InvalidParameter
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.sources import LoadFormat, ModelSource, locate

LOOPS = ("forward", "generate")
"""A bare greedy loop over `model(...)`, which spares the checks of `generate()`; and `model.generate` itself."""
CACHES = ("dynamic", "static")
_TRIES = 2
"""Of each candidate, the best of which counts, after one that warms it up."""


class TransformersAdapter(Adapter):
    """`settings`: `loop` (forward, generate) and `cache` (dynamic, static); what is given is not tuned."""

    def __init__(self, load: Load) -> None:
        self._fixed = _checked(load.settings)  # before anything heavy is imported
        import torch

        torch.set_num_threads(load.num_threads)
        form: LoadFormat = load.load_format  # type: ignore[assignment]
        self._chosen = {"loop": "forward", "cache": "dynamic", **self._fixed}
        self._device = torch.device(load.device)
        source = locate(load.model_path, load_format=form, offline=True)
        self._model = _build(source, getattr(torch, load.dtype)).to(self._device).eval()
        # Transformers 5.24 renamed the argument.
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        )

    def loaded(self) -> Loaded:
        """From the model and from torch."""
        import torch

        config = self._model.config
        return Loaded(
            vocab_size=config.vocab_size,
            dtype=str(self._model.dtype).removeprefix("torch."),
            device=self._device.type,
            num_threads=torch.get_num_threads(),
            details={"attention": config._attn_implementation, **self._chosen},
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """All rows in one batch; they must be of one length, so that nothing is padded."""
        import torch

        with torch.inference_mode():
            tokens = torch.tensor(prompts, device=self._device)
            if self._chosen["loop"] == "generate":
                return self._library_loop(tokens, new_tokens)
            return self._forward_loop(tokens, new_tokens)

    def tune(self, prompts: list[list[int]], new_tokens: int) -> Tuned:
        """Time the ways to decode that the settings leave open and keep the fastest."""
        options = {"loop": LOOPS, "cache": CACHES} | {name: (value,) for name, value in self._fixed.items()}
        tried: dict[str, float] = {}
        candidates = {
            f"{loop}, {cache} cache": {"loop": loop, "cache": cache}
            for loop, cache in itertools.product(options["loop"], options["cache"])
        }
        for name, self._chosen in candidates.items():
            self.generate(prompts, min(new_tokens, 2))
            tried[name] = min(self._seconds(prompts, new_tokens) for _ in range(_TRIES))
        self._chosen = candidates[min(tried, key=tried.__getitem__)]
        return Tuned(dict(self._chosen), tried)

    def preferred(self, texts: list[list[int]], start: int) -> list[list[int]]:
        """One forward per text."""
        import torch

        with torch.inference_mode():
            return [
                self._model(torch.tensor([text], device=self._device)).logits[0, start:].argmax(dim=-1).tolist()
                for text in texts
            ]

    def weights_digest(self) -> str:
        """Of the model that runs."""
        return digest(self._model)

    def _seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        start = time.perf_counter()
        self.generate(prompts, new_tokens)
        return time.perf_counter() - start

    def _forward_loop(self, tokens: Any, new_tokens: int) -> list[list[int]]:
        import torch
        from transformers import DynamicCache, StaticCache

        config = self._model.config
        cache = (
            StaticCache(config=config, max_cache_len=tokens.shape[1] + new_tokens)
            if self._chosen["cache"] == "static"
            else DynamicCache(config=config)
        )
        produced: list[Any] = []
        while len(produced) < new_tokens:
            logits = self._model(tokens, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache}).logits
            tokens = logits[:, -1:].argmax(dim=-1)
            produced.append(tokens)
        rows: list[list[int]] = torch.cat(produced, dim=1).tolist()
        return rows

    def _library_loop(self, tokens: Any, new_tokens: int) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static" if self._chosen["cache"] == "static" else None,
        )
        out = self._model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
        rows: list[list[int]] = out[:, tokens.shape[1] :].tolist()
        return rows


def _checked(settings: dict[str, Any]) -> dict[str, str]:
    known = {"loop": LOOPS, "cache": CACHES}
    for name, value in settings.items():
        if value not in known.get(name, ()):
            raise InvalidParameter(
                f"peer setting {name}={value}; known are "
                + ", ".join(f"{each}={'|'.join(values)}" for each, values in known.items()),
                param="peer_setting",
            )
    return settings


def _build(source: ModelSource, dtype: Any) -> Any:
    """The model in `dtype`. Its rotary table stays in float32, as it does when a user loads in this dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if source.kind == "safetensors":
        return AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype, attn_implementation="sdpa")
    if source.kind == "gguf":
        return _build_gguf(str(source.path), dtype)
    checkpoint = open_checkpoint(source)
    config = AutoConfig.for_model("llama", **_llama_config(checkpoint))
    ours = checkpoint.build_model("float32", "cpu")
    return _filled(config, dict(ours.named_parameters()), dtype)


def _build_gguf(path: str, dtype: Any) -> Any:
    """What `from_pretrained(gguf_file=...)` does, step by step: that itself insists on accelerate being installed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    given = load_gguf_checkpoint(path)["config"]
    config = AutoConfig.for_model(**given)
    with torch.device("meta"):  # only asked for the names of its parameters
        named = AutoModelForCausalLM.from_config(config)
    parsed = load_gguf_checkpoint(path, return_tensors=True, model_to_load=named)
    return _filled(config, parsed["tensors"], dtype)


def _filled(config: Any, tensors: dict[str, Any], dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    config.tie_word_embeddings = "lm_head.weight" not in tensors
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    outcome = model.load_state_dict(tensors, strict=False)
    missing = [name for name in outcome.missing_keys if name != "lm_head.weight"]
    if missing or outcome.unexpected_keys:
        raise InvalidParameter(
            f"transformers lacks weights for {missing[:3]} and has no place for {outcome.unexpected_keys[:3]}",
            param="model_path",
        )
    model.tie_weights()
    return model


def _llama_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Our shape in transformers' words."""
    config = checkpoint.config
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    )
    fields = {name: getattr(config, name) for name in names}
    return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
