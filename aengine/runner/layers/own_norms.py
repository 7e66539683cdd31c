"""Decoder layers whose norms are ops of their own, as they are no RMS norms before a product.

NormAfterLayer                           ParallelLayer                      LayerNormLayer
residual ─┬─ attention ─ norm ─┐         residual ─┬─ norm ─┬─ attention ─┐    that of Llama, its norms
residual ─┴────────────────────+─          │       │        └─ mlp ───────┤    are layer norms
residual ─┬─ mlp ─ norm ─┐                 └───────┴──────────────────────+─
residual ─┴──────────────+─
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..model_config import ModelConfig
from ..weights.scope import WeightScope
from .attention import AttentionCall
from .decoder import Config, Decoder, SelfAttention
from .norm import LayerNorm


class _FeedForward(Protocol):
    """`GatedMLP`, `MLP`."""

    def add_to(self, residual: Tensor, x: Tensor) -> None: ...


class NormAfterLayer:
    """Attention and feed-forward of the residual stream itself; each has a ``post_norm``."""

    def __init__(self, attention: SelfAttention, mlp: _FeedForward) -> None:
        self.attention = attention
        self.mlp = mlp

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        """Change the residual stream [num_tokens, hidden_size] in place."""
        self.attention.add_to(residual, residual, attn)
        self.mlp.add_to(residual, residual)


class ParallelLayer:
    """A decoder layer whose attention and feed-forward get the same normalised input."""

    def __init__(self, norm: LayerNorm, attention: SelfAttention, mlp: _FeedForward) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp = mlp

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        """Change the residual stream [num_tokens, hidden_size] in place."""
        x = self.norm(residual)
        self.attention.add_to(residual, x, attn)
        self.mlp.add_to(residual, x)


class LayerNormLayer:
    """A decoder layer with attention, then feed-forward, and a layer norm before each."""

    def __init__(self, norm: LayerNorm, attention: SelfAttention, mlp_norm: LayerNorm, mlp: _FeedForward) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        """Change the residual stream [num_tokens, hidden_size] in place."""
        self.attention.add_to(residual, self.norm(residual), attn)
        self.mlp.add_to(residual, self.mlp_norm(residual))


class LayerNormDecoder(Decoder[Config]):
    """A `Decoder` whose norms are layer norms."""

    has_norm_bias = True

    def make_layer_norm(self, weights: WeightScope) -> LayerNorm:
        config: ModelConfig = self.config
        return LayerNorm(weights, config.hidden_size, config.rms_norm_eps, self.has_norm_bias)

    def make_last_norm(self, weights: WeightScope) -> LayerNorm:
        return self.make_layer_norm(weights)
