"""Pipeline parallel: the layers of a model are divided among stages, each on a rank of its own (or on several, which
share each of its layers).

    stage 0                     stage 1                      stage 2
    embed, layers 0 .. 9 ─────> layers 10 .. 19 ─────> layers 20 .. 29, head, sampling
          ^        IntermediateTensors                            │
          └────────────────────── sampled ids ────────────────────┘

Every stage gets every frame of the host, in the same order. A step's hidden states go from stage to stage, its sampled
ids from the last stage to the first, which needs them for the next step of the same requests; the host is in neither
way. While a later stage computes a step, the earlier ones compute those of other micro-batches
(engine/scheduler/decode_batches.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .stage import PipelineStage


class IntermediateTensors(NamedTuple):
    """The tensors that a pipeline stage passes on to the next."""

    hidden: Tensor  # [num_tokens, hidden_size]: the residual stream


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of the largest messages that stages exchange, and how many are under way at most."""

    hidden_size: int
    dtype: torch.dtype  # dtype of the hidden states
    max_batched: int  # most tokens of a step
    max_ids: int  # most ids of a step
    steps_in_flight: int  # most unanswered steps of the host, not counting those in which nothing is sampled


class Outbox(Protocol):
    """Messages to one other stage."""

    def send(self, x: Tensor) -> None:
        """Send [n, ...]. Does not wait."""


class Inbox(Protocol):
    """Messages of one other stage, in order."""

    def receive(self, length: int) -> Tensor:
        """Return the next message, [length, ...]. It is the caller's, also to be changed, until the next call."""


class Message(Enum):
    """What stages send each other."""

    HIDDEN = 0  # hidden states [num_tokens, hidden_size], to the next stage
    IDS = 1  # sampled ids int64 [n], from the last stage to the first

    def form(self, sizes: StepSizes) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype, and the shape of one token's part."""
        return (sizes.dtype, (sizes.hidden_size,)) if self is Message.HIDDEN else (torch.int64, ())


class PipelineLink:
    """A stage's connections. All stages call the methods in the order of the steps."""

    def __init__(
        self,
        stage: PipelineStage,
        sizes: StepSizes,
        inbox: Callable[[Message, int], Inbox],
        outbox: Callable[[Message, int], Outbox],
    ) -> None:
        """``inbox`` and ``outbox`` connect with another stage, given by its index, for messages of a kind."""
        self.sizes = sizes
        self._hidden_in = None if stage.is_first else inbox(Message.HIDDEN, stage.index - 1)
        self._hidden_out = None if stage.is_last else outbox(Message.HIDDEN, stage.index + 1)
        self._ids_in = inbox(Message.IDS, stage.size - 1) if stage.is_first else None
        self._ids_out = outbox(Message.IDS, 0) if stage.is_last else None

    def send(self, tensors: IntermediateTensors) -> None:
        """Pass a step on to the next stage. Does not wait for it."""
        assert self._hidden_out is not None, "the last stage has no next one"
        self._hidden_out.send(tensors.hidden)

    def receive(self, num_tokens: int) -> IntermediateTensors:
        """Return the hidden states of a step of so many tokens, from the stage before. They are the caller's, also to
        be changed, until the next call."""
        assert self._hidden_in is not None, "the first stage has none before it"
        return IntermediateTensors(self._hidden_in.receive(num_tokens))

    def send_ids(self, token_ids: Tensor) -> None:
        """Send the ids sampled in a step (int64 [n]) to the first stage. Does not wait. For the last stage."""
        assert self._ids_out is not None, "the last stage alone samples"
        self._ids_out.send(token_ids)

    def receive_ids(self, count: int) -> Tensor:
        """Return the ids sampled in the oldest step not yet received: int64 [count], until the next call. Of the first
        stage; no more than ``sizes.steps_in_flight`` of the steps that sample may be left."""
        assert self._ids_in is not None, "the first stage alone needs the ids"
        return self._ids_in.receive(count)

    def warm_up(self) -> None:
        """Load the kernels that the other methods launch; nothing is exchanged."""


class _Zeros:
    """Brings zeros, and sends nothing."""

    def __init__(self, message: Message, sizes: StepSizes, device: torch.device) -> None:
        self._dtype, self._shape = message.form(sizes)
        self._device = device

    def send(self, x: Tensor) -> None:
        pass

    def receive(self, length: int) -> Tensor:
        return torch.zeros((length, *self._shape), dtype=self._dtype, device=self._device)


class NoLink(PipelineLink):
    """For a rehearsal of one stage: it gets zeros, and what it sends goes nowhere."""

    def __init__(self, stage: PipelineStage, sizes: StepSizes, device: torch.device) -> None:
        def box(message: Message, other: int) -> _Zeros:
            return _Zeros(message, sizes, device)

        super().__init__(stage, sizes, box, box)


class _GlooBox:
    """Messages to or from one other stage."""

    def __init__(self, group: Any, other: int, message: Message, sizes: StepSizes, most_sent: int) -> None:
        self._group, self._other, self._tag, self._most_sent = group, other, message.value, most_sent
        self._dtype, self._shape = message.form(sizes)
        self._sent: deque[tuple[Any, Tensor]] = deque()  # tensors that are still being read: gloo does not copy them

    def send(self, x: Tensor) -> None:
        # A send of gloo is noted as completed by `wait` alone. So many are not on their way at once: a stage needs the
        # ids of a step before it computes the batch again, and there is a batch for each stage.
        while len(self._sent) > self._most_sent:
            self._sent.popleft()[0].wait()
        x = x.contiguous()
        self._sent.append((self._group.send([x], self._other, self._tag), x))

    def receive(self, length: int) -> Tensor:
        x = torch.empty((length, *self._shape), dtype=self._dtype)
        self._group.recv([x], self._other, self._tag).wait()
        return x


class GlooLink(PipelineLink):
    """A link between CPUs, by gloo: of one machine, over its loopback interface, or of several."""

    def __init__(
        self,
        store: dist.Store,
        stage: PipelineStage,
        sizes: StepSizes,
        timeout: timedelta,
        address: str = "127.0.0.1",
    ) -> None:
        """Meet the other stages at ``store``. ``timeout``: longest wait for another stage, here and in every call;
        ``address``: by which they reach this one.

        Raises RuntimeError, here and in every call: a stage did not come in time, or has died.
        """
        gloo: Any = dist.ProcessGroupGloo  # torch has no types for it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timeout
        group = gloo(store, stage.index, stage.size, options)

        def box(message: Message, other: int) -> _GlooBox:
            return _GlooBox(group, other, message, sizes, 2 * stage.size)

        super().__init__(stage, sizes, box, box)
