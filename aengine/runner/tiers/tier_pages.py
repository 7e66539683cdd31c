"""`TierPages`: the places of the host's memory to and from which a rank copies pages, beside its steps.

    call "copy_pages" ──> a side stream each way: pages <─> places ──> the reply, when the device has made the copies
    steps go on meanwhile: the host gives no step a page that is being copied to, and keeps one that is copied from

The memory is the host process'. It is pinned in parts, which takes seconds for each ten gigabytes, and the host uses
those that are: a copy to or from others would hold up the thread that launches steps.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.kv_pages import KVPages
from ..attention.staged_pages import StagedPages
from ..platforms.platform import Event, Platform
from .large_pages import SIZE as PAGE_BYTES
from .large_pages import make_pages, map_file

logger = logging.getLogger("aengine.runner")

_STAGED_BYTES = 64 << 20
_PINNED_BYTES = 64 << 20  # bytes that are pinned at a time: other calls of the driver wait meanwhile
_PAUSE = 0.002  # seconds between two times, in which steps are launched


class Copied(NamedTuple):
    """The reply to a copy, when ``event`` is done (None: it is): which pages were not copied, by index."""

    event: Event | None
    lost: list[int]

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def get(self) -> list[int]:
        return self.lost


class TierPages:
    """Copies pages of one rank of a replica. Its calls come between two steps."""

    def __init__(self, pages: KVPages, platform: Platform, rank: int) -> None:
        """``rank``: among those of its replica."""
        self._kv = pages
        self._platform = platform
        self._rank = rank
        self._host = torch.empty(0)
        self._num_pinned = 0  # places that can be used
        self._part = 1  # places that are pinned at a time
        self.calls: Mapping[str, Callable[..., Any]] = {
            "map_pages": self.map,
            "pinned_pages": lambda: self._num_pinned,
            "copy_pages": self.copy,
        }

    def map(self, pid: int, fds: Sequence[int], num_places: int) -> None:
        """Map the memory that process ``pid`` has open as ``fds``, one of each rank, with so many places."""
        fd = os.open(f"/proc/{pid}/fd/{fds[self._rank]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = map_file(fd, num_places * self._kv.layout.page_bytes)
        except BaseException:
            os.close(fd)
            raise
        size = self._kv.layout.page_bytes
        whole = PAGE_BYTES // math.gcd(size, PAGE_BYTES)  # places that are whole pages of the system
        self._part = max(1, _PINNED_BYTES // (size * whole)) * whole
        staged = self._kv, self._platform, min(_STAGED_BYTES, len(memory)), self._part
        # Pages that somebody waits for are not queued behind others.
        self._leaving, self._coming = StagedPages(*staged), StagedPages(*staged)
        self._host = self._coming.places_of(memory)
        if self._platform.pins_memory:
            self.pinning = threading.Thread(target=self._pin, args=(fd, memory), name="aengine-pinning", daemon=True)
            self.pinning.start()
        else:
            self._num_pinned = num_places
            os.close(fd)

    def _pin(self, fd: int, memory: Tensor) -> None:
        """Have the system make the memory's pages, and pin them, in parts: each is a run of places at most."""
        size = self._kv.layout.page_bytes
        try:
            for begin in range(0, len(self._host), self._part):
                end = min(begin + self._part, len(self._host))
                make_pages(fd, memory, begin * size, end * size)
                if not self._platform.share(memory[begin * size : end * size]):
                    raise OSError("the driver refuses it")
                self._num_pinned = end
                time.sleep(_PAUSE)
        except OSError as error:
            logger.warning(
                "kv_tiers: the host's memory can't be pinned, so that pages are copied slowly (%s): lower its size, or "
                "raise the limit of locked memory (ulimit -l)",
                error,
            )
        finally:
            self._num_pinned = len(self._host)
            os.close(fd)

    @torch.inference_mode()
    def copy(self, is_fetch: bool, pages: bytes, places: bytes) -> Copied:
        """Copy places to pages, or pages to places, int32 columns."""
        columns = _ints(pages), _ints(places)
        lost: list[int] = []
        event: Event | None = None
        try:
            if is_fetch:  # the pages' last owners were in no step that is on its way
                event = self._coming.copy_back(self._host, columns[1], columns[0], after=None)
            else:
                event = self._leaving.copy_aside(columns[0], self._host, columns[1])
        except RuntimeError:
            logger.warning("%d pages of KV could not be copied", len(columns[0]), exc_info=True)
            lost = list(range(len(columns[0])))
        return Copied(event, lost)


def _ints(column: bytes) -> array[int]:
    numbers = array("i")
    numbers.frombytes(column)
    return numbers
