"""Matrices on a CPU that compiled kernels multiply (kernels/cpu/): packed in tiles, activations in float32.

Of a GGUF's blocks the codes stay what they are, and activations become codes of 16 bits with a scale for each 32, row
by row: what else is in a batch changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.activation import Activation, act_and_mul
from ...kernels.cpu import ops
from ...kernels.cpu.codes import (
    Activations,
    PackedMatrix,
    activated,
    activations,
    add_to,
    can_gate,
    embed,
    gated,
    multiply,
    pack,
    pack_grouped,
    pack_int16,
    quantise_int16,
)
from ...kernels.cpu.expert_ops import PackedExperts, add_experts, expert_product, gathered
from ...kernels.cpu.packed.layouts import BLOCK, ROWS
from ...kernels.cpu.tape import empty
from ...kernels.expert_types import ExpertGate, ExpertPlan
from ...kernels.grouped_codes import GroupedCodes
from ...kernels.rms_norm import add_rms_norm, rms_norm
from .expert_weights import SeparateExperts
from .float16_cpu import FLOAT16_MAX
from .plain import plain_tensors
from .weight import ExpertWeights, Norm, StoredTensor, Weight, WeightsBelow


class CompiledWeight(Weight):
    """A packed matrix. Each verb is one kernel or two, and can be recorded."""

    __slots__ = ("_as_codes", "packed")

    def __init__(self, packed: PackedMatrix, bias: Tensor | None, *, as_codes: bool) -> None:
        """``as_codes``: activations become codes of 16 bits, which a matrix of codes can be multiplied with."""
        self.packed, self._as_codes = packed, as_codes
        self.bias = bias

    def _activations(self, x: Tensor, norm: Norm | None = None) -> Activations:
        if norm is not None and x.shape[1] % ROWS:
            x, norm = rms_norm(x, norm.weight, norm.eps), None
        own = None if norm is None else (norm.weight, norm.eps)
        if not x.is_contiguous():
            x = x.contiguous()
        of = activations(x, own, as_codes=self._as_codes)
        return quantise_int16(of.x) if self.packed.kind == "int16" else of

    @property
    def wants(self) -> tuple[bool, bool]:
        """What activations become; weights that want the same share them."""
        return self._as_codes, self.packed.kind == "int16"

    def copy_from(self, other: Weight) -> None:
        """See `Weight`: tapes hold addresses, and kernels of a kind: other numbers of 16 bits become those of this."""
        assert isinstance(other, CompiledWeight)
        packed, kind = other.packed, self.packed.kind
        if packed.kind != kind:
            numbers = other.rows(torch.arange(packed.out_features), 1.0)
            most = torch.finfo(getattr(torch, kind)).max
            packed = pack(kind, numbers.clamp(-most, most).to(getattr(torch, kind)))
        self.packed.memory.copy_(packed.memory)
        if self.bias is not None and other.bias is not None:
            self.bias.copy_(other.bias)

    def multiply(self, x: Tensor) -> Tensor:
        return multiply(self.packed, self._activations(x), self.bias)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        assert out_dtype in (None, torch.float32)
        return multiply(self.packed, self._activations(x, norm), self.bias)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor:
        return self._gated(self._activations(x, norm), activation)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        return self._gated(self._activations(x), activation)

    def _gated(self, of: Activations, activation: Activation) -> Tensor:
        if can_gate(self.packed):
            return gated(self.packed, of, activation, self.bias)
        return _gated(multiply(self.packed, of, self.bias), activation)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        return activated(self.packed, self._activations(x), activation, self.bias)

    def above(self, others: Sequence[Weight]) -> Weight:
        parts = [self, *(other for other in others if isinstance(other, CompiledWeight))]
        return CompiledWeightsBelow(parts) if len(parts) > len(others) else super().above(others)

    def beside(self, others: Sequence[Weight]) -> CompiledExperts | None:
        all_of = [self, *(other for other in others if isinstance(other, CompiledWeight))]
        forms = {(own.wants, own.packed.kind, own.bias is None) for own in all_of}
        return CompiledExperts(all_of) if len(all_of) > len(others) and len(forms) == 1 else None

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        add_to(residual, self.packed, self._activations(x), 1.0, self.bias)

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: Norm) -> None:
        add_norm = add_rms_norm if residual.shape[1] % ROWS else ops.add_norm
        add_norm(residual, self.multiply(x), norm.weight, norm.eps)

    def add_scaled_to(self, residual: Tensor, x: Tensor, scale: float) -> None:
        add_to(residual, self.packed, self._activations(x), scale, self.bias)

    def rows(self, ids: Tensor, scale: float) -> Tensor:
        """Return scale * the matrix' rows ``ids`` (int64 [n]) as numbers, float32 [n, in_features]."""
        return embed(self.packed, ids, scale)


