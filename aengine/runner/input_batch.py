"""A step's batch, planned on the host and gathered from the persistent rows; nothing of it outlives the step.

The requests are put in the order that the attention likes, those that compute one token first; ``batch_idx`` remembers
where the scheduler had them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import GrammarOutput, KVCacheGroup, SchedulerOutput
from ..kernels.input_prep import PreparedInputs, gather_block_table, prepare_inputs
from .block_tables import BlockTables
from .request_state import RequestState, Scalars
from .speculation.positions import NO_SPEC_DECODE, SpecDecode, places_in
from .transfer import to_device

Rows = npt.NDArray[np.int64]
NO_ROWS: Rows = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class BatchPlan:
    """A step as the host plans it: all numpy int64, nothing is read from the device. Decodes first.

    Of a row whose tokens are not settled yet, ``seq_lens`` is an upper bound; the device knows."""

    batch_idx: Rows  # [num_reqs]: position of each request in the SchedulerOutput
    rows: Rows  # [num_reqs]: row of each request
    query_lens: Rows  # [num_reqs]: tokens that each request computes
    seq_lens: Rows  # [num_reqs]: tokens that each request has in all, this step's included
    sampling: Rows  # [num_sampled]: indices of the requests that sample, ascending
    num_tokens: int  # tokens computed for all requests together
    num_decodes: int  # leading requests of one token
    num_samples: Rows | None = (
        None  # [num_reqs]: last positions of each at which it samples, if it does; None: one each
    )
    is_exact: bool = True  # False: the seq_len of some request with more than one token is an upper bound
    state_pages: Rows | None = None  # [num_groups, num_reqs]: page of each request's state; None: the model has none
    # [k, 4] request, tokens, KV group, page: where the states are kept within this step; those of a request ascend
    kept_states: Rows | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every request computes only positions at which it samples."""
        if len(self.sampling) < len(self.rows):
            return False
        if self.num_samples is None:
            return self.num_decodes == len(self.rows)
        return bool((self.query_lens == self.num_samples).all())

    @property
    def num_logits(self) -> int:
        """Number of tokens of the batch whose logits are computed."""
        return len(self.sampling) if self.num_samples is None else int(self.num_samples[self.sampling].sum())

    def logits_indices(self) -> Rows:
        """Return the tokens of the batch that need logits, [num_logits]: the last ones of each request that samples."""
        last = np.cumsum(self.query_lens)[self.sampling] - 1
        if self.num_samples is None:
            return last
        counts = self.num_samples[self.sampling]
        owner, places = places_in(counts)
        return (last + 1 - counts)[owner] + places

    def sampled(self) -> tuple[Rows, Rows]:
        """Return the row and the batch_idx of each position that samples: [num_logits]."""
        if self.num_samples is None and len(self.sampling) == len(self.rows):
            return self.rows, self.batch_idx
        rows, batch_idx = self.rows[self.sampling], self.batch_idx[self.sampling]
        if self.num_samples is None:
            return rows, batch_idx
        counts = self.num_samples[self.sampling]
        return np.repeat(rows, counts), np.repeat(batch_idx, counts)

    def first(self, n: int) -> BatchPlan:
        """Return the plan of the first n requests alone."""
        return BatchPlan(
            batch_idx=self.batch_idx[:n],
            rows=self.rows[:n],
            query_lens=self.query_lens[:n],
            seq_lens=self.seq_lens[:n],
            sampling=self.sampling[self.sampling < n],
            num_tokens=int(self.query_lens[:n].sum()),
            num_decodes=min(n, self.num_decodes),
            num_samples=None if self.num_samples is None else self.num_samples[:n],
            is_exact=self.is_exact,
            state_pages=None if self.state_pages is None else self.state_pages[:, :n],
        )

    @classmethod
    def make(
        cls, out: SchedulerOutput, requests: RequestState, tables: BlockTables, ahead: Rows | None = None
    ) -> BatchPlan:
        """Plan a step. ``ahead`` [num_reqs]: tokens beyond its known ones that each request computes, in the order of
        the SchedulerOutput. Raises InternalError if it does not fit the rows, before anything is run."""
        query_lens = np.array(out.num_scheduled_tokens, dtype=np.int64)
        rows = np.array(out.req_idx, dtype=np.int64)
        is_long = query_lens != 1
        num_decodes = len(rows) - int(np.count_nonzero(is_long))
        if num_decodes == len(rows):
            batch_idx = np.arange(len(rows))
        else:
            batch_idx = np.argsort(is_long.astype(np.int8) + (query_lens > tables.most_unsettled), kind="stable")
            query_lens, rows = query_lens[batch_idx], rows[batch_idx]
        _check(rows, query_lens, requests)
        seq_lens = requests.num_computed_tokens[rows] + query_lens
        num_tokens_of_row = requests.num_tokens[rows]
        if ahead is not None:
            ahead = ahead[batch_idx]
            num_tokens_of_row = num_tokens_of_row + ahead
            if ((ahead > 0) & (seq_lens != num_tokens_of_row)).any():
                raise InternalError(f"step {out.step_id} looks ahead in a row that does not sample")
        if (seq_lens > num_tokens_of_row).any():
            raise InternalError(f"step {out.step_id} computes tokens that are not known yet")
        tables.check_room(rows, seq_lens)
        is_last = seq_lens == num_tokens_of_row
        if requests.num_exempt:
            is_last &= ~requests.is_exempt[rows]
        sampling = is_last.nonzero()[0]
        num_tokens = int(query_lens.sum())
        is_exact = num_decodes == len(rows) or not requests.num_unsettled[rows].any()
        where = (batch_idx, rows, query_lens, seq_lens, sampling, num_tokens, num_decodes)
        kept = _kept_states(out, rows, query_lens, tables) if out.kept_states else None
        return cls(*where, None, is_exact, tables.state_pages(rows), kept)


