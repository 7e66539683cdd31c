"""`CudaGroup`: ranks with a GPU each, on one machine: our own kernels over memory that all of them reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from ...kernels.all_reduce import EACH_WAY, add_all_reduced, all_gathered, all_reduced
from ...kernels.exchange_buffers import MAX_PROGRAMS, ExchangeBuffers
from .symmetric_memory import SymmetricMemory

_WORDS_PER_RANK = 2**16
_BULK_BYTES = 2**27  # bytes of a rank's memory for bulk; tensors larger than its part for one rank are sent in pieces


class CudaGroup:
    """A `TensorGroup` over GPUs that reach each other's memory, by NVLink or PCIe.

    That memory is allocated here, so before any graph is captured. Its calls may be: each finds its number on the
    device.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        """Meet the other ranks at ``store``.

        ``timeout``: longest wait for another rank here. A call on the device waits for ever.

        Raises as `SymmetricMemory`.
        """
        self.rank = rank
        self.size = size
        self._is_rehearsing = False
        store.set_timeout(timeout)
        bulk_per_rank = _BULK_BYTES // (2 * size) // 16 * 16
        num_bytes = ExchangeBuffers.bytes_needed(size, _WORDS_PER_RANK, bulk_per_rank)
        self._memory = SymmetricMemory(num_bytes, store, rank, size, device)
        calls = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self.buffers = ExchangeBuffers(rank, size, _WORDS_PER_RANK, bulk_per_rank, self._memory.addresses, calls)

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        if self._is_rehearsing:
            residual.add_(partial)
            return
        add_all_reduced(residual, partial, self.buffers)

    def sum(self, partial: Tensor) -> Tensor:
        return partial.clone() if self._is_rehearsing else all_reduced(partial, self.buffers)

    def gather(self, x: Tensor) -> Tensor:
        if self._is_rehearsing:
            return x.expand(self.size, *x.shape).contiguous()
        return all_gathered(x.contiguous(), self.buffers)

    def warm_up(self, hidden_size: int, dtype: torch.dtype) -> None:
        for num_bytes in EACH_WAY:
            rows = -(-num_bytes // (hidden_size * dtype.itemsize))
            x = torch.zeros(rows, hidden_size, dtype=dtype, device=self.buffers.addresses.device)
            self.add_sum(x, self.sum(x))
            self.gather(x)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False
