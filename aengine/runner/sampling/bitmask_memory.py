"""Memory from which a graph reads the bitmasks of its step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InternalError
from ...ipc.messages import GrammarOutput
from ..input_batch import NO_ROWS, Rows
from ..platforms.platform import Platform


class HostBitmasks:
    """Bitmasks as a GRAMMAR frame brings them: bytes of its own, or memory shared with the host.

    The shared memory is made known to the device once, so that the device reads it without the CPU.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._shared: Tensor | None = None  # uint8 [bytes]

    def register(self, memory: memoryview, platform: Platform) -> None:
        """Note that bitmasks will lie in ``memory`` for as long as this process lives. They are copied if the device
        can't read it."""
        if not platform.is_accelerator or not len(memory):
            return
        tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        if platform.share(tensor):
            self._shared = tensor

    def shared_rows(self, count: int) -> Tensor | None:
        """Return uint8 [count, row_bytes], on the host, from the beginning of memory that the device sees; None if
        there is not so much."""
        if self._shared is None or len(self._shared) < count * self.row_bytes:
            return None
        return self._shared[: count * self.row_bytes].view(count, self.row_bytes)

    def of_batch(self, grammar: GrammarOutput | None, batch_idx: Rows) -> tuple[Rows, npt.NDArray[np.uint8] | None]:
        """Return (rows [n], bits [n, row_bytes] over the frame's memory): bits[i] belongs to the row of logits rows[i],
        where ``batch_idx`` has the batch position of each row of logits; those of one position follow each other.

        Raises InternalError when the frame does not hold as much as it should.
        """
        if grammar is None or not grammar.batch_idx:
            return NO_ROWS, None
        count, bitmask = len(grammar.batch_idx), grammar.bitmask
        assert not isinstance(bitmask, int), "the worker has looked it up"
        if len(bitmask) != count * self.row_bytes:
            raise InternalError(f"the bitmask has {len(bitmask)} bytes, but {count} rows of {self.row_bytes} are due")
        # torch warns of memory that can't be written to, though none is written to.
        memory = bytearray(bitmask) if isinstance(bitmask, bytes) else bitmask
        bits = np.frombuffer(memory, dtype=np.uint8).reshape(count, self.row_bytes)
        masked = np.frombuffer(grammar.batch_idx, dtype=np.int32)
        place = np.full(int(max(batch_idx.max(initial=0), masked.max())) + 1, -1, dtype=np.int64)
        place[batch_idx[::-1]] = np.arange(len(batch_idx))[::-1]  # the first row of each position
        rows = place[masked]
        if len(masked) > 1:
            again = np.arange(len(masked))
            again -= np.maximum.accumulate(np.where(np.diff(masked, prepend=-1) != 0, again, 0))
            rows = np.where(rows < 0, rows, rows + again)
        if rows.min() < 0:  # a request that does not sample, for want of memory for its prompt
            bits, rows = bits[rows >= 0], rows[rows >= 0]
        return rows, bits

    def to_device(self, rows: npt.NDArray[np.uint8], place: Tensor) -> None:
        """Copy into ``place``, uint8 of that shape. Shared memory may not change until the step has been answered."""
        tensor = torch.from_numpy(rows)
        if place.device.type != "cpu" and not self._is_shared(rows.ctypes.data):
            tensor = tensor.pin_memory()
        place.copy_(tensor, non_blocking=True)

    def _is_shared(self, address: int) -> bool:
        return self._shared is not None and 0 <= address - self._shared.data_ptr() < len(self._shared)


class MaskMemory:
    """Memory of a graph's bitmasks: one for each of at most ``max_size`` rows of logits that have one.

    The bits are read where the host has written them, if that is memory shared with it: nothing is copied, and the
    kernel takes as long as a copy would. Otherwise they are on the device.
    """

    def __init__(self, max_size: int, host: HostBitmasks, device: torch.device) -> None:
        self._max_size = max_size
        self._host = host
        self._device = device
        self._bits: Tensor | None = None  # None until the shared memory is known
        self.rows = torch.full((max_size,), -1, dtype=torch.int64, device=device)
        """bits[i] belongs to the row of logits rows[i]; -1: to none."""
        self._rows_host = np.full(max_size, -1, dtype=np.int64)  # content of `rows` once all copies have run

    @property
    def bits(self) -> Tensor:
        """uint8 [max_size, row_bytes]; the same memory from the first use on."""
        if self._bits is None:
            shared = self._host.shared_rows(self._max_size)
            shape = (self._max_size, self._host.row_bytes)
            self._bits = torch.zeros(shape, dtype=torch.uint8, device=self._device) if shared is None else shared
        return self._bits

    def set(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, size: int) -> None:
        """Set the bitmasks of the next launch, of ``size`` rows: ``bits`` [n, row_bytes], or None, of ``rows`` [n].

        A bitmask comes when the step before has been answered, so the old one is not read any more.
        """
        n = len(rows)
        wanted = np.full(size, -1, dtype=np.int64)
        wanted[:n] = rows
        if not np.array_equal(self._rows_host[:size], wanted):
            sent = torch.from_numpy(wanted)
            self.rows[:size].copy_(sent if self._device.type == "cpu" else sent.pin_memory(), non_blocking=True)
            self._rows_host[:size] = wanted
        if bits is None or bits.ctypes.data == self.bits.data_ptr():
            return
        if self.bits.device == self._device:
            self._host.to_device(bits, self.bits[:n])
        else:  # the bitmask came through the ring
            self.bits.numpy()[:n] = bits
