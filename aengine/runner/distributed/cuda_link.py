"""`CudaLink`: pipeline stages with a GPU each, on one machine, that write into each other's memory.

        sender's GPU                           receiver's GPU
    wait until the slot has been read  <────── set: all before message k has been read
    copy the tensor  ────────────────────────> slot k % number of slots
    set: message k is there  ────────────────> wait; what is queued next reads the slot

All of it is queued on the GPUs, between the steps. The hosts number the messages, and wait for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed import Store

from ...kernels.signal import signal, wait
from .pipeline import Message, PipelineLink, StepSizes
from .stage import PipelineStage
from .symmetric_memory import SymmetricMemory


class _Counter(IntEnum):
    """Numbers of messages in the memory of a stage, each set by one other stage."""

    HIDDEN_THERE = 0  # set by the stage before
    HIDDEN_READ = 1  # set by the next stage
    IDS_THERE = 2  # on the first stage, set by the last
    IDS_READ = 3  # on the last stage, set by the first
    SCRATCH = 4


_COUNTERS = {
    Message.HIDDEN: (_Counter.HIDDEN_THERE, _Counter.HIDDEN_READ),
    Message.IDS: (_Counter.IDS_THERE, _Counter.IDS_READ),
}


class StageMemory:
    """The memory of a stage: [hidden states | ids | counters]. The same on all, though none uses all of it."""

    def __init__(self, memory: Tensor, sizes: StepSizes) -> None:
        """``memory``: uint8 [num_bytes(sizes)], as this rank reaches it, zero at first."""
        slots = _num_slots(sizes)
        hidden, ids, counters = memory.split(_bytes_of_parts(sizes))
        num_bytes = slots * sizes.max_batched * sizes.hidden_size * sizes.dtype.itemsize
        self.slots = {
            Message.HIDDEN: hidden[:num_bytes].view(sizes.dtype).view(slots, sizes.max_batched, sizes.hidden_size),
            Message.IDS: ids.view(torch.int64).view(slots, sizes.max_ids),
        }
        self._counters = counters.view(torch.int64)

    @staticmethod
    def num_bytes(sizes: StepSizes) -> int:
        return sum(_bytes_of_parts(sizes))

    def address(self, counter: _Counter) -> Tensor:
        """Return the address of a counter, int64 [1] on the device; see kernels/signal.py."""
        return torch.tensor([self._counters[counter].data_ptr()], device=self._counters.device)


def _num_slots(sizes: StepSizes) -> int:
    """Return how many slots never meet: the host gives a step when the one so many before it has been answered, and the
    slot that was read last is given back when the next message is asked for."""
    return sizes.steps_in_flight + 1


def _bytes_of_parts(sizes: StepSizes) -> list[int]:
    hidden = sizes.max_batched * sizes.hidden_size * sizes.dtype.itemsize
    slots = _num_slots(sizes)
    return [-(-slots * hidden // 16) * 16, slots * sizes.max_ids * 8, 8 * len(_Counter)]


class _Outbox:
    """Sends messages to one other stage."""

    def __init__(self, slots: Tensor, there: Tensor, read: Tensor) -> None:
        """``slots`` [slots, most, ...]: the receiver's; ``there``, ``read``: addresses of its counter and of ours."""
        self._slots = slots
        self._there = there
        self._read = read
        self._num_sent = 0

    def send(self, x: Tensor) -> None:
        slot = self._slots[self._num_sent % len(self._slots)]
        self._num_sent += 1
        if self._num_sent > len(self._slots):
            wait(self._read, self._num_sent - len(self._slots))
        slot[: len(x)].copy_(x)
        signal(self._there, self._num_sent)


class _Inbox:
    """Receives the messages of one other stage, in order."""

    def __init__(self, slots: Tensor, there: Tensor, read: Tensor) -> None:
        """``slots`` [slots, most, ...]: our own; ``there``, ``read``: addresses of our counter and of the sender's."""
        self._slots = slots
        self._there = there
        self._read = read
        self._num_received = 0

    def receive(self, length: int) -> Tensor:
        """Return [length, ...]: the next message, for what is queued until the next call."""
        if self._num_received:
            signal(self._read, self._num_received)
        slot = self._slots[self._num_received % len(self._slots)]
        self._num_received += 1
        wait(self._there, self._num_received)
        return slot[:length]


class CudaLink(PipelineLink):
    """What it returns is valid for what is queued before the next call of the method."""

    def __init__(
        self, stage: PipelineStage, sizes: StepSizes, memories: Sequence[StageMemory], owner: object = None
    ) -> None:
        """``memories``: of all stages, as this rank reaches them; ``owner`` keeps them."""
        self._owner = owner
        own = memories[stage.index]
        self._scratch = own.address(_Counter.SCRATCH)

        def inbox(message: Message, other: int) -> _Inbox:
            there, read = _COUNTERS[message]
            return _Inbox(own.slots[message], own.address(there), memories[other].address(read))

        def outbox(message: Message, other: int) -> _Outbox:
            (there, read), its = _COUNTERS[message], memories[other]
            return _Outbox(its.slots[message], its.address(there), own.address(read))

        super().__init__(stage, sizes, inbox, outbox)

    def warm_up(self) -> None:
        signal(self._scratch, 0)
        wait(self._scratch, 0)


def open_cuda_link(
    store: Store, stage: PipelineStage, sizes: StepSizes, device: torch.device, timeout: timedelta
) -> CudaLink:
    """Meet the other stages at ``store``. ``timeout``: longest wait for them here; on the device they are waited for
    without end.

    Raises as `SymmetricMemory`.
    """
    store.set_timeout(timeout)
    memory = SymmetricMemory(StageMemory.num_bytes(sizes), store, stage.index, stage.size, device)
    return CudaLink(stage, sizes, [StageMemory(memory.part(i), sizes) for i in range(stage.size)], memory)
