"""A decoder-only model: embeddings, layers, a last norm, the output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.rotary import rotary_rows
from ..layers.decoder import AttentionCall, DecoderLayer, Rotary
from ..layers.embedding import Embedding
from ..layers.linear import Linear, LinearFormat
from ..layers.norm import RMSNorm
from ..layers.slot import Slot
from ..model_config import ModelConfig

__all__ = ["DecoderModel"]


class DecoderModel:
    """What the architectures here share. `slots` names every tensor that must be loaded before it is called."""

    def __init__(self, config: ModelConfig, linear_format: LinearFormat, device: torch.device) -> None:
        self.config = config
        self.format = linear_format
        inv_freq, self._rotary_factor = config.rope.inv_freq()
        self._inv_freq = inv_freq.to(device)
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
        """Hidden states [num_tokens, hidden_size] for int64 [num_tokens] ids and positions."""
        rotary = Rotary(*(t.to(self.format.dtype) for t in self._rotary_rows(positions)))
        residual = self._embed(input_ids)
        delta: Tensor | None = None
        for layer in self._layers:
            delta = layer(delta, residual, rotary, attn)
        assert delta is not None
        return self._norm.after_adding(delta, residual)

    def _rotary_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_rows(positions, self._inv_freq, self._rotary_factor)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] for hidden [n, hidden_size]."""
        return self._lm_head(hidden).float()
