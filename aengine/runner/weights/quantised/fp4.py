"""Weights in FP4 (E2M1): W = codes * scale, two codes a byte, of which the lower half is the first.

    format                  tensors
    NVFP4 of ModelOpt       weight uint8 [N, K / 2], weight_scale e4m3 [N, K / 16], weight_scale_2 []: scales multiplied
    NVFP4 of compressed-    weight_packed uint8 [N, K / 2], weight_scale e4m3 [N, K / 16], weight_global_scale [1]: the
      tensors               first divided by the second
    MXFP4 of compressed-    weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]: 2^(scale - 127)
      tensors

Activations are not quantised, also where the checkpoint's recipe would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..weight import RANDOM_EXPONENTS, StoredTensor, random_scales
from . import faults
from .matrices import AllButIgnored, Asked, ignored_matrices
from .unpacked import UnpackedCodes, UnpackedFormat, codes_of_bytes


@dataclass(frozen=True, slots=True)
class Fp4Format(UnpackedFormat):
    name: str  # "nvfp4" or "mxfp4"
    weight: str = "weight_packed"  # name of the codes' tensor
    matrix_scale: str | None = None  # name of the scale of the whole matrix
    divides: bool = False  # the scales are divided by that of the matrix

    @property
    def _group(self) -> int:
        return 16 if self.name == "nvfp4" else 32

    def sizes(self, in_features: int) -> tuple[int, int]:
        return 4, self._group

    def codes_tensors(self, out_features: int, in_features: int) -> list[StoredTensor]:
        if in_features % self._group:
            raise ValueError(
                f"{in_features} columns are no multiple of {self._group}, which have a scale in {self.name}"
            )
        dtype = torch.float8_e4m3fn if self.name == "nvfp4" else torch.uint8
        groups = (out_features, in_features // self._group)
        scales = (224, 448) if self.name == "nvfp4" else RANDOM_EXPONENTS
        fault = faults.of_scale if self.name == "nvfp4" else faults.of_exponents
        count = out_features * in_features
        found = [
            StoredTensor(self.weight, (out_features, in_features // 2), torch.uint8, count, in_dim=1),
            StoredTensor("weight_scale", groups, dtype, 0, in_dim=1, drawn=scales, fault=fault),
        ]
        if self.matrix_scale is not None:
            whole = random_scales(6 * 448)
            whole = (1 / whole[1], 1 / whole[0]) if self.divides else whole
            fault = faults.of_divisor if self.divides else faults.of_scale
            found.append(StoredTensor(self.matrix_scale, (), torch.float32, 0, None, drawn=whole, fault=fault))
        return found

    def unpack(self, tensors: Mapping[str, Tensor]) -> UnpackedCodes:
        codes, scale = codes_of_bytes(tensors[self.weight]), tensors["weight_scale"]
        if self.name == "mxfp4":
            scale = scale.view(torch.float8_e8m0fnu)
        row_scale = None
        if self.matrix_scale is not None:
            row_scale = tensors[self.matrix_scale].float().expand(len(codes), 1).flatten().contiguous()
            row_scale = row_scale.reciprocal() if self.divides else row_scale
        return UnpackedCodes("e2m1", codes, scale, self._group, None, row_scale)


def read_modelopt_fp4(asked: Asked) -> AllButIgnored | None:
    """Return what a quantization_config of ModelOpt describes; None if it is not NVFP4."""
    method, algorithm = asked.config.get("quant_method"), asked.config.get("quant_algo")
    if method not in ("modelopt", "modelopt_fp4") or algorithm != "NVFP4":
        return None
    base = asked.plain, asked.device.type == "cpu", asked.dequantises
    return AllButIgnored(Fp4Format(*base, "nvfp4", "weight", "weight_scale_2"), ignored_matrices(asked))
