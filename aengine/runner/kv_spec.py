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
state is one block, whatever the length. Slabs are as large as the largest state; then layers lie in a slab behind each
other, so that a block need not have many tokens. Four layers with keys and values, twelve with a state:

             slab 0                    slab 1
    page 0 [ layer 3, layer 7        | layer 11, layer 15 ]   a block of group 0
    page 1 [ state of layer 0        | state of layer 1   ]   a sequence has one block of each of groups 1 to 6
    page 2 [ state of layer 2        | state of layer 4   ]
             ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from ..ipc.messages import STATE_BLOCK_SIZE, KVCacheGroup


@dataclass(frozen=True, slots=True)
class FullKV:
    """Keys and values of all tokens."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LatentKV(FullKV):
    """Keys of all tokens, whose last ``value_dim`` elements are the values, too."""

    value_dim: int


@dataclass(frozen=True, slots=True)
class WindowKV:
    """Keys and values of the last ``window`` tokens: the query at position p sees keys p - window + 1 to p."""

    num_kv_heads: int
    head_dim: int
    window: int


class StateTensor(NamedTuple):
    """A tensor of a state."""

    name: str
    shape: tuple[int, ...]  # shape of the state of one sequence
    dtype: torch.dtype = torch.float32
    per_position: int = 0  # entries by which it is longer for each token of a step that looks ahead

    @property
    def num_bytes(self) -> int:
        return _align(prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class StateKV:
    """A state of fixed size a sequence, whatever its length (a linear attention, a convolution)."""

    tensors: tuple[StateTensor, ...]  # tensors of the state, in the order in which they lie in memory
    num_ahead: int = 0  # tokens that a step may guess of a sequence, and its state can be rid of

    def with_ahead(self, num_ahead: int) -> StateKV:
        """Return what is kept where a step may guess so many tokens of a sequence; the same if this state can be
        rid of none. What is apart by position is what a convolution reads, at least."""
        if not any(tensor.per_position for tensor in self.tensors):
            return self
        most = max(num_ahead + 1, *(t.shape[0] for t in self.tensors if t.per_position))
        longer = (
            t._replace(shape=(t.shape[0] + most * t.per_position, *t.shape[1:])) if t.per_position else t
            for t in self.tensors
        )
        return StateKV(tuple(longer), most - 1)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SharedKV:
    """Shared KV: the layer reads what layer ``layer`` keeps."""

    layer: int


LayerKV = FullKV | WindowKV | StateKV | SharedKV


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Place of a layer's KV."""

    kv: FullKV | WindowKV | StateKV
    group: int  # index of the KV group whose block table leads to the layer's pages
    slab: int
    first_byte: int = 0  # first byte of the layer within the slab's part of a page


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pool's form: pages of ``num_slabs`` slabs, each of ``slab_bytes``."""

    groups: tuple[KVCacheGroup, ...]
    layers: tuple[LayerPlace | None, ...]  # one for each layer of the model; None: another pipeline stage has it
    num_slabs: int
    slab_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    def of_layers(self, own: range) -> KVLayout:
        """Return the layout on a pipeline stage that has these layers alone: groups and their blocks are those of all
        stages, but pages have no slab that only other layers use."""
        used = sorted({place.slab for i, place in enumerate(self.layers) if place is not None and i in own})
        new = {slab: number for number, slab in enumerate(used)}
        places = (
            None if place is None or i not in own else replace(place, slab=new[place.slab])
            for i, place in enumerate(self.layers)
        )
        return replace(self, layers=tuple(places), num_slabs=len(used))


_AnyKV = FullKV | WindowKV | StateKV


def lay_out_kv(layers: Sequence[LayerKV], block_size: int, itemsize: int) -> KVLayout:
    """Put the layers in groups.

    Args:
        block_size: tokens in a block of the layers with the most bytes a token; a multiple of it where a state needs
            a larger page
        itemsize: bytes of an element of keys and values
    """
    kinds: dict[_AnyKV, list[int]] = {}
    for index, kv in enumerate(layers):
        if not isinstance(kv, SharedKV):
            kinds.setdefault(kv, []).append(index)
    slabs = _choose_slabs({kv: len(own) for kv, own in kinds.items()}, block_size, itemsize)
    groups: list[KVCacheGroup] = []
    places: dict[int, LayerPlace] = {}
    for kv, own in kinds.items():
        num_bytes = slabs.bytes_of(kv)
        for begin in range(0, len(own), slabs.layers_in_page(kv)):
            for i, index in enumerate(own[begin : begin + slabs.layers_in_page(kv)]):
                slab, place = i % slabs.count, i // slabs.count
                places[index] = LayerPlace(kv, len(groups), slab, place * num_bytes)
            groups.append(_group(kv, slabs.block_size(kv)))
    for index, kv in enumerate(layers):
        if isinstance(kv, SharedKV):
            places[index] = places[kv.layer]
    return KVLayout(tuple(groups), tuple(places[i] for i in range(len(layers))), slabs.count, slabs.num_bytes)


