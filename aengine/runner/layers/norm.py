"""Norms with their weights."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.rms_norm import rms_norm
from ..distributed.shares import Share, part_of
from ..weights.scope import WeightScope
from ..weights.weight import put_into


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps), over the last dimension.

    ``plus_one``: the checkpoint has the weight less one (Gemma). The sum is kept in float32: most such weights lie near
    zero, where 16 bits tell numbers apart that they don't near one.
    """

    def __init__(self, scope: WeightScope, size: int, eps: float, *, plus_one: bool = False) -> None:
        self.weight: Tensor  # [size]
        self.eps = eps
        self._plus_one = plus_one
        self._dtype = torch.float32 if plus_one else scope.formats.dtype
        scope.want("weight", (size,), self._dtype, self._put)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Self:
        """Make a norm of a weight that is loaded already."""
        norm = cls.__new__(cls)
        norm.weight, norm.eps = weight, eps
        return norm

    def _put(self, tensor: Tensor) -> None:
        own = tensor.to(self._dtype)
        put_into(self, "weight", own + 1.0 if self._plus_one else own)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    def __init__(self, scope: WeightScope, size: int, eps: float, has_bias: bool = True) -> None:
        self.weight: Tensor  # [size]
        self.bias: Tensor | None = None
        self._eps = eps
        self._dtype = scope.formats.dtype
        self._is_compiled = scope.formats.is_compiled and size % 16 == 0
        scope.want("weight", (size,), self._dtype, self._put_weight)
        if has_bias:
            scope.want("bias", (size,), self._dtype, self._put_bias)

    def _put_weight(self, tensor: Tensor) -> None:
        put_into(self, "weight", tensor.to(self._dtype))

    def _put_bias(self, tensor: Tensor) -> None:
        put_into(self, "bias", tensor.to(self._dtype))

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_compiled and x.dim() == 2 and x.is_contiguous():
            from ...kernels.cpu.ops import layer_norm

            return layer_norm(x, self.weight, self.bias, self._eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)


class QKNorm:
    """RMS norms of q and of k, each over all heads of a token together, by ops of their own (OLMo 2).

    Among ranks each has some of the heads: the squares of all are summed.
    """

    def __init__(self, scope: WeightScope, q: Share, k: Share, eps: float) -> None:
        """Build the norms. ``q``, ``k``: features of q and k on this rank."""
        self._weights: list[Tensor | None] = [None, None]  # [features of this rank], of q and of k
        self._sizes = [q.size, k.size]
        self._eps = eps
        self._group = scope.group
        self._dtype = scope.formats.dtype
        for i, (name, share) in enumerate((("q_norm", q), ("k_norm", k))):
            part = part_of((share,), 0, share.total)
            scope.at(name).want("weight", (share.total,), self._dtype, partial(self._put, i), part=part)

    def _put(self, index: int, tensor: Tensor) -> None:
        own = tensor.to(self._dtype)
        if (before := self._weights[index]) is None:
            self._weights[index] = own
        else:
            before.copy_(own)

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return ``qkv`` [num_tokens, features of q, k and v] with q and k normalised."""
        *parts, v = qkv.split([*self._sizes, qkv.shape[1] - sum(self._sizes)], 1)
        if self._group.size == 1:
            normed = [rms_norm(x, self._of(i), self._eps) for i, x in enumerate(parts)]
        else:
            squares = qkv.new_zeros((len(qkv), 4), dtype=torch.float32)  # rows that are exchanged have 16 bytes or more
            for i, x in enumerate(parts):
                squares[:, i] = x.float().square().mean(1) / self._group.size
            scales = torch.rsqrt(self._group.sum(squares) + self._eps)
            normed = [(x * scales[:, i : i + 1] * self._of(i)).to(x.dtype) for i, x in enumerate(parts)]
        return torch.cat((*normed, v), 1)

    def _of(self, index: int) -> Tensor:
        weight = self._weights[index]
        assert weight is not None, "the model is not loaded"
        return weight
