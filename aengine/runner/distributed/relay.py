"""`Relay`: what a pipeline stage gets of each step from the others, and passes on to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..request_state import RequestState
from .awaited_ids import AwaitedIds
from .pipeline import IntermediateTensors, PipelineLink
from .stage import PipelineStage

__all__ = ["Relay"]

Rows = npt.NDArray[np.int64]


class Relay:
    """One stage's side. Without a ``link`` there is one stage, which gets and passes on nothing.

    The link is used outside of graphs, which read what it got, and write what it passes on, in memory of this object:
    so a graph waits for no other stage, and may be captured at any time.
    """

    def __init__(
        self, stage: PipelineStage, link: PipelineLink | None, requests: RequestState, *, has_graphs: bool
    ) -> None:
        self._stage = stage
        self._link = link
        self._awaited = AwaitedIds(requests, link) if link is not None and stage.is_first else None
        self._hidden: Tensor | None = None  # [max_batched, hidden_size]: input of graphs
        self.token_ids: Tensor | None = None
        """int64 [max_num_seqs]: the sampled ids, where graphs leave them; None: nobody needs them."""
        if link is not None and has_graphs:
            sizes, device = link.sizes, requests.token_ids.device
            if not stage.is_first:
                self._hidden = torch.zeros(sizes.max_batched, sizes.hidden_size, dtype=sizes.dtype, device=device)
            if stage.is_last:
                self.token_ids = torch.zeros(sizes.max_num_seqs, dtype=torch.int64, device=device)

    @property
    def samples(self) -> bool:
        """Whether this stage samples: it is the last."""
        return self._stage.is_last

    def note_new_owner(self, row: int) -> None:
        """Note that the row belongs to another request from now on."""
        if self._awaited is not None:
            self._awaited.note_new_owner(row)

    def receive_ids_for(self, rows: Rows) -> None:
        """Called before a step: receive ids until the newest ones of these rows (int64 [m]) are in them."""
        if self._awaited is not None:
            self._awaited.receive_for(rows)

    def receive(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Receive the hidden states of a step from the stage before. The first stage gets nothing."""
        if self._link is None or self._stage.is_first:
            return ()
        return self._link.receive(num_tokens)

    def receive_for_graph(self, num_tokens: int) -> None:
        """Receive a step where graphs read it. What pads it there is of earlier steps."""
        for hidden in self.receive(num_tokens):
            assert self._hidden is not None, "there are graphs"
            self._hidden[:num_tokens].copy_(hidden)

    def received(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Within a graph: what was received for a step of so many tokens, padding included.

        A copy, for layers change what they get. And it is a launch that waits for all before it, as layers need one
        ahead of them (kernels/triton/launch.py): on the first stage that is the lookup of the embeddings.
        """
        return () if self._hidden is None else (self._hidden[:num_tokens].clone(),)

    def send(self, hidden: Tensor) -> None:
        """Pass a step on to the next stage."""
        assert self._link is not None, "a stage that is not the last has a link to the next"
        self._link.send(IntermediateTensors(hidden))

    def expect_ids(self, rows: Rows) -> None:
        """Note that the last stage samples one token for each of these rows (int64 [n])."""
        if self._awaited is not None:
            self._awaited.expect(rows)

    def send_ids(self, token_ids: Tensor) -> None:
        """Send the sampled ids (int64 [n]) to the first stage."""
        if self._link is not None:
            self._link.send_ids(token_ids)

    def send_ids_of_graph(self, count: int) -> None:
        """Send the first ``count`` ids that a graph has left, as `send_ids` does."""
        if self.token_ids is not None:
            self.send_ids(self.token_ids[:count])
