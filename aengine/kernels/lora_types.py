"""What the kernels of adapters are given: see lora.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["AdapterMatrices", "AdapterPlan"]


class AdapterMatrices(NamedTuple):
    """Matrices of all slots, in the dtype of activations, without gaps; zeros where a slot's adapter has less. Of
    experts a slot is that of an adapter and one of these, those of each adapter one behind the other."""

    a: Tensor  # [slots, parts * rank, in_features]
    b: Tensor  # [slots, out_features, rank]
    starts: Tensor  # int32 [parts + 1]: the first of each part's output features, and their number
    sizes: tuple[int, ...]  # output features of each part

    @property
    def rank(self) -> int:
        return self.b.shape[2]


class AdapterPlan(NamedTuple):
    """Which tokens of a step have which slot; of experts, which pairs of a token and an expert."""

    slots: Tensor  # int32 [n]: of each token; the number of slots: none
    by_slot: list[tuple[int, Tensor]]  # slot and tokens, int64; empty where kernels sort
    order: Tensor | None = None  # int32 [blocks * block_m]: tokens by slot; n: none; unused if block_m is 1
    block_slots: Tensor | None = None  # int32 [blocks]: slot of each; -1: past all; None: there are no blocks
    block_m: int = 0  # tokens of a block; 1: block i has token i
    weights: Tensor | None = None  # float32 [n]: of pairs, 0 without an adapter; None: these are tokens

    @property
    def is_empty(self) -> bool:
        """Whether it is known that none has an adapter."""
        return self.block_slots is None and not self.by_slot
