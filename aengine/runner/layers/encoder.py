"""Layers of encoders: norms with means, and BERT's layer, whose norms are behind the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ..pooling.attention import attend
from ..pooling.batch import EncoderBatch
from ..weights.scope import WeightScope
from .linear import Linear

__all__ = ["ACTIVATIONS", "LayerNorm", "PostNormLayer"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    def __init__(self, scope: WeightScope, size: int, eps: float, has_bias: bool = True) -> None:
        self.weight: Tensor  # [size]
        self.bias: Tensor | None = None
        self._eps = eps
        self._dtype = scope.formats.dtype
        scope.want("weight", (size,), self._dtype, self._put_weight)
        if has_bias:
            scope.want("bias", (size,), self._dtype, self._put_bias)

    def _put_weight(self, tensor: Tensor) -> None:
        self.weight = tensor.to(self._dtype)

    def _put_bias(self, tensor: Tensor) -> None:
        self.bias = tensor.to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)


class PostNormLayer:
    """norm(x + attention(x)), then norm(x + down(activation(up(x))))."""

    def __init__(
        self,
        *,
        num_heads: int,
        activation: str,
        qkv: Linear,
        attention_out: Linear,
        attention_norm: LayerNorm,
        up: Linear,
        down: Linear,
        norm: LayerNorm,
    ) -> None:
        self._num_heads = num_heads
        self._activation = ACTIVATIONS[activation]
        self._qkv = qkv
        self._attention_out = attention_out
        self._attention_norm = attention_norm
        self._up = up
        self._down = down
        self._norm = norm

    def __call__(self, x: Tensor, batch: EncoderBatch, biases: Sequence[Tensor] | None = None) -> Tensor:
        """[num_tokens, hidden_size]. ``biases``: to the scores of each of the batch's groups, see `attend`."""
        q, k, v = self._qkv.multiply(x).view(len(x), 3 * self._num_heads, -1).chunk(3, dim=1)
        attended = attend(q, k, v, batch, biases=biases)
        self._attention_out.add_to(x, attended)
        x = self._attention_norm(x)
        inner = self._activation(self._up.multiply(x))
        self._down.add_to(x, inner)
        return self._norm(x)
