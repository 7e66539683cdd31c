"""Linear layers, and the number formats that their weights may have on a CPU.

    format     weights              activations   when
    float32    float32              float32       dtype="float32": exact
    bfloat16   bfloat16             bfloat16      dtype="bfloat16"
    float16    float16, twice       float32       dtype="auto" and "float16": half the bytes of float32 at small
                                                  batches, and the matrix units' 16-bit rate at large ones

On a GPU they are as they are called. In the float16 format on a CPU a batch of a few rows goes through FBGEMM, which
reads float16 weights and multiplies in float32; a larger one through whichever is faster on this processor,
measured once (`Float16Plan`). FBGEMM is for x86-64 with AVX2: elsewhere, as on arm64, "auto" is float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ModelLoadError
from ...kernels.activation import silu_and_mul
from ...kernels.linear import add_linear, norm_gated_linear, norm_linear
from ..weights.slot import Slot
from .norm import RMSNorm

__all__ = ["Linear", "LinearFormat", "Weight"]

FLOAT16_MAX = 65504.0


class Weight(Protocol):
    """A weight [out_features, in_features] with its bias, in some format."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, out_features] for x [n, in_features]."""


@dataclass(slots=True)
class PlainWeight:
    """As torch has it: float32 or bfloat16, on any device."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Float16Weight:
    """float16 weights under float32 activations, on a CPU."""

    __slots__ = ("_bias", "_half", "_packed", "_plan", "_scale")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._plan = float16_plan()
        self._bias = bias
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        self._half: Tensor | None = None
        self._scale: Tensor | None = None
        if self._plan.large is half_linear:
            self._half, self._scale = scaled_half(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self._half is None or self._scale is None or x.shape[0] < self._plan.first_large:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return half_linear(x, self._half, self._scale, self._bias)


def scaled_half(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(float16 weight, float32 scale [out_features]): each row divided by a power of two that brings its absolute sum
    to 1 or less, so that no product is larger than its largest input."""
    scale = weight.float().abs().sum(1).clamp_min_(2.0**-100).log2_().ceil_().exp2_()
    return (weight.float() / scale[:, None]).half(), scale


def half_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """float32 in and out, float16 between, summed in float32 by oneDNN; ``weight``, ``scale`` as of `scaled_half`.

    Inputs past float16's range are cut to it; outputs may go past it.
    """
    out = F.linear(x.clamp(-FLOAT16_MAX, FLOAT16_MAX).half(), weight).float().mul_(scale)
    return out if bias is None else out.add_(bias)


@dataclass(frozen=True, slots=True)
class Float16Plan:
    """What the measurement found: from ``first_large`` rows on, ``large`` is faster than FBGEMM; None: it never is."""

    large: Callable[..., Tensor] | None
    first_large: int


def has_fbgemm() -> bool:
    """Whether this processor can multiply by packed float16 weights."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def float16_plan() -> Float16Plan:
    """Time both on a matrix of middling size; some 20 ms, once a process.

    Processors with 16-bit matrix units (AMX) multiply float16 several times faster than float32; on others torch's
    float16 product is far slower than FBGEMM's.
    """
    weight = torch.randn(1536, 576) * 0.05
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    half, scale = scaled_half(weight)
    for rows in (4, 8, 16, 32):
        x = torch.randn(rows, 576)
        plain = _fastest(lambda x=x: torch.ops.quantized.linear_dynamic_fp16(x, packed))  # type: ignore[misc]
        if _fastest(lambda x=x: half_linear(x, half, scale, None)) < plain:  # type: ignore[misc]
            return Float16Plan(half_linear, rows)
    return Float16Plan(None, 0)


def _fastest(call: Callable[[], Tensor], repeats: int = 12) -> float:
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How the weights of a model are kept, and in which dtype activations and KV are."""

    name: str
    dtype: torch.dtype

    @classmethod
    def choose(cls, dtype: str, device: torch.device) -> LinearFormat:
        """From the setting ``dtype``, see the table above.

        Raises ModelLoadError if float16 was asked for on a CPU that has no product for it.
        """
        if device.type == "cpu" and dtype in ("auto", "float16"):
            if not has_fbgemm():
                if dtype == "float16":
                    raise ModelLoadError(
                        "dtype='float16' on a CPU needs FBGEMM, which torch has for x86-64 with AVX2 only: use "
                        "dtype='auto', 'float32' or 'bfloat16'"
                    )
                return cls("float32", torch.float32)
            float16_plan()  # now, while nothing else runs that would disturb its measurement
            return cls("float16", torch.float32)
        name = "bfloat16" if dtype == "auto" else dtype
        return cls(name, getattr(torch, name))

    def pack(self, weight: Tensor, bias: Tensor | None) -> Weight:
        if self.name == "float16" and weight.device.type == "cpu":
            return Float16Weight(weight, None if bias is None else bias.float())
        return PlainWeight(weight.to(self.dtype), None if bias is None else bias.to(self.dtype))


class Linear:
    """y = x W^T + b, possibly of several checkpoint matrices side by side (q, k, v; gate, up).

    ``parts``: checkpoint name and output features of each. When the last tensor has come, they are joined in the
    format in which they are multiplied, and the originals let go.
    """

    def __init__(self, in_features: int, parts: list[tuple[str, int]], bias: bool, linear_format: LinearFormat) -> None:
        self._in_features = in_features
        self._parts = parts
        self._has_bias = bias
        self._format = linear_format
        self._loaded: dict[tuple[str, int], Tensor] = {}
        self._lock = Lock()  # of _loaded: several threads may load
        self._weight: Weight | None = None

    def slots(self) -> Iterator[Slot]:
        for i, (name, features) in enumerate(self._parts):
            yield Slot(f"{name}.weight", (features, self._in_features), partial(self._load, "weight", i))
            if self._has_bias:
                yield Slot(f"{name}.bias", (features,), partial(self._load, "bias", i))

    def _load(self, kind: str, part: int, tensor: Tensor) -> None:
        with self._lock:
            self._loaded[kind, part] = tensor
            is_last = len(self._loaded) == len(self._parts) * (1 + self._has_bias)
        if is_last:
            bias = self._join("bias") if self._has_bias else None
            self._weight = self._format.pack(self._join("weight"), bias)
            self._loaded = {}

    def _join(self, kind: str) -> Tensor:
        tensors = [self._loaded[kind, part] for part in range(len(self._parts))]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def __call__(self, x: Tensor) -> Tensor:
        assert self._weight is not None, "weights are not loaded"
        return self._weight(x)

    def after_norm(self, x: Tensor, norm: RMSNorm, out_dtype: torch.dtype | None = None) -> Tensor:
        """The product by norm(x): [n, out_features] in x's dtype or ``out_dtype``, a new tensor."""
        w = self._weight
        if isinstance(w, PlainWeight):
            return norm_linear(x, norm.weight, norm.eps, w.weight, w.bias, out_dtype)
        return self(norm(x)).to(out_dtype or x.dtype)

    def gated_after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """silu(gate) * up of the product by norm(x), for a Linear whose two parts are gate and up."""
        w = self._weight
        if isinstance(w, PlainWeight):
            return norm_gated_linear(x, norm.weight, norm.eps, w.weight, w.bias)
        return silu_and_mul(self(norm(x)))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the product by x to ``residual`` [n, out_features], in place."""
        w = self._weight
        if isinstance(w, PlainWeight):
            add_linear(residual, x, w.weight, w.bias)
        else:
            residual.add_(self(x))
