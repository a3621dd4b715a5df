"""A GGUF model as a Hugging Face folder, for peers that read nothing else: the expanded weights, rounded to bfloat16.

Called by `sgl.bench.comparison`, which gives the folder to both sides and compares the weights that they load. Written
are `config.json`, `model.safetensors` and what the tokenizer needs; the caller owns the folder. The weights are made in
a process of its own, since torch has no place in the harness.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sgl.errors import BenchError
from sgl.runtime.loading.sources import ModelSource, locate

DTYPE = "bfloat16"


def convert(source: ModelSource, folder: str) -> None:
    """Fill `folder` with the model of the GGUF file at `source`.

    Raises:
        BenchError: it cannot be read or written.
    """
    command = [sys.executable, "-P", "-m", "sgl.bench.peers.convert", str(source.path), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{source.name} could not be converted: {done.stderr.strip().splitlines()[-1:]}")


def config_of(config: Any) -> dict[str, Any]:
    """`config.json` of a llama-like shape."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    )
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": DTYPE,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        **{name: getattr(config, name) for name in names},
    }


def main(path: str, folder: str) -> None:
    """Convert the file at `path`, in this process."""
    from safetensors.torch import save_file

    from sgl.runtime.loading.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(locate(path, offline=True))
    model = checkpoint.build_model(DTYPE, "cpu")
    target = Path(folder)
    save_file(
        {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer = checkpoint.tokenizer().save()
    config = config_of(checkpoint.config)
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": list(tokenizer.eos_ids)}, indent=2))
    (target / "tokenizer.json").write_text(tokenizer.backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
