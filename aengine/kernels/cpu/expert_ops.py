"""Compiled ops of mixtures of experts as functions of tensors, which run at once or are recorded (tape.py).

    routing = route(logits, rule, correction)             # logits [n, experts]
    slots = plan_experts(routing, num_experts)
    hidden = expert_product(gate_up, gathered(activations(x), slots), slots, gate)       # [n * top_k, inner]
    add_experts(residual, down, activations(hidden), slots)

Memory of a step follows from its pairs, n * top_k, not from how many experts there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..expert_types import ExpertGate, ExpertSlots, Routing, RoutingRule
from .codes import Activations, PackedMatrix, can_gate
from .experts import ENTRY
from .library import library
from .packed.layouts import BLOCK, NUMBERS
from .packed.products import GATES
from .tape import Argument, empty, launch

_BYTES_OF_CHUNK = 2**17
_ALL_ROWS = 1 << 40
"""A grain: chunks are of all rows."""
_CHUNKS_OF_THREAD = 8
_LEAST_CHUNKS = 4


class PackedExperts:
    """Matrices of experts, all of one kind and shape, each in memory of its own."""

    def __init__(self, matrices: Sequence[PackedMatrix], biases: Sequence[Tensor | None]) -> None:
        """``biases``: float32 [out_features] of each, or of none."""
        self.kept = matrices, biases
        self.first = matrices[0]
        self.num_experts = len(matrices)
        self._places = np.array([one.memory.data_ptr() for one in matrices], np.int64)
        self._biases = np.array([one.data_ptr() for one in biases if one is not None], np.int64)
        assert {(one.kind, one.memory.shape) for one in matrices} == {(self.first.kind, self.first.memory.shape)}
        assert len(self._biases) in (0, len(matrices))

    def words(self, of: Activations, out: Tensor, features: int, tiles: int, of_chunk: int) -> list[Argument]:
        """Words that both products have."""
        first = self.first
        assert of.x.shape[1] == first.in_features
        size = first.in_features if first.kind in NUMBERS else first.in_features // BLOCK
        biases = self._biases.ctypes.data if len(self._biases) else None
        tensors: list[Argument] = [of.x, of.meta, self._places.ctypes.data, out, biases]
        return [*tensors, features, size, first.memory.shape[1], tiles, of_chunk]

    def kernel(self, name: str, of: Activations) -> str:
        return f"{name}.{self.first.kind}.{of.form}"


def route(logits: Tensor, rule: RoutingRule, correction: Tensor | None) -> Routing:
    """See kernels/routing.py. ``rule``: of one group."""
    rows, num_experts = logits.shape
    assert logits.is_contiguous() and rule.num_groups == 1
    choice = empty(rows, num_experts, torch.float32)
    ids, weights = empty(rows, rule.top_k, torch.int32), empty(rows, rule.top_k, torch.float32)
    launch(
        f"route.{rule.scoring}.{'chosen' if rule.renormalise else 'all'}",
        [logits, correction, choice, ids, weights, num_experts, rule.top_k, float(rule.scale)],
        rows,
    )
    return Routing(ids, weights)


def plan_experts(routing: Routing, num_experts: int) -> ExpertSlots:
    """Give each pair a slot."""
    rows, top_k = routing.expert_ids.shape
    assert routing.expert_ids.is_contiguous() and routing.weights.is_contiguous()
    slots = ExpertSlots(
        empty(rows, top_k, torch.int32), empty(rows, top_k, torch.float32), empty(rows, top_k * ENTRY, torch.int32)
    )
    launch(f"plan_experts.{num_experts}", [*routing, top_k, *slots], rows, grain=_ALL_ROWS)
    return slots


def gathered(of: Activations, slots: ExpertSlots) -> Activations:
    """Return the activations of each slot's token, [slots, size]."""
    rows, top_k = slots.tokens.shape
    x = empty(rows * top_k, of.x.shape[1], of.x.dtype)
    words: list[Argument] = [of.x, x, of.x.shape[1] * of.x.element_size()]
    meta = None
    if of.meta is not None:
        meta = empty(rows * top_k, of.meta.shape[1], of.meta.dtype)
        words += [of.meta, meta, of.meta.shape[1] * 4]
    else:
        words += [None, None, 0]
    launch("gather", [*words, slots.tokens], rows, top_k)
    return Activations(x, meta, of.form)


def expert_product(experts: PackedExperts, of: Activations, slots: ExpertSlots, gate: ExpertGate) -> Tensor:
    """Return each slot's gated activation of the product with its expert's matrix, float32 [slots, features / 2]."""
    first, top_k = experts.first, slots.tokens.shape[1]
    rows, is_fused = len(slots.tokens), gate.kind in GATES and not gate.is_interleaved and can_gate(experts.first)
    features = first.out_features // 2 if is_fused else first.out_features
    tiles, tile_bytes = len(first.memory) // (1 + is_fused), first.memory.shape[1]
    wanted = max(_LEAST_CHUNKS, tiles * tile_bytes // _BYTES_OF_CHUNK)
    of_chunk = max(1, tiles // wanted)
    chunks = -(-tiles // of_chunk)
    out = empty(rows * top_k, features, torch.float32)
    launch(
        f"{experts.kernel('expert_product', of)}.{gate.kind if is_fused else 'store'}",
        [*experts.words(of, out, features, tiles, of_chunk), slots.entries, chunks],
        rows,
        top_k * chunks,
        most=experts.num_experts * chunks,
    )
    if is_fused:
        return out
    gated = empty(rows * top_k, features // 2, torch.float32)
    kernel = f"gate_experts.{gate.kind}.{'interleaved' if gate.is_interleaved else 'halves'}"
    launch(kernel, [out, gated, features // 2, float(gate.alpha), float(gate.limit)], rows, top_k)
    return gated


def add_experts(residual: Tensor, experts: PackedExperts, of: Activations, slots: ExpertSlots) -> None:
    """Add each token's weighted sum of its slots' products to ``residual``, float32 [n, out_features]."""
    assert residual.stride(1) == 1 and residual.shape[1] == experts.first.out_features
    tiles, top_k = len(experts.first.memory), slots.tokens.shape[1]
    of_chunk = max(1, tiles // (_CHUNKS_OF_THREAD * library().team.num_threads))
    words = experts.words(of, residual, residual.shape[1], tiles, of_chunk)
    of_slots = slots.entries, residual.stride(0), experts.num_experts, slots.tokens, slots.weights, top_k
    launch(
        experts.kernel("add_experts", of), [*words, *of_slots], len(residual), -(-tiles // of_chunk), grain=_ALL_ROWS
    )
