"""Interface between a layer and the step's attention.

Between the product that gives q, k and v and the one that takes the attention's output lies what belongs to the
attention: norms of q and k, rotary, the KV cache. So all of it can be one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..model_config import ModelConfig
from .norm import RMSNorm

__all__ = ["AttentionCall", "AttentionLayer"]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's parameters of attention."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q k^T
    q_norm: RMSNorm | None  # head by head
    k_norm: RMSNorm | None

    @classmethod
    def make(
        cls, config: ModelConfig, index: int, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None
    ) -> AttentionLayer:
        """The usual: heads of one size in all layers, scores scaled by head_dim ** -0.5."""
        return cls(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            q_norm=q_norm,
            k_norm=k_norm,
        )


class AttentionCall(Protocol):
    """Interface of the step's attention for layers (runner/attention/)."""

    def begin(self, positions: Tensor) -> None:
        """Called once a step, before its first layer. positions: int64 [num_tokens]."""

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim] for qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], which is
        used up: normalised, rotated by position, written to the KV cache, attended to."""
