"""Matrices of all experts in one tensor of the checkpoint, or in two, and how one expert's is taken out of it.

TransposedExperts   name [num_experts, in_features, out_features]
Mxfp4Experts        name_blocks uint8 [num_experts, out_features, in_features / 32, 16]: two codes a byte, the first in
                    the lower half; name_scales uint8 [num_experts, out_features, in_features / 32]: 2^(scale - 127).
                    OCP Microscaling Formats (MX) Specification 1.0, 2023: E2M1 with an E8M0 scale of 32
both                name_bias [num_experts, out_features]

MXFP4 becomes numbers as it is loaded, one expert at a time; bfloat16 holds them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.grouped_codes import values
from .weight import RANDOM_EXPONENTS, StoredTensor

__all__ = ["Mxfp4Experts", "TransposedExperts"]


class TransposedExperts:
    def tensors(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
    ) -> list[StoredTensor]:
        shape = (num_experts, in_features, out_features)
        weight = StoredTensor("", shape, dtype, num_experts * in_features * out_features, out_dim=2, in_dim=1)
        return [weight, *_bias(num_experts, out_features, has_bias, dtype)]

    def expert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        return {"weight": tensors[""].t(), **_bias_of(tensors)}


class Mxfp4Experts:
    def tensors(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
    ) -> list[StoredTensor]:
        shape = (num_experts, out_features, in_features // 32)
        return [
            StoredTensor("_blocks", (*shape, 16), torch.uint8, num_experts * out_features * in_features, 1, 2),
            StoredTensor("_scales", shape, torch.uint8, 0, 1, 2, drawn=RANDOM_EXPONENTS),
            *_bias(num_experts, out_features, has_bias, dtype),
        ]

    def expert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        blocks, scales = tensors["_blocks"], tensors["_scales"]
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [out_features, in_features / 32, 32]
        weight = torch.ldexp(values("e2m1", codes), scales.int()[..., None] - 127).flatten(-2).to(dtype)
        return {"weight": weight, **_bias_of(tensors)}


def _bias(num_experts: int, out_features: int, has_bias: bool, dtype: torch.dtype) -> list[StoredTensor]:
    shape = (num_experts, out_features)
    return [StoredTensor("_bias", shape, dtype, num_experts * out_features, 1)] if has_bias else []


def _bias_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"bias": tensors["_bias"]} if "_bias" in tensors else {}
