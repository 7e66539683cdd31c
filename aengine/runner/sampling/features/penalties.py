"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from ....ipc.messages import NewRequest
from ....kernels.penalties import PenaltyInputs, apply_penalties, count_tokens
from ...input_batch import Rows
from ...lazy_zeros import lazy_zeros
from ...request_state import RequestState, Scalars
from ...speculation.positions import SpecDecode
from .feature import SamplingFeature


class Penalties(SamplingFeature):
    """The table of counts exists from the first request that needs it, or
    from `reserve` on."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        self._new: list[tuple[int, int, int]] = []  # row, num_prompt_tokens, num_tokens
        self._counts: Tensor | None = None  # int32 [max_num_seqs, vocab_size]

    def reserve(self) -> None:
        """Allocate the table of counts, which graphs refer to."""
        if self._counts is None:
            shape = (len(self.uses), self._vocab_size)
            self._counts = lazy_zeros(shape, torch.int32, self._requests.token_ids.device)

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
            self.reserve()
            assert self._counts is not None
            for row, num_prompt_tokens, num_tokens in new:
                count_tokens(self._counts[row], self._requests.token_ids[row, :num_tokens], num_prompt_tokens)
        except torch.OutOfMemoryError:
            rows = [row for row, _, _ in new]
            self.uses[rows] = False
            return rows
        return []

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        apply_penalties(logits, spec_decode.counted(self._inputs(rows_device, scalars)))

    def commit(self, sampled: Tensor, rows: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        spec_decode.count_sampled(sampled, self._inputs(rows, scalars))

    def _inputs(self, rows: Tensor, scalars: Scalars) -> PenaltyInputs:
        assert self._counts is not None
        penalties = (scalars.repetition_penalty, scalars.frequency_penalty, scalars.presence_penalty)
        return PenaltyInputs(rows, self._counts, *penalties)