class CompiledWeightsBelow(WeightsBelow):
    """Matrices of several kinds below each other, as q, k and v of a GGUF: each fills its columns of the product."""

    __slots__ = ()
    parts: Sequence[CompiledWeight]

    def multiply(self, x: Tensor) -> Tensor:
        return self._product(x)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        assert out_dtype in (None, torch.float32)
        return self._product(x, norm)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor:
        return _gated(self._product(x, norm), activation)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        return _gated(self._product(x), activation)

    def _product(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        sizes = [part.packed.out_features for part in self.parts]
        out = empty(x.shape[0], sum(sizes), torch.float32)
        found = {part.wants: part for part in self.parts}
        of = {wanted: part._activations(x, norm) for wanted, part in found.items()}
        for part, own in zip(self.parts, out.split(sizes, 1), strict=True):
            multiply(part.packed, of[part.wants], part.bias, own)
        return out


class CompiledExperts:
    """The matrices of a mixture, all of one kind: of each that tokens have chosen, the rows of these are multiplied."""

    def __init__(self, weights: Sequence[CompiledWeight]) -> None:
        self._first = weights[0]
        self._packed = PackedExperts([own.packed for own in weights], [own.bias for own in weights])

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        assert plan.slots is not None
        of = gathered(self._first._activations(x, norm), plan.slots)
        return expert_product(self._packed, of, plan.slots, gate)

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        assert plan.slots is not None
        add_experts(residual, self._packed, self._first._activations(hidden), plan.slots)


def _gated(gate_up: Tensor, activation: Activation) -> Tensor:
    return (act_and_mul if gate_up.shape[1] % (2 * ROWS) else ops.act_and_mul)(gate_up, activation)


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """Plain numbers, in ``dtype``; with float16, bfloat16 stays what it is. Activations are numbers, too.

    ``as_int16``: both become int16, with a scale for each 32 columns of a row, where these divide it: as exact as
    float16, and multiplied twice as fast. That is for many rows, whose products are bound by computing.
    """

    dtype: torch.dtype
    as_int16: bool = False

    @property
    def name(self) -> str:
        return "int16" if self.as_int16 else str(self.dtype).removeprefix("torch.")

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        return plain_tensors(out_features, in_features, has_bias, torch.float32)

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        weight, bias = tensors["weight"], tensors.get("bias")
        packed = pack_int16(weight) if self.as_int16 and weight.shape[1] % BLOCK == 0 else self._pack(weight)
        return CompiledWeight(packed, None if bias is None else bias.float().contiguous(), as_codes=False)

    def _pack(self, weight: Tensor) -> PackedMatrix:
        if self.dtype == torch.float32:
            weight = weight.float()
        elif weight.dtype not in (torch.float16, torch.bfloat16):
            weight = weight.clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
        return pack(str(weight.dtype).removeprefix("torch."), weight)

    def make_of_codes(self, codes: GroupedCodes, bias: Tensor | None) -> CompiledWeight | None:
        """Return a matrix that stays codes; None: there is no layout for them. Activations are numbers."""
        packed = pack_grouped(codes)
        if packed is None:
            return None
        return CompiledWeight(packed, None if bias is None else bias.float().contiguous(), as_codes=False)

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        return SeparateExperts(self.make, tensors)
