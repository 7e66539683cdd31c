"""`Relay`: what a pipeline stage gets of each step from the others, and passes on to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..request_state import RequestState
from .awaited_ids import AwaitedIds
from .pipeline import IntermediateTensors, PipelineLink
from .stage import PipelineStage

__all__ = ["Relay"]

Rows = npt.NDArray[np.int64]


class Relay:
    """One stage's side. Without a ``link`` there is one stage, which gets and passes on nothing."""

    def __init__(self, stage: PipelineStage, link: PipelineLink | None, requests: RequestState) -> None:
        self._stage = stage
        self._link = link
        self._awaited = AwaitedIds(requests, link) if link is not None and stage.is_first else None

    @property
    def has_others(self) -> bool:
        """Whether there are other stages."""
        return self._link is not None

    @property
    def samples(self) -> bool:
        """Whether this stage samples: it is the last."""
        return self._stage.is_last

    def note_new_owner(self, row: int) -> None:
        """The row is another request's from now on."""
        if self._awaited is not None:
            self._awaited.note_new_owner(row)

    def receive_ids_for(self, rows: Rows) -> None:
        """Before a step: see that the newest ids of these rows, int64 [m], are in them."""
        if self._awaited is not None:
            self._awaited.receive_for(rows)

    def receive(self, num_tokens: int) -> tuple[Tensor, ...]:
        """The hidden states of a step from the stage before; nothing on the first."""
        if self._link is None or self._stage.is_first:
            return ()
        return self._link.receive(num_tokens)

    def send(self, hidden: Tensor) -> None:
        """Pass a step on to the next stage."""
        assert self._link is not None, "a stage that is not the last has a link to the next"
        self._link.send(IntermediateTensors(hidden))

    def expect_ids(self, rows: Rows) -> None:
        """The last stage samples one token for each of these rows, int64 [n]."""
        if self._awaited is not None:
            self._awaited.expect(rows)

    def send_ids(self, token_ids: Tensor) -> None:
        """Tell the first stage what was sampled, int64 [n]."""
        if self._link is not None:
            self._link.send_ids(token_ids)
