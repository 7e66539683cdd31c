"""Interface between a layer and the step's attention.

Between the product that gives q, k and v and the one that takes the attention's output lies what belongs to the
attention: norms of q and k, rotary, the KV cache. So all of it can be one kernel. A layer that normalises and rotates
by itself calls `AttentionCall.attend` instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...kernels.paged_attention import Scores
from ...kernels.rotary import HeadNorms
from ..distributed.shares import part_of
from ..model_config import ModelConfig
from ..weights.scope import WeightScope
from ..weights.weight import put_into
from .norm import RMSNorm
from .states import LayerStates


class Sinks(Protocol):
    """Scores of each head that take their share of the softmax, and add no value."""

    @property
    def weight(self) -> Tensor:
        """The sinks of this rank's heads, [num_heads]. They must have been loaded."""


class HeadSinks:
    """`Sinks` of the checkpoint."""

    def __init__(self, scope: WeightScope, num_heads: int, name: str = "sinks") -> None:
        self.weight: Tensor
        self._dtype = scope.formats.dtype
        heads = scope.share(num_heads)
        scope.want(name, (heads.total,), self._dtype, self._put, part=part_of((heads,), 0, heads.total))

    def _put(self, tensor: Tensor) -> None:
        put_into(self, "weight", tensor.to(self._dtype))


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's parameters of attention. Heads and their sizes may differ from layer to layer; those of keys and
    values are also in ``ModelConfig.kv_layers``, those of queries in ``ModelConfig.query_heads``."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of q k^T
    q_norm: RMSNorm | None = None  # head by head
    k_norm: RMSNorm | None = None
    rope: int | None = 0  # index into ModelConfig.ropes; None: q and k are not rotated
    softcap: float = 0.0  # a score s counts as softcap * tanh(s / softcap); 0: as it is
    sinks: Sinks | None = None

    @property
    def norms(self) -> HeadNorms | None:
        """The norms of q and k, for the kernels."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def scores(self, window: int | None) -> Scores:
        """Return how its scores are made, for the kernels. ``window``: that of its KV."""
        return Scores(self.scale, window, self.softcap, None if self.sinks is None else self.sinks.weight)

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        index: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        *,
        scale: float | None = None,
        rope: int | None = 0,
        softcap: float = 0.0,
        sinks: Sinks | None = None,
    ) -> AttentionLayer:
        """Make the usual layer: heads of one size in all layers, scores scaled by head_dim ** -0.5."""
        return cls(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if scale is None else scale,
            q_norm=q_norm,
            k_norm=k_norm,
            rope=rope,
            softcap=softcap,
            sinks=sinks,
        )


class AttentionCall(Protocol):
    """Interface of the step's attention for layers (runner/attention/)."""

    def begin(self, positions: Tensor) -> None:
        """Prepare a step, once before its first layer. positions: int64 [num_tokens]."""

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """Return [num_tokens, num_heads * head_dim] for qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim],
        which is used up: normalised, rotated by position, written to the KV cache, attended to."""

    def write(self, layer: AttentionLayer, qkv: Tensor) -> None:
        """`forward` without the attention: what it writes to the KV cache."""

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [num_tokens, num_heads * value_dim]: k and v are written to the KV cache as they are, and attended to.

        The layer has normalised and rotated q and k; its ``q_norm``, ``k_norm`` and ``rope`` are not looked at.

        Args:
            q: [num_tokens, num_heads, head_dim], any strides, as of k and v
            k: [num_tokens, num_kv_heads, head_dim]
            v: [num_tokens, num_kv_heads, value_dim], value_dim <= head_dim
        """

    def attend_to_latents(self, layer: AttentionLayer, q: Tensor, latents: Tensor) -> Tensor:
        """Return [num_tokens, num_heads * value_dim] for q [num_tokens, num_heads, head_dim] and ``latents``
        [num_tokens, head_dim], of a layer that keeps `LatentKV`. Both are used up: their first elements are turned by
        position."""

    def first_lens(self) -> Tensor | None:
        """Return int32 [num_tokens]: how many tokens each token's request had when it got its row; None: no rotary
        embedding of the model depends on it."""

    def states(self, index: int) -> LayerStates:
        """Return the states that layer ``index`` keeps, of the step's requests: it reads and writes them itself."""
