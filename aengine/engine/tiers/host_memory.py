"""The host's memory in which workers keep pages: files without a name, one for each rank of a replica.

They are this process': a worker that dies leaves them, and the next one maps them again. Workers open them by this
process' id and a descriptor; when both have ended, however they did, the kernel frees the memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

from ...errors import NotEnoughMemoryError
from ...limits.memory import free_memory
from ..stores.store import KVStore


class HostMemory:
    """``num_places`` places of pages for each rank; a rank's page has so many bytes as ``page_bytes`` says of it."""

    def __init__(self, num_bytes: int, page_bytes: Sequence[int]) -> None:
        """``num_bytes``: of all ranks together. Raises NotEnoughMemoryError."""
        self.page_bytes = sum(page_bytes)
        self.num_places = num_bytes // self.page_bytes
        if not self.num_places:
            raise NotEnoughMemoryError(
                f"kv_tiers: a HostTier of {num_bytes} bytes has no room for a page of KV, which has {self.page_bytes} "
                f"on all ranks: raise its size, or leave it out"
            )
        if num_bytes > (free := free_memory()):
            raise NotEnoughMemoryError(
                f"kv_tiers: a HostTier of {num_bytes} bytes, and {free} of the host's memory are free: lower its size"
            )
        self.stores: list[tuple[str, KVStore]] = []  # stores of this replica by name, nearest first
        self.fingerprints: list[bytes] = []  # what the keys of each rank's pages there begin with
        self.fds: list[int] = []
        self._closing = weakref.finalize(self, _close, self.fds)
        for own in page_bytes:
            self.fds.append(os.memfd_create("aengine-kv-pages", os.MFD_CLOEXEC))
            os.truncate(self.fds[-1], self.num_places * own)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._closing()


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
