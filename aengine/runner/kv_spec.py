"""Specs of what each layer of a model keeps of a sequence, and its layout in the pages of one pool.

A model's config says it layer by layer, in plain values (`LayerKV`). Layers that keep the same form a group, which has
a block table of its own; all groups take their blocks from one pool of equal pages. With six layers, every other one of
them windowed:

             slab 0      slab 1      slab 2
    page 0 [ layer 0   | layer 2   | layer 4   ]   a block of group 0: the layers that keep all tokens
    page 1 [ layer 1   | layer 3   | layer 5   ]   a block of group 1: the windowed layers
    page 2 [ layer 0   | layer 2   | layer 4   ]   another block of group 0
             ...

A slab is one tensor over all pages, so a model with one group has a tensor a layer. Layers of a kind that are more than
there are slabs form several groups. A layer with fewer bytes a token has more tokens in a block, by a power of two; a
state is one block, whatever the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ipc.messages import STATE_BLOCK_SIZE, KVCacheGroup

__all__ = ["FullKV", "KVLayout", "LatentKV", "LayerKV", "LayerPlace", "SharedKV", "StateKV", "WindowKV", "lay_out_kv"]


@dataclass(frozen=True, slots=True)
class FullKV:
    """Keys and values of all tokens."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class WindowKV:
    """Keys and values of the last ``window`` tokens: the query at position p sees keys p - window + 1 to p."""

    num_kv_heads: int
    head_dim: int
    window: int


@dataclass(frozen=True, slots=True)
class LatentKV:
    """A vector of ``width`` elements a token, which all heads share (multi-head latent attention)."""

    width: int


@dataclass(frozen=True, slots=True)
class StateKV:
    """A state of ``num_bytes`` a sequence, whatever its length (a linear attention, a convolution)."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class SharedKV:
    """Shared KV: the layer reads what layer ``layer`` keeps."""

    layer: int


LayerKV = FullKV | WindowKV | LatentKV | StateKV | SharedKV


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Place of a layer's KV."""

    kv: FullKV | WindowKV | LatentKV | StateKV
    group: int  # whose block table leads to it
    slab: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pool's form: pages of ``num_slabs`` slabs, each of ``slab_bytes``."""

    groups: tuple[KVCacheGroup, ...]
    layers: tuple[LayerPlace, ...]  # of every layer of the model, those that share another's included
    num_slabs: int
    slab_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes


def lay_out_kv(layers: Sequence[LayerKV], block_size: int, itemsize: int) -> KVLayout:
    """Put the layers in groups.

    Args:
        block_size: tokens in a block of the layers with the most bytes a token; more where a state needs a larger page
        itemsize: bytes of an element of keys and values
    """
    kinds: dict[FullKV | WindowKV | LatentKV | StateKV, list[int]] = {}
    for index, kv in enumerate(layers):
        if not isinstance(kv, SharedKV):
            kinds.setdefault(kv, []).append(index)
    num_slabs = _choose_num_slabs([len(own) for own in kinds.values()])
    slab_bytes = max((_token_bytes(kv, itemsize) * block_size for kv in kinds), default=0)
    largest_state = max((kv.num_bytes for kv in kinds if isinstance(kv, StateKV)), default=0)
    if not slab_bytes:
        slab_bytes = largest_state
    while slab_bytes < largest_state:
        slab_bytes *= 2
    groups: list[KVCacheGroup] = []
    places: dict[int, LayerPlace] = {}
    for kv, own in kinds.items():
        for begin in range(0, len(own), num_slabs):
            for slab, index in enumerate(own[begin : begin + num_slabs]):
                places[index] = LayerPlace(kv, len(groups), slab)
            groups.append(_group(kv, block_size, slab_bytes, itemsize))
    for index, kv in enumerate(layers):
        if isinstance(kv, SharedKV):
            places[index] = places[kv.layer]
    return KVLayout(tuple(groups), tuple(places[i] for i in range(len(layers))), num_slabs, slab_bytes)


_MOST_WASTE = 1 / 8
"""Share of all groups' slabs that may stay empty: those of a group that has fewer layers than there are slabs."""


def _choose_num_slabs(counts: list[int]) -> int:
    """Choose for kinds of so many layers each: the fewest groups with little waste; of those the least waste."""

    def cost(num_slabs: int) -> tuple[bool, int, int]:
        num_groups = sum(-(-count // num_slabs) for count in counts)
        empty = num_groups * num_slabs - sum(counts)
        return empty > _MOST_WASTE * num_groups * num_slabs, num_groups, empty

    return min(range(1, max(counts) + 1), key=cost)


def _token_bytes(kv: FullKV | WindowKV | LatentKV | StateKV, itemsize: int) -> int:
    if isinstance(kv, StateKV):
        return 0
    if isinstance(kv, LatentKV):
        return kv.width * itemsize
    return 2 * kv.num_kv_heads * kv.head_dim * itemsize


def _group(kv: FullKV | WindowKV | LatentKV | StateKV, block_size: int, slab_bytes: int, itemsize: int) -> KVCacheGroup:
    if isinstance(kv, StateKV):
        return KVCacheGroup("state", STATE_BLOCK_SIZE)
    while 2 * block_size * _token_bytes(kv, itemsize) <= slab_bytes:
        block_size *= 2
    if isinstance(kv, WindowKV):
        return KVCacheGroup("window", block_size, kv.window)
    return KVCacheGroup("full", block_size)
