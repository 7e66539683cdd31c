"""Whole pages between the device and the host's memory, on a stream beside the device's own.

    pages of the slabs ──gathered───> staged: [n, slabs, words] ──a run of places──> host: [place, slab, words]
                       <──scattered──                           <───────────────────

A page is a row of each slab, whatever the layers, the KV groups, the dtype and this rank's share of them are; in the
host's memory its rows lie together. The stream makes copies one after the other, so what is copied back is what was
copied aside before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.copy_pages import Slabs, gather_pages, scatter_pages
from ..platforms.platform import Event, Platform
from ..transfer import to_device
from .kv_pages import KVPages


class StagedPages:
    """The pages of a pool, and memory of the device in which some are gathered, so that one copy over the bus takes
    many of them."""

    def __init__(self, pages: KVPages, platform: Platform, most_bytes: int, part: int = 1 << 62) -> None:
        """``most_bytes``: of the staged memory, which has room for one page at least. ``part``: host memory is pinned
        in parts of so many places, and no copy is of two."""
        self._part = part
        width = pages.layout.slab_bytes
        self._word = torch.int64 if width % 8 == 0 else torch.uint8  # nothing is computed with what is copied
        self._slabs = Slabs([slab.view(self._word) for slab in pages.slabs])
        self.page_shape = len(pages.slabs), width // self._word.itemsize
        self.page_bytes = pages.layout.page_bytes
        self._platform = platform
        self._stream = platform.side_stream()
        most = max(1, most_bytes // max(1, self.page_bytes))
        self._staged = torch.empty((most, *self.page_shape), dtype=self._word, device=platform.device)

    def places_of(self, memory: Tensor) -> Tensor:
        """Return host memory, uint8 [at least a page], as [places, slabs, words]."""
        num_places = memory.nbytes // self.page_bytes
        return memory[: num_places * self.page_bytes].view(self._word).view(num_places, *self.page_shape)

    def copy_aside(self, pages: Sequence[int], host: Tensor, places: Sequence[int]) -> Event | None:
        """Queue copies of pages to places of ``host``, behind all that was queued before. Returns the event that is
        done when they are; None: they are. Raises RuntimeError."""

        def work() -> None:
            for begin, end, rows in self._parts(pages):
                gather_pages(self._slabs, rows, self._staged[: end - begin])
                for first, last, place in _runs(places[begin:end], self._part):
                    host[place : place + last - first].copy_(self._staged[first:last], non_blocking=True)

        return self._stream.launch(work, self._platform.record_event())

    def copy_back(self, host: Tensor, places: Sequence[int], pages: Sequence[int], after: Event | None) -> Event | None:
        """Queue copies of places to pages, likewise, behind ``after``; None: nothing uses these pages."""

        def work() -> None:
            for begin, end, rows in self._parts(pages):
                for first, last, place in _runs(places[begin:end], self._part):
                    self._staged[first:last].copy_(host[place : place + last - first], non_blocking=True)
                scatter_pages(self._slabs, rows, self._staged[: end - begin])

        return self._stream.launch(work, after)

    def _parts(self, pages: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (begin, end, their rows on the device) of as many pages as are staged at a time."""
        for begin in range(0, len(pages), len(self._staged)):
            end = min(len(pages), begin + len(self._staged))
            yield begin, end, to_device(np.array(pages[begin:end], dtype=np.int64), self._platform.device)


def _runs(places: Sequence[int], part: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, place) of each run within a part: the indices ``first`` to ``last`` - 1 have the places from
    ``place`` on."""
    first = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1 or places[index] % part == 0:
            yield first, index, places[first]
            first = index
