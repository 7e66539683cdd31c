"""A decoder whose layers run as one tape of compiled ops, on a CPU: what a graph of launches is on a GPU.

    model.forward ──recorded once, over memory of its own──> Tape
    a step        ──ids, positions, slots, rows──> that memory, then Tape.run(tokens) ──> hidden
    the head      ──the same, over the tokens that sample──> logits

One tape serves every batch, of prompts and decodes alike: its ops are told how many tokens a step has. A model that has
an op which no tape holds runs op by op, as before.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor

from ...kernels.cpu.tape import NotRecorded, Tape, record
from ..attention.tape_attention import StepMemory, TapeAttention, tape_rope
from ..attention.torch_attention import KvCache
from ..input_batch import InputBatch
from ..weights.step_rows import ROWS_UNSEEN, StepRows

logger = logging.getLogger("aengine.runner")


class TapeModel:
    """A `Model` over a recorded one."""

    def __init__(
        self, model: Any, cache: KvCache, tables: Tensor, max_tokens: int, max_model_len: int, step_rows: StepRows
    ) -> None:
        """``max_tokens``: most of a step; ``step_rows``: has the kinds of steps, of which the first is recorded. Raises
        NotRecorded: an op of the model can't be on a tape."""
        self._model, self._cache, self._step_rows = model, cache, step_rows
        self._memory = StepMemory(max_tokens, tables)
        self._input_ids = torch.zeros(max_tokens, dtype=torch.int64)
        ropes = [tape_rope(rope.config, max_model_len) for rope in cache.ropes]
        with record(max_tokens) as self._layers:
            attn = TapeAttention(cache, self._memory, ropes)
            self._hidden = model.forward(self._input_ids, self._memory.positions, attn)
        self._last = torch.zeros(tables.shape[1], self._hidden.shape[1])  # the tokens of a step that sample
        self._head: Tape | None = None
        try:
            with record(len(self._last)) as head:
                self._logits = model.compute_logits(self._last)
            self._head = head
        except NotRecorded:  # torch scales the logits
            model.compute_logits(self._last[:1])  # compiles what it launches

    @property
    def num_ops(self) -> int:
        return len(self._layers)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: InputBatch) -> Tensor:
        """See `Model`. The next step overwrites the result."""
        if self._step_rows.kind:
            hidden: Tensor = self._model.forward(input_ids, positions, self._cache.op_by_op(batch))
            return hidden
        n = len(input_ids)
        self._input_ids[:n] = input_ids
        self._memory.fill(batch)
        self._layers.run(n)
        return self._hidden[:n]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`. The next step overwrites the result."""
        n = len(hidden)
        if self._head is None or n > len(self._last):
            logits: Tensor = self._model.compute_logits(hidden)
            return logits
        self._last[:n] = hidden
        self._head.run(n)
        return self._logits[:n]

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        final: Tensor = self._model.final_hidden(hidden)
        return final


def taped(
    model: Any,
    cache: KvCache,
    tables: Tensor,
    *,
    max_tokens: int,
    max_model_len: int,
    step_rows: StepRows = ROWS_UNSEEN,
) -> Any:
    """The model as a tape, or, with a line in the log, as it is."""
    begun = time.perf_counter()
    try:
        own = TapeModel(model, cache, tables, max_tokens, max_model_len, step_rows)
    except NotRecorded as why:
        logger.info("the model runs op by op: %s is not compiled", why)
        return model
    cache.is_taped = True
    logger.info("the model runs as a tape of %d ops, made in %.2f s", own.num_ops, time.perf_counter() - begun)
    return own
