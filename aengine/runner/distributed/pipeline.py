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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .stage import PipelineStage

_HIDDEN, _IDS = 0, 1  # tags of messages


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


class PipelineLink(Protocol):
    """A stage's connections. All stages call the methods in the order of the steps."""

    @property
    def sizes(self) -> StepSizes: ...

    def send(self, tensors: IntermediateTensors) -> None:
        """Pass a step on to the next stage. Does not wait for it."""

    def receive(self, num_tokens: int) -> IntermediateTensors:
        """Return the hidden states of a step of so many tokens, from the stage before. They are the caller's, also to
        be changed, until the next call."""

    def send_ids(self, token_ids: Tensor) -> None:
        """Send the ids sampled in a step (int64 [n]) to the first stage. Does not wait. For the last stage."""

    def receive_ids(self, count: int) -> Tensor:
        """Return the ids sampled in the oldest step not yet received: int64 [count], until the next call. Of the first
        stage; no more than ``sizes.steps_in_flight`` of the steps that sample may be left."""

    def warm_up(self) -> None:
        """Load the kernels that the other methods launch; nothing is exchanged."""


class Outbox(Protocol):
    """Messages to one other stage."""

    def send(self, x: Tensor) -> None:
        """Send [n, ...]. Does not wait."""


class Inbox(Protocol):
    """Messages of one other stage."""

    def receive(self, length: int) -> Tensor:
        """Return the hidden states of a step of so many tokens, from the stage before. They are the caller's, also to
        be changed, until the next call."""


class BoxedLink:
    """A `PipelineLink` by a box for each of the other stages that this one exchanges with. None: it is the first, the
    last, or neither, and never asks that box."""

    def __init__(
        self,
        sizes: StepSizes,
        *,
        hidden_in: Inbox | None,
        hidden_out: Outbox | None,
        ids_in: Inbox | None,
        ids_out: Outbox | None,
    ) -> None:
        self.sizes = sizes
        self._hidden_in = hidden_in
        self._hidden_out = hidden_out
        self._ids_in = ids_in
        self._ids_out = ids_out

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


class NoLink:
    """In place of a `PipelineLink` for a rehearsal of one stage: it gets zeros, and what it sends goes nowhere."""

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        self.sizes = sizes
        self._device = device

    def send(self, tensors: IntermediateTensors) -> None:
        pass

    def receive(self, num_tokens: int) -> IntermediateTensors:
        sizes = self.sizes
        return IntermediateTensors(torch.zeros(num_tokens, sizes.hidden_size, dtype=sizes.dtype, device=self._device))

    def send_ids(self, token_ids: Tensor) -> None:
        pass

    def receive_ids(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def warm_up(self) -> None:
        pass


class GlooLink:
    """A `PipelineLink` between CPUs, by gloo: of one machine, over its loopback interface, or of several."""

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
        self.sizes = sizes
        self._stage = stage
        self._group = gloo(store, stage.index, stage.size, options)
        self._sent: deque[tuple[Any, Tensor]] = deque()  # tensors that are still being read: gloo does not copy them

    def send(self, tensors: IntermediateTensors) -> None:
        self._send(tensors.hidden, self._stage.index + 1, _HIDDEN)

    def receive(self, num_tokens: int) -> IntermediateTensors:
        hidden = torch.empty((num_tokens, self.sizes.hidden_size), dtype=self.sizes.dtype)
        self._group.recv([hidden], self._stage.index - 1, _HIDDEN).wait()
        return IntermediateTensors(hidden)

    def send_ids(self, token_ids: Tensor) -> None:
        self._send(token_ids, 0, _IDS)

    def receive_ids(self, count: int) -> Tensor:
        token_ids = torch.empty(count, dtype=torch.int64)
        self._group.recv([token_ids], self._stage.size - 1, _IDS).wait()
        return token_ids

    def warm_up(self) -> None:
        pass

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        # A send of gloo is noted as completed by `wait` alone. So many are not on their way at once: a stage needs the
        # ids of a step before it computes the batch again, and there is a batch for each stage.
        while len(self._sent) > 2 * self._stage.size:
            self._sent.popleft()[0].wait()
        tensor = tensor.contiguous()
        self._sent.append((self._group.send([tensor], stage, tag), tensor))
