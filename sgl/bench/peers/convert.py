"""A GGUF model as a Hugging Face folder, for peers that read nothing else: the expanded weights, rounded to bfloat16.

Called by `sgl.bench.comparison`, which gives the folder to both sides and compares the weights that they load. Written
are `config.json`, `model.safetensors` and what the tokenizer needs. The weights are made in a process of its own, since
torch has no place in the harness.

The folder stays in the cache, named by what it was made from: a peer that compiles for a model (vLLM, minutes) finds
what it compiled by the model's path, and finds nothing for a path that is new each time.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl.bench.peers.weights import file_digest
from sgl.errors import BenchError
from sgl.runtime.loading.cache import cache_folder
from sgl.runtime.loading.sources import ModelSource, locate

DTYPE = "bfloat16"


def converted(source: ModelSource, progress: Callable[[str], None] = lambda what: None) -> Path:
    """The folder of the GGUF file at `source`; made now if it is not there.

    Raises:
        BenchError: the file cannot be read, or the folder not be written.
    """
    if source.path is None:
        raise BenchError(f"{source.name} is no file", hint="name a GGUF file")
    made_from = file_digest(source.path) + file_digest(__file__)
    folder = cache_folder() / "peers" / f"{source.path.stem}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    progress(f"converting {source.name} to a folder, once")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            command = [sys.executable, "-P", "-m", "sgl.bench.peers.convert", str(source.path), f"{temporary}/whole"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BenchError(f"{source.name} could not be converted: {done.stderr.strip().splitlines()[-1:]}")
            (Path(temporary) / "whole").rename(folder)
    except OSError as error:
        raise BenchError(
            f"{source.name} could not be converted in {folder.parent}: {error}", hint="SGL_CACHE names another folder"
        ) from None
    return folder


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
    """Convert the file at `path` to the new folder `folder`, in this process."""
    from safetensors.torch import save_file

    from sgl.runtime.loading.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(locate(path, offline=True))
    model = checkpoint.build_model(DTYPE, "cpu")
    target = Path(folder)
    target.mkdir()
    save_file(
        {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer = checkpoint.tokenizer().save()
    named = {each["id"]: each["content"] for each in json.loads(tokenizer.backend)["added_tokens"]}
    config = config_of(checkpoint.config)
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": list(tokenizer.eos_ids)}, indent=2))
    (target / "tokenizer.json").write_text(tokenizer.backend)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": named.get(next(iter(tokenizer.eos_ids), None))}
    (target / "tokenizer_config.json").write_text(json.dumps(kind))


if __name__ == "__main__":
    main(*sys.argv[1:])
