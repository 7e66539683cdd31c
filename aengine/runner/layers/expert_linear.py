"""The matrices of a layer's experts: names in the checkpoint on one side, weights that multiply on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.expert_types import ExpertGate, ExpertPlan
from ..distributed.shares import NOTHING, Part, Share, part_of, sizes
from ..weights.expert_weights import ExpertWeights
from ..weights.scope import WeightScope
from ..weights.weight import Norm, StoredTensor
from .linear import Features, drop, part_of_matrix, shares_of

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
        experts: Share,
        in_features: Features,
        parts: Mapping[str, Features],
        *,
        bias: bool = False,
        layout: PackedLayout | None = None,
    ) -> None:
        """``parts``: name and output features of each matrix; one if there is a layout. Experts are divided among the
        ranks, or the features of each, as in `Linear`."""
        self.weights: ExpertWeights
        self._num_experts = experts.size
        self._experts = range(*experts.range)
        self._layout = layout
        columns = shares_of(in_features)
        # Added up over the ranks, the products have the bias once.
        self._drops_bias = scope.group.rank > 0 and any(share.is_divided for share in columns)
        self._cut: Part | None = None  # of the columns of a matrix that is loaded whole
        self._lock = Lock()  # several threads may load
        if layout is None:
            self._format = scope.format_of([f"0.{name}" for name in parts])
            self._want_each(scope, experts.total, columns, parts, bias)
        else:
            self._format = scope.formats.plain
            self._dtype = scope.formats.dtype
            self._want_packed(scope, experts, columns, parts, bias, layout)

    def _want_each(
        self,
        scope: WeightScope,
        num_experts: int,
        columns: Sequence[Share],
        parts: Mapping[str, Features],
        bias: bool,
    ) -> None:
        in_features = sizes(columns)[1]
        matrices = {name: shares_of(features) for name, features in parts.items()}
        stored_of = {name: self._format.tensors(sizes(rows)[1], in_features, bias) for name, rows in matrices.items()}
        own_bias = bias and not self._drops_bias
        num_missing = sum(own_bias or one.suffix != "bias" for stored in stored_of.values() for one in stored)
        for expert in range(num_experts):
            own: list[dict[str, Tensor]] = [{} for _ in parts]
            for kept, (name, rows) in zip(own, matrices.items(), strict=True):
                for stored in stored_of[name]:
                    full = f"{expert}.{name}.{stored.suffix}"
                    what = (full, stored.shape, stored.dtype)
                    if expert not in self._experts or (self._drops_bias and stored.suffix == "bias"):
                        scope.want(*what, drop, stored.num_parameters, NOTHING)
                        continue
                    place = expert - self._experts.start
                    put = partial(self._put_one, place, own, kept, stored.suffix, num_missing)
                    part = part_of_matrix(stored, rows, columns, full, scope.group.size)
                    scope.want(*what, put, stored.num_parameters, part)

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
        self,
        scope: WeightScope,
        experts: Share,
        columns: Sequence[Share],
        parts: Mapping[str, Features],
        bias: bool,
        layout: PackedLayout,
    ) -> None:
        ((name, features),) = parts.items()
        rows, in_features = shares_of(features), sizes(columns)[1]
        wanted = layout.tensors(experts.total, sizes(rows)[1], in_features, bias, self._dtype)
        kept: dict[str, Tensor] = {}
        num_wanted = len(wanted) - (bias and self._drops_bias)
        for stored in wanted:
            what = (f"{name}{stored.suffix}", stored.shape, stored.dtype)
            if self._drops_bias and stored.suffix == "_bias":
                scope.want(*what, drop, stored.num_parameters, NOTHING)
                continue
            part = part_of((experts,), 0, experts.total) or self._part_of_packed(stored, rows, columns)
            put = partial(self._put_packed, kept, stored.suffix, num_wanted, layout)
            scope.want(*what, put, stored.num_parameters, part)

    def _part_of_packed(self, stored: StoredTensor, rows: Sequence[Share], columns: Sequence[Share]) -> Part | None:
        """The part of a tensor of all experts; None, with ``_cut`` set, where ranks' columns meet within its blocks."""
        if stored.out_dim is not None and (part := part_of(rows, stored.out_dim, stored.shape[stored.out_dim])):
            return part
        if stored.in_dim is None:
            return None
        try:
            return part_of(columns, stored.in_dim, stored.shape[stored.in_dim])
        except ValueError:
            self._cut = part_of(columns, 1, sizes(columns)[1])
            return None

    def _put_packed(
        self, kept: dict[str, Tensor], suffix: str, wanted: int, layout: PackedLayout, tensor: Tensor
    ) -> None:
        with self._lock:
            kept[suffix] = tensor
            is_last = len(kept) == wanted
        if is_last:
            for expert in range(self._num_experts):
                own = layout.expert(kept, expert, self._dtype)
                if self._cut is not None:
                    own = {**own, "weight": self._cut.of(own["weight"])}
                self._put_expert(expert, [own], tensor.device)
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
