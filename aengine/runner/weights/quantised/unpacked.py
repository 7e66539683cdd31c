"""Codes of 4 or 8 bits with a scale a group of columns, as checkpoints of many kinds keep them: one code a byte.

    W[n, k] = (value(code[n, k]) - zero[n, g]) * scale[n, g] * row_scale[n],    g = k // group, or column_group[k]

A format names the checkpoint's tensors and makes `UnpackedCodes` of them (`UnpackedFormat`). On a CPU these stay
codes where compiled kernels have a layout for them, else they become plain numbers as they are loaded. On a GPU they
stay codes (grouped.py) where that keeps their shape; what it does not keep is refused, or becomes plain numbers, as the
setting ``on_unsupported_format`` says.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.expert_types import ExpertGate, ExpertPlan
from ....kernels.grouped_codes import values
from ..expert_weights import GatheredExperts, SeparateExperts
from ..weight import ExpertWeights, Norm, NotMultiplied, OrdersDiffer, StoredTensor, Weight, WeightFormat
from .grouped import CodedExperts, CodeKind, GroupedCodes, compiled_format, fits, grouped_weight, pack

logger = logging.getLogger("aengine.runner")

_DEQUANTISE = "use on_unsupported_format='dequantise' (16 bits), or a CPU"
_NUMBERS_AT_ONCE = 2**22
"""Codes that become numbers at once: 16 MiB of float32, and some tensors of as much."""


class UnpackedCodes(NamedTuple):
    """The codes of a matrix [N, K]."""

    kind: CodeKind  # "int4", "uint4", "e2m1", "int8" or "uint8"
    codes: Tensor  # uint8 [N, K]; of kind "int8" int8
    scale: Tensor  # [N, G], a floating format
    group: int  # columns that share a scale
    zero: Tensor | None = None  # uint8 [N, G]
    row_scale: Tensor | None = None  # float32 [N]
    column_group: Tensor | None = None  # int64 [K]: the group of each column, where they are not in order


def codes_of_words(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """uint8 codes of int32 ``words`` [n, m], along ``dim``: code i of a word is at bit ``bits`` * order[i]; without an
    order the first is the lowest."""
    per_word = 32 // bits
    places = torch.arange(per_word, dtype=torch.int32) if order is None else torch.tensor(order, dtype=torch.int32)
    shifts = (places * bits).to(words.device)
    shape = (-1, 1) if dim == 0 else (-1,)
    return ((words.unsqueeze(dim + 1) >> shifts.view(shape)) & (1 << bits) - 1).to(torch.uint8).flatten(dim, dim + 1)


def codes_of_bytes(pairs: Tensor) -> Tensor:
    """uint8 codes [N, K] of uint8 ``pairs`` [N, K / 2], of which the lower half is the first."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def order_of_columns(g_idx: Tensor, in_features: int, group: int) -> Tensor | None:
    """Return `UnpackedCodes.column_group` of the groups of a matrix' columns; None: they are in order.

    Args:
        g_idx: int32 [parts * K]: of matrices that lie below each other one behind the other, and all the same

    Raises OrdersDiffer: they are not the same.
    """
    of_parts = g_idx.view(-1, in_features).long()
    first = of_parts[0]
    if not torch.equal(of_parts, first.expand_as(of_parts)):
        raise OrdersDiffer("the columns of matrices that are multiplied together have other orders")
    in_order = torch.arange(in_features, device=first.device) // group
    return None if torch.equal(first, in_order) or bool((first < 0).all()) else first


def random_g_idx(in_features: int, group: int, is_ordered: bool) -> Tensor:
    """int32 [K]: the group of each column, for random weights: of all matrices with as many columns the same, as those
    that are multiplied together have it. ``is_ordered``: act-order has mixed the columns."""
    g_idx = torch.arange(in_features, dtype=torch.int32) // group
    return g_idx[torch.randperm(in_features, generator=torch.Generator().manual_seed(0))] if is_ordered else g_idx


