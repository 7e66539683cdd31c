"""Pages of KV copied aside, into the host's memory, and back: whole pages, on a stream beside the device's own.

    main stream   step N-1 ──┬────────────── step N ... step N+k, which has one of these pages anew
                             └─> side stream: pages -> host ──────┘ waits for the copy, on the device
    main stream   step M-1 ──┬─ (nothing of step M) ──┐ step M, which reads the pages
                             └─> side stream: host -> pages ──────┘ waits likewise

The side stream makes copies one after the other, so what is copied back is what was copied aside before, and a place
of the host's memory may be given anew at once. A page is a row of each slab, whatever the layers, the KV groups, the
dtype and this rank's share of them are: so all of it is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import InternalError, NotEnoughMemoryError
from ..lazy_zeros import lazy_zeros
from ..platforms.platform import Event, Platform
from ..transfer import to_device
from .kv_pages import KVPages, PageCopies

logger = logging.getLogger("aengine.runner")

_STAGED_BYTES = 32 << 20
"""Memory of the device in which rows of a slab are gathered, so that one copy over the bus takes many of them."""

_pinned: list[Tensor] = []
"""What `Platform.share` has pinned stays so until the process ends, and must stay there."""


class SwapSpace(PageCopies):
    """``num_places`` places for pages in the host's memory, which are known by the numbers from ``num_blocks`` on."""

    def __init__(self, pages: KVPages, num_blocks: int, num_places: int, platform: Platform, *, is_alone: bool) -> None:
        """``is_alone``: a copy that fails is the error of its request alone; else it ends the step on all ranks.

        Raises NotEnoughMemoryError if the device can't read and write so much of the host's memory by itself.
        """
        self._num_blocks = num_blocks
        self._num_places = num_places
        self._platform = platform
        self._is_alone = is_alone
        self._stream = platform.side_stream()
        width, cpu = pages.layout.slab_bytes, torch.device("cpu")
        word = torch.int64 if width % 8 == 0 else torch.uint8  # nothing is computed with what is copied
        self._slabs = [slab.view(word) for slab in pages.slabs]
        self._host = [lazy_zeros((num_places, width // word.itemsize), word, cpu) for _ in self._slabs]
        if platform.pins_memory and not all(map(platform.share, self._host)):
            raise NotEnoughMemoryError(
                f"swap_space_bytes: {num_places * pages.layout.page_bytes} bytes of the host's memory can't be pinned: "
                f"lower it, free memory, or raise the limit of locked memory (ulimit -l)"
            )
        if platform.pins_memory:
            _pinned.extend(self._host)
        num_staged = max(1, min(num_places, _STAGED_BYTES // max(1, width)))
        self._staged = torch.empty(num_staged, width // word.itemsize, dtype=word, device=platform.device)
        self._leaving: dict[int, Event] = {}  # the end of the copy of each page that may still be read
        self._lost: set[int] = set()  # places whose page did not arrive
        self.num_copied = [0, 0]  # pages that were copied aside, and back

    def apply(self, pairs: Sequence[int], fresh: np.ndarray) -> tuple[Sequence[int], set[int]]:
        """See `PageCopies`."""
        inside: list[int] = []
        aside, back = [], []
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            if not max(source, target) < self._num_blocks + self._num_places or min(source, target) < 0:
                raise InternalError(f"pages outside 0 to {self._num_blocks + self._num_places - 1} are to be copied")
            if target >= self._num_blocks:
                aside.append((source, target - self._num_blocks))
            elif source >= self._num_blocks:
                back.append((source - self._num_blocks, target))
            else:
                inside += source, target
        if aside:
            self._copy_aside(aside)
        if self._leaving:
            self._await_copies([*fresh.tolist(), *inside[1::2]])
        return inside, self._copy_back(back) if back else set()

    def _copy_aside(self, pairs: list[tuple[int, int]]) -> None:
        self._leaving = {page: event for page, event in self._leaving.items() if not event.query()}
        pages, places = zip(*pairs, strict=True)

        def work() -> None:
            for begin in range(0, len(pages), len(self._staged)):
                end = min(len(pages), begin + len(self._staged))
                rows = to_device(np.array(pages[begin:end]), self._platform.device)
                for slab, host in zip(self._slabs, self._host, strict=True):
                    torch.index_select(slab, 0, rows, out=self._staged[: end - begin])
                    for first, last, place in _runs(places[begin:end]):
                        host[place : place + last - first].copy_(self._staged[first:last], non_blocking=True)

        event, failed = self._launch(work, len(pages))
        self._lost.difference_update(places)
        if failed:
            self._lost.update(places)
        elif event is not None:
            self._leaving.update(dict.fromkeys(pages, event))
        self.num_copied[0] += len(pages)

    def _copy_back(self, pairs: list[tuple[int, int]]) -> set[int]:
        """Copy pages back. Returns the pages that do not come."""
        lost = {page for place, page in pairs if place in self._lost}
        pairs = [pair for pair in pairs if pair[1] not in lost]
        if not pairs:
            return lost
        places, pages = zip(*pairs, strict=True)

        def work() -> None:
            for begin in range(0, len(pages), len(self._staged)):
                end = min(len(pages), begin + len(self._staged))
                rows = to_device(np.array(pages[begin:end]), self._platform.device)
                for slab, host in zip(self._slabs, self._host, strict=True):
                    for first, last, place in _runs(places[begin:end]):
                        self._staged[first:last].copy_(host[place : place + last - first], non_blocking=True)
                    slab.index_copy_(0, rows, self._staged[: end - begin])

        event, failed = self._launch(work, len(pages))
        if event is not None:
            event.wait()
        self.num_copied[1] += len(pages)
        return lost | set(pages) if failed else lost

    def _launch(self, work: Callable[[], None], num_pages: int) -> tuple[Event | None, bool]:
        """Queue copies behind all that was queued before. Returns the event that ends them, and whether they failed."""
        try:
            return self._stream.launch(work, self._platform.record_event()), False
        except RuntimeError:
            if not self._is_alone:
                raise
            logger.warning("%d pages could not be copied: their requests are computed again", num_pages, exc_info=True)
            return None, True

    def _await_copies(self, pages: list[int]) -> None:
        """Have what is queued from now on wait until none of these pages, which have new owners, is read any more."""
        events = [self._leaving.pop(page) for page in pages if page in self._leaving]
        for event in dict.fromkeys(events):
            event.wait()


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return (first, last, place) of each run: the indices ``first`` to ``last`` - 1 have the places from ``place``
    on."""
    first = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield first, index, places[first]
            first = index
