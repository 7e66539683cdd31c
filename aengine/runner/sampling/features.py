"""Features that change logits, each a state object with the same verbs.

A feature keeps what it needs of the rows that use it, and is skipped in a step where no sampling row does. Lists of
uneven length (biases, stop ids) stay one small tensor a row, and are joined for the rows of a step.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ipc.messages import NewRequest
from ...kernels.bitmask import apply_bitmask
from ...kernels.logit_bias import add_bias, ban_tokens
from ...kernels.penalties import PenaltyInputs, apply_penalties, count_sampled, count_tokens
from ..input_batch import Rows, SampleBatch, to_device
from ..lazy_zeros import lazy_zeros
from ..request_state import RequestState
from .bitmask_memory import HostBitmasks

__all__ = ["Bitmask", "LogitBias", "MinTokens", "Penalties", "SamplingFeature", "make_features"]


class SamplingFeature(Protocol):
    uses: npt.NDArray[np.bool_]  # host [max_num_seqs]: the rows on which `apply` acts in every step

    def add_request(self, request: NewRequest) -> None:
        """A row is taken. Nothing may be written to the device yet."""

    def remove_request(self, row: int) -> None:
        """A row is free."""

    def apply_staged_writes(self) -> list[int]:
        """The new rows are on the device. Returns those for which there is no memory, and forgets them."""

    def is_pending(self, rows: Rows) -> bool:
        """Whether, as far as these rows have come, `apply` acts on some that are not in ``uses``."""

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        """Change logits float32 [n, vocab_size] in place."""

    def commit(self, sampled: Tensor, batch: SampleBatch) -> None:
        """The rows' new tokens, int64 [n]."""


def make_features(requests: RequestState, vocab_size: int, bitmasks: HostBitmasks) -> list[SamplingFeature]:
    """Make the features, in the order in which they act."""
    return [
        LogitBias(requests),
        MinTokens(requests, vocab_size),
        Bitmask(requests, bitmasks),
        Penalties(requests, vocab_size),
    ]


class _Feature:
    """A feature that does nothing."""

    def __init__(self, requests: RequestState) -> None:
        self._requests = requests
        self._device = requests.token_ids.device
        self.uses = np.zeros(len(requests.in_use), dtype=bool)

    def add_request(self, request: NewRequest) -> None:
        pass

    def remove_request(self, row: int) -> None:
        self.uses[row] = False

    def apply_staged_writes(self) -> list[int]:
        return []

    def is_pending(self, rows: Rows) -> bool:
        return False

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
        self.uses[request.req_idx] = bool(request.bias_token_ids)
        if request.bias_token_ids:
            # One copy for both: the values go as the bits of float64.
            ids = np.array(request.bias_token_ids, dtype=np.int64)
            values = np.array(request.bias_values, dtype=np.float64)
            sent = to_device(np.concatenate((ids, values.view(np.int64))), self._device)
            self._of_row[request.req_idx] = _Entry(sent[: len(ids)], sent[len(ids) :].view(torch.float64).float())

    def remove_request(self, row: int) -> None:
        super().remove_request(row)
        self._of_row.pop(row, None)

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        chosen = np.flatnonzero(self.uses[batch.rows])
        if len(chosen):
            entries = [self._of_row[int(row)] for row in batch.rows[chosen]]
            index = np.repeat(chosen, [len(e.token_ids) for e in entries])
            ids, values = torch.cat([e.token_ids for e in entries]), torch.cat([e.values for e in entries])
            add_bias(logits, to_device(index, self._device), ids, values)