def numbers(unpacked: UnpackedCodes, dtype: torch.dtype) -> Tensor:
    """[N, K]: what the codes mean, by the definition above in float32, as ``dtype``."""
    n, k = unpacked.codes.shape
    out = torch.empty(n, k, dtype=dtype, device=unpacked.codes.device)
    of_column = unpacked.column_group
    if of_column is None:
        of_column = torch.arange(k, device=out.device) // unpacked.group
    for begin in range(0, n, step := max(1, _NUMBERS_AT_ONCE // max(k, 1))):
        own = slice(begin, begin + step)
        own_values = values(unpacked.kind, unpacked.codes[own])
        if unpacked.zero is not None:
            own_values -= unpacked.zero[own].float().index_select(1, of_column)
        scale = unpacked.scale[own].float()
        if unpacked.row_scale is not None:
            scale = scale * unpacked.row_scale[own, None]
        out[own] = own_values.mul_(scale.index_select(1, of_column))
    return out


@dataclass(frozen=True, slots=True)
class UnpackedFormat(ABC):
    """A `WeightFormat` by `UnpackedCodes`."""

    plain: WeightFormat  # the format of what becomes plain numbers
    is_cpu: bool
    dequantises: bool  # on a GPU, what it can't keep as codes becomes plain numbers; else that is an error

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for messages."""

    @abstractmethod
    def sizes(self, in_features: int) -> tuple[int, int]:
        """Return bits of a code, and columns that share a scale."""

    @property
    def mixes_columns(self) -> bool:
        """Whether columns are in another order than their groups."""
        return False

    @abstractmethod
    def codes_tensors(self, out_features: int, in_features: int) -> list[StoredTensor]:
        """Return the tensors in which the checkpoint keeps one matrix, but for its bias. Raises ValueError: it can't
        keep one of this shape."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor]) -> UnpackedCodes:
        """Return the codes of a matrix. Raises ValueError: the tensors are none."""

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        """Raises ValueError, or NotMultiplied: a GPU can't keep them as codes."""
        found = self.codes_tensors(out_features, in_features)
        bits, group = self.sizes(in_features)
        has_kernels = not self.is_cpu or compiled_format(self.plain) is not None
        is_kept = has_kernels and fits("int4" if bits == 4 else "int8", in_features, group)
        if not is_kept and not self.is_cpu and not self.dequantises:
            raise _unfit(in_features, group)
        if not is_kept:
            kept = self._plain_dtype
            found = [tensor._replace(kept=kept) if tensor.num_parameters else tensor for tensor in found]
        if has_bias:
            found.append(StoredTensor("bias", (out_features,), torch.float32, out_features))
        return found

    @property
    def _plain_dtype(self) -> torch.dtype:
        return self.plain.tensors(1, 1, False)[0].dtype

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        """Raises ValueError: the tensors are none. `NotMultiplied`: a GPU can't keep them as codes."""
        unpacked, bias = self.unpack(tensors), tensors.get("bias")
        if not self.is_cpu:
            try:
                codes, order = grouped_codes(unpacked)
                return grouped_weight(codes, bias, self.plain, order)
            except NotMultiplied as error:
                if not self.dequantises:
                    raise
                log_dequantised(self.name, str(error))
        elif (compiled := compiled_format(self.plain)) is not None and unpacked.column_group is None:
            made = compiled.make_of_codes(grouped_codes(unpacked)[0], bias) if _fit(unpacked) else None
            if made is not None:
                return made
        own = {"weight": numbers(unpacked, self._plain_dtype)}
        return self.plain.make(own if bias is None else {**own, "bias": bias})

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        """Raises ModelLoadError: a GPU does not multiply such experts."""
        if self.is_cpu:
            return SeparateExperts(self._make_expert, tensors)
        is_kept = all(tensor.kept is None for tensor in tensors)
        if is_kept and not self.mixes_columns:
            return CodedExperts(lambda own: grouped_codes(self.unpack(own))[0], num_experts, tensors, device)
        problem = "their columns have an order (desc_act)" if is_kept else "a GPU keeps no codes in groups of this size"
        if not self.dequantises:
            raise ModelLoadError(f"experts in {self.name}: {problem}: {_DEQUANTISE}")
        log_dequantised(f"experts in {self.name}", problem)
        return DequantisedExperts(self._expert_numbers, self.plain, num_experts, tensors, device)

    def _make_expert(self, tensors: Mapping[str, Tensor]) -> Weight:
        try:
            return self.make(tensors)
        except OrdersDiffer:
            own = {"weight": self._expert_numbers(tensors)}
            return self.plain.make({**own, "bias": tensors["bias"]} if "bias" in tensors else own)

    def _expert_numbers(self, tensors: Mapping[str, Tensor]) -> Tensor:
        try:
            return numbers(self.unpack(tensors), self._plain_dtype)
        except OrdersDiffer:  # gate's and up's, which have as many rows
            halves = zip(*(tensor.chunk(2) for tensor in tensors.values()), strict=True)
            return torch.cat([self._expert_numbers(dict(zip(tensors, half, strict=True))) for half in halves])


def _fit(unpacked: UnpackedCodes) -> bool:
    return fits(unpacked.kind, unpacked.codes.shape[1], unpacked.group)


def _unfit(in_features: int, group: int) -> NotMultiplied:
    return NotMultiplied(f"{in_features} columns in groups of {group} are no codes for GPUs: {_DEQUANTISE}")


def grouped_codes(unpacked: UnpackedCodes) -> tuple[GroupedCodes, Tensor | None]:
    """Return what a GPU multiplies, and the order of the columns of x: int64 [K]; None: as they are.

    Raises NotMultiplied: there is none of this shape.
    """
    codes, scale, zero, order = unpacked.codes, unpacked.scale, unpacked.zero, None
    if not _fit(unpacked):
        raise _unfit(codes.shape[1], unpacked.group)
    if unpacked.column_group is not None:
        order = unpacked.column_group.argsort(stable=True)
        groups, sizes = unpacked.column_group.unique(return_counts=True)
        if not bool((sizes == unpacked.group).all()):
            raise NotMultiplied(
                f"this rank's columns are not whole groups, as desc_act has mixed them: use one rank, or {_DEQUANTISE}"
            )
        codes, scale = codes.index_select(1, order), scale.index_select(1, groups)
        zero = None if zero is None else zero.index_select(1, groups)
    codes = pack(codes) if unpacked.kind in ("int4", "uint4", "e2m1") else codes
    zero = None if zero is None else zero.contiguous()
    return GroupedCodes(unpacked.kind, codes, _smallest(scale), unpacked.group, zero, None, unpacked.row_scale), order


def _smallest(scale: Tensor) -> Tensor:
    """The scale in 16 bits, if that is what the checkpoint has: the loader makes float32 of all numbers."""
    for dtype in (torch.float16, torch.bfloat16) if scale.dtype == torch.float32 else ():
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype).contiguous()
    return scale.contiguous()


@cache
def log_dequantised(what: str, why: str) -> None:
    """Once for each."""
    logger.warning("%s: become 16 bits as they are loaded: %s", what, why)


class DequantisedExperts(GatheredExperts):
    """Experts on a GPU that are kept as plain numbers."""

    __slots__ = ("_inner", "_num_experts", "_numbers", "_plain")

    def __init__(
        self,
        numbers_of: Callable[[Mapping[str, Tensor]], Tensor],
        plain: WeightFormat,
        num_experts: int,
        tensors: Sequence[StoredTensor],
        device: torch.device,
    ) -> None:
        """``numbers_of``: makes [N, K] of an expert's tensors."""
        super().__init__(tensors, device)
        self._numbers = numbers_of
        self._plain = plain
        self._num_experts = num_experts
        self._inner: ExpertWeights | None = None

    @property
    def can_group(self) -> bool:
        return self._inner is not None and self._inner.can_group

    def finish(self, expert: int) -> None:
        tensors = self._rooms.pop(expert)
        own = {"weight": self._numbers(tensors)}
        if "bias" in tensors:
            own["bias"] = tensors["bias"]
        with self._lock:
            if self._inner is None:
                n, k = own["weight"].shape
                stored = self._plain.tensors(n, k, "bias" in own)
                self._inner = self._plain.make_experts(self._num_experts, stored, self._device)
        for suffix, tensor in own.items():
            self._inner.room(expert, suffix, slice(None)).copy_(tensor)
        self._inner.finish(expert)

    def multiply(self, x: Tensor, plan: ExpertPlan) -> Tensor:
        assert self._inner is not None
        return self._inner.multiply(x, plan)

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        assert self._inner is not None
        return self._inner.gated_after_norm(x, norm, plan, gate)

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        assert self._inner is not None
        self._inner.add_to(residual, hidden, plan)
