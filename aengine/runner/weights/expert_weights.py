"""The matrices of a layer's experts, in two ways.

    StackedExperts     one tensor for all experts, through the ops of kernels/experts.py; on a GPU without a look at
                       which experts were chosen, so that a step can be captured
    SeparateExperts    a `Weight` for each, of any format; on a CPU, where the chosen ones are known

Codes with a scale a group are stacked in quantised/grouped.py.

The checkpoint's tensors are copied to their rows of the stack, or of their expert's matrix, as each is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

from ...kernels.expert_gate import gate_experts
from ...kernels.expert_types import ExpertGate, ExpertMatrices, ExpertPlan, InputNorm, can_group
from ...kernels.experts import add_experts, add_weighted, expert_product
from ...kernels.rms_norm import rms_norm
from .weight import ExpertWeights, MultipliedExperts, Norm, StoredTensor, Weight


class StackedExperts(ExpertWeights):
    """Stacked matrices of experts as plain numbers of one dtype. (`ScaledExperts` have 8-bit codes.)"""

    __slots__ = ("_device", "_lock", "_num_experts", "_tensors", "matrices", "stacks")

    def __init__(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> None:
        self.matrices: ExpertMatrices | None = None
        self.stacks: dict[str, Tensor] = {}  # [num_experts, ...] for each tensor, by suffix
        self._num_experts = num_experts
        self._tensors = {tensor.suffix: tensor for tensor in tensors}
        self._device = device
        self._lock = Lock()

    @property
    def can_group(self) -> bool:
        return self.matrices is not None and can_group(self.matrices)

    def room(self, expert: int, suffix: str, rows: slice) -> Tensor:
        with self._lock:
            if suffix not in self.stacks:
                stored = self._tensors[suffix]
                shape = (self._num_experts, *stored.shape)
                self.stacks[suffix] = torch.empty(shape, dtype=stored.dtype, device=self._device)
        return self.stacks[suffix][expert, rows]

    def finish(self, expert: int) -> None:
        if self.matrices is None:
            self.matrices = self._matrices()

    def _matrices(self) -> ExpertMatrices:
        return ExpertMatrices(self.stacks["weight"], self.stacks.get("bias"))

    def multiply(self, x: Tensor, plan: ExpertPlan) -> Tensor:
        assert self.matrices is not None
        return expert_product(x, self.matrices, plan)

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        assert self.matrices is not None
        return expert_product(x, self.matrices, plan, gate, InputNorm(norm.weight, norm.eps))

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        assert self.matrices is not None
        add_experts(residual, hidden, self.matrices, plan)


class GatheredExperts(ExpertWeights):
    """Each expert's tensors have memory until all of them have come, and become something else then."""

    __slots__ = ("_device", "_lock", "_rooms", "_tensors")

    def __init__(self, tensors: Sequence[StoredTensor], device: torch.device) -> None:
        self._tensors = {tensor.suffix: tensor for tensor in tensors}
        self._device = device
        self._rooms: dict[int, dict[str, Tensor]] = {}  # tensors of incomplete experts, by expert and suffix
        self._lock = Lock()

    def room(self, expert: int, suffix: str, rows: slice) -> Tensor:
        with self._lock:
            own = self._rooms.setdefault(expert, {})
            if suffix not in own:
                shape, dtype = self._tensors[suffix].shape, self._tensors[suffix].dtype
                own[suffix] = torch.empty(shape, dtype=dtype, device=self._device)
        return own[suffix][rows]


class SeparateExperts(GatheredExperts):
    """Each expert's matrix is a `Weight`. Those of a CPU's compiled kernels, if all are of a kind, are multiplied
    together."""

    __slots__ = ("_make", "_together", "_weights")

    def __init__(self, make: Callable[[Mapping[str, Tensor]], Weight], tensors: Sequence[StoredTensor]) -> None:
        super().__init__(tensors, torch.device("cpu"))
        self._make = make
        self._weights: dict[int, Weight] = {}
        self._together: MultipliedExperts | None = None

    @property
    def is_compiled(self) -> bool:
        """See `ExpertWeights`; asked once all have come."""
        if self._together is None:
            first, *others = (self._weights[expert] for expert in range(len(self._weights)))
            self._together = first.beside(others)
        return self._together is not None

    def finish(self, expert: int) -> None:
        made = self._make(self._rooms.pop(expert))
        if expert in self._weights:
            self._weights[expert].copy_from(made)
        else:
            self._weights[expert] = made

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        if plan.slots is not None and self._together is not None:
            return self._together.gated_after_norm(x, norm, plan, gate)
        return gate_experts(self.multiply(rms_norm(x, norm.weight, norm.eps), plan), gate)

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        if plan.slots is not None and self._together is not None:
            self._together.add_to(residual, hidden, plan)
        elif plan.chosen:
            add_weighted(residual, self._multiply([hidden[pairs] for _, pairs in plan.chosen], plan), plan)

    def multiply(self, x: Tensor, plan: ExpertPlan) -> Tensor:
        if not plan.chosen:
            return x.new_empty(plan.num_pairs, 0)
        return self._multiply([x[pairs // plan.shape.top_k] for _, pairs in plan.chosen], plan)

    def _multiply(self, rows: Sequence[Tensor], plan: ExpertPlan) -> Tensor:
        """Return [pairs, out_features], for the rows of each chosen expert's pairs."""
        products = [self._weights[expert].multiply(x) for (expert, _), x in zip(plan.chosen, rows, strict=True)]
        joined = torch.cat(products)
        out = joined.new_zeros(plan.num_pairs, joined.shape[1])  # an expert that is not here adds nothing
        out[torch.cat([pairs for _, pairs in plan.chosen])] = joined
        return out
