"""Our own engine as a side: `sgl.Engine`, client half and worker, as a user has it. Imports no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any, get_type_hints

from sgl.bench.peers.adapter import Adapter
from sgl.bench.peers.messages import Load, Loaded
from sgl.bench.peers.weights import file_digest
from sgl.environment import parse_option
from sgl.errors import BenchError
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.loading.sources import locate

_DETAILS = ("kernels", "page_size", "max_running_requests", "chunked_prefill_size")
_IDLE_S = 10.0
"""In which an engine that has answered everything becomes idle."""


class EngineAdapter(Adapter):
    """`settings` are fields of `EngineConfig`, as values or as text: two engines that differ in one of them make a
    measurement of that option."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._engine = Engine(
            **{
                **parsed_options(load.settings, "--peer-setting"),
                "model_path": load.model_path,
                "load_format": load.load_format,
                "dtype": load.dtype,
                "device": load.device,
                "num_threads": load.num_threads,
            }
        )

    def loaded(self) -> Loaded:
        """From what the engine resolved."""
        info = self._engine.server_info()
        resolved = info["resolved"]
        return Loaded(
            vocab_size=info["vocab_size"],
            dtype=resolved["dtype"],
            device=resolved["device"],
            num_threads=resolved["num_threads"],
            quantization=resolved["quantization"],
            details={name: resolved[name] for name in _DETAILS},
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """One call of `Engine.generate`, without streaming."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return [output["output_ids"] for output in outputs]

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._engine.flush_cache(wait_s=_IDLE_S)

    def weights_digest(self) -> str | None:
        """Of the model as the loader builds it, from a process of its own; of the file whose blocks are kept. None for
        weights that are rounded at load: no other side has the same."""
        quantization = self.loaded().quantization
        if quantization != "none":
            path = locate(self._load.model_path, offline=True).path
            return file_digest(path) if quantization == "gguf" and path is not None else None
        command = [sys.executable, "-P", "-m", "sgl.bench.peers.weights"]
        done = subprocess.run(
            [*command, self._load.model_path, self._load.load_format, self.loaded().dtype],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"the weights could not be read: {done.stderr.strip().splitlines()[-1:]}")
        return done.stdout.strip()

    def close(self) -> None:
        """End the worker."""
        self._engine.shutdown()


def parsed_options(settings: Mapping[str, Any], flag: str) -> dict[str, Any]:
    """Engine options from settings, text read by the type of its field; unknown ones are the engine's to refuse.

    Args:
        flag: of the command that they were given with, for its errors.
    """
    kinds = get_type_hints(EngineConfig, include_extras=True)
    return {
        name: parse_option(value, kinds[name], f"{flag} {name}") if isinstance(value, str) and name in kinds else value
        for name, value in settings.items()
    }
