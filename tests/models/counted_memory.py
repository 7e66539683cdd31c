"""Bytes that a model takes on its device, and at most while it is loaded, counted without a GPU.

The device is torch's "meta", whose tensors have shapes and no memory. Every storage there is counted from the operation
that makes it until nothing refers to it, also in the threads that load; and each goes through a model of the caching
allocator of CUDA, which keeps what was freed in blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aengine.runner.weights.sources import random_source, reading

META = torch.device("meta")
MIB = 2**20


@dataclass(eq=False)
class Block:
    size: int
    segment: list[Block]  # all blocks of its segment, in order
    is_free: bool = True


@dataclass
class CachingAllocator:
    """torch's for CUDA (c10/cuda/CUDACachingAllocator.cpp): sizes in multiples of 512 bytes; up to 1 MiB out of
    segments of 2 MiB, up to 10 MiB out of segments of 20 MiB, larger ones of their own, of whole 2 MiB. The best
    fitting free block is split; of large ones only where more than 1 MiB is left."""

    limit: int = 2**60
    reserved: int = 0
    peak: int = 0
    _segments: dict[bool, list[list[Block]]] = field(default_factory=lambda: {True: [], False: []})

    def allocate(self, size: int) -> Block:
        size = max(512, -(-size // 512) * 512)
        is_small = size <= MIB
        block = self._fitting(size, is_small)
        if block is None:
            whole = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.reserved + whole > self.limit:
                self._release()
            if self.reserved + whole > self.limit:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.0f} MiB")
            self.reserved += whole
            self.peak = max(self.peak, self.reserved)
            segment: list[Block] = []
            block = Block(whole, segment)
            segment.append(block)
            self._segments[is_small].append(segment)
        rest = block.size - size
        if rest >= 512 if is_small else rest > MIB:
            block.size = size
            block.segment.insert(block.segment.index(block) + 1, Block(rest, block.segment))
        block.is_free = False
        return block

    def free(self, block: Block) -> None:
        block.is_free = True
        blocks, i = block.segment, block.segment.index(block)
        for other in (blocks[i + 1 : i + 2] + blocks[max(0, i - 1) : i]) if len(blocks) > 1 else []:
            if other.is_free:
                block.size += other.size
                blocks.remove(other)

    def _fitting(self, size: int, is_small: bool) -> Block | None:
        found = [block for segment in self._segments[is_small] for block in segment if block.is_free]
        return min((block for block in found if block.size >= size), key=lambda block: block.size, default=None)

    def _release(self) -> None:
        for segments in self._segments.values():
            empty = [segment for segment in segments if len(segment) == 1 and segment[0].is_free]
            for segment in empty:
                self.reserved -= segment[0].size
                segments.remove(segment)


@dataclass
class CountedMemory:
    """What is allocated on the device now, and was at most."""

    device: torch.device
    allocator: CachingAllocator
    now: int = 0
    most: int = 0
    _blocks: dict[int, tuple[Any, Block, int]] = field(default_factory=dict)
    _lock: Any = field(default_factory=RLock)

    def see(self, value: Any) -> None:
        if not isinstance(value, Tensor) or value.device.type != self.device.type:
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if size == 0 or key in self._blocks:
                return
            self.now += size
            self.most = max(self.most, self.now)
            self._blocks[key] = weakref.ref(storage, self._forgetter(key)), self.allocator.allocate(size), size

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            with self._lock:
                _, block, size = self._blocks.pop(key)
                self.now -= size
                self.allocator.free(block)

        return forget


class _Counting(TorchDispatchMode):
    def __init__(self, memory: CountedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._memory.see(leaf)
        return out


@contextmanager
def counted(
    monkeypatch: pytest.MonkeyPatch, limit: int = 2**60, device: torch.device = META
) -> Iterator[CountedMemory]:
    """Count what is made on the device within. ``limit``: its bytes."""
    memory = CountedMemory(device, CachingAllocator(limit))

    class CountingPool(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            def call() -> Any:
                with _Counting(memory):  # a mode holds in its own thread alone
                    return fn(*args, **kwargs)

            return super().submit(call)

    monkeypatch.setattr(reading, "ThreadPoolExecutor", CountingPool)
    if device == META:  # for which torch has no generator
        monkeypatch.setattr(random_source, "_generator", lambda device, seed: None)
    with _Counting(memory):
        yield memory
