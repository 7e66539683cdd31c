"""The memory of the one pool of pages (runner/kv_spec.py), a layer's part of it, and what a KV cache is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.kv_codes import kept_kv, kv_numbers
from ..distributed.stage import WHOLE, PipelineStage
from ..kv_spec import FullKV, KVLayout, LatentKV, LayerPlace, StateKV, WindowKV, lay_out_kv, num_kept
from ..lazy_zeros import NewZeros, lazy_zeros
from ..model_config import AttendingLayers, ModelConfig
from .kv_format import KVFormat

Rows = npt.NDArray[np.int64]
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """Sizes and dtypes of a KV cache."""

    config: ModelConfig | AttendingLayers
    num_blocks: int
    block_size: int
    dtype: torch.dtype  # dtype of the computation
    device: torch.device
    max_num_seqs: int
    max_model_len: int
    kv_format: KVFormat | None = None  # what keys and values are kept as; None: numbers of ``dtype``
    stage: PipelineStage = WHOLE  # the pipeline stage whose layers the pages are for
    max_positions: int = 0  # most positions of a decode whose rows have several, as a graph
    zeros: NewZeros = lazy_zeros  # makes the memory of the pages

    def make_pages(self, *, has_spare: bool = False) -> KVPages:
        """``has_spare``: one page more, behind the others, if there are states."""
        kept = self.kv_format or KVFormat(self.dtype)
        layers = self.config.kv_layers
        layout = lay_out_kv(layers, self.block_size, kept.dtype.itemsize).of_layers(self.stage.layers(len(layers)))
        num_spare = int(has_spare and any(group.kind == "state" for group in layout.groups))
        return KVPages(layout, self.num_blocks + num_spare, kept, self.device, self.zeros)


class AttentionLayerKV:
    """A layer's KV as attention uses it."""

    __slots__ = ("cache", "group", "heads", "scales", "value_dim", "window")

    def __init__(self, place: LayerPlace, cache: Tensor, scales: Tensor | None = None) -> None:
        assert isinstance(place.kv, FullKV | WindowKV)
        # [num_blocks, block_size, 2, num_kv_heads, head_dim], any strides but the last; values may be the keys' memory
        self.cache = cache
        self.scales = scales  # float32 [2, num_kv_heads], of keys and of values; None: the cache has plain numbers
        self.group = place.group  # index of the KV group whose block table leads to it
        self.heads = place.kv.num_kv_heads, place.kv.head_dim
        # size of the values with which keys end; None: values are apart
        self.value_dim = place.kv.value_dim if isinstance(place.kv, LatentKV) else None
        self.window = place.kv.window if isinstance(place.kv, WindowKV) else None  # tokens, the query's own included

    def kept(self, kv: Tensor) -> Tensor:
        """``kv`` [num_tokens, 2, num_kv_heads, head_dim] as the cache keeps it."""
        return kept_kv(kv, self.cache.dtype, self.scales)

    def numbers(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """What the cache keeps [n, 2, num_kv_heads, head_dim] as numbers."""
        return kv_numbers(kept, dtype, self.scales)

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """k and v [num_tokens, num_kv_heads, head_dim] as they are read from the cache, for who does not read it."""
        if self.scales is None:
            return tuple(t.to(self.cache.dtype).to(t.dtype) for t in (k, v))
        return self.numbers(self.kept(torch.stack((k, v), 1)), k.dtype).unbind(1)


class LayerStatePlace(NamedTuple):
    """A layer's states in the pages."""

    group: int  # index of the KV group whose block table leads to it
    tensors: dict[str, Tensor]  # [num_pages, *shape] for each tensor, by name


class KVPages:
    """The pages of KV: one tensor a slab, [num_pages, elements], zeroed."""

    def __init__(
        self, layout: KVLayout, num_pages: int, kept: KVFormat, device: torch.device, zeros: NewZeros = lazy_zeros
    ) -> None:
        self.layout, self._format = layout, kept
        shape = (num_pages, layout.slab_bytes // kept.dtype.itemsize)
        self.slabs = [zeros(shape, kept.dtype, device) for _ in range(layout.num_slabs)]

    def layers(self, *, heads_first: bool) -> dict[int, AttentionLayerKV]:
        """The caches of all layers that attend, by index. ``heads_first``: a block is [2, num_kv_heads, block_size,
        head_dim] in memory, so that a head's tokens are one run; else [block_size, 2, num_kv_heads, head_dim], so that
        a token is."""
        return {
            i: self._layer(i, place, self._view(place, heads_first))
            for i, place in enumerate(self.layout.layers)
            if place is not None and not isinstance(place.kv, StateKV)
        }

    def _layer(self, index: int, place: LayerPlace, cache: Tensor) -> AttentionLayerKV:
        return AttentionLayerKV(place, cache, self._format.scales(index, cache.shape[3], cache.device))

    def states(self) -> dict[int, LayerStatePlace]:
        """Return the states of all layers that have one, by index."""
        states = {}
        for i, place in enumerate(self.layout.layers):
            if place is not None and isinstance(place.kv, StateKV):
                states[i] = LayerStatePlace(place.group, self._state_tensors(place.kv, place))
        return states

    def _state_tensors(self, kv: StateKV, place: LayerPlace) -> dict[str, Tensor]:
        tensors, begin = {}, place.first_byte
        for tensor in kv.tensors:
            shape, dtype = tensor.shape, tensor.dtype
            slab, size = self.slabs[place.slab].view(dtype), dtype.itemsize
            own = slab[:, begin // size : begin // size + math.prod(shape)]
            tensors[tensor.name] = own.unflatten(1, shape)
            begin += tensor.num_bytes
        return tensors

    def _view(self, place: LayerPlace, heads_first: bool) -> Tensor:
        assert isinstance(place.kv, FullKV | WindowKV)
        size = self.layout.groups[place.group].block_size
        kept, heads, head_dim = num_kept(place.kv), place.kv.num_kv_heads, place.kv.head_dim
        shape = (kept, heads, size, head_dim) if heads_first else (size, kept, heads, head_dim)
        slab = self.slabs[place.slab]
        first = place.first_byte // slab.itemsize
        blocks = slab[:, first : first + math.prod(shape)].unflatten(1, shape)
        return (blocks.permute(0, 3, 1, 2, 4) if heads_first else blocks).expand(-1, -1, 2, -1, -1)

    def copy(self, pairs: Sequence[int]) -> None:
        """Copy whole pages, [from, to, from, to, ...]: none is both. One by one, so that no memory is needed."""
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            for slab in self.slabs:
                slab[target].copy_(slab[source])

    def clear(self, block_ids: Tensor) -> None:
        """Zero these pages (int64 [m])."""
        for slab in self.slabs:
            slab.index_fill_(0, block_ids, 0)


class PageCopies:
    """What a step copies of pages beyond the pool. Here: nothing."""

    def apply(self, pairs: Sequence[int], fresh: Rows) -> tuple[Sequence[int], AbstractSet[int]]:
        """Copy pages to places outside of the pool, and back, as far as ``pairs`` say so ([from, to, from, to, ...]),
        ahead of what is queued from now on. ``fresh``: host int64 [m], pages that have new owners, who may write them
        then. Returns the pairs within the pool, and the pages that did not come back."""
        return pairs, _NONE
