"""Weights of codes in 4 or 8 bits with a scale a group of columns: one form in memory for many formats of checkpoints.

A format's part is to name the checkpoint's tensors (`WeightFormat.tensors`) and to make `GroupedCodes` of them, which
kernels/grouped_codes.py defines: kind of codes, order of two in a byte, what may be a scale, what shapes can be kept.

    def make(self, tensors):
        return grouped_weight(self._codes(tensors), tensors.get("bias"), self.plain)

    def make_experts(self, num_experts, tensors, device):
        return CodedExperts(self._codes, num_experts, tensors, device)

What `_codes` must deliver, of the tensors of matrices that are perhaps below each other, on their device:

- Codes by `pack`, or `pack_halves` (GGUF's Q4_0, IQ4_NL). One code a byte is made of one
  matrix at a time, so a load needs the memory of that beside the result.
- Zero points as small integers in ``zero``, with kind "uint4" or "uint8" (AWQ; GPTQ, whose older files have them less
  one). A product scale * zero in 16 bits would be too coarse. Minima that are numbers go into ``offset``, with their
  sign (GGUF's Q4_1: m; Q4_K: -dmin * m).
- A scale in the checkpoint's dtype, where that is one of those, else float32. A product of two scales (Q4_K: d * sc) is
  float32, or float16 of what is left after a ``row_scale`` has taken the row's largest: float16 alone loses scales
  below 6e-5. A scale a matrix (NVFP4) is a ``row_scale``, the same for all of its rows. The format looks for scales
  that are no numbers, and raises ValueError.
- Shapes that can't be kept so raise ValueError in `GroupedCodes`; a format that would rather have plain numbers there
  asks `fits` first.

Divided by input features among ranks, K of each must end where a group ends: codes and scales name the same ``in_dim``
in their `StoredTensor`s, and the loader refuses what can't be cut. An order of columns (GPTQ's act-order) is not
divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....kernels.cpu.compiler.target import unavailable
from ....kernels.expert_types import ExpertCodes, ExpertGate, ExpertPlan, InputNorm
from ....kernels.experts import add_experts, expert_product
from ....kernels.grouped_codes import CodeKind, GroupedCodes, numbers, pack, pack_halves, unpack
from ....kernels.matrix import Matrix
from ..expert_weights import GatheredExperts
from ..plain import MatrixWeight
from ..weight import Norm, StoredTensor, Weight, WeightFormat

if TYPE_CHECKING:
    from ..compiled import CompiledFormat

__all__ = [
    "CodeKind",
    "CodedExperts",
    "GroupedCodes",
    "GroupedWeight",
    "compiled_format",
    "fits",
    "grouped_weight",
    "numbers",
    "pack",
    "pack_halves",
    "unpack",
]

CodesOf = Callable[[Mapping[str, Tensor]], GroupedCodes]
"""Makes the codes of a matrix' tensors by suffix."""


class GroupedWeight(MatrixWeight):
    """A product reads the codes. ``quantises_x``: see `Matrix`; of FP8 in blocks."""

    __slots__ = ("codes", "quantises_x")

    def __init__(self, codes: GroupedCodes, bias: Tensor | None, quantises_x: bool = False) -> None:
        self.codes = codes
        self.bias = bias
        self.quantises_x = quantises_x

    def copy_from(self, other: Weight) -> None:
        assert isinstance(other, GroupedWeight)
        self.codes.copy_from(other.codes)
        if self.bias is not None and other.bias is not None:
            self.bias.copy_(other.bias)

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.codes, self.bias, None, self.quantises_x)


class OrderedWeight(Weight):
    """A weight whose columns are in another order than those of x: column j is x's column order[j]."""

    __slots__ = ("inner", "order")

    def __init__(self, inner: Weight, order: Tensor) -> None:
        self.inner = inner
        self.order = order  # int64 [K]
        self.bias = inner.bias

    def multiply(self, x: Tensor) -> Tensor:
        return self.inner.multiply(x.index_select(1, self.order))


