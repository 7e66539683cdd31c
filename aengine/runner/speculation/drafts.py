"""`DraftVerifier`: steps in which requests have drafts, which are written into their rows, computed, and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import InternalError
from ...ipc.messages import DraftColumns, GrammarOutput, ModelRunnerOutput, RowError, SchedulerOutput
from ..async_output import AsyncOutput, HostOutput, SideOutput, int_column, logprob_columns
from ..graphs.cuda_graphs import CudaGraphManager
from ..input_batch import BatchPlan, Rows, SampleBatch
from ..request_state import RequestState
from ..transfer import to_device
from ..weights.step_rows import StepRows
from .graphs import DraftStep
from .positions import Verification, places_in
from .proposer import Proposer
from .speculation import Verifier

_NOTHING: tuple[Rows, Rows] = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


class DraftVerifier(Verifier):
    """A request with drafts gets those that are what is sampled, and one token more."""

    def __init__(
        self,
        requests: RequestState,
        sizes: Sequence[int],
        parts: Sequence[Any],
        enforce_eager: bool,
        has_tokens: bool,
        proposer: Proposer,
        step_rows: StepRows,
    ) -> None:
        """``sizes``: numbers of positions of decodes that run as graphs, made of ``parts``: `DecodeStep`'s arguments
        but for the largest size. ``has_tokens``: the rows get what is sampled; else drafts are counted, not written,
        and settled on the device too, before the row's next step. ``proposer``: finds drafts in the rows.
        ``step_rows``: has the kinds of steps."""
        super().__init__(requests)
        self._proposer = proposer
        self._has_tokens = has_tokens
        self._step: DraftStep | None = None  # what its graphs run
        if sizes:
            step = self._step = DraftStep(*parts[:3], max(sizes), *parts[3:])
            how = {"enforce_eager": enforce_eager, "has_ends": False}
            self.graphs = CudaGraphManager(step, list(sizes), step.platform, step_rows=step_rows, **how)
        self._columns: DraftColumns | None = None  # drafts of the step being run
        self._unwritten = _NOTHING  # how many of its drafts each row has that a graph would write, and these drafts
        self._rows: Rows = np.empty(0, dtype=np.int64)  # its rows, in the order of the columns

    def update(self, out: SchedulerOutput) -> None:
        """Settle how many drafts were rejected; an answer told the host."""
        self._columns = out.drafts
        self._proposer.update(out)
        if out.settled_rows:
            rows, num_rejected = np.array(out.settled_rows, dtype=np.int64), np.array(out.num_rejected, dtype=np.int64)
            self._requests.settle(rows, num_rejected)
            if not self._has_tokens:
                computed = self._requests.scalars.num_computed_tokens
                row, rejected = to_device(np.stack((rows, num_rejected)), computed.device).unbind()
                computed.index_add_(0, row, rejected.int(), alpha=-1)

    def ahead(self, out: SchedulerOutput, vocab_size: int) -> Rows | None:
        if out.drafts is None:
            return None
        if out.drafts.token_ids and not 0 <= min(out.drafts.token_ids) <= max(out.drafts.token_ids) < vocab_size:
            raise InternalError("a draft is a token that the model does not have")
        self._rows = np.array(out.req_idx, dtype=np.int64)
        return np.array(out.drafts.counts, dtype=np.int64)

    def begin(self, plan: BatchPlan) -> None:
        """Prepare the drafts of the step. Those that are certain become tokens of the row, and need no logits of their
        own."""
        self._unwritten = _NOTHING
        self._proposer.catch_up(plan)
        if self._columns is not None:
            self._put(self._columns, plan)
        self._proposer.advance(plan)

    def _put(self, columns: DraftColumns, plan: BatchPlan) -> None:
        counts, is_certain = np.array(columns.counts, dtype=np.int64), np.array(columns.is_certain, dtype=bool)
        if self._has_tokens and any(columns.is_found):
            is_found = np.array(columns.is_found, dtype=bool)
            self._proposer.propose(self._rows[is_found], counts[is_found])
        if self._has_tokens and columns.token_ids:
            known = np.array(columns.num_known()), np.array(columns.token_ids, dtype=np.int64)
            if is_certain.any():
                self._write(*known, is_certain)
            else:
                self._unwritten = known
        if is_certain.any():
            self._requests.append(self._rows, np.where(is_certain, counts, 0))
        counts = np.where(is_certain, 0, counts)
        if counts.any():
            plan.num_samples = counts[plan.batch_idx] + 1
            if self._step is not None:
                self._step.positions = _positions(plan, *self._unwritten)

    def begin_batch(self) -> None:
        """Write the drafts behind the tokens of their rows."""
        if len(self._unwritten[1]):
            self._write(*self._unwritten, np.zeros(len(self._rows), dtype=bool))

    def _write(self, counts: Rows, token_ids: Rows, is_certain: np.ndarray) -> None:
        requests = self._requests
        owner, places = places_in(counts)
        columns = np.stack((self._rows[owner], places, token_ids, is_certain[owner]))
        row, place, token_id, certain = to_device(columns, requests.token_ids.device).unbind()
        end = requests.scalars.num_tokens.index_select(0, row)
        requests.token_ids.index_put_((row, end + place), token_id.int())
        if is_certain.any():
            requests.scalars.num_tokens.index_add_(0, row, certain.int())

    def gather(self, plan: BatchPlan, idx_mapping: Tensor, grammar: GrammarOutput | None) -> SampleBatch:
        if plan.num_samples is None:
            return super().gather(plan, idx_mapping, grammar)
        requests, rows = self._requests, plan.rows[plan.sampling]
        verified = Verification.gather(rows, plan.num_samples[plan.sampling] - 1, requests)
        rows_device = verified.rows.index_select(0, verified.owner)
        scalars = requests.scalars.select(rows_device)
        verified.count_before(scalars.num_tokens)
        rows, batch_idx = plan.sampled()
        return SampleBatch(rows, batch_idx, rows_device, scalars, grammar, verified)

    def note_sampled(self, plan: BatchPlan) -> None:
        if plan.num_samples is None:
            super().note_sampled(plan)
        else:
            self._requests.append_at_most(plan.rows[plan.sampling], plan.num_samples[plan.sampling])

    def answer(self, plan: BatchPlan | None, *answer: Any, side: SideOutput) -> AsyncOutput:
        if self._columns is None:
            return super().answer(plan, *answer, side=side)
        places = None
        if plan is not None and plan.num_samples is not None:
            places = places_in(plan.num_samples[plan.sampling])[1]
        return RaggedOutput(self._columns, places, *answer, side=side)


def _positions(plan: BatchPlan, counts: Rows, token_ids: Rows) -> Rows:
    """Return `DraftStep.positions` of a step. ``counts``, ``token_ids``: see `DraftVerifier`; without drafts empty."""
    assert plan.num_samples is not None
    owner, places = places_in(plan.num_samples)
    drafts = np.full(len(places), -1, dtype=np.int64)
    if len(token_ids):
        owner = plan.batch_idx[owner]
        is_known = (places > 0) & (places <= counts[owner])
        drafts[is_known] = token_ids[((np.cumsum(counts) - counts)[owner] + places - 1)[is_known]]
    return np.stack((places, drafts))


class RaggedOutput(AsyncOutput):
    """The answer of a step with drafts."""

    def __init__(self, columns: DraftColumns, places: Rows | None, *answer: Any, **how: Any) -> None:
        """``columns``: the step's drafts; ``places`` [n]: how many that are not certain are before each row of logits;
        the others as of `AsyncOutput`."""
        super().__init__(*answer, **how)
        self._columns = columns
        self._places = places

    def _accepted(self, host: HostOutput) -> Rows:
        """Return the rows of logits whose tokens were accepted, in the order of the batch."""
        order = np.argsort(self._sampling, kind="stable")
        if host.token_ids is None:
            return order
        if host.counts is None or self._places is None:  # in place of a token that no request gets there is -1
            return order[host.token_ids[order] >= 0]
        counts = host.counts[np.cumsum(self._places == 0) - 1]  # the count of each row's request
        return order[(self._places < counts)[order]]

    def _read(self, host: HostOutput) -> tuple[ModelRunnerOutput, dict[int, RowError]]:
        kept = self._accepted(host)
        errors = self._errors(host, kept)
        return self._ragged(host, kept, errors), errors

    def _ragged(self, host: HostOutput, kept: Rows, errors: Mapping[int, RowError]) -> ModelRunnerOutput:
        if errors:
            kept = kept[~np.isin(self._sampling[kept], list(errors))]
        counts = np.bincount(self._sampling[kept], minlength=self._num_reqs).astype(np.int32)
        token_ids = np.empty(0, dtype=np.int32) if host.token_ids is None else host.token_ids[kept].astype(np.int32)
        # Drafts that are certain come before the token sampled after them.
        certain = np.zeros_like(counts)
        if any(self._columns.is_certain):
            num_drafts, is_certain = np.array(self._columns.counts), np.array(self._columns.is_certain, dtype=bool)
            certain = np.where(is_certain & (counts > 0), num_drafts, 0).astype(np.int32)
            certain_ids = np.array(self._columns.token_ids)[np.repeat(certain > 0, self._columns.num_known())]
            token_ids = np.insert(token_ids, np.repeat(np.cumsum(counts) - counts, certain), certain_ids)
            counts += certain
        logprobs = None
        if self._logprobs is not None:
            token_idx = np.full(len(self._sampling), -1, dtype=np.int64)
            token_idx[kept] = np.arange(len(kept)) + np.cumsum(certain)[self._sampling[kept]]
            token_idx = token_idx[self._logprobs.rows]
            keep = [i for i in np.argsort(token_idx) if token_idx[i] >= 0]
            logprobs = logprob_columns(self._logprobs, host, keep, token_idx)
        return ModelRunnerOutput(self._step_id, int_column(token_ids), logprobs, counts=int_column(counts))
