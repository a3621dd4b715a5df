"""BERT: reads a text as a whole, in both directions, and keeps nothing. With one vector, or one row of label scores, a
text.

Owns the encoder's layers, the pooling of their states and the head of a classifier. Several texts are computed
together, filled up to the longest; what fills up is seen by no token and takes no part in a pooled vector. Parameters
carry Hugging Face's names, without the leading `bert.`. (BERT, Devlin et al. 2018; Sentence-BERT, Reimers and Gurevych
2019.)

Shapes: B texts, L tokens of the longest, N hidden size, H heads, D head size, C labels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from sgl.runtime.models.encoder_config import EncoderConfig
from sgl.runtime.models.registry import register_model

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
"""`hidden_act` of a config."""


@register_model("BertModel", "BertForSequenceClassification")
class Bert(nn.Module):
    """The whole encoder; parameters are on the meta device until the loader assigns them.

    Args:
        config: its shape, its pooling, its head.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = _Stack(config)
        self.pooler: _Dense | None = None
        self.classifier: nn.Linear | None = None
        if config.num_labels:
            self.pooler = _Dense(config.hidden_size, config.hidden_size)
            self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, token_ids_BL: torch.Tensor, type_ids_BL: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Float32 vectors `[B, N]`, or logits `[B, C]` of a classifier.

        Args:
            lengths_B: tokens of each text, from the left; what stands behind is not looked at.
        """
        here_BL = torch.arange(token_ids_BL.shape[1], device=lengths_B.device) < lengths_B[:, None]
        states_BLN = self.encoder(self.embeddings(token_ids_BL, type_ids_BL), here_BL[:, None, None, :])
        if self.classifier is not None and self.pooler is not None:
            logits: torch.Tensor = self.classifier(torch.tanh(self.pooler(states_BLN[:, 0]))).float()
            return logits
        vectors_BN = self._pooled(states_BLN.float(), here_BL, lengths_B)
        return functional.normalize(vectors_BN, dim=-1) if self.config.normalize else vectors_BN

    def _pooled(self, states_BLN: torch.Tensor, here_BL: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """One vector of a text's states."""
        if self.config.pooling == "cls":
            return states_BLN[:, 0]
        if self.config.pooling == "last":
            return states_BLN[torch.arange(len(lengths_B), device=lengths_B.device), lengths_B - 1]
        return (states_BLN * here_BL[:, :, None]).sum(dim=1) / lengths_B[:, None]


class _Embeddings(nn.Module):
    """The sum of what a token is, where it stands, and of which of two texts it is, normed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, token_ids_BL: torch.Tensor, type_ids_BL: torch.Tensor) -> torch.Tensor:
        words_BLN = self.word_embeddings(token_ids_BL) + self.token_type_embeddings(type_ids_BL)
        normed: torch.Tensor = self.LayerNorm(words_BLN + self.position_embeddings.weight[: token_ids_BL.shape[1]])
        return normed


class _Stack(nn.Module):
    """The layers, one after another."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, states_BLN: torch.Tensor, mask_B11L: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            states_BLN = layer(states_BLN, mask_B11L)
        return states_BLN


class _Layer(nn.Module):
    """Attention and feed-forward, each added to what came in and normed behind it."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _Dense(config.hidden_size, config.intermediate_size)
        self.output = _Output(config.intermediate_size, config)
        self.activate = ACTIVATIONS[config.hidden_act]

    def forward(self, states_BLN: torch.Tensor, mask_B11L: torch.Tensor) -> torch.Tensor:
        states_BLN = self.attention(states_BLN, mask_B11L)
        after: torch.Tensor = self.output(self.activate(self.intermediate(states_BLN)), states_BLN)
        return after


class _Attention(nn.Module):
    """Each token of a text looks at all of them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self = _Heads(config)  # as checkpoints call it
        self.output = _Output(config.hidden_size, config)

    def forward(self, states_BLN: torch.Tensor, mask_B11L: torch.Tensor) -> torch.Tensor:
        after: torch.Tensor = self.output(self.self(states_BLN, mask_B11L), states_BLN)
        return after


class _Heads(nn.Module):
    """What the heads of attention give, side by side."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.num_heads = config.num_attention_heads

    def forward(self, states_BLN: torch.Tensor, mask_B11L: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            product(states_BLN).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        mixed_BHLD = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_B11L)
        return mixed_BHLD.transpose(1, 2).flatten(2)


class _Dense(nn.Module):
    """One product, under the name that checkpoints give it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.dense(x)
        return product


class _Output(nn.Module):
    """A product, what came in added, normed."""

    def __init__(self, size: int, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x_BLN: torch.Tensor, residual_BLN: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.LayerNorm(self.dense(x_BLN) + residual_BLN)
        return normed
