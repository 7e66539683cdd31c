"""What requests may ask of the logits, each a state object with the same verbs.

A feature keeps what it needs of the rows that use it, and is skipped in a step where no sampling row does. Lists of
uneven length (biases, stop ids) stay one small tensor a row, and are joined for the rows of a step.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import NewRequest
from ..kernels.bitmask import apply_bitmask
from ..kernels.logit_bias import add_bias, ban_tokens
from ..kernels.penalties import apply_penalties, count_tokens
from .input_batch import Rows, SampleBatch, to_device
from .request_state import RequestState
from .untouched import untouched_zeros

__all__ = ["Bitmask", "LogitBias", "MinTokens", "Penalties", "SamplingFeature", "make_features"]


class SamplingFeature(Protocol):
    def add_request(self, request: NewRequest) -> None:
        """A row is taken. Nothing may be written to the device yet."""

    def remove_request(self, row: int) -> None:
        """A row is free."""

    def apply_staged_writes(self) -> None:
        """The new rows are on the device."""

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        """Change logits float32 [n, vocab_size] in place."""

    def commit(self, sampled: Tensor, batch: SampleBatch) -> None:
        """The rows' new tokens, int64 [n]."""


def make_features(requests: RequestState, vocab_size: int) -> list[SamplingFeature]:
    """In the order in which they act."""
    return [
        LogitBias(requests),
        MinTokens(requests, vocab_size),
        Bitmask(requests, vocab_size),
        Penalties(requests, vocab_size),
    ]


class _Feature:
    """A feature that does nothing."""

    def __init__(self, requests: RequestState) -> None:
        self._requests = requests
        self._device = requests.token_ids.device

    def add_request(self, request: NewRequest) -> None:
        pass

    def remove_request(self, row: int) -> None:
        pass

    def apply_staged_writes(self) -> None:
        pass

    def commit(self, sampled: Tensor, batch: SampleBatch) -> None:
        pass


class _Entry(NamedTuple):
    token_ids: Tensor  # int64 [m]
    values: Tensor  # float32 [m]


class LogitBias(_Feature):
    """`logit_bias`: numbers added to single tokens."""

    def __init__(self, requests: RequestState) -> None:
        super().__init__(requests)
        self._of_row: dict[int, _Entry] = {}

    def add_request(self, request: NewRequest) -> None:
        if request.bias_token_ids:
            ids = to_device(np.array(request.bias_token_ids, dtype=np.int64), self._device)
            values = torch.tensor(request.bias_values, dtype=torch.float32).to(self._device, non_blocking=True)
            self._of_row[request.req_idx] = _Entry(ids, values)

    def remove_request(self, row: int) -> None:
        self._of_row.pop(row, None)

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        if not self._of_row:
            return
        found = [(i, self._of_row[row]) for i, row in enumerate(map(int, batch.rows)) if row in self._of_row]
        if found:
            index = _repeat([i for i, _ in found], [len(e.token_ids) for _, e in found])
            ids, values = torch.cat([e.token_ids for _, e in found]), torch.cat([e.values for _, e in found])
            add_bias(logits, to_device(index, self._device), ids, values)


