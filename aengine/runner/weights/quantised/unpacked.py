"""Codes of 4 or 8 bits with a scale a group of columns, as checkpoints of many kinds keep them: one code a byte.

    W[n, k] = (value(code[n, k]) - zero[n, g]) * scale[n, g] * row_scale[n],    g = k // group, or column_group[k]

A format names the checkpoint's tensors and makes `UnpackedCodes` of them (`UnpackedFormat`). On a CPU these become plain
numbers as they are loaded. On a GPU they stay codes (grouped.py) where that keeps their shape; what it does not keep is
refused, or becomes plain numbers, as the setting ``on_unsupported_format`` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ..expert_weights import SeparateExperts
from ..weight import ExpertWeights, StoredTensor, Weight, WeightFormat

__all__ = [
    "DequantisedExperts",
    "UnpackedCodes",
    "UnpackedFormat",
    "checked_scale",
    "codes_of_bytes",
    "codes_of_words",
    "numbers",
    "order_of_columns",
]

CodeKind = Literal["int4", "uint4", "e2m1", "int8", "uint8"]

_NUMBERS_AT_ONCE = 2**22
"""Codes that become numbers at once: 16 MiB of float32, and some tensors of as much."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class UnpackedCodes(NamedTuple):
    """The codes of a matrix [N, K]."""

    kind: CodeKind  # value of a code: "int4": less 8; "e2m1": OCP's FP4; of the others itself
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


def checked_scale(scale: Tensor, name: str) -> Tensor:
    """Return the scale. Raises ValueError: one is negative or no number."""
    values = scale.float()
    if not bool(((values >= 0) & (values < torch.inf)).all()):
        raise ValueError(f"{name} has a scale that is negative, infinite or no number")
    return scale


def order_of_columns(g_idx: Tensor, in_features: int, num_groups: int, group: int, name: str) -> Tensor | None:
    """Return `UnpackedCodes.column_group` of the groups of a matrix' columns; None: they are in order.

    Args:
        g_idx: int32 [parts * K]: of matrices that lie below each other one behind the other, and all the same

    Raises ValueError: they are not the same, or name groups that there are not.
    """
    of_parts = g_idx.view(-1, in_features).long()
    first = of_parts[0]
    if not torch.equal(of_parts, first.expand_as(of_parts)):
        raise ValueError(f"{name} of matrices that are multiplied together are not the same")
    if not bool(((first >= 0) & (first < num_groups)).all()):
        raise ValueError(f"{name} names a group that is none of the {num_groups}")
    in_order = torch.arange(in_features, device=first.device) // group
    return None if torch.equal(first, in_order) else first


def numbers(unpacked: UnpackedCodes, dtype: torch.dtype) -> Tensor:
    """[N, K]: what the codes mean, by the definition above in float32, as ``dtype``."""
    n, k = unpacked.codes.shape
    out = torch.empty(n, k, dtype=dtype, device=unpacked.codes.device)
    of_column = unpacked.column_group
    if of_column is None:
        of_column = torch.arange(k, device=out.device) // unpacked.group
    for begin in range(0, n, step := max(1, _NUMBERS_AT_ONCE // max(k, 1))):
        own = slice(begin, begin + step)
        values = _values(unpacked.kind, unpacked.codes[own])
        if unpacked.zero is not None:
            values -= unpacked.zero[own].float().index_select(1, of_column)
        scale = unpacked.scale[own].float()
        if unpacked.row_scale is not None:
            scale = scale * unpacked.row_scale[own, None]
        out[own] = values.mul_(scale.index_select(1, of_column))
    return out


def _values(kind: CodeKind, codes: Tensor) -> Tensor:
    if kind == "e2m1":
        return torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)[codes.int()]
    values = codes.float()
    return values.sub_(8) if kind == "int4" else values


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
    def codes_tensors(self, out_features: int, in_features: int) -> list[StoredTensor]:
        """Return the tensors in which the checkpoint keeps one matrix, but for its bias. Raises ValueError: it can't
        keep one of this shape."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor]) -> UnpackedCodes:
        """Return the codes of a matrix. Raises ValueError: the tensors are none."""

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        found = self.codes_tensors(out_features, in_features)
        if self.is_cpu or self.dequantises:
            kept = self._plain_dtype
            found = [tensor._replace(kept=kept) if tensor.num_parameters else tensor for tensor in found]
        if has_bias:
            found.append(StoredTensor("bias", (out_features,), torch.float32, out_features))
        return found

    @property
    def _plain_dtype(self) -> torch.dtype:
        return self.plain.tensors(1, 1, False)[0].dtype

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        return self._make_plain(tensors)

    def _make_plain(self, tensors: Mapping[str, Tensor]) -> Weight:
        own = {"weight": numbers(self.unpack(tensors), self._plain_dtype)}
        return self.plain.make(own if "bias" not in tensors else {**own, "bias": tensors["bias"]})

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        if self.is_cpu:
            return SeparateExperts(self.make, tensors)
        raise ModelLoadError("on a GPU")
