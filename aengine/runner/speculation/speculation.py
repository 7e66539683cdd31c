"""`Verifier`: how many tokens the requests of a step get.

    update ─> ahead ─> begin ─┬─> begin_batch, the layers ─┬─> gather, sampling, note_sampled, append ─┬─> answer
                              └─> a graph's first half ────┴─> its second half, note_sampled ──────────┘

Here each gets one, if it samples. `DraftVerifier` verifies guesses of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...ipc.messages import GrammarOutput, SchedulerOutput
from ..async_output import AsyncOutput, SideOutput
from ..graphs.cuda_graphs import CudaGraphManager
from ..input_batch import BatchPlan, Rows, SampleBatch
from ..request_state import RequestState


class Verifier:
    """One token each. `ModelRunner` calls the methods in the order of the picture."""

    graphs: CudaGraphManager | None = None
    """Graphs of decodes in which a row has several positions; their sizes count positions. None: there are none."""

    def __init__(self, requests: RequestState) -> None:
        self._requests = requests

    def update(self, out: SchedulerOutput) -> None:
        """Take in what a step tells of those before it, ahead of its own changes of rows."""

    def ahead(self, out: SchedulerOutput, vocab_size: int) -> Rows | None:
        """Return how many tokens beyond its known ones each request of the step computes; None: there are none. Raises
        InternalError for an id that the model, of ``vocab_size`` tokens, does not have."""
        return None

    def begin(self, plan: BatchPlan) -> None:
        """Prepare the rows of a planned step, before its inputs are read; set at how many positions each samples."""

    def begin_batch(self) -> None:
        """Prepare the rows of a step, begun, that no graph of several positions runs."""

    def gather(self, plan: BatchPlan, idx_mapping: Tensor, grammar: GrammarOutput | None) -> SampleBatch:
        """Return the step's rows of logits. ``idx_mapping``: int64 [num_reqs], the plan's rows on the device."""
        return SampleBatch.gather(plan, idx_mapping, self._requests, grammar)

    def append(self, batch: SampleBatch, token_ids: Tensor) -> Mapping[str, Tensor]:
        """Give the rows the tokens that were sampled for them, int64 [n]. Returns what the host must know beside
        these, by field of `HostOutput`."""
        return batch.spec_decode.commit(token_ids, batch.rows_device, self._requests)

    def note_sampled(self, plan: BatchPlan) -> None:
        """Note on the host that the step has sampled."""
        self._requests.append(plan.sampled()[0])

    def answer(self, plan: BatchPlan | None, *answer: Any, side: SideOutput) -> AsyncOutput:
        """Return the step's answer, made of the arguments of `AsyncOutput`. ``plan``: None if nothing was run."""
        return AsyncOutput(*answer, side=side)
