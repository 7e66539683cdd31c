"""float16 weights under float32 activations, on a CPU.

A batch of a few rows goes through FBGEMM, which reads float16 weights and multiplies in float32: half the bytes of
float32. A larger one goes through whichever is faster on this processor, measured once (`Float16Plan`): with 16-bit
matrix units torch's own float16 product is. FBGEMM is for x86-64 with AVX2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed.group import TensorGroup
from .expert_weights import SeparateExperts
from .plain import plain_tensors
from .weight import ExpertWeights, StoredTensor, Weight

FLOAT16_MAX = 65504.0


class Float16Weight(Weight):
    __slots__ = ("_half", "_packed", "_plan", "_scale")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._plan = float16_plan()
        self.bias = bias
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        self._half: Tensor | None = None
        self._scale: Tensor | None = None
        if self._plan.large is half_linear:
            self._half, self._scale = scaled_half(weight)

    def multiply(self, x: Tensor) -> Tensor:
        if self._half is None or self._scale is None or x.shape[0] < self._plan.first_large:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return half_linear(x, self._half, self._scale, self.bias)


@dataclass(frozen=True, slots=True)
class Float16Format:
    name: str = "float16"

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        return plain_tensors(out_features, in_features, has_bias, torch.float32)

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        bias = tensors.get("bias")
        return Float16Weight(tensors["weight"], None if bias is None else bias.float())

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        return SeparateExperts(self.make, tensors)


def scaled_half(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float16 weight, float32 scale [out_features]): each row divided by a power of two that brings its
    absolute sum to 1 or less, so that no product is larger than its largest input."""
    scale = weight.float().abs().sum(1).clamp_min_(2.0**-100).log2_().ceil_().exp2_()
    return (weight.float() / scale[:, None]).half(), scale


def half_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return float32 for float32 x; the product has float16 inputs, summed in float32 by oneDNN; ``weight``, ``scale``:
    see `scaled_half`.

    Inputs past float16's range are cut to it; outputs may go past it.
    """
    out = F.linear(x.clamp(-FLOAT16_MAX, FLOAT16_MAX).half(), weight).float().mul_(scale)
    return out if bias is None else out.add_(bias)


@dataclass(frozen=True, slots=True)
class Float16Plan:
    """The measurement's result: from ``first_large`` rows on ``large`` is faster than FBGEMM; None: it never is."""

    large: Callable[..., Tensor] | None
    first_large: int


def has_fbgemm() -> bool:
    """Return whether this processor can multiply by packed float16 weights."""
    return "fbgemm" in torch.backends.quantized.supported_engines


_agreed: list[Float16Plan] = []
"""The plan of the first rank, once `agree_on_plan` has been called."""


def agree_on_plan(group: TensorGroup) -> None:
    """Let all ranks have the first one's plan: what each of them computes alike (routing) must round alike."""
    if group.size > 1:
        first = int(group.gather(torch.tensor([float16_plan().first_large]))[0])
        _agreed[:] = [Float16Plan(half_linear if first else None, first)]
        float16_plan.cache_clear()


@cache
def float16_plan() -> Float16Plan:
    """Return the plan of this process: the group's, or one that is measured once."""
    return _agreed[0] if _agreed else _measure()


def _measure() -> Float16Plan:
    """Return the faster plan, measured on a matrix of middling size in some 20 ms.

    Processors with 16-bit matrix units (AMX) multiply float16 several times faster than float32; on others torch's
    float16 product is far slower than FBGEMM's.
    """
    weight = torch.randn(1536, 576) * 0.05
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    half, scale = scaled_half(weight)
    for rows in (4, 8, 16, 32):
        x = torch.randn(rows, 576)
        if _is_faster(
            lambda x=x: half_linear(x, half, scale, None),  # type: ignore[misc]
            lambda x=x: torch.ops.quantized.linear_dynamic_fp16(x, packed),  # type: ignore[misc]
        ):
            return Float16Plan(half_linear, rows)
    return Float16Plan(None, 0)


def _is_faster(call: Callable[[], Tensor], other: Callable[[], Tensor]) -> bool:
    """Compare the best of twelve runs each, in turn; of two each where ``call`` is three times slower."""
    best = other_best = float("inf")
    for i in range(12):
        best, other_best = min(best, _seconds(call)), min(other_best, _seconds(other))
        if i > 0 and best > 3 * other_best:
            return False
    return best < other_best


def _seconds(call: Callable[[], Tensor]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
