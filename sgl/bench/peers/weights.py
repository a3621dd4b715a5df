"""Whether two sides compute with the same weights: one checksum over names, shapes and bytes.

`python -m sgl.bench.peers.weights MODEL LOAD_FORMAT DTYPE` prints that of the model as sgl loads it. It is a process of
its own because a second copy of the weights has no place beside a measurement.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters in the order of their names, which must be Hugging Face's. A tied one counts once."""
    return _digest(dict(model.named_parameters()))


def folder_digest(path: str | Path) -> str:
    """`digest` of the tensors in a folder's safetensors files."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in Path(path).glob("*.safetensors"):
        tensors |= load_file(file)
    return _digest(tensors)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    import torch

    checksum = hashlib.sha256()
    for name, parameter in sorted(tensors.items()):
        checksum.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        checksum.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(model_path: str, load_format: str, dtype: str) -> None:
    """Print the checksum of the model as sgl loads it."""
    from sgl.runtime.loading.checkpoint import open_checkpoint
    from sgl.runtime.loading.sources import LoadFormat, locate

    form: LoadFormat = load_format  # type: ignore[assignment]
    sys.stdout.write(
        digest(open_checkpoint(locate(model_path, load_format=form, offline=True)).build_model(dtype, "cpu")) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
