"""`Relay`: what a pipeline stage gets of each step from the others, and passes on to them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.messages import SchedulerOutput
from ..distributed.group import ALONE, TensorGroup
from ..distributed.pipeline import IntermediateTensors, PipelineLink
from ..distributed.stage import PipelineStage
from ..request_state import RequestState
from .awaited_ids import AwaitedIds
from .step_exchange import Rows, StepExchange


class Relay(StepExchange):
    """One stage's side, of several.

    The link is used outside of graphs, which read what it got, and write what it passes on, in memory of this object:
    so a graph waits for no other stage, and may be captured at any time.
    """

    is_alone = False

    def __init__(self, stage: PipelineStage, link: PipelineLink, group: TensorGroup = ALONE) -> None:
        """``group``: the ranks that share each of the stage's layers."""
        super().__init__(group)
        self.samples, self.has_tokens = stage.is_last, stage.is_first or stage.is_last
        self._stage = stage
        self._link = link
        self._awaited: AwaitedIds | None = None  # the first stage's
        self._hidden: Tensor | None = None  # [max_batched, hidden_size]: input of graphs, on all but the first stage

    def attach(self, requests: RequestState, *, has_graphs: bool) -> None:
        sizes, device = self._link.sizes, requests.token_ids.device
        if self._stage.is_first:
            self._awaited = AwaitedIds(requests, self._link)
        elif has_graphs:
            self._hidden = torch.zeros(sizes.max_batched, sizes.hidden_size, dtype=sizes.dtype, device=device)
        if self._stage.is_last and has_graphs:
            self.sampled_ids = torch.zeros(sizes.max_ids, dtype=torch.int64, device=device)

    def add_request(self, row: int) -> None:
        if self._awaited is not None:
            self._awaited.note_new_owner(row)

    def begin(self, out: SchedulerOutput, rows: Rows, num_tokens: int) -> None:
        """Receive ids until the newest ones of these rows are in them."""
        if self._awaited is not None:
            self._awaited.receive_for(rows)

    def receive(self, num_tokens: int) -> tuple[Tensor, ...]:
        return () if self._stage.is_first else self._link.receive(num_tokens)

    def receive_for_graph(self, num_tokens: int) -> None:
        for hidden in self.receive(num_tokens):
            assert self._hidden is not None, "there are graphs"
            self._hidden[:num_tokens].copy_(hidden)

    def received(self, num_tokens: int, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return a copy of the hidden states, for layers change what they get. The copy is also a launch that waits for
        all before it, as layers need one ahead of them (kernels/triton/launch.py); on the first stage that is the
        lookup of the embeddings."""
        return () if self._hidden is None else (self._hidden[:num_tokens].clone(),)

    def send(self, hidden: Tensor) -> None:
        self._link.send(IntermediateTensors(hidden))

    def expect_ids(self, rows: Rows, counts: Rows | None) -> None:
        if self._awaited is not None:
            self._awaited.expect(rows, counts)

    def send_ids(self, token_ids: Tensor) -> None:
        self._link.send_ids(token_ids)

    def send_ids_of_graph(self, count: int) -> None:
        if self.sampled_ids is not None:
            self.send_ids(self.sampled_ids[:count])
