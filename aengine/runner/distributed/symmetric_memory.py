"""`SymmetricMemory`: memory on the GPU of each rank that all ranks of a group reach, by NVLink or PCIe."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store

_numbers = itertools.count()
_WRITTEN = 2**48  # a value that the memory is unlikely to have held before


class NoPeers(RuntimeError):
    """The GPUs can't reach each other's memory; the message is what the driver says, or what was seen."""


def check_writes(parts: Sequence[Tensor], store: Store, rank: int) -> None:
    """Write into the memory of all ranks, and look whether theirs comes into this one's. Every rank calls it.

    The driver also gives GPUs each other's memory where the mainboard sends such writes elsewhere. A kernel that waits
    for one would never end.

    ``parts``: of each rank, uint8 [8 * number of ranks or more], as this one reaches it; what it holds is overwritten.
    ``store``: with a prefix for this memory alone.

    Raises:
        NoPeers: they do not come, or the device fails
        RuntimeError: a rank did not come in time, or has died
    """
    size = len(parts)
    numbers = [part.view(torch.int64)[:size] for part in parts]
    try:
        for theirs in numbers:
            theirs[rank] = _WRITTEN + rank
        numbers[rank].tolist()  # waits until the device has written all of them
    except RuntimeError as error:
        raise NoPeers(_first_line(error)) from error
    _meet(store, "written", rank, size)
    for other, number in enumerate(numbers[rank].tolist()):
        if number != _WRITTEN + other:
            raise NoPeers(
                f"what rank {other} writes into the memory of rank {rank} does not arrive: the mainboard may redirect "
                f"it, which its settings of the IOMMU and of PCIe's Access Control Services (ACS) can end"
            )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _meet(store: Store, where: str, rank: int, size: int) -> None:
    store.set(f"{where}/{rank}", "")
    store.wait([f"{where}/{other}" for other in range(size)])


class SymmetricMemory:
    """Memory of the same size on each rank, all zero at first. It is there as long as this object is, on all ranks."""

    def __init__(self, num_bytes: int, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Allocate, and meet the other ranks at ``store``, whose prefix no other memory has, within its timeout.

        Raises:
            NoPeers: the driver does not map the others' memory, or what they write does not arrive
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
        self._num_bytes = num_bytes
        try:
            self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        except RuntimeError as error:
            raise NoPeers(_first_line(error)) from error
        check_writes([self.part(other)[: 8 * size] for other in range(size)], store, rank)
        self._memory.zero_()
        torch.accelerator.synchronize(device)
        _meet(store, "zeroed", rank, size)  # no rank writes into another's memory before that was zeroed
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        """int64 [size]: where each rank's memory begins, as this one's kernels reach it."""

    def part(self, rank: int) -> Tensor:
        """Return the memory of that rank, as this one reaches it: uint8 [num_bytes]."""
        return self._handle.get_buffer(rank, (self._num_bytes,), torch.uint8)
