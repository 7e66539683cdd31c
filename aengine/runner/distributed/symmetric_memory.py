"""`SymmetricMemory`: memory on the GPU of each rank that all ranks of a group reach, by NVLink or PCIe."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store

__all__ = ["NoPeers", "SymmetricMemory"]

_numbers = itertools.count()


class NoPeers(RuntimeError):
    """The GPUs can't be given each other's memory; the message is what the driver says."""


class SymmetricMemory:
    """Memory of the same size on each rank, all zero at first. It is there as long as this object is, on all ranks."""

    def __init__(self, num_bytes: int, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Allocate, and meet the other ranks at ``store``, within its timeout.

        Raises:
            NoPeers: the driver does not map the others' memory
            RuntimeError: a rank did not come in time, or has died
        """
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        # torch finds the store by the name of a process group, in its table or in that of its symmetric memory; all
        # ranks of a group make their groups in the same order, so the names agree.
        name: Any = f"aengine-{next(_numbers)}"
        self._group = ProcessGroup(PrefixStore("group", store), rank, size)
        self._group._set_group_name(name)
        _register_process_group(name, self._group)
        _SymmetricMemory.set_group_info(name, rank, size, PrefixStore("memory", store))
        self._memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._memory.zero_()
        torch.accelerator.synchronize(device)
        try:
            self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        except RuntimeError as error:
            raise NoPeers(str(error).partition("\n")[0]) from error
        store.set(f"zeroed/{rank}", "")  # nobody writes into another's memory before that is zeroed
        store.wait([f"zeroed/{other}" for other in range(size)])
        self._num_bytes = num_bytes
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        """int64 [size]: where each rank's memory begins, as this one's kernels reach it."""

    def part(self, rank: int) -> Tensor:
        """uint8 [num_bytes]: that rank's memory, as this one reaches it."""
        return self._handle.get_buffer(rank, (self._num_bytes,), torch.uint8)
