"""BERT's layer, whose norms are behind the sums, and activations of layers without a gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ..model_config import ACTIVATIONS as _OF_PRODUCTS
from ..pooling.attention import attend
from ..pooling.batch import EncoderBatch
from .linear import Linear
from .norm import LayerNorm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


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
        self._activation = activation
        self._qkv = qkv
        self._attention_out = attention_out
        self._attention_norm = attention_norm
        self._up = up
        self._down = down
        self._norm = norm

    def __call__(self, x: Tensor, batch: EncoderBatch, biases: Sequence[Tensor] | None = None) -> Tensor:
        """Return [num_tokens, hidden_size]. ``biases``: what is added to the scores of each of the batch's groups, see
        `attend`."""
        q, k, v = self._qkv.multiply(x).view(len(x), 3 * self._num_heads, -1).split(self._num_heads, 1)
        attended = attend(q, k, v, batch, biases=biases)
        self._attention_out.add_to(x, attended)
        x = self._attention_norm(x)
        self._down.add_to(x, self._inner(x))
        return self._norm(x)

    def _inner(self, x: Tensor) -> Tensor:
        if (own := _OF_PRODUCTS.get(self._activation)) is not None:
            return self._up.activated(x, own)
        return ACTIVATIONS[self._activation](self._up.multiply(x))
