"""Weights in FP8 (float8_e4m3fn), as checkpoints keep them, or made of a 16-bit checkpoint as it is loaded.

    quant_method          scale                                      its tensor
    compressed-tensors    a row [N, 1], or a matrix [1]              weight_scale; format "float-quantized"
    fbgemm_fp8            a row [N, 1]                               weight_scale
    modelopt              a matrix []                                weight_scale; quant_algo "FP8"
    fp8                   a matrix []                                weight_scale; weight_scale_inv of transformers
    fp8                   a block [N / 128, K / 128]                 weight_scale_inv; with "weight_block_size"

W = scale * codes. A GPU multiplies the codes: with a scale a row or a matrix as `ScaledWeight`, with a scale a block as
`GroupedWeight`. On a CPU, and in blocks whose width is no power of two, they become plain numbers as they are loaded.

Recipes of checkpoints quantise activations, too, but for compressed-tensors' without input_activations. So may kernels
then, and those of what is made here, where that is faster: with a scale a row of its largest number, also where the
checkpoint has a static one, or a recipe with a scale a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ..expert_weights import SeparateExperts
from ..weight import ExpertWeights, StoredTensor, Weight, WeightFormat, random_scales
from . import faults
from .grouped import CodedExperts, GroupedCodes, fits, grouped_weight
from .matrices import AllButIgnored, Asked, ignored_matrices
from .scaled import ScaledExperts, ScaledWeight
from .unpacked import DequantisedExperts, log_dequantised

__all__ = ["Fp8Format", "MadeFp8Format", "read_fp8_matrices"]

_LARGEST = 448.0  # the largest number of float8_e4m3fn
_NUMBERS_AT_ONCE = 2**24
"""Numbers that are quantised at once, in float32: 64 MiB."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Codes as the checkpoint has them."""

    plain: WeightFormat  # the format of what becomes plain numbers
    scale: str = "weight_scale"  # name of the scale's tensor
    of_rows: bool = True  # a scale a row; else one a matrix, or with ``block`` one a block
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    quantises_x: bool = False  # activations may be quantised, as the checkpoint's recipe does
    dequantises: bool = False  # experts that a GPU can't multiply become plain numbers; else that is an error
    name: str = "fp8"

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        shape, scales = (out_features, in_features), random_scales(_LARGEST)
        found = [
            StoredTensor(
                "weight", shape, torch.float8_e4m3fn, out_features * in_features, in_dim=1, fault=faults.of_fp8
            )
        ]
        if self.block is not None:
            blocks = (-(-out_features // self.block[0]), -(-in_features // self.block[1]))
            scale = StoredTensor(self.scale, blocks, torch.float32, 0, in_dim=1, drawn=scales, fault=faults.of_scale)
            found.append(scale._replace(block=self.block))
        elif self.of_rows:
            found.append(
                StoredTensor(self.scale, (out_features, 1), torch.float32, 0, drawn=scales, fault=faults.of_scale)
            )
        else:
            found.append(StoredTensor(self.scale, (), torch.float32, 0, None, drawn=scales, fault=faults.of_scale))
        if has_bias:
            found.append(StoredTensor("bias", (out_features,), torch.float32, out_features))
        return found

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        codes, bias, scale = tensors["weight"], tensors.get("bias"), tensors[self.scale].float()
        if codes.device.type != "cpu" and self.block is None:
            rows = scale.expand(len(codes), 1).flatten().contiguous()
            return ScaledWeight(codes, rows, None if bias is None else bias.float(), self.quantises_x)
        if self.block is not None and fits("e4m3", codes.shape[1], self.block[1]):
            return grouped_weight(self._codes(tensors), bias, self.plain, quantises_x=self.quantises_x)
        numbers = {"weight": self._numbers(tensors)}
        return self.plain.make(numbers if bias is None else {**numbers, "bias": bias})

    def _codes(self, tensors: Mapping[str, Tensor]) -> GroupedCodes:
        """Return the matrix' codes with a scale a block."""
        assert self.block is not None
        rows, columns = self.block
        return GroupedCodes("e4m3", tensors["weight"], tensors[self.scale].float().contiguous(), columns, rows=rows)

    def expert_codes(self, tensors: Mapping[str, Tensor]) -> GroupedCodes:
        """Return `_codes` with scales of as many rows as divide the matrix: experts' lie below each other."""
        codes, n = self._codes(tensors), len(tensors["weight"])
        rows = min(codes.rows, n)
        own = gcd(rows, n)
        return replace(codes, scale=codes.scale.repeat_interleave(rows // own, 0)[: n // own], rows=own)

    def _numbers(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """float32 [N, K]."""
        codes, scale = tensors["weight"], tensors[self.scale].float()
        if self.block is not None:
            (rows, columns), (n, k) = self.block, codes.shape
            scale = scale.repeat_interleave(min(rows, n), 0)[:n].repeat_interleave(min(columns, k), 1)[:, :k]
        return codes.float().mul_(scale)

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        """Raises ModelLoadError: on a GPU, for blocks that it does not multiply, and that may not become plain
        numbers."""
        if device.type == "cpu":
            return SeparateExperts(self.make, tensors)
        if self.block is None:
            return ScaledExperts(num_experts, tensors, device, self.scale)
        (weight,) = (tensor for tensor in tensors if tensor.suffix == "weight")
        if fits("e4m3", weight.shape[1], self.block[1]):
            made = CodedExperts(self.expert_codes, num_experts, tensors, device)
            made.quantises_x = self.quantises_x
            return made
        problem = f"experts in FP8 in blocks of {self.block[1]} columns are no codes for GPUs"
        if not self.dequantises:
            cure = "use on_unsupported_format='dequantise', or give 16 bits"
            raise ModelLoadError(f"quantization_config: {problem}; {cure}")
        log_dequantised("experts in fp8", problem)
        return DequantisedExperts(self._numbers, self.plain, num_experts, tensors, device)


@dataclass(frozen=True, slots=True)
class MadeFp8Format:
    """Plain numbers in the checkpoint, which become codes with a scale a row as they are loaded."""

    plain: WeightFormat
    name: str = "fp8"

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        weight, *bias = self.plain.tensors(out_features, in_features, has_bias)
        return [weight._replace(kept=torch.float8_e4m3fn), *bias]

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        codes, scale = quantised(tensors["weight"])
        bias = tensors.get("bias")
        return ScaledWeight(codes, scale, None if bias is None else bias.float(), quantises_x=True)

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        return MadeFp8Experts(num_experts, tensors, device)


class MadeFp8Experts(ScaledExperts):
    """Each expert's numbers have memory until all of them have come."""

    __slots__ = ("_incomplete", "_stored")

    def __init__(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> None:
        self._incomplete: dict[int, Tensor] = {}  # numbers of incomplete experts
        (self._stored,) = (tensor for tensor in tensors if tensor.suffix == "weight")
        kept = [tensor for tensor in tensors if tensor.suffix != "weight"]
        kept.append(self._stored._replace(dtype=torch.float8_e4m3fn))
        kept.append(StoredTensor("weight_scale", (self._stored.shape[0], 1), torch.float32, 0))
        super().__init__(num_experts, kept, device)

    def room(self, expert: int, suffix: str, rows: slice) -> Tensor:
        if suffix != "weight":
            return super().room(expert, suffix, rows)
        with self._lock:
            if expert not in self._incomplete:
                shape, dtype = self._stored.shape, self._stored.dtype
                self._incomplete[expert] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._incomplete[expert][rows]

    def finish(self, expert: int) -> None:
        codes, scale = quantised(self._incomplete.pop(expert))
        everything = slice(None)
        super().room(expert, "weight", everything).copy_(codes)
        super().room(expert, "weight_scale", everything).copy_(scale[:, None])
        super().finish(expert)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes float8_e4m3fn [N, K] and scales float32 [N], of numbers [N, K]: a row's largest becomes 448."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for begin in range(0, len(weight), rows := max(1, _NUMBERS_AT_ONCE // weight.shape[1])):
        own = slice(begin, begin + rows)
        numbers = weight[own].float()
        scale[own] = numbers.abs().amax(1).div_(_LARGEST).clamp_(min=1e-12)
        codes[own] = numbers / scale[own, None]
    return codes, scale


def read_fp8_matrices(asked: Asked) -> AllButIgnored | None:
    """Return what a quantization_config describes; None if it is none of these. (compressed.py reads
    compressed-tensors'.)"""
    found = _read_fp8(asked.config, asked.plain)
    if found is None:
        return None
    return AllButIgnored(replace(found, quantises_x=True, dequantises=asked.dequantises), ignored_matrices(asked))


def _read_fp8(config: Mapping[str, Any], plain: WeightFormat) -> Fp8Format | None:
    method = config.get("quant_method")
    if method == "fbgemm_fp8":
        return Fp8Format(plain)
    if method == "modelopt":
        return Fp8Format(plain, of_rows=False) if config.get("quant_algo") == "FP8" else None
    if method == "fp8":
        block = config.get("weight_block_size")
        if block is None:  # transformers' name where it says that there are none, else that of AutoFP8
            name = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
            return Fp8Format(plain, name, of_rows=False)
        sizes = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        return Fp8Format(plain, "weight_scale_inv", of_rows=False, block=(block[0], block[1])) if sizes else None
    return None
