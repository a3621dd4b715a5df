"""The shape of an encoder, and what becomes of its states. Read by `loading/encoder_checkpoint.py`; no torch here."""

from __future__ import annotations

from typing import Literal

import msgspec

Pooling = Literal["mean", "cls", "last"]
Activation = Literal["identity", "sigmoid", "softmax"]


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One encoder. Names follow Hugging Face's configs where these agree.

    Attributes:
        max_len: tokens of an input, special ones included.
        pooling, normalize: how a text's states become its vector, and whether that has length one.
        prompt: text that is put before every text.
        lower_case: texts are made lower case before they are tokenized, whatever the tokenizer does.
        labels: names of what a classifier tells apart; empty when the model gives vectors.
        activation: what becomes of a classifier's logits.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str
    max_len: int
    pooling: Pooling = "mean"
    normalize: bool = False
    prompt: str = ""
    lower_case: bool = False
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    checkpoint_dtype: str = "float32"

    @property
    def num_labels(self) -> int:
        """Of a classifier; 0 when the model gives vectors."""
        return len(self.labels)
