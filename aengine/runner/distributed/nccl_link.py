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
from .pipeline import IntermediateTensors, Message, PipelineLink, StepSizes
from .stage import PipelineStage


class _Box:
    """Messages to or from one other stage."""

    def __init__(self, group: Any, stage: int, slots: Tensor, platform: Platform) -> None:
        """``slots`` [slots, most, ...]: where messages lie until they have been sent, or read."""
        self._group = group
        self._stage = stage
        self._slots = slots
        self._platform = platform
        self._stream = platform.side_stream()
        self._done: list[Event | None] = [None] * len(slots)  # event of each slot: its last message was sent, or read
        self._num_messages = 0


class _Outbox(_Box):
    def send(self, x: Tensor) -> None:
        place = self._num_messages % len(self._slots)
        self._num_messages += 1
        slot, sent = self._slots[place][: len(x)], self._done[place]
        if sent is not None:
            sent.wait()
        slot.copy_(x)

        def send() -> None:
            self._group.send([slot], self._stage, 0).wait()  # the stream waits, not the host

        self._done[place] = self._stream.launch(send, self._platform.record_event())


class _Inbox(_Box):
    def receive(self, length: int) -> Tensor:
        place = self._num_messages % len(self._slots)
        if self._num_messages:
            self._done[place - 1] = self._platform.record_event()
        self._num_messages += 1
        slot = self._slots[place][:length]

        def receive() -> None:
            self._group.recv([slot], self._stage, 0).wait()  # the stream waits, not the host

        there = self._stream.launch(receive, self._done[place])
        if there is not None:
            there.wait()
        return slot


class NcclLink(PipelineLink):
    """What it returns is valid for what is queued before the next call of the method."""

    def __init__(
        self, store: dist.Store, stage: PipelineStage, sizes: StepSizes, platform: Platform, timeout: timedelta
    ) -> None:
        """Meet the other stages at ``store``, and connect to those that this one exchanges with. ``timeout``: longest
        wait for them here; on the device they are waited for without end.

        Raises RuntimeError: NCCL can't connect, or a stage has died.
        """
        # Two groups, as what travels one way must not wait for the other.
        groups = {message: _open_group(message.name.lower(), store, stage, timeout) for message in Message}

        def slots(message: Message) -> Tensor:
            dtype, shape = message.form(sizes)
            most = sizes.max_batched if message is Message.HIDDEN else sizes.max_ids
            return torch.zeros((sizes.steps_in_flight + 1, most, *shape), dtype=dtype, device=platform.device)

        super().__init__(
            stage,
            sizes,
            lambda message, other: _Inbox(groups[message], other, slots(message), platform),
            lambda message, other: _Outbox(groups[message], other, slots(message), platform),
        )
        # NCCL connects two ranks at their first message.
        if not stage.is_first:
            self.receive(1)
        if not stage.is_last:
            hidden = torch.zeros((1, sizes.hidden_size), dtype=sizes.dtype, device=platform.device)
            self.send(IntermediateTensors(hidden))
        if stage.is_last:
            self.send_ids(torch.zeros((1,), dtype=torch.int64, device=platform.device))
        if stage.is_first:
            self.receive_ids(1)
        platform.synchronize()


def _open_group(name: str, store: dist.Store, stage: PipelineStage, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL  # torch has no types for it
    options = nccl.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True
    return nccl(dist.PrefixStore(name, store), stage.index, stage.size, options)
