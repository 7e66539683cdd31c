"""8-bit integer weights with a scale a row, as compressed-tensors keeps them: W = codes * scale.

    format of the config   tensors
    "int-quantized"        weight int8 [N, K], weight_scale [N, 1], or [1] of a matrix
    "pack-quantized"       weight_packed int32 [N, K / 4]: four codes, each plus 128, the first in the lowest byte;
                           weight_scale [N, 1]

Both mean symmetric codes of 8 bits, one scale for each output feature or for all. Activations are not quantised, also
where the checkpoint's recipe would (W8A8): that is nearer to the model that it was made from.

On a CPU compiled kernels multiply the codes; without them these become numbers for each product: half the memory of 16
bits, and slower than they are. torch's own product for 8-bit weights is not used: with float32 it is slower still, and
some shapes crash it (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....kernels.expert_types import ExpertMatrices
from ....kernels.grouped_codes import GroupedCodes
from ..expert_weights import SeparateExperts
from ..weight import ExpertWeights, StoredTensor, Weight, WeightFormat, random_scales
from . import faults
from .grouped import compiled_format
from .scaled import ScaledExperts, ScaledWeight


@dataclass(frozen=True, slots=True)
class Int8Format:
    is_packed: bool
    of_rows: bool = True  # a scale a row; else one a matrix
    plain: WeightFormat | None = None  # the format of plain numbers
    name: str = "int8"

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        count = out_features * in_features
        if self.is_packed:
            found = [StoredTensor("weight_packed", (out_features, in_features // 4), torch.int32, count, in_dim=1)]
        else:
            found = [StoredTensor("weight", (out_features, in_features), torch.int8, count, in_dim=1)]
        shape, out_dim = ((out_features, 1), 0) if self.of_rows else ((), None)
        how: dict[str, Any] = {"drawn": random_scales(128), "fault": faults.of_scale}
        found.append(StoredTensor("weight_scale", shape, torch.float32, 0, out_dim, **how))
        if has_bias:
            found.append(StoredTensor("bias", (out_features,), torch.float32, out_features))
        return found

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        codes = unpacked(tensors["weight_packed"]) if self.is_packed else tensors["weight"]
        bias = tensors.get("bias")
        scale = tensors["weight_scale"].float().expand(len(codes), 1).contiguous()
        if (compiled := compiled_format(self.plain)) is not None and codes.shape[1] % 32 == 0:
            made = compiled.make_of_codes(GroupedCodes("int8", codes.contiguous(), scale, codes.shape[1]), bias)
            if made is not None:
                return made
        return ScaledWeight(codes, scale.flatten(), None if bias is None else bias.float())

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        """On a GPU the codes are stacked, and become numbers as they are multiplied."""
        is_cpu = device.type == "cpu"
        return SeparateExperts(self.make, tensors) if is_cpu else Int8Experts(num_experts, tensors, device)


def unpacked(words: Tensor) -> Tensor:
    """int8 [..., 4 n] codes of int32 [..., n] words; on a GPU, where these are the loader's own, in their memory."""
    codes = words.view(torch.int8)
    return codes ^ -128 if words.device.type == "cpu" else codes.bitwise_xor_(-128)  # subtracts 128, by a flip of bit 7


class Int8Experts(ScaledExperts):
    __slots__ = ()

    def finish(self, expert: int) -> None:
        words = self.stacks.get("weight_packed")
        if words is not None:
            words[expert].view(torch.int8).bitwise_xor_(-128)  # as in `unpacked`
        super().finish(expert)

    def _matrices(self) -> ExpertMatrices:
        words = self.stacks.get("weight_packed")
        if words is None:
            return super()._matrices()
        return ExpertMatrices(words.view(torch.int8), self.stacks.get("bias"), self.stacks["weight_scale"].squeeze(2))
