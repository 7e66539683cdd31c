"""Memory whose addresses stay while the memory itself is given back: whatever holds a pointer into it, as graphs and
tapes do, is right again once there is memory behind its addresses anew.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor


class VirtualMemory(Protocol):
    """Addresses of a device, and the memory behind them. Called by one thread, in whole multiples of
    ``granularity``."""

    granularity: int  # bytes
    mapped_bytes: int  # bytes of memory that there is behind the addresses, as far as it counts as the device's

    def open(self) -> None:
        """Called before the methods below, when the device is open. Raises InternalError, OSError: it has no such
        memory."""

    def reserve(self, size: int) -> int:
        """Return the first of ``size`` addresses, behind which there is no memory yet."""

    def map(self, address: int, size: int) -> None:
        """Put memory behind all addresses that `reserve` gave at once; what is in it is not known. Raises
        torch.OutOfMemoryError; then nothing has changed."""

    def unmap(self, address: int, size: int) -> None:
        """Give the memory behind them back to the system. Nothing may be using it."""

    def tensor(self, address: int, size: int) -> Tensor:
        """Return uint8 [size] over memory that is mapped. It is valid again whenever it is mapped again."""


class CpuMemory:
    """See `VirtualMemory`. The kernel gives pages of zeros when they are first written, so nothing is to be mapped, and
    nothing is counted."""

    granularity = mmap.PAGESIZE
    mapped_bytes = 0

    def __init__(self) -> None:
        self._spaces: dict[int, mmap.mmap] = {}

    def open(self) -> None:
        pass

    def reserve(self, size: int) -> int:
        space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(space))
        self._spaces[address] = space
        return address

    def map(self, address: int, size: int) -> None:
        pass

    def unmap(self, address: int, size: int) -> None:
        self._spaces[address].madvise(mmap.MADV_DONTNEED)

    def tensor(self, address: int, size: int) -> Tensor:
        return torch.frombuffer(self._spaces[address], dtype=torch.uint8)


if TYPE_CHECKING:
    _: type[VirtualMemory] = CpuMemory