def grouped_weight(
    codes: GroupedCodes,
    bias: Tensor | None,
    plain: WeightFormat,
    order: Tensor | None = None,
    quantises_x: bool = False,
) -> Weight:
    """Return a weight that multiplies the codes on a GPU; on a CPU they become numbers of the format ``plain``.

    ``order``: int64 [K]: codes' column j belongs to x's column order[j], as GPTQ's act-order has them; None: j.
    """
    if codes.device.type == "cpu":
        tensors = {"weight": numbers(codes)}
        if order is not None:
            tensors["weight"] = tensors["weight"].index_select(1, order.argsort())
        return plain.make(tensors if bias is None else {**tensors, "bias": bias})
    made = GroupedWeight(codes, None if bias is None else bias.float(), quantises_x)
    return made if order is None else OrderedWeight(made, order)


def compiled_format(plain: WeightFormat | None) -> CompiledFormat | None:
    """Return the format of plain numbers, if it is that of a CPU's compiled kernels, which multiply codes as well."""
    if unavailable() is not None:
        return None
    from ..compiled import CompiledFormat

    return plain if isinstance(plain, CompiledFormat) else None


class CodedExperts(GatheredExperts):
    """Codes of all experts in one tensor, for the ops of kernels/experts.py. ``quantises_x``: see `ExpertCodes`."""

    __slots__ = ("_codes_of", "_num_come", "_num_experts", "matrices", "quantises_x")

    def __init__(
        self, codes_of: CodesOf, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device
    ) -> None:
        super().__init__(tensors, device)
        self.quantises_x = False
        self.matrices: ExpertCodes | None = None
        self._codes_of, self._num_experts, self._num_come = codes_of, num_experts, 0

    @property
    def kind(self) -> CodeKind | None:
        return None if self.matrices is None else self.matrices.codes.kind

    def finish(self, expert: int) -> None:
        """Raises ValueError: the tensors are no codes."""
        tensors = self._rooms.pop(expert)
        codes, bias = self._codes_of(tensors), tensors.get("bias")
        with self._lock:
            matrices = self.matrices = self._stack_for(codes, bias)
            self._num_come += 1
            matrices.of(expert).copy_from(codes)
            if matrices.bias is not None and bias is not None:
                matrices.bias[expert] = bias

    def _stack_for(self, codes: GroupedCodes, bias: Tensor | None) -> ExpertCodes:
        """Return memory for all experts, which are like one with these codes."""
        stack = self.matrices
        if stack is None:
            room: dict[str, Any] = {
                name: tensor.new_empty(self._num_experts * len(tensor), *tensor.shape[1:])
                for name, tensor in codes.tensors().items()
            }
            biases = None if bias is None else bias.new_empty(self._num_experts, *bias.shape)
            return ExpertCodes(replace(codes, **room), self._num_experts, biases, self.quantises_x)
        if stack.codes.scale.dtype in (codes.scale.dtype, torch.float32):
            return stack
        if self._num_come >= self._num_experts:  # captured graphs have their addresses
            raise ValueError(f"scales are {codes.scale.dtype} now, and were {stack.codes.scale.dtype}")
        return stack._replace(codes=replace(stack.codes, scale=stack.codes.scale.float()))

    def multiply(self, x: Tensor, plan: ExpertPlan) -> Tensor:
        assert self.matrices is not None
        return expert_product(x, self.matrices, plan)

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        assert self.matrices is not None
        return expert_product(x, self.matrices, plan, gate, InputNorm(norm.weight, norm.eps))

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        assert self.matrices is not None
        add_experts(residual, hidden, self.matrices, plan)


def fits(kind: CodeKind, in_features: int, group: int) -> bool:
    """Return whether matrices of so many columns can be kept as `GroupedCodes`."""
    whole = in_features % (16 if kind in ("int8", "uint8", "e4m3") else 32) == 0
    return whole and (group >= in_features or (group >= 16 and group & (group - 1) == 0))
