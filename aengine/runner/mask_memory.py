"""Where a graph reads the bitmasks of its step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import GrammarOutput
from .input_batch import Rows

__all__ = ["HostBitmasks", "MaskMemory"]


class HostBitmasks:
    """Bitmasks as a GRAMMAR frame brings them: bytes of its own, or memory shared with the host.

    The shared memory is made known to CUDA once, so that copies to the device begin without the CPU's reading it.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._shared = range(0)  # addresses

    def register(self, memory: memoryview, device: torch.device) -> None:
        """``memory`` is where bitmasks will lie, for as long as this process lives."""
        if device.type != "cuda" or not len(memory):
            return
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        if int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)) == 0:
            self._shared = range(address, address + len(memory))

    def of_batch(self, grammar: GrammarOutput | None, batch_idx: Rows) -> tuple[Rows, npt.NDArray[np.uint8] | None]:
        """(rows [n], bits [n, row_bytes] over the frame's memory): bits[i] belongs to the request that is at rows[i] in
        ``batch_idx``, the positions of the requests that sample.

        Raises InternalError when the frame does not hold as much as it should.
        """
        if grammar is None or not grammar.batch_idx:
            return np.empty(0, dtype=np.int64), None
        count, bitmask = len(grammar.batch_idx), grammar.bitmask
        assert not isinstance(bitmask, int), "the worker has looked it up"
        if len(bitmask) != count * self.row_bytes:
            raise InternalError(f"the bitmask has {len(bitmask)} bytes, but {count} rows of {self.row_bytes} are due")
        # torch warns of memory that can't be written to, though nobody does.
        memory = bytearray(bitmask) if isinstance(bitmask, bytes) else bitmask
        bits = np.frombuffer(memory, dtype=np.uint8).reshape(count, self.row_bytes)
        masked = np.frombuffer(grammar.batch_idx, dtype=np.int32)
        place = np.full(int(max(batch_idx.max(initial=0), masked.max())) + 1, -1, dtype=np.int64)
        place[batch_idx] = np.arange(len(batch_idx))
        rows = place[masked]
        if rows.min() < 0:  # a request that does not sample, for want of memory for its prompt
            bits, rows = bits[rows >= 0], rows[rows >= 0]
        return rows, bits

    def to_device(self, rows: npt.NDArray[np.uint8], place: Tensor) -> None:
        """Copy into ``place``, uint8 of that shape. Shared memory may not change until the step has been answered."""
        tensor = torch.from_numpy(rows)
        if place.is_cuda and rows.ctypes.data not in self._shared:
            tensor = tensor.pin_memory()
        place.copy_(tensor, non_blocking=True)


class MaskMemory:
    """Static memory on the device: one bitmask for each of at most ``max_size`` rows of logits that have one."""

    def __init__(self, max_size: int, row_bytes: int, device: torch.device) -> None:
        self.bits = torch.zeros((max_size, row_bytes), dtype=torch.uint8, device=device)
        self.rows = torch.full((max_size,), -1, dtype=torch.int64, device=device)
        """bits[i] belongs to the row of logits rows[i]; -1: to none."""
        self._rows_host = np.full(max_size, -1, dtype=np.int64)  # what `rows` holds, or will
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def set(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, size: int, host: HostBitmasks) -> None:
        """For the next launch of a graph of ``size`` rows: ``bits`` [n, row_bytes], or None, are of ``rows`` [n].

        Copied while the forward runs: a bitmask comes when the step before has been answered, so nobody reads the old.
        """
        if self._stream is None:
            self._set(rows, bits, size, host)
            return
        with torch.cuda.stream(self._stream):
            self._set(rows, bits, size, host)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _set(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, size: int, host: HostBitmasks) -> None:
        n = len(rows)
        wanted = np.full(size, -1, dtype=np.int64)
        wanted[:n] = rows
        if not np.array_equal(self._rows_host[:size], wanted):
            sent = torch.from_numpy(wanted)
            self.rows[:size].copy_(sent.pin_memory() if self.rows.is_cuda else sent, non_blocking=True)
            self._rows_host[:size] = wanted
        if bits is not None:
            host.to_device(bits, self.bits[:n])
