"""The matrices of a layer's experts: names in the checkpoint on one side, weights that multiply on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.expert_types import ExpertGate, ExpertPlan
from ..weights.expert_weights import ExpertWeights
from ..weights.scope import WeightScope
from ..weights.weight import Norm, StoredTensor

__all__ = ["ExpertLinear", "PackedLayout"]


class PackedLayout(Protocol):
    """How a checkpoint keeps a matrix of all experts in one tensor, or in a few; in memory it is plain."""

    def tensors(
        self, num_experts: int, out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
    ) -> list[StoredTensor]:
        """Return the tensors by suffix, which follows the matrix's name immediately."""

    def expert(self, tensors: Mapping[str, Tensor], index: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Make one expert's "weight" [out_features, in_features], and "bias" if there is one."""


class ExpertLinear:
    """y = x W^T + b by the matrices of the experts that a token takes, possibly of several below each other (gate, up).

    The checkpoint has a matrix an expert, "7.up_proj.weight" below the scope; or, with a layout, all in one tensor,
    "up_proj". The verbs are those of `ExpertWeights`.
    """

    def __init__(
        self,
        scope: WeightScope,
        num_experts: int,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        layout: PackedLayout | None = None,
    ) -> None:
        """``parts``: name and output features of each matrix; one if there is a layout."""
        self.weights: ExpertWeights
        self._num_experts = num_experts
        self._layout = layout
        self._lock = Lock()  # several threads may load
        if layout is None:
            self._format = scope.format_of([f"0.{name}" for name in parts])
            self._want_each(scope, in_features, parts, bias)
        else:
            self._format = scope.formats.plain
            self._dtype = scope.formats.dtype
            self._want_packed(scope, in_features, parts, bias, layout)

    def _want_each(self, scope: WeightScope, in_features: int, parts: Mapping[str, int], bias: bool) -> None:
        kept: list[list[dict[str, Tensor]]] = [[{} for _ in parts] for _ in range(self._num_experts)]
        num_missing = sum(len(self._format.tensors(size, in_features, bias)) for size in parts.values())
        for expert, own in enumerate(kept):
            for part, (name, size) in zip(own, parts.items(), strict=True):
                for stored in self._format.tensors(size, in_features, bias):
                    put = partial(self._put_one, expert, own, part, stored.suffix, num_missing)
                    full = f"{expert}.{name}.{stored.suffix}"
                    scope.want(full, stored.shape, stored.dtype, put, stored.num_parameters)

    def _put_one(
        self,
        expert: int,
        own: list[dict[str, Tensor]],
        part: dict[str, Tensor],
        suffix: str,
        wanted: int,
        tensor: Tensor,
    ) -> None:
        with self._lock:
            part[suffix] = tensor
            is_last = sum(map(len, own)) == wanted
        if is_last:
            self._put_expert(expert, own, tensor.device)
            own.clear()

    def _want_packed(
        self, scope: WeightScope, in_features: int, parts: Mapping[str, int], bias: bool, layout: PackedLayout
    ) -> None:
        ((name, size),) = parts.items()
        stored = layout.tensors(self._num_experts, size, in_features, bias, self._dtype)
        kept: dict[str, Tensor] = {}
        for suffix, shape, dtype, num_parameters in stored:
            put = partial(self._put_packed, kept, suffix, len(stored), layout)
            scope.want(f"{name}{suffix}", shape, dtype, put, num_parameters)

    def _put_packed(
        self, kept: dict[str, Tensor], suffix: str, wanted: int, layout: PackedLayout, tensor: Tensor
    ) -> None:
        with self._lock:
            kept[suffix] = tensor
            is_last = len(kept) == wanted
        if is_last:
            for expert in range(self._num_experts):
                self._put_expert(expert, [layout.expert(kept, expert, self._dtype)], tensor.device)
            kept.clear()

    def _put_expert(self, expert: int, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        with self._lock:
            if not hasattr(self, "weights"):
                self.weights = self._format.make_experts(self._num_experts, device)
        self.weights.put(expert, parts)

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        return self.weights.gated_after_norm(x, norm, plan, gate)

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        self.weights.add_to(residual, hidden, plan)