class MinTokens(_Feature):
    """`min_tokens`: until then, no token that would end the completion."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests)
        self._vocab_size = vocab_size
        self._of_row: dict[int, tuple[int, Tensor]] = {}  # row: (min_tokens, stop ids int64 [m])

    def add_request(self, request: NewRequest) -> None:
        stop_ids = np.array([t for t in request.stop_token_ids if t < self._vocab_size], dtype=np.int64)
        if request.min_tokens > 0 and len(stop_ids):
            self._of_row[request.req_idx] = (request.min_tokens, to_device(stop_ids, self._device))

    def remove_request(self, row: int) -> None:
        self._of_row.pop(row, None)

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        if not self._of_row:
            return
        found: list[tuple[int, Tensor]] = []
        for i, row in enumerate(map(int, batch.rows)):
            min_tokens, stop_ids = self._of_row.get(row, (0, None))
            if stop_ids is not None and batch.num_generated[i] < min_tokens:
                found.append((i, stop_ids))
        if found:
            index = _repeat([i for i, _ in found], [len(ids) for _, ids in found])
            ban_tokens(logits, to_device(index, self._device), torch.cat([ids for _, ids in found]))


class Bitmask(_Feature):
    """`structured_output`: the tokens that the grammars of this step allow. Its state lives on the host half."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests)
        self._row_bytes = 4 * ((vocab_size + 31) // 32)

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        grammar = batch.grammar
        if grammar is None or not grammar.batch_idx:
            return
        count = len(grammar.batch_idx)
        if len(grammar.bitmask) != count * self._row_bytes:
            raise InternalError(
                f"the bitmask has {len(grammar.bitmask)} bytes, but {count} rows of {self._row_bytes} are due"
            )
        bits = np.frombuffer(bytearray(grammar.bitmask), dtype=np.uint8).reshape(count, self._row_bytes)
        # A masked request that does not sample yet (a chunk of its prompt) has no row of logits.
        place = {int(b): i for i, b in enumerate(batch.batch_idx)}
        pairs = [(place[b], i) for i, b in enumerate(grammar.batch_idx) if b in place]
        if pairs:
            rows, of_mask = np.array(pairs, dtype=np.int64).T
            mask = torch.from_numpy(bits[of_mask]).to(self._device, non_blocking=True)
            apply_bitmask(logits, to_device(np.ascontiguousarray(rows), self._device), mask)


class Penalties(_Feature):
    """Repetition, frequency and presence penalties. The table of counts exists from the first request that needs it."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests)
        self._vocab_size = vocab_size
        self._used = np.zeros(len(requests.in_use), dtype=bool)
        self._new: list[tuple[int, int, int]] = []  # row, num_prompt_tokens, num_tokens
        self._counts: Tensor | None = None  # int32 [max_num_seqs, vocab_size]: of each id in the row's completion

    def add_request(self, request: NewRequest) -> None:
        penalties = (request.repetition_penalty, request.frequency_penalty, request.presence_penalty)
        self._used[request.req_idx] = penalties != (1.0, 0.0, 0.0)
        if self._used[request.req_idx]:
            self._new.append((request.req_idx, request.num_prompt_tokens, len(request.token_ids)))

    def apply_staged_writes(self) -> None:
        if not self._new:
            return
        if self._counts is None:
            shape = (len(self._used), self._vocab_size)
            self._counts = untouched_zeros(shape, torch.int32, self._device)
        for row, begin, end in self._new:
            count_tokens(self._counts[row], self._requests.token_ids[row, begin:end])
        self._new = []

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        chosen = np.flatnonzero(self._used[batch.rows])
        if not len(chosen):
            return
        assert self._counts is not None
        index = to_device(chosen, self._device)
        rows = batch.rows_device.index_select(0, index)
        scalars = batch.scalars.select(index)
        token_ids = self._requests.token_ids[:, : batch.max_num_tokens].index_select(0, rows)
        apply_penalties(
            logits,
            index,
            token_ids,
            scalars.num_tokens,
            self._counts[rows[:, None], token_ids],
            scalars.repetition_penalty,
            scalars.frequency_penalty,
            scalars.presence_penalty,
        )

    def commit(self, sampled: Tensor, batch: SampleBatch) -> None:
        chosen = np.flatnonzero(self._used[batch.rows])
        if len(chosen):
            assert self._counts is not None
            index = to_device(chosen, self._device)
            place = (batch.rows_device.index_select(0, index), sampled.index_select(0, index))
            self._counts.index_put_(
                place, torch.ones(len(chosen), dtype=torch.int32, device=self._device), accumulate=True
            )


def _repeat(values: list[int], counts: list[int]) -> Rows:
    return np.repeat(np.array(values, dtype=np.int64), counts)
