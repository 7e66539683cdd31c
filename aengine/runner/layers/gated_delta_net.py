"""The gated delta net, a linear attention with a state of fixed size. Yang et al. 2024, arXiv:2412.06464.

                ┌─ q, k, v ─ convolution ─ silu ─┐
residual ─ norm ┼─ b, a ─────────────────────────┴─ gated delta rule ─ norm ─┬─ * ─ out ─ + residual
                └─ z ─ silu ─────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...kernels.delta_memory import DeltaGates, DeltaInputs
from ..distributed.shares import part_of
from ..kv_spec import StateKV, StateTensor
from ..model_config import Divisible
from ..weights.scope import WeightScope
from ..weights.weight import put_into
from .attention import AttentionCall
from .linear import Linear
from .norm import RMSNorm
from .short_conv import ShortConv

_NAME = "recurrent"


@dataclass(frozen=True, slots=True)
class DeltaSizes(Divisible):
    """Heads and their sizes, and the width of the convolution."""

    num_key_heads: int
    num_value_heads: int  # a multiple
    key_dim: int
    value_dim: int
    conv_width: int

    def divided(self, num_ranks: int) -> Self | None:
        if self.num_key_heads % num_ranks or self.num_value_heads % num_ranks:
            return None
        key_heads, value_heads = self.num_key_heads // num_ranks, self.num_value_heads // num_ranks
        return replace(self, num_key_heads=key_heads, num_value_heads=value_heads)

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: elements of q, k and v."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> StateKV:
        """The state that the layer keeps of a sequence."""
        recurrent = StateTensor(_NAME, (self.num_value_heads, self.key_dim, self.value_dim))
        kept = ShortConv.state(self.channels, self.conv_width), recurrent
        pending = StateTensor("pending", (0, self.keys + self.values + 2 * self.num_value_heads), per_position=2)
        return StateKV((*kept, pending, StateTensor("tags", (0,), torch.int32, per_position=2)))


class DeltaProducts(NamedTuple):
    """The inputs of a gated delta net, made of norm(residual) by matrix products."""

    qkv: Tensor  # [num_tokens, channels]
    z: Tensor  # [num_tokens, values]: the gate of the output
    b: Tensor  # [num_tokens, num_value_heads]: the share of a correction that is written
    a: Tensor  # [num_tokens, num_value_heads]: the share of the state that is forgotten


class GatedDeltaNet:
    """A gated delta net. ``project`` computes its inputs, as the family does."""

    def __init__(
        self,
        sizes: DeltaSizes,
        index: int,
        hidden_size: int,
        eps: float,
        scope: WeightScope,
        project: Callable[[Tensor, RMSNorm], DeltaProducts],
    ) -> None:
        self._sizes = sizes
        self._index = index
        self._project = project
        self._rate: Tensor  # float32 [num_value_heads], < 0: the slope of the decay
        self._bias: Tensor  # float32 [num_value_heads]
        keys, values, heads = (scope.share(size) for size in (sizes.keys, sizes.values, sizes.num_value_heads))
        self.conv = ShortConv(scope.at("conv1d"), (keys, keys, values), sizes.conv_width)
        self.norm = RMSNorm(scope.at("norm"), sizes.value_dim, eps)
        self.out = Linear(scope, values, {"out_proj": hidden_size})
        part = part_of((heads,), 0, heads.total)
        scope.want("A_log", (heads.total,), torch.float32, self._put_rate, part=part)
        scope.want("dt_bias", (heads.total,), torch.float32, self._put_bias, part=part)

    def _put_rate(self, tensor: Tensor) -> None:
        put_into(self, "_rate", -tensor.float().exp())

    def _put_bias(self, tensor: Tensor) -> None:
        put_into(self, "_bias", tensor.float())

    def __call__(self, residual: Tensor, norm: RMSNorm, attn: AttentionCall) -> None:
        """Add the output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        sizes, states = self._sizes, attn.states(self._index)
        qkv, z, b, a = self._project(residual, norm)
        inputs = DeltaInputs(self.conv(qkv, states), z, b, a, sizes.num_key_heads)
        gates = DeltaGates(self._rate, self._bias, self.norm.weight, self.norm.eps)
        self.out.add_to(residual, states.gated_delta(_NAME, inputs, gates))
