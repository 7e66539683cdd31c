"""Values that the ops of a mixture of experts share: how tokens choose experts, and what is multiplied by what.

Pair ``token * top_k + rank`` is the token's expert of that rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import Activation
from .expert_tilings import ExpertShape, ExpertTiling
from .grouped_codes import GroupedCodes


@dataclass(frozen=True, slots=True)
class RoutingRule:
    top_k: int  # number of experts that a token chooses
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # the weights of the chosen add up to ``scale``
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1  # number of groups that a token chooses from

    @property
    def group_best(self) -> int:
        """Number of a group's best experts whose scores say how good it is."""
        return 2 if self.scoring == "sigmoid" else 1


class Routing(NamedTuple):
    expert_ids: Tensor  # int32 [n, top_k], the best first; those of a token differ; num_experts: one that is not here
    weights: Tensor  # float32 [n, top_k]; 0 of one that is not here


class ExpertGate(NamedTuple):
    kind: Activation | Literal["clamped_swiglu"] = "silu"
    is_interleaved: bool = False  # gate and up alternate; else all of the gate comes first
    alpha: float = 1.702
    limit: float = 7.0


class ExpertBlocks(NamedTuple):
    """Slots hold pairs, in blocks of one expert each; an expert's last block is filled up with empty slots."""

    order: Tensor  # int32 [slots]: the slot's pair; the number of pairs for an empty one
    slots: Tensor  # int32 [pairs]: the pair's slot
    experts: Tensor  # int32 [blocks]: the block's expert; -1 past the last block
    ends: Tensor  # int32 [num_experts]: the slot behind each expert's last one


class ExpertSlots(NamedTuple):
    """Slots hold pairs, those of each expert behind each other, for a CPU's compiled kernels (cpu/experts.py)."""

    tokens: Tensor  # int32 [n, top_k]: the slot's token
    weights: Tensor  # float32 [n, top_k]: the slot's weight
    entries: Tensor  # int32 [n, top_k * 3]: of each expert that is used its number, first slot, slots; then zeros


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    routing: Routing
    shape: ExpertShape
    chosen: list[tuple[int, Tensor]]  # (chosen expert, int64 tensor of its pairs) on the CPU
    tiling: ExpertTiling | None = None  # tile sizes of the Triton kernels; None on the CPU
    blocks: ExpertBlocks | None = None  # blocks of pairs for the Triton kernels; None: each pair is computed alone
    is_partial: bool = False  # other ranks have some of the chosen experts
    slots: ExpertSlots | None = None  # slots of pairs for a CPU's compiled kernels, which ``chosen`` is empty for

    @property
    def num_pairs(self) -> int:
        return self.routing.expert_ids.numel()


class ExpertMatrices(NamedTuple):
    """One matrix of each expert, stacked, with their biases and scales."""

    weight: Tensor  # [num_experts, out_features, in_features], of any strides; numbers, or int8 codes with a scale
    bias: Tensor | None = None  # [num_experts, out_features]
    scale: Tensor | None = None  # float32 [num_experts, out_features]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, out_features, in_features)."""
        num_experts, n, k = self.weight.shape
        return num_experts, n, k

    @property
    def quantises_x(self) -> bool:
        return False


class ExpertCodes(NamedTuple):
    """One matrix of each expert in codes with a scale a group; they lie below each other in one matrix."""

    codes: GroupedCodes  # [num_experts * out_features, in_features]; no two experts share a scale
    num_experts: int
    bias: Tensor | None = None  # [num_experts, out_features]
    quantises_x: bool = False  # x may be rounded to FP8, with a scale for 128 columns of a row; of FP8 in blocks

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, out_features, in_features)."""
        n, k = self.codes.shape
        return self.num_experts, n // self.num_experts, k

    def of(self, expert: int) -> GroupedCodes:
        """Return one expert's, as views."""
        own: dict[str, Any] = {
            name: tensor.view(self.num_experts, -1, *tensor.shape[1:])[expert]
            for name, tensor in self.codes.tensors().items()
        }
        return replace(self.codes, **own)


def can_group(*matrices: ExpertMatrices | ExpertCodes) -> bool:
    """Return whether torch's grouped product takes them all: numbers of 16 bits, in rows of multiples of 16 bytes."""
    return hasattr(F, "grouped_mm") and all(
        isinstance(one, ExpertMatrices)
        and one.scale is None
        and one.weight.dtype in (torch.bfloat16, torch.float16)
        and all(stride % 8 == 0 for stride in one.weight.stride() if stride != 1)
        for one in matrices
    )


class InputNorm(NamedTuple):
    weight: Tensor  # [in_features]
    eps: float