@dataclass(slots=True)
class GroupBatch:
    """The blocks of a batch in one KV group, from the first that any query of this step looks at."""

    block_table: Tensor  # int32 [num_reqs, width]; past a request's own blocks its first one is repeated
    seq_lens: list[int]  # host [num_reqs]: tokens of each request in these blocks, this step's included
    skipped: list[int]  # host [num_reqs]: tokens of each request before them

    @classmethod
    def gather(
        cls, query_lens: Rows, group: KVCacheGroup, table: Tensor, idx_mapping: Tensor, seq_lens: Tensor
    ) -> GroupBatch:
        """``seq_lens``: int32 [num_reqs], on the CPU; a plan's may be upper bounds."""
        size, lens = group.block_size, seq_lens.tolist()
        first, skipped = None, [0] * len(lens)
        if group.window:
            blocks = np.maximum(np.array(lens) - query_lens - group.window + 1, 0) // size
            first, skipped = torch.from_numpy(blocks), (blocks * size).tolist()
            lens = (lens - blocks * size).tolist()
        width = -(-max(lens) // size)
        return cls(gather_block_table(table, idx_mapping, seq_lens, size, width, first), lens, skipped)


@dataclass(slots=True)
class InputBatch:
    """The requests of a step, decodes first. Tensors are on the device; "host" marks numpy."""

    plan: BatchPlan
    idx_mapping: Tensor  # int64 [num_reqs]: row of each request
    inputs: PreparedInputs
    tables: BlockTables

    @property
    def block_table(self) -> Tensor:
        """int32 [num_groups, max_num_seqs, max_blocks_per_seq], the persistent one, by idx_mapping: kernels read it."""
        return self.tables.table

    def groups(self) -> list[GroupBatch]:
        """Gather the blocks of each KV group, for attention by ops of torch."""
        tables, seq_lens = self.tables, self.inputs.seq_lens
        return [
            GroupBatch.gather(self.plan.query_lens, group, table, self.idx_mapping, seq_lens)
            for group, table in zip(tables.groups, tables.of_group, strict=True)
        ]

    @property
    def num_reqs(self) -> int:
        return self.plan.num_reqs

    @classmethod
    def gather(cls, plan: BatchPlan, requests: RequestState, tables: BlockTables) -> InputBatch:
        device = requests.token_ids.device
        columns = to_device(np.array((plan.rows, plan.query_lens)), device)
        idx_mapping = columns[0]
        inputs = prepare_inputs(
            requests.token_ids,
            requests.scalars.num_computed_tokens,
            tables.table,
            idx_mapping,
            columns[1],
            tables.block_sizes,
            plan.num_tokens,
        )
        return cls(plan=plan, idx_mapping=idx_mapping, inputs=inputs, tables=tables)


def _kept_states(out: SchedulerOutput, rows: Rows, query_lens: Rows, tables: BlockTables) -> Rows:
    """Return `BatchPlan.kept_states`. Raises InternalError if they do not fit the batch."""
    kept = np.array(out.kept_states, dtype=np.int64).reshape(-1, 4)
    tables.checked(kept[:, 3].tolist())
    order = np.argsort(rows)
    place = order[np.searchsorted(rows, kept[:, 0], sorter=order).clip(max=len(rows) - 1)]
    fits = (rows[place] == kept[:, 0]) & (kept[:, 1] > 0) & (kept[:, 1] < query_lens[place])
    if not fits.all():
        raise InternalError(f"step {out.step_id} keeps states within what it does not compute")
    kept[:, 0] = place
    return kept


def _check(rows: Rows, query_lens: Rows, requests: RequestState) -> None:
    if rows.min() < 0 or rows.max() >= len(requests.in_use) or not requests.in_use[rows].all():
        raise InternalError("the batch names a row that has no request")
    if np.bincount(rows).max() > 1:
        raise InternalError("the batch names a row twice")
    if query_lens.min() < 1:
        raise InternalError("a request of the batch computes no token")


@dataclass(slots=True)
class SampleBatch:
    """The n rows of logits of a step: one for each position that samples, those of a request one after the other."""

    rows: Rows  # host int64 [n]: row of the request
    batch_idx: Rows  # host int64 [n]: position of the request in the SchedulerOutput
    rows_device: Tensor  # int64 [n]: `rows` on the device
    scalars: Scalars  # columns of [n]; num_tokens counts those before each row of logits
    grammar: GrammarOutput | None
    spec_decode: SpecDecode = NO_SPEC_DECODE  # what is verified of several rows of a request

    @classmethod
    def gather(
        cls, plan: BatchPlan, idx_mapping: Tensor, requests: RequestState, grammar: GrammarOutput | None
    ) -> SampleBatch:
        """``idx_mapping``: int64 [num_reqs], the plan's rows on the device."""
        rows, batch_idx = plan.sampled()
        whole = len(rows) == plan.num_reqs
        rows_device = idx_mapping if whole else to_device(rows, idx_mapping.device)
        return cls(rows, batch_idx, rows_device, requests.scalars.select(rows_device), grammar)
