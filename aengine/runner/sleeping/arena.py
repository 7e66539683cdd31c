"""`Arena`: memory of one kind, which is given back to the system and taken again as a whole. Its addresses stay.

take, place ──> regions, each of addresses of its own ──give_back──> no memory behind them
                                                      <──take_back── memory again: zeros, or what was kept
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ...limits.cgroups import num_usable_cpus
from ...limits.memory import free_memory
from ..platforms.platform import Platform
from ..platforms.virtual_memory import VirtualMemory

logger = logging.getLogger("aengine.runner")

_REGION = 256 << 20
"""Bytes of a region in which `place` puts many tensors."""
_THREADS = 8
"""Threads that have the kernel make pages: to pin them makes those that are missing too, one after the other, which
takes four times as long."""
_ALIGNMENT = 512  # bytes; that of torch's own allocator, which kernels rely on


@dataclass(slots=True)
class Region:
    address: int
    memory: Tensor  # uint8 [size]
    kept: Tensor | None = None  # uint8 [size], in host memory: what was in it; once made it stays, as pinning is slow


class Arena:
    """Memory of a device. ``keeps``: what is in it is kept in the host's memory meanwhile; else it comes back zeroed.

    There is more of it while it is mapped only.
    """

    def __init__(self, memory: VirtualMemory, platform: Platform, *, keeps: bool) -> None:
        self._memory = memory
        self._platform = platform
        self._keeps = keeps
        self.regions: list[Region] = []
        self._room = torch.empty(0, dtype=torch.uint8)  # the rest of the region that `place` fills
        self.is_mapped = True

    @property
    def num_bytes(self) -> int:
        """Bytes of all its addresses."""
        return sum(len(region.memory) for region in self.regions)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of zeros in a region of its own; see `lazy_zeros`."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._take(size)
        if self._platform.is_accelerator:
            memory.zero_()
        return memory[:size].view(dtype).view(shape)

    def place(self, size: int, to_come: int) -> Tensor:
        """Return uint8 [size or a little more], whose content is not known. ``to_come``: bytes that will be placed from
        here on, at most."""
        size = aligned(size)
        if len(self._room) < size:
            self._room = self._take(max(size, min(_REGION, to_come)))
        place, self._room = self._room[:size], self._room[size:]
        return place

    def _take(self, size: int) -> Tensor:
        assert self.is_mapped
        granularity = self._memory.granularity
        size = max(1, -(-size // granularity)) * granularity
        address = self._memory.reserve(size)
        self._memory.map(address, size)
        self.regions.append(Region(address, self._memory.tensor(address, size)))
        return self.regions[-1].memory

    def give_back(self) -> None:
        """Give all memory back to the system. Nothing may use it. Without effect if it has gone already.

        Raises MemoryError if the host has no room for what is to be kept; then nothing has changed.
        """
        if not self.is_mapped:
            return
        self._platform.synchronize()
        if self._keeps:
            self._make_room()
            for region in self.regions:
                assert region.kept is not None
                region.kept.copy_(region.memory, non_blocking=True)
            self._platform.synchronize()
        self.is_mapped = False
        for region in self.regions:
            self._memory.unmap(region.address, len(region.memory))

    def take_back(self) -> None:
        """Take memory for all addresses again, with what was kept. Without effect if it is there.

        Raises torch.OutOfMemoryError; then nothing has been taken.
        """
        if self.is_mapped:
            return
        taken: list[Region] = []
        try:
            for region in self.regions:
                self._memory.map(region.address, len(region.memory))
                taken.append(region)
        except BaseException:
            for region in taken:
                self._memory.unmap(region.address, len(region.memory))
            raise
        self.is_mapped = True
        for region in self.regions:
            if region.kept is not None:
                region.memory.copy_(region.kept, non_blocking=True)
            elif self._platform.is_accelerator:  # a CPU's is zeroed
                region.memory.zero_()
        self._platform.synchronize()

    def _make_room(self) -> None:
        """Take host memory for what is to be kept, where there is none yet, and pin it if that is possible."""
        missing = [region for region in self.regions if region.kept is None]
        needed, free = sum(len(region.memory) for region in missing), free_memory()
        if needed > free:
            raise MemoryError(f"the weights have {needed} bytes, and {free} of the host's memory are free")
        with ThreadPoolExecutor(min(_THREADS, num_usable_cpus()), "pages") as threads:
            kept = list(threads.map(_host_memory, [len(region.memory) for region in missing]))
        for region, memory in zip(missing, kept, strict=True):
            region.kept = memory
        if self._platform.pins_memory and not all(self._platform.share(memory) for memory in kept):
            logger.warning(
                "the host's memory for weights can't be pinned, so that they are copied slowly: raise the limit of "
                "locked memory (ulimit -l)"
            )


def _host_memory(size: int) -> Tensor:
    """Return uint8 [size] of zeros, all pages of which are there: large ones, if the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def aligned(size: int) -> int:
    """Return the bytes that `Arena.place` takes for ``size`` bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
