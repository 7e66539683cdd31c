"""A decoder-only model: embeddings, layers, a last norm, the output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..layers.decoder import AttentionCall, DecoderLayer
from ..layers.embedding import Embedding
from ..layers.linear import Linear, LinearFormat
from ..layers.norm import RMSNorm
from ..model_config import ModelConfig
from ..weights.slot import Slot

__all__ = ["DecoderModel"]


class DecoderModel:
    """What the architectures here share. `slots` names every tensor that must be loaded before it is called."""

    def __init__(self, config: ModelConfig, linear_format: LinearFormat, device: torch.device) -> None:
        self.config = config
        self.format = linear_format
        vocab_size, size = config.vocab_size, config.hidden_size
        self._lm_head = Linear(size, [("lm_head", vocab_size)], False, linear_format)
        head_slot = next(self._lm_head.slots())
        tied = head_slot.set if config.tie_word_embeddings else None
        self._embed = Embedding("model.embed_tokens", vocab_size, size, linear_format, also=tied)
        self._layers = [DecoderLayer(config, i, linear_format) for i in range(config.num_layers)]
        self._norm = RMSNorm("model.norm", size, config.rms_norm_eps, linear_format.dtype)

    def slots(self) -> Iterator[Slot]:
        yield from self._embed.slots()
        for layer in self._layers:
            yield from layer.slots()
        yield from self._norm.slots()
        if not self.config.tie_word_embeddings:
            yield from self._lm_head.slots()

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionCall) -> Tensor:
        """The residual stream after the last layer, [num_tokens, hidden_size]; ids, positions: int64 [num_tokens]."""
        residual = self._embed(input_ids)
        attn.begin(positions)
        for layer in self._layers:
            layer(residual, attn)
        return residual

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] for n rows of what `forward` returns."""
        return self._lm_head.after_norm(hidden, self._norm, torch.float32)
