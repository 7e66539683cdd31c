"""Pages of KV copied aside, into the host's memory, and back: whole pages, on a stream beside the device's own.

    main stream   step N-1 ──┬────────────── step N ... step N+k, which has one of these pages anew
                             └─> side stream: pages -> host ──────┘ waits for the copy, on the device
    main stream   step M-1 ──┬─ (nothing of step M) ──┐ step M, which reads the pages
                             └─> side stream: host -> pages ──────┘ waits likewise

The side stream makes copies one after the other, so what is copied back is what was copied aside before, and a place
of the host's memory may be given anew at once (`StagedPages`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...errors import InternalError, NotEnoughMemoryError
from ..lazy_zeros import lazy_zeros
from ..platforms.platform import Event, Platform
from .kv_pages import KVPages, PageCopies
from .staged_pages import StagedPages

logger = logging.getLogger("aengine.runner")

_STAGED_BYTES = 32 << 20
"""Memory of the device in which pages are gathered."""

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
        self._pages = StagedPages(pages, platform, min(_STAGED_BYTES, num_places * pages.layout.page_bytes))
        memory = lazy_zeros((num_places * pages.layout.page_bytes,), torch.uint8, torch.device("cpu"))
        self._host = self._pages.places_of(memory)
        if platform.pins_memory and not platform.share(memory):
            raise NotEnoughMemoryError(
                f"swap_space_bytes: {num_places * pages.layout.page_bytes} bytes of the host's memory can't be pinned: "
                f"lower it, free memory, or raise the limit of locked memory (ulimit -l)"
            )
        if platform.pins_memory:
            _pinned.append(memory)
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
        event, failed = self._launch(partial(self._pages.copy_aside, pages, self._host, places), len(pages))
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
        after = self._platform.record_event()
        event, failed = self._launch(partial(self._pages.copy_back, self._host, places, pages, after), len(pages))
        if event is not None:
            event.wait()
        self.num_copied[1] += len(pages)
        return lost | set(pages) if failed else lost

    def _launch(self, copy: Callable[[], Event | None], num_pages: int) -> tuple[Event | None, bool]:
        """Queue copies. Returns the event that ends them, and whether they failed."""
        try:
            return copy(), False
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
