"""A causal convolution over the last few tokens, whose inputs a sequence keeps as its state."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributed.shares import part_of, sizes
from ..kv_spec import StateTensor
from ..weights.scope import WeightScope
from ..weights.weight import put_into
from .linear import Features, Linear, shares_of
from .norm import RMSNorm
from .states import LayerStates

_NAME = "convolution"


class ShortConv:
    """A causal convolution with one filter of ``width`` tokens for each channel."""

    def __init__(self, scope: WeightScope, channels: Features, width: int, *, bias: bool = False) -> None:
        self.weight: Tensor  # float32 [width, channels of this rank]
        self.bias: Tensor | None = None  # float32 [channels of this rank]
        shares = shares_of(channels)
        total = sizes(shares)[1]
        part = part_of(shares, 0, total)
        scope.want("weight", (total, 1, width), torch.float32, self._put_weight, part=part)
        if bias:
            scope.want("bias", (total,), torch.float32, self._put_bias, part=part)

    @staticmethod
    def state(channels: int, width: int) -> StateTensor:
        """Return the form of the state: a sequence keeps its last ``width`` - 1 inputs."""
        return StateTensor(_NAME, (width - 1, channels), per_position=1)

    def _put_weight(self, tensor: Tensor) -> None:
        put_into(self, "weight", tensor.float().squeeze(1).t().contiguous())

    def _put_bias(self, tensor: Tensor) -> None:
        put_into(self, "bias", tensor.float())

    def __call__(self, x: Tensor, states: LayerStates) -> Tensor:
        """Return [num_tokens, channels] for x of that shape."""
        return states.conv(_NAME, x, self.weight, self.bias)

    def gated_after_norm(self, inputs: Linear, residual: Tensor, norm: RMSNorm, states: LayerStates) -> Tensor:
        """Return c * convolution(b * x), [num_tokens, channels]: b, c and x are products by ``inputs`` with
        norm(residual)."""
        conv = states.conv_of_all(_NAME, self.weight, self.bias)
        if conv is not None:
            return inputs.weight.conv_after_norm(residual, norm, conv)
        return states.gated_conv(_NAME, inputs.after_norm(residual, norm), self.weight, self.bias)
