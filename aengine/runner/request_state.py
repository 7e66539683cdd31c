"""The persistent rows: all that the device knows of a request, from when it is added until it is removed.

A row is written once, when its request comes; after that the device itself moves it on (`advance`, `append`). The
host keeps copies of the few numbers that decide which ops a step needs, so that it never has to ask the device.

One row of ``scalars``, 16 words of 4 bytes, a cache line:

    word 0, 1    2              3       4       5             6            7
        ┌───────┬──────────────┬───────┬───────┬─────────────┬────────────┬───────────┐
        │ seed  │ temperature  │ top_p │ min_p │ repetition_ │ frequency_ │ presence_ │   seed int64,
        │       │              │       │       │ penalty     │ penalty    │ penalty   │   the others float32
        ├───────┼──────────────┴────┬──┴───────┴──┬──────────┴──────────┬─┴───────────┤
        │ top_k │ num_prompt_tokens │ num_tokens  │ num_computed_tokens │ (4 unused)  │   int32
        └───────┴───────────────────┴─────────────┴─────────────────────┴─────────────┘
    word 8        9                   10            11                    12 to 15
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import NewRequest
from ..kernels.input_prep import ScalarColumns, append_tokens
from .staged_writes import StagedArena

__all__ = ["COLUMNS", "SCALAR_WORDS", "RequestState", "Scalars"]

SCALAR_WORDS = 16
COLUMNS = ScalarColumns(seed=0, temperature=2, num_tokens=10, num_computed_tokens=11)
_ROW = struct.Struct("<q6f4i")
_MIN_TEMPERATURE = (
    1e-5  # below, logits / temperature could overflow; two tokens that differ at all are decided long before
)


class Scalars:
    """Named columns of scalar rows; views, nothing is copied. n: max_num_seqs, or the rows of a batch."""

    def __init__(self, words: Tensor) -> None:
        numbers = words.view(torch.float32)
        self.words = words  # int32 [n, 16]
        self.seed = words.view(torch.int64)[:, 0]  # int64 [n]
        self.temperature = numbers[:, 2]  # float32 [n]; 0: greedy
        self.top_p = numbers[:, 3]  # float32 [n]
        self.min_p = numbers[:, 4]  # float32 [n]
        self.repetition_penalty = numbers[:, 5]  # float32 [n]
        self.frequency_penalty = numbers[:, 6]  # float32 [n]
        self.presence_penalty = numbers[:, 7]  # float32 [n]
        self.top_k = words[:, 8]  # int32 [n]; 0: all
        self.num_prompt_tokens = words[:, 9]  # int32 [n]
        self.num_tokens = words[:, 10]  # int32 [n]: prompt and completion so far
        self.num_computed_tokens = words[:, 11]  # int32 [n]: have their KV

    def select(self, rows: Tensor) -> Scalars:
        """A copy of some rows (int64 [m])."""
        return Scalars(self.words.index_select(0, rows))


class RequestState:
    """Rows of ``max_num_seqs`` requests. `add_request` stages; nothing is on the device before the arena's apply."""

    def __init__(self, arena: StagedArena) -> None:
        self._arena = arena
        self.token_ids = arena.part("token_ids")  # int32 [max_num_seqs, max_model_len]: prompt, then completion
        self.scalars = Scalars(arena.part("scalars"))
        max_num_seqs = self.token_ids.shape[0]
        # The host's copies, [max_num_seqs] each.
        self.in_use = np.zeros(max_num_seqs, dtype=bool)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_random = np.zeros(max_num_seqs, dtype=bool)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.has_top_p = np.zeros(max_num_seqs, dtype=bool)
        self.has_min_p = np.zeros(max_num_seqs, dtype=bool)

    def add_request(self, request: NewRequest) -> None:
        """Take a free row. The caller has checked the token ids."""
        row, length = request.req_idx, len(request.token_ids)
        max_num_seqs, max_model_len = self.token_ids.shape
        if not 0 <= row < max_num_seqs:
            raise InternalError(f"a request for row {row}, but there are {max_num_seqs} rows")
        if self.in_use[row]:
            raise InternalError(f"a request for row {row}, which another request still has")
        if length > max_model_len:
            raise InternalError(f"a request of {length} tokens for row {row}, which holds {max_model_len}")
        # With top_k = 1 only the likeliest is left: greedy, which also settles ties.
        greedy = request.temperature == 0 or request.top_k == 1
        self.in_use[row] = True
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_tokens[row] = length
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.is_random[row] = not greedy
        self.top_k[row] = request.top_k
        self.has_top_p[row] = request.top_p < 1
        self.has_min_p[row] = request.min_p > 0
        packed = _ROW.pack(
            (request.seed + 2**63) % 2**64 - 2**63,  # seed + i of a call with n > 1 may have passed the end
            0.0 if greedy else max(request.temperature, _MIN_TEMPERATURE),
            request.top_p,
            request.min_p,
            request.repetition_penalty,
            request.frequency_penalty,
            request.presence_penalty,
            request.top_k,
            request.num_prompt_tokens,
            length,
            request.num_computed_tokens,
        )
        self._arena.stage("scalars", row, 0, np.frombuffer(packed, dtype=np.int32))
        self._arena.stage("token_ids", row, 0, np.array(request.token_ids, dtype=np.int32))

    def remove_request(self, row: int) -> None:
        """Free a row. Its contents stay until the next request overwrites them: no one reads past num_tokens."""
        if not (0 <= row < len(self.in_use) and self.in_use[row]):
            raise InternalError(f"row {row} is removed, but has no request")
        self.in_use[row] = False

    def advance(self, rows: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]) -> None:
        """On the host: the rows have computed their tokens up to ``seq_lens`` [n]."""
        self.num_computed_tokens[rows] = seq_lens

    def advance_device(self, rows: Tensor, seq_lens: Tensor) -> None:
        """The same on the device: int64 [n], int32 [n]."""
        self.scalars.num_computed_tokens.index_copy_(0, rows, seq_lens)

    def append_known(self, rows: Iterable[int], token_ids: Iterable[int]) -> None:
        """Each of the rows gets the token that stands beside it, on the host and, staged, on the device. Of one row
        they follow each other, and what it has sampled so far."""
        given: dict[int, list[int]] = {}
        for row, token_id in zip(rows, token_ids, strict=True):
            given.setdefault(row, []).append(token_id)
        for row, ids in given.items():
            if not (0 <= row < len(self.in_use) and self.in_use[row]):
                raise InternalError(f"row {row} gets tokens, but has no request")
            begin = int(self.num_tokens[row])
            if begin + len(ids) >= self.token_ids.shape[1]:
                raise InternalError(f"a row is full: it holds {self.token_ids.shape[1]} tokens")
            self.num_tokens[row] += len(ids)
            self._arena.stage("token_ids", row, begin, np.array(ids, dtype=np.int32))
            end = np.array([begin + len(ids)], dtype=np.int32)
            self._arena.stage("scalars", row, COLUMNS.num_tokens, end)

    def append(self, rows: npt.NDArray[np.int64]) -> None:
        """On the host: each of the rows has one token more."""
        if len(rows) and self.num_tokens[rows].max() >= self.token_ids.shape[1]:
            raise InternalError(f"a row is full: it holds {self.token_ids.shape[1]} tokens")
        self.num_tokens[rows] += 1

    def append_device(self, rows: Tensor, sampled: Tensor) -> None:
        """The same on the device: int64 [n] each."""
        append_tokens(self.token_ids, self.scalars.num_tokens, rows, sampled)
