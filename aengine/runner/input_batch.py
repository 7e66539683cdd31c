"""One step's batch, gathered from the persistent rows; nothing of it outlives the step.

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
from ..ipc.messages import GrammarOutput, SchedulerOutput
from ..kernels.input_prep import gather_block_table, prepare_inputs
from .block_tables import BlockTables
from .request_state import RequestState, Scalars

__all__ = ["InputBatch", "SampleBatch", "to_device"]

Rows = npt.NDArray[np.int64]


def to_device(column: Rows, device: torch.device) -> Tensor:
    """An int64 column on the device. On CUDA it belongs in pinned memory that is not written again."""
    return torch.from_numpy(column).to(device, non_blocking=True)


@dataclass(slots=True)
class InputBatch:
    """The requests of a step, decodes first. Tensors are on the device; "host" marks numpy."""

    num_reqs: int
    num_tokens: int  # over all requests
    max_query_len: int
    max_seq_len: int
    batch_idx: Rows  # host int64 [num_reqs]: position of each request in the SchedulerOutput
    rows: Rows  # host int64 [num_reqs]: row of each request
    query_lens: Rows  # host int64 [num_reqs]: tokens that each computes
    seq_lens_host: Rows  # host int64 [num_reqs]: seq_lens
    sampling: Rows  # host int64 [num_sampled]: which requests sample, ascending
    idx_mapping: Tensor  # int64 [num_reqs]: rows
    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]
    query_start_loc: Tensor  # int32 [num_reqs + 1]
    seq_lens: Tensor  # int32 [num_reqs], this step's tokens included
    block_table: Tensor  # int32 [num_reqs, ceil(max_seq_len / block_size)]; past a request's own, its first
    logits_indices: Tensor | None  # int64 [num_sampled]: the last token of each that samples; None: every token

    @classmethod
    def gather(cls, out: SchedulerOutput, requests: RequestState, tables: BlockTables) -> InputBatch:
        """Raises InternalError if the step does not fit the rows, before the model has run."""
        query_lens = np.array(out.num_scheduled_tokens, dtype=np.int64)
        batch_idx = np.argsort(query_lens != 1, kind="stable")
        query_lens = query_lens[batch_idx]
        rows = np.array(out.req_idx, dtype=np.int64)[batch_idx]
        _check(rows, query_lens, requests)
        seq_lens = requests.num_computed_tokens[rows] + query_lens
        num_tokens_of_row = requests.num_tokens[rows]
        if (seq_lens > num_tokens_of_row).any():
            raise InternalError(f"step {out.step_id} computes tokens that are not known yet")
        tables.check_room(rows, seq_lens)
        sampling = np.flatnonzero(seq_lens == num_tokens_of_row)
        device = requests.token_ids.device
        idx_mapping = to_device(rows, device)
        num_tokens, max_seq_len = int(query_lens.sum()), int(seq_lens.max())
        inputs = prepare_inputs(
            requests.token_ids,
            requests.scalars.num_computed_tokens,
            tables.table,
            idx_mapping,
            to_device(query_lens, device),
            tables.block_size,
            num_tokens,
        )
        every_token = len(sampling) == num_tokens
        width = -(-max_seq_len // tables.block_size)
        return cls(
            num_reqs=len(rows),
            num_tokens=num_tokens,
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
            batch_idx=batch_idx,
            rows=rows,
            query_lens=query_lens,
            seq_lens_host=seq_lens,
            sampling=sampling,
            idx_mapping=idx_mapping,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=gather_block_table(tables.table, idx_mapping, inputs.seq_lens, tables.block_size, width),
            logits_indices=None if every_token else to_device(np.cumsum(query_lens)[sampling] - 1, device),
        )


def _check(rows: Rows, query_lens: Rows, requests: RequestState) -> None:
    if rows.min() < 0 or rows.max() >= len(requests.in_use) or not requests.in_use[rows].all():
        raise InternalError("the batch names a row that has no request")
    if len(np.unique(rows)) != len(rows):
        raise InternalError("the batch names a row twice")
    if query_lens.min() < 1:
        raise InternalError("a request of the batch computes no token")


@dataclass(slots=True)
class SampleBatch:
    """The requests of a batch that sample in this step; n of them, one row of logits each."""

    rows: Rows  # host int64 [n]
    batch_idx: Rows  # host int64 [n]: position in the SchedulerOutput
    num_generated: Rows  # host int64 [n]: tokens of the completion so far
    rows_device: Tensor  # int64 [n]: rows
    scalars: Scalars  # columns of [n]
    max_num_tokens: int  # of these rows
    grammar: GrammarOutput | None

    @classmethod
    def gather(cls, batch: InputBatch, requests: RequestState, grammar: GrammarOutput | None) -> SampleBatch:
        rows = batch.rows[batch.sampling]
        whole = len(rows) == batch.num_reqs
        rows_device = batch.idx_mapping if whole else to_device(rows, batch.idx_mapping.device)
        return cls(
            rows=rows,
            batch_idx=batch.batch_idx[batch.sampling],
            num_generated=requests.num_tokens[rows] - requests.num_prompt_tokens[rows],
            rows_device=rows_device,
            scalars=requests.scalars.select(rows_device),
            max_num_tokens=int(requests.num_tokens[rows].max()),
            grammar=grammar,
        )
