"""The two phases of a step. ``execute_model`` ends with logits, ``sample_tokens`` turns them into the answer.

               execute_model(SchedulerOutput)                      sample_tokens(GrammarOutput | None)
    rows freed, taken, given blocks ─> InputBatch ─> model ─> logits ─┬─> mask, sample ─> ids into the rows, AsyncOutput
                                                                      │
                             ExecuteModelState, held between the two ─┘   the host fills bitmasks meanwhile

Nothing between the two ends asks the device for a value: what the host must know to queue the next op (which rows
sample, how long they are) follows from the SchedulerOutputs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import GrammarOutput, NewRequest, RowError, SchedulerOutput
from .async_output import AsyncOutput
from .block_tables import BlockTables
from .input_batch import InputBatch, SampleBatch, to_device
from .request_state import SCALAR_WORDS, RequestState
from .sampler import Sampler
from .staged_writes import StagedArena

__all__ = ["ExecuteModelState", "KvMemory", "Model", "ModelRunner"]


class Model(Protocol):
    """What the runner needs of a model. ``attn`` is what ``KvMemory.bind`` makes of a batch."""

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any) -> Tensor:
        """hidden [num_tokens, hidden_size] for int64 [num_tokens] ids and positions; writes and reads KV by attn."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size], a new tensor, for hidden [n, hidden_size]."""


class KvMemory(Protocol):
    """The KV cache of all layers, as the runner sees it."""

    def bind(self, batch: InputBatch) -> Any:
        """The attention of one step: the cache together with the batch's metadata."""

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Blocks (int64 [m]) have a new owner, who must not find there what could spoil a sum under a mask."""


@dataclass(slots=True)
class ExecuteModelState:
    """What the second phase needs of the first."""

    step_id: int
    batch: InputBatch | None  # None: a step without requests
    logits: Tensor | None  # float32 [num_sampled, vocab_size]; None: nothing samples
    row_errors: dict[int, RowError] = field(default_factory=dict)  # by position in the SchedulerOutput


class ModelRunner:
    """Rows, model and sampler of one rank. Not thread-safe; the phases alternate, or it raises InternalError."""

    def __init__(
        self,
        model: Model,
        kv_memory: KvMemory,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._kv_memory = kv_memory
        self._vocab_size = vocab_size
        self._arena = StagedArena(
            {
                "scalars": (max_num_seqs, SCALAR_WORDS),
                "token_ids": (max_num_seqs, max_model_len),
                "block_table": (max_num_seqs, -(-max_model_len // block_size)),
            },
            device,
        )
        self._requests = RequestState(self._arena)
        self._tables = BlockTables(self._arena, num_blocks=num_blocks, block_size=block_size)
        self._sampler = Sampler(self._requests, vocab_size)
        self._row_faults: dict[int, tuple[str, str]] = {}  # row: type and message of what is wrong with its request
        self._state: ExecuteModelState | None = None

    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> None:
        """Apply the step's row changes and run the model; logits stay on the device.

        Raises:
            InternalError: the step before has not been sampled, or this one does not fit the rows.
        """
        if self._state is not None:
            raise InternalError(f"step {out.step_id} came before step {self._state.step_id} was sampled")
        self._update_rows(out)
        if not out.req_idx:
            self._state = ExecuteModelState(out.step_id, None, None)
            return
        batch = InputBatch.gather(out, self._requests, self._tables)
        hidden = self._model.forward(batch.input_ids, batch.positions, self._kv_memory.bind(batch))
        logits = None
        if len(batch.sampling):
            last = hidden if batch.logits_indices is None else hidden.index_select(0, batch.logits_indices)
            logits = self._model.compute_logits(last)
        self._requests.advance(batch.rows, batch.idx_mapping, batch.seq_lens, batch.seq_lens_host)
        self._state = ExecuteModelState(out.step_id, batch, logits, self._errors_of(batch))

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> AsyncOutput:
        """Sample the step that `execute_model` ran last, under its bitmask if it has one.

        Raises:
            InternalError: no step waits to be sampled, or ``grammar`` is another step's.
        """
        state, self._state = self._state, None
        if state is None:
            raise InternalError("there is no step to sample: execute_model comes first")
        if grammar is not None and grammar.step_id != state.step_id:
            raise InternalError(f"the bitmask of step {grammar.step_id} came for step {state.step_id}")
        if state.batch is None:
            return AsyncOutput(state.step_id, 0, np.empty(0, dtype=np.int64), None, {})
        batch = state.batch
        sampled = None
        if state.logits is not None:
            sample_batch = SampleBatch.gather(batch, self._requests, grammar)
            sampled = self._sampler.sample(state.logits, sample_batch)
            self._requests.append(sample_batch.rows, sample_batch.rows_device, sampled.token_ids)
        return AsyncOutput(state.step_id, batch.num_reqs, batch.batch_idx[batch.sampling], sampled, state.row_errors)

    def _update_rows(self, out: SchedulerOutput) -> None:
        """In the order of the SchedulerOutput's fields, so that a row may be freed and taken in one step."""
        for row in out.removed:
            self._requests.remove_request(row)
            self._sampler.remove_request(row)
            self._row_faults.pop(row, None)
        for request in out.new_requests:
            fault = _check_tokens(request, self._vocab_size)
            if fault is not None:
                self._row_faults[request.req_idx] = ("InvalidRequestError", fault)
            self._requests.add_request(request)
            self._sampler.add_request(request)
            self._tables.replace(request.req_idx, request.block_ids, request.num_computed_tokens)
        self._tables.append(out.block_rows, out.block_ids)
        fresh = self._tables.take_fresh()
        if len(fresh):
            self._kv_memory.clear_blocks(to_device(fresh, self._requests.token_ids.device))
        self._arena.apply()
        self._sampler.apply_staged_writes()

    def _errors_of(self, batch: InputBatch) -> dict[int, RowError]:
        if not self._row_faults:
            return {}
        places = ((int(i), self._row_faults.get(int(row))) for i, row in zip(batch.batch_idx, batch.rows, strict=True))
        return {i: RowError(i, *fault) for i, fault in places if fault is not None}


def _check_tokens(request: NewRequest, vocab_size: int) -> str | None:
    """What is wrong with the request's token ids, which are then made harmless; None if nothing.

    The host has checked them. A wrong index would still kill the worker, and every other request with it.
    """
    fault = None
    if not _all_within(request.token_ids, vocab_size):
        wrong = next(t for t in request.token_ids if not 0 <= t < vocab_size)
        fault = f"the prompt has token id {wrong}, but this model's are 0 to {vocab_size - 1}"
        for i, token_id in enumerate(request.token_ids):
            if not 0 <= token_id < vocab_size:
                request.token_ids[i] = 0
    if not _all_within(request.bias_token_ids, vocab_size):
        wrong = next(t for t in request.bias_token_ids if not 0 <= t < vocab_size)
        fault = fault or f"logit_bias names token id {wrong}, but this model's are 0 to {vocab_size - 1}"
        del request.bias_token_ids[:], request.bias_values[:]
    return fault


def _all_within(column: Sequence[int], vocab_size: int) -> bool:
    ids = np.asarray(column)
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < vocab_size)
