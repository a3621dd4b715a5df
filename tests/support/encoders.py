"""Small random encoders in folders, as their makers save them, and cores that compute them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl.errors import SglError
from sgl.runtime.config import EngineConfig
from sgl.runtime.encoder import EncoderCore
from sgl.runtime.encoder_start import build_encoder
from sgl.runtime.loading.encoder_checkpoint import EncoderCheckpoint, encoder_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.messages import Encode, EncodeReply, EncoderInput

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "##s", "##ting", "red", ",", ".", "!"),
]
TEXTS = ["The cat sat.", "a dog", "the red cats ran on the mat, the dog!", "unknownword sitting"]
_SHAPE = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}


def make(head: str = "Model", **changes: Any) -> Any:
    """A random BERT of transformers, its norms and biases random, too."""
    import transformers

    torch.manual_seed(7)
    config = transformers.BertConfig(**{**_SHAPE, **changes})
    model = getattr(transformers, f"Bert{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write(folder: Path, model: Any, files: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Saved as its makers would, with a vocabulary and `files` beside it; `fields` replace some of config.json."""
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    config = json.loads((folder / "config.json").read_text())
    for name, content in {"config.json": {**config, **fields}, **(files or {})}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def sentence_files(mode: str = "pooling_mode_mean_tokens", *, normalize: bool = True) -> dict[str, Any]:
    """As sentence-transformers writes them."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    return {"modules.json": modules, "1_Pooling/config.json": {"word_embedding_dimension": 48, mode: True}}


def modules(*kinds: str, first: str = "") -> dict[str, Any]:
    """A `modules.json` of these, in folders of their own but for the first, with means where one pools."""
    rows = [
        {"path": f"{index}_{kind}" if index else first, "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    pooling = {f"{row['path']}/config.json": {"pooling_mode": "mean"} for row in rows if "Pooling" in row["type"]}
    return {"modules.json": rows, **pooling}


def opened(folder: Path) -> EncoderCheckpoint:
    found = encoder_checkpoint(locate(str(folder)))
    assert found is not None
    return found


def core_of(folder: Path, **options: Any) -> EncoderCore:
    return build_encoder(EngineConfig(model_path=str(folder), device="cpu", **options), opened(folder))[0]


def ask(core: EncoderCore, task: Any, inputs: Sequence[EncoderInput], *, truncate: bool = False) -> np.ndarray:
    """What a core answers to one call; its error is raised."""
    core.handle(Encode(request=1, task=task, inputs=tuple(inputs), truncate=truncate))
    while core.has_work:
        core.step()
    (reply,) = core.take_replies()
    assert isinstance(reply, EncodeReply)
    if reply.error is not None:
        raise SglError.from_info(reply.error)
    return np.stack([np.frombuffer(row, dtype=np.float32) for row in reply.rows])


def texts(*given: str) -> list[EncoderInput]:
    return [EncoderInput(text=text) for text in given]


def encoded(folder: Path, *given: Any) -> Any:
    """The oracle's own tokens."""
    from transformers import BertTokenizer

    return BertTokenizer(str(folder / "vocab.txt"))(*given, padding=True, return_tensors="pt")