_MOST_WASTE = 1 / 8
"""Share of all groups' slabs that may stay empty: those of a group that has fewer layers than there are slabs."""
_ALIGNMENT = 256  # bytes


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Slabs:
    """Form of a page."""

    count: int
    num_bytes: int  # bytes of each page
    num_tokens: int  # tokens in a block of the layers that take the most bytes a token
    stacked: int  # layers whose keys and values lie behind each other in one slab
    itemsize: int

    def block_size(self, kv: _AnyKV) -> int:
        """Return the tokens in a block of such a layer."""
        if isinstance(kv, StateKV):
            return STATE_BLOCK_SIZE
        size = self.num_tokens
        while 2 * size * self.stacked * _token_bytes(kv, self.itemsize) <= self.num_bytes:
            size *= 2
        return size

    def bytes_of(self, kv: _AnyKV) -> int:
        """Return how many bytes a block of one layer takes."""
        if isinstance(kv, StateKV):
            return kv.num_bytes
        return self.block_size(kv) * _token_bytes(kv, self.itemsize)

    def layers_in_page(self, kv: _AnyKV) -> int:
        return self.count * (self.num_bytes // kv.num_bytes if isinstance(kv, StateKV) else self.stacked)


def _choose_slabs(counts: dict[_AnyKV, int], block_size: int, itemsize: int) -> _Slabs:
    """Choose for so many layers of each kind."""
    most = max((_token_bytes(kv, itemsize) for kv in counts), default=0)
    largest_state = max((kv.num_bytes for kv in counts if isinstance(kv, StateKV)), default=0)
    if not most:
        return _Slabs(_choose_num_slabs(list(counts.values())), largest_state, STATE_BLOCK_SIZE, 1, itemsize)
    if largest_state > most * block_size:
        return _share_with_states(counts, largest_state, most * block_size, block_size, itemsize)
    one = _Slabs(1, most * block_size, block_size, 1, itemsize)
    return replace(one, count=_choose_num_slabs([-(-n // one.layers_in_page(kv)) for kv, n in counts.items()]))


def _choose_num_slabs(counts: list[int]) -> int:
    """Choose for kinds of so many layers each: the fewest groups with little waste; of those the least waste."""

    def cost(num_slabs: int) -> tuple[bool, int, int]:
        num_groups = sum(-(-count // num_slabs) for count in counts)
        empty = num_groups * num_slabs - sum(counts)
        return empty > _MOST_WASTE * num_groups * num_slabs, num_groups, empty

    return min(range(1, max(counts) + 1), key=cost)


def _share_with_states(
    counts: dict[_AnyKV, int], slab_bytes: int, least_bytes: int, block_size: int, itemsize: int
) -> _Slabs:
    """Choose for states that are larger than a block of keys and values (``least_bytes``): the fewest groups with
    little waste, both of a token's memory and of a sequence's states, half a block of tokens counted to them."""
    attending = {kv: n for kv, n in counts.items() if not isinstance(kv, StateKV)}
    state_bytes = sum(n * kv.num_bytes for kv, n in counts.items() if isinstance(kv, StateKV))

    def cost(slabs: _Slabs) -> tuple[bool, int, float]:
        page = slabs.count * slabs.num_bytes
        groups = {kv: -(-n // slabs.layers_in_page(kv)) for kv, n in counts.items()}
        used = [n * slabs.bytes_of(kv) / (groups[kv] * page) for kv, n in attending.items()]
        num_attending = sum(groups[kv] for kv in attending)
        fixed = page * (sum(groups.values()) - num_attending / 2)
        waste = max(1 - min(used), 1 - state_bytes / fixed)
        return waste > _MOST_WASTE, sum(groups.values()), waste

    most_stacked = min(max(attending.values()), slab_bytes // least_bytes)
    choices = []
    for count, stacked in product(range(1, max(counts.values()) + 1), range(1, most_stacked + 1)):
        num_tokens = slab_bytes // (stacked * least_bytes) * block_size
        choices.append(_Slabs(count, slab_bytes, num_tokens, stacked, itemsize))
    best = min(choices, key=cost)
    return best if not cost(best)[0] else min(choices, key=lambda slabs: cost(slabs)[2])


def _token_bytes(kv: _AnyKV, itemsize: int) -> int:
    if isinstance(kv, StateKV):
        return 0
    return num_kept(kv) * kv.num_kv_heads * kv.head_dim * itemsize


def num_kept(kv: FullKV | WindowKV) -> int:
    """Return how much is kept for each head of a token: a key and a value, or one that is both."""
    return 1 if isinstance(kv, LatentKV) else 2


def _group(kv: _AnyKV, block_size: int) -> KVCacheGroup:
    if isinstance(kv, StateKV):
        return KVCacheGroup("state", block_size, num_ahead=kv.num_ahead)
    if isinstance(kv, WindowKV):
        return KVCacheGroup("window", block_size, kv.window)
    return KVCacheGroup("full", block_size)
