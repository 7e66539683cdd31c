"""Matrices of all experts in one tensor of the checkpoint, or in two, and how one expert's is taken out of it.

TransposedExperts   name [num_experts, in_features, out_features]
Mxfp4Experts        name_blocks uint8 [num_experts, out_features, in_features / 32, 16]: two codes a byte, the first in
                    the lower half; name_scales uint8 [num_experts, out_features, in_features / 32]: 2^(scale - 127).
                    OCP Microscaling Formats (MX) Specification 1.0, 2023: E2M1 with an E8M0 scale of 32
both                name_bias [num_experts, out_features]

A GPU multiplies the codes of MXFP4 (quantised/grouped.py), and so do the compiled kernels of a CPU. Without these they
become numbers as they are loaded, one expert at a time; bfloat16 holds them exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...checkpoint.gguf_file import GGML_TYPES
from ...kernels.grouped_codes import GroupedCodes, pack, unpack_halves, values
from .quantised import faults
from .quantised.gguf import GgufFormat
from .quantised.grouped import CodedExperts
from .quantised.unpacked import codes_of_bytes, log_dequantised
from .weight import RANDOM_EXPONENTS, ExpertWeights, NotMultiplied, StoredTensor

if TYPE_CHECKING:
    from .formats import WeightFormats

_GROUP = 32


class PackedLayout(ABC):
    """How a checkpoint keeps a matrix of all experts in one tensor, or in a few."""

    def of(self, formats: WeightFormats, in_features: int) -> PackedLayout:
        """Return the layout to be used for matrices of so many columns on this rank. Raises NotMultiplied."""
        return self

    @abstractmethod
    def tensors(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
    ) -> list[StoredTensor]:
        """Return the tensors by suffix, which follows the matrix's name immediately."""

    def make_experts(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, formats: WeightFormats
    ) -> ExpertWeights:
        """Make the weights of a rank's experts, which are yet to be filled; of plain numbers, unless overridden."""
        stored = formats.plain.tensors(out_features, in_features, has_bias)
        return formats.plain.make_experts(num_experts, stored, formats.device)

    @abstractmethod
    def expert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Make what `make_experts` has room for, of an expert's own of the tensors: of plain numbers "weight"
        [out_features, in_features], and "bias" if there is one."""


class TransposedExperts(PackedLayout):
    def tensors(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
    ) -> list[StoredTensor]:
        shape = (num_experts, in_features, out_features)
        weight = StoredTensor("", shape, dtype, num_experts * in_features * out_features, out_dim=2, in_dim=1)
        return [weight, *_bias(num_experts, out_features, has_bias, dtype)]

    def expert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        return {"weight": tensors[""].t(), **_bias_of(tensors)}


class Mxfp4Experts(PackedLayout):
    def kept(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which numbers are kept; None: codes are."""
        return dtype

    def of(self, formats: WeightFormats, in_features: int) -> PackedLayout:
        """Raises NotMultiplied: a rank's columns on a GPU are not whole groups, and may not become numbers."""
        if formats.device.type == "cpu":
            return Mxfp4Blocks() if formats.is_compiled and in_features % _GROUP == 0 else self
        if in_features % _GROUP == 0:
            return Mxfp4Codes()
        problem = f"{in_features} columns of a rank are no whole groups of {_GROUP}"
        if not formats.dequantises:
            cure = "use fewer ranks, enable_expert_parallel=True, or on_unsupported_format='dequantise' (16 bits)"
            raise NotMultiplied(f"{problem}: {cure}")
        log_dequantised("experts in mxfp4", problem)
        return self

    def tensors(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
    ) -> list[StoredTensor]:
        shape, count = (num_experts, out_features, in_features // _GROUP), num_experts * out_features * in_features
        return [
            StoredTensor("_blocks", (*shape, 16), torch.uint8, count, 1, 2, kept=self.kept(dtype)),
            StoredTensor("_scales", shape, torch.uint8, 0, 1, 2, drawn=RANDOM_EXPONENTS, fault=faults.of_exponents),
            *_bias(num_experts, out_features, has_bias, dtype),
        ]

    def expert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        blocks, scales = tensors["_blocks"], tensors["_scales"]
        codes = values("e2m1", codes_of_bytes(blocks.flatten(0, 1))).view(*scales.shape, 32)
        weight = torch.ldexp(codes, scales.int()[..., None] - 127).flatten(-2).to(dtype)
        return {"weight": weight, **_bias_of(tensors)}


class Mxfp4Codes(Mxfp4Experts):
    """Layout of MXFP4 whose codes and scales stay as they are, for GPUs, whose kernels multiply them."""

    def kept(self, dtype: torch.dtype) -> torch.dtype | None:
        return None

    def make_experts(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, formats: WeightFormats
    ) -> ExpertWeights:
        stored = [
            StoredTensor("codes", (out_features, in_features // 2), torch.uint8, out_features * in_features),
            StoredTensor("scale", (out_features, in_features // _GROUP), torch.uint8, 0),
        ]
        if has_bias:
            stored.append(StoredTensor("bias", (out_features,), torch.float32, out_features))
        return CodedExperts(self._codes, num_experts, stored, formats.device)

    def expert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        codes = pack(codes_of_bytes(tensors["_blocks"].flatten(1)))
        return {"codes": codes, "scale": tensors["_scales"], **_bias_of(tensors)}

    def _codes(self, tensors: Mapping[str, Tensor]) -> GroupedCodes:
        scale = tensors["scale"].view(torch.float8_e8m0fnu)
        return GroupedCodes("e2m1", tensors["codes"], scale, _GROUP)


class Mxfp4Blocks(Mxfp4Experts):
    """Layout of MXFP4 that becomes blocks of a GGUF, which the compiled kernels of a CPU multiply."""

    _form = GgufFormat(next(code for code, kind in GGML_TYPES.items() if kind.name == "MXFP4"), "float32")

    def kept(self, dtype: torch.dtype) -> torch.dtype | None:
        return None

    def make_experts(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, formats: WeightFormats
    ) -> ExpertWeights:
        stored = self._form.tensors(out_features, in_features, has_bias)
        return self._form.make_experts(num_experts, stored, formats.device)

    def expert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        scales = tensors["_scales"]
        codes = unpack_halves(pack(codes_of_bytes(tensors["_blocks"].flatten(1)))).view(*scales.shape, 16)
        return {"weight": torch.cat((scales[..., None], codes), -1), **_bias_of(tensors)}


def _bias(num_experts: int, out_features: int, has_bias: bool, dtype: torch.dtype) -> list[StoredTensor]:
    shape = (num_experts, out_features)
    return [StoredTensor("_bias", shape, dtype, num_experts * out_features, 1)] if has_bias else []


def _bias_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"bias": tensors["_bias"]} if "_bias" in tensors else {}
