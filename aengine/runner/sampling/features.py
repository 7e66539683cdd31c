"""Features that change logits, each a state object with the same verbs.

A feature keeps what it needs of the rows that use it, on the device, so that `apply` asks nothing of the host and a
graph may hold it. It is skipped in a step that runs op by op where no sampling row uses it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ipc.messages import NewRequest
from ...kernels.logit_bias import WIDTH, apply_lists, pack_lists
from ...kernels.penalties import PenaltyInputs, apply_penalties, count_sampled, count_tokens
from ..input_batch import Rows
from ..lazy_zeros import lazy_zeros
from ..request_state import RequestState, Scalars
from ..staged_writes import StagedArena

__all__ = ["Penalties", "SamplingFeature", "TokenLists"]


class SamplingFeature(Protocol):
    uses: npt.NDArray[np.bool_]  # host [max_num_seqs]: the rows on which `apply` acts in every step

    def add_request(self, request: NewRequest) -> None:
        """Note what the request of a new row asks for. Nothing may be written to the device yet."""

    def remove_request(self, row: int) -> None:
        """Note that the row is free."""

    def apply_staged_writes(self) -> list[int]:
        """Write what the feature needs of the new rows, which are on the device now. Returns the rows for which there
        is no memory; what they ask for is dropped."""

    def is_pending(self, rows: Rows) -> bool:
        """Whether `apply` acts on some of these rows at their present lengths, beyond those in ``uses``."""

    def apply(self, logits: Tensor, rows: Tensor, scalars: Scalars) -> None:
        """Change logits float32 [n, vocab_size] in place. ``rows``: int64 [n], -1 for padding; ``scalars``: of the same
        rows."""

    def commit(self, sampled: Tensor, rows: Tensor, scalars: Scalars) -> None:
        """Note the tokens, int64 [n], that the rows have got."""


class TokenLists:
    """`logit_bias`: numbers added to single tokens; `min_tokens`: until then, no token that would end a completion."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        max_num_seqs = len(requests.in_use)
        self.uses = np.zeros(max_num_seqs, dtype=bool)
        self._arena = StagedArena({"lists": (max_num_seqs, WIDTH)}, requests.token_ids.device)
        self._lists = self._arena.part("lists")
        self._has_lists = np.zeros(max_num_seqs, dtype=bool)  # [max_num_seqs]: the table has entries for the row
        # [max_num_seqs]: tokens of the row below which its stop tokens are banned; 0: nothing is banned
        self._banned_until = np.zeros(max_num_seqs, dtype=np.int64)

    def add_request(self, request: NewRequest) -> None:
        row = request.req_idx
        stop_ids = [t for t in request.stop_token_ids if t < self._vocab_size] if request.min_tokens > 0 else []
        self.uses[row] = bool(request.bias_token_ids)
        self._banned_until[row] = request.num_prompt_tokens + request.min_tokens if stop_ids else 0
        has_lists = bool(stop_ids) or bool(self.uses[row])
        if has_lists or self._has_lists[row]:
            parts = pack_lists(request.bias_token_ids, request.bias_values, stop_ids, int(self._banned_until[row]))
            for column, values in parts:
                self._arena.stage("lists", row, column, values)
        self._has_lists[row] = has_lists

    def remove_request(self, row: int) -> None:
        self.uses[row] = False
        self._banned_until[row] = 0

    def apply_staged_writes(self) -> list[int]:
        self._arena.apply()
        return []

    def is_pending(self, rows: Rows) -> bool:
        return bool((self._requests.num_tokens[rows] < self._banned_until[rows]).any())

    def apply(self, logits: Tensor, rows: Tensor, scalars: Scalars) -> None:
        apply_lists(logits, rows, self._lists, scalars.num_tokens)

    def commit(self, sampled: Tensor, rows: Tensor, scalars: Scalars) -> None:
        pass


class Penalties:
    """Repetition, frequency and presence penalties. The table of counts exists from the first request that needs it, or
    from `reserve` on."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        self.uses = np.zeros(len(requests.in_use), dtype=bool)
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

    def remove_request(self, row: int) -> None:
        self.uses[row] = False

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

    def is_pending(self, rows: Rows) -> bool:
        return False

    def apply(self, logits: Tensor, rows: Tensor, scalars: Scalars) -> None:
        apply_penalties(logits, self._inputs(rows, scalars))

    def commit(self, sampled: Tensor, rows: Tensor, scalars: Scalars) -> None:
        count_sampled(sampled, self._inputs(rows, scalars))

    def _inputs(self, rows: Tensor, scalars: Scalars) -> PenaltyInputs:
        assert self._counts is not None
        penalties = (scalars.repetition_penalty, scalars.frequency_penalty, scalars.presence_penalty)
        return PenaltyInputs(rows, self._counts, *penalties)
