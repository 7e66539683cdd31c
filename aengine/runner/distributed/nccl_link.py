"""`NcclLink`: pipeline stages with a GPU each, on several machines, by NCCL over the network between these.

        sender's GPU                                        receiver's GPU
    layers ─> copy to slot k ─┐                       ┌─> what is queued next reads slot k
                              └─ send ~~ network ~~> receive
                             (a stream of its own)   (a stream of its own, as soon as the slot has been read)

Slots of messages are used in turn, and events keep the streams in order. The hosts number the messages, and wait for
nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..platforms.platform import Event, Platform
from .pipeline import IntermediateTensors, StepSizes
from .stage import PipelineStage

__all__ = ["NcclLink"]


class _Outbox:
    """Sends messages to one other stage."""

    def __init__(self, group: Any, stage: int, slots: Tensor, platform: Platform) -> None:
        """``slots`` [slots, most, ...]: where messages lie until they have been sent."""
        self._group = group
        self._stage = stage
        self._slots = slots
        self._platform = platform
        self._stream = platform.side_stream()
        self._sent: list[Event | None] = [None] * len(slots)
        self._num_sent = 0

    def send(self, x: Tensor) -> None:
        place = self._num_sent % len(self._slots)
        self._num_sent += 1
        slot, sent = self._slots[place][: len(x)], self._sent[place]
        if sent is not None:
            sent.wait()
        slot.copy_(x)

        def send() -> None:
            self._group.send([slot], self._stage, 0).wait()  # the stream waits, not the host

        self._sent[place] = self._stream.launch(send, self._platform.record_event())

    def send_anything(self) -> None:
        """Send a message of length 1."""
        self.send(self._slots[0][:1].clone())


class _Inbox:
    """Receives the messages of one other stage, in order."""

    def __init__(self, group: Any, stage: int, slots: Tensor, platform: Platform) -> None:
        """``slots`` [slots, most, ...]: where messages lie until they have been read."""
        self._group = group
        self._stage = stage
        self._slots = slots
        self._platform = platform
        self._stream = platform.side_stream()
        self._read: list[Event | None] = [None] * len(slots)
        self._num_received = 0

    def receive(self, length: int) -> Tensor:
        """[length, ...]: the next message, for what is queued until the next call."""
        place = self._num_received % len(self._slots)
        if self._num_received:
            self._read[place - 1] = self._platform.record_event()
        self._num_received += 1
        slot = self._slots[place][:length]

        def receive() -> None:
            self._group.recv([slot], self._stage, 0).wait()  # the stream waits, not the host

        there = self._stream.launch(receive, self._read[place])
        if there is not None:
            there.wait()
        return slot


class NcclLink:
    """A `PipelineLink`. What it returns is valid for what is queued before the next call of the method."""

    def __init__(
        self, store: dist.Store, stage: PipelineStage, sizes: StepSizes, platform: Platform, timeout: timedelta
    ) -> None:
        """Meet the other stages at ``store``, and connect to those that this one exchanges with. ``timeout``: longest
        wait for them here; on the device they are waited for without end.

        Raises RuntimeError: NCCL can't connect, or a stage has died.
        """
        self.sizes = sizes
        self._stage = stage
        hidden = _open_group("hidden", store, stage, timeout)  # what travels one way must not wait for the other
        ids = _open_group("ids", store, stage, timeout)
        num_slots = sizes.steps_in_flight + 1
        hidden_shape, ids_shape = (num_slots, sizes.max_batched, sizes.hidden_size), (num_slots, sizes.max_num_seqs)

        def slots_of_hidden() -> Tensor:
            return torch.zeros(hidden_shape, dtype=sizes.dtype, device=platform.device)

        def slots_of_ids() -> Tensor:
            return torch.zeros(ids_shape, dtype=torch.int64, device=platform.device)

        self._hidden_in = None if stage.is_first else _Inbox(hidden, stage.index - 1, slots_of_hidden(), platform)
        self._hidden_out = None if stage.is_last else _Outbox(hidden, stage.index + 1, slots_of_hidden(), platform)
        self._ids_in = _Inbox(ids, stage.size - 1, slots_of_ids(), platform) if stage.is_first else None
        self._ids_out = _Outbox(ids, 0, slots_of_ids(), platform) if stage.is_last else None
        self._connect()
        platform.synchronize()

    def _connect(self) -> None:
        """Exchange one message each way: NCCL connects two ranks at their first."""
        if self._hidden_in is not None:
            self._hidden_in.receive(1)
        if self._hidden_out is not None:
            self._hidden_out.send_anything()
        if self._ids_out is not None:
            self._ids_out.send_anything()
        if self._ids_in is not None:
            self._ids_in.receive(1)

    def send(self, tensors: IntermediateTensors) -> None:
        assert self._hidden_out is not None, "the last stage has no next one"
        self._hidden_out.send(tensors.hidden)

    def receive(self, num_tokens: int) -> IntermediateTensors:
        assert self._hidden_in is not None, "the first stage has none before it"
        return IntermediateTensors(self._hidden_in.receive(num_tokens))

    def send_ids(self, token_ids: Tensor) -> None:
        assert self._ids_out is not None, "the last stage alone samples"
        self._ids_out.send(token_ids)

    def receive_ids(self, count: int) -> Tensor:
        assert self._ids_in is not None, "the first stage alone needs the ids"
        return self._ids_in.receive(count)

    def warm_up(self) -> None:
        pass


def _open_group(name: str, store: dist.Store, stage: PipelineStage, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL  # torch has no types for it
    options = nccl.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True
    return nccl(dist.PrefixStore(name, store), stage.index, stage.size, options)