class MinTokens(_Feature):
    """`min_tokens`: until then, no token that would end the completion."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests)
        self._vocab_size = vocab_size
        self._stop_ids: dict[int, Tensor] = {}  # row: int64 [m]
        self._least = np.zeros(len(requests.in_use), dtype=np.int64)  # [max_num_seqs]: min_tokens, 0 without stop ids

    def add_request(self, request: NewRequest) -> None:
        stop_ids = np.array([t for t in request.stop_token_ids if t < self._vocab_size], dtype=np.int64)
        self._least[request.req_idx] = request.min_tokens if len(stop_ids) else 0
        if self._least[request.req_idx] > 0:
            self._stop_ids[request.req_idx] = to_device(stop_ids, self._device)

    def remove_request(self, row: int) -> None:
        self._least[row] = 0
        self._stop_ids.pop(row, None)

    def is_pending(self, rows: Rows) -> bool:
        if not self._stop_ids:
            return False
        num_generated = self._requests.num_tokens[rows] - self._requests.num_prompt_tokens[rows]
        return bool((num_generated < self._least[rows]).any())

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        if not self._stop_ids:
            return
        chosen = np.flatnonzero(batch.num_generated < self._least[batch.rows])
        if len(chosen):
            stop_ids = [self._stop_ids[int(row)] for row in batch.rows[chosen]]
            index = np.repeat(chosen, [len(ids) for ids in stop_ids])
            ban_tokens(logits, to_device(index, self._device), torch.cat(stop_ids))


class Bitmask(_Feature):
    """`structured_output`: the tokens that the grammars of this step allow. Its state is on the host."""

    def __init__(self, requests: RequestState, bitmasks: HostBitmasks) -> None:
        super().__init__(requests)
        self._bitmasks = bitmasks

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        rows, bits = self._bitmasks.of_batch(batch.grammar, batch.batch_idx)
        if bits is not None and len(rows):
            place = torch.empty(bits.shape, dtype=torch.uint8, device=self._device)
            self._bitmasks.to_device(bits, place)
            apply_bitmask(logits, to_device(rows, self._device), place)


class Penalties(_Feature):
    """Repetition, frequency and presence penalties. The table of counts exists from the first request that needs it."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests)
        self._vocab_size = vocab_size
        self._new: list[tuple[int, int, int]] = []  # row, num_prompt_tokens, num_tokens
        self._counts: Tensor | None = None  # int32 [max_num_seqs, vocab_size]: of each id in the row's completion

    def add_request(self, request: NewRequest) -> None:
        penalties = (request.repetition_penalty, request.frequency_penalty, request.presence_penalty)
        self.uses[request.req_idx] = penalties != (1.0, 0.0, 0.0)
        if self.uses[request.req_idx]:
            self._new.append((request.req_idx, request.num_prompt_tokens, len(request.token_ids)))

    def apply_staged_writes(self) -> list[int]:
        new, self._new = self._new, []
        if not new:
            return []
        try:
            if self._counts is None:
                shape = (len(self.uses), self._vocab_size)
                self._counts = lazy_zeros(shape, torch.int32, self._device)
            for row, begin, end in new:
                count_tokens(self._counts[row], self._requests.token_ids[row, begin:end])
        except torch.OutOfMemoryError:
            rows = [row for row, _, _ in new]
            self.uses[rows] = False
            return rows
        return []

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        chosen = np.flatnonzero(self.uses[batch.rows])
        if not len(chosen):
            return
        assert self._counts is not None
        scalars = batch.scalars
        inputs = PenaltyInputs(
            rows=batch.rows_device,
            token_ids=self._requests.token_ids,
            counts=self._counts,
            num_tokens=scalars.num_tokens,
            repetition=scalars.repetition_penalty,
            frequency=scalars.frequency_penalty,
            presence=scalars.presence_penalty,
            max_num_tokens=batch.max_num_tokens,
        )
        apply_penalties(logits, to_device(chosen, self._device), inputs)

    def commit(self, sampled: Tensor, batch: SampleBatch) -> None:
        chosen = np.flatnonzero(self.uses[batch.rows])
        if len(chosen):
            assert self._counts is not None
            count_sampled(self._counts, batch.rows_device, sampled, to_device(chosen, self._device))
