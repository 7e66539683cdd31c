"""The persistent rows: a request's state on the device, from when it is added until it is removed.

A row is written once, when its request comes; after that the device itself moves it on (`advance`, `append`). The
host keeps copies of the few numbers that decide which ops a step needs, so that it never has to ask the device. Of a
row that samples at several positions in a step they are upper bounds, until a later step settles how many tokens that
brought.

One row of ``scalars``, 16 words of 4 bytes, a cache line:

    word 0, 1    2              3       4       5             6            7
        ┌───────┬──────────────┬───────┬───────┬─────────────┬────────────┬───────────┐
        │ seed  │ temperature  │ top_p │ min_p │ repetition_ │ frequency_ │ presence_ │   seed int64,
        │       │              │       │       │ penalty     │ penalty    │ penalty   │   the others float32
        ├───────┼──────────────┴────┬──┴───────┴──┬──────────┴──────────┬─┴───────────┤
        │ top_k │ num_prompt_tokens │ num_tokens  │ num_computed_tokens │ first_len   │   int32
        ├───────┴────────┬──────────┴─────────────┴─────────────────────┴─────────────┘
        │ logprobs_asked │                                                                  int32
        └────────────────┘
    word 13 (14 and 15 are unused); the line above it: 8, 9, 10, 11, 12
"""

from __future__ import annotations

import struct
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import NewRequest
from ..kernels.input_prep import ScalarColumns, append_tokens
from .staged_writes import StagedArena

SCALAR_WORDS = 16
COLUMNS = ScalarColumns(seed=0, temperature=2, num_tokens=10, num_computed_tokens=11)
_ROW = struct.Struct("<q6f6i")
_MIN_TEMPERATURE = (
    1e-5  # below this logits / temperature could overflow, and the likeliest token is certain long before
)


def _column(index: int, dtype: torch.dtype) -> cached_property[Tensor]:
    return cached_property(lambda scalars: scalars.words.view(dtype)[:, index])


class Scalars:
    """Named columns [n] of scalar rows: views, made when first read; nothing is copied. n: max_num_seqs, or the rows of
    a batch."""

    def __init__(self, words: Tensor, rows: Tensor | None = None) -> None:
        """``words``: int32 [m, 16]. ``rows``: int64 [n], those that are copied when a column is first read; None: all,
        in place."""
        self._all, self._rows = words, rows

    @cached_property
    def words(self) -> Tensor:
        """int32 [n, 16]."""
        return self._all if self._rows is None else self._all.index_select(0, self._rows)

    seed = _column(0, torch.int64)
    temperature = _column(2, torch.float32)  # 0: greedy
    top_p = _column(3, torch.float32)
    min_p = _column(4, torch.float32)
    repetition_penalty = _column(5, torch.float32)
    frequency_penalty = _column(6, torch.float32)
    presence_penalty = _column(7, torch.float32)
    top_k = _column(8, torch.int32)  # 0: all
    num_prompt_tokens = _column(9, torch.int32)
    num_tokens = _column(10, torch.int32)  # prompt and completion so far
    num_computed_tokens = _column(11, torch.int32)  # tokens whose KV is written
    first_len = _column(12, torch.int32)  # num_tokens when the request got its row
    logprobs_asked = _column(13, torch.int32)  # alternatives to each token, plus 1; 0: no log-probabilities

    def select(self, rows: Tensor) -> Scalars:
        """Return a copy of the rows int64 [m], made when a column is first read."""
        return Scalars(self.words, rows)


class RequestState:
    """Rows of ``max_num_seqs`` requests. `add_request` stages; nothing is on the device before the arena's apply."""

    def __init__(self, arena: StagedArena) -> None:
        self._arena = arena
        self.token_ids = arena.part("token_ids")  # int32 [max_num_seqs, max_model_len]: prompt, then completion
        self.scalars = Scalars(arena.part("scalars"))
        max_num_seqs = self.token_ids.shape[0]
        # Copies that the host keeps, [max_num_seqs] each.
        self.in_use = np.zeros(max_num_seqs, dtype=bool)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        # steps that brought a number of tokens not yet known to the host, for each row
        self.num_unsettled = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_exempt = np.zeros(max_num_seqs, dtype=bool)  # see `exempt`
        self.num_exempt = 0
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
        self.num_unsettled[row] = 0
        self.is_random[row] = not greedy
        self.top_k[row] = request.top_k
        self.has_top_p[row] = request.top_p < 1
        self.has_min_p[row] = request.min_p > 0
        packed = _ROW.pack(
            (request.seed + 2**63) % 2**64 - 2**63,  # seed + i of a call with n > 1 may be beyond 64 bits
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
            length,
            request.logprobs + 1,
        )
        self._arena.stage("scalars", row, 0, np.frombuffer(packed, dtype=np.int32))
        self._arena.stage("token_ids", row, 0, np.array(request.token_ids, dtype=np.int32))

    def remove_request(self, row: int) -> None:
        """Free a row. Its contents stay until the next request overwrites them: no one reads past num_tokens."""
        if not (0 <= row < len(self.in_use) and self.in_use[row]):
            raise InternalError(f"row {row} is removed, but has no request")
        self.in_use[row] = False
        self.num_exempt -= int(self.is_exempt[row])
        self.is_exempt[row] = False

    def exempt(self, row: int) -> None:
        """Note that the row's request samples no tokens."""
        self.is_exempt[row] = True
        self.num_exempt += 1

    def advance(self, rows: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]) -> None:
        """Note on the host that the rows' tokens up to ``seq_lens`` [n] are computed."""
        self.num_computed_tokens[rows] = seq_lens

    def advance_device(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Note on the device that the rows' tokens up to the lengths are computed: rows int64 [n], seq_lens int32
        [n]."""
        if rows.is_cpu:
            self.scalars.num_computed_tokens.numpy()[rows.numpy()] = seq_lens.numpy()
        else:
            self.scalars.num_computed_tokens.index_copy_(0, rows, seq_lens)

    def settle(self, rows: npt.NDArray[np.int64], num_missing: npt.NDArray[np.int64]) -> None:
        """Subtract on the host the tokens that an answered step of each of the rows did not bring (the device never
        counted them). A row may be named several times."""
        if not all(0 <= row < len(self.in_use) and self.in_use[row] for row in rows):
            raise InternalError("tokens are settled of a row that has no request")
        np.subtract.at(self.num_tokens, rows, num_missing)
        np.subtract.at(self.num_computed_tokens, rows, num_missing)
        np.subtract.at(self.num_unsettled, rows, 1)

    def append(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | int = 1) -> None:
        """Add ``counts`` tokens to each row on the host."""
        num_tokens = self.num_tokens[rows] + counts
        if len(rows) and num_tokens.max() > self.token_ids.shape[1]:
            raise InternalError(f"a row is full: it holds {self.token_ids.shape[1]} tokens")
        self.num_tokens[rows] = num_tokens

    def append_at_most(self, rows: npt.NDArray[np.int64], most: npt.NDArray[np.int64]) -> None:
        """Append tokens of a step whose answer will tell how many each row gets, at most ``most`` [n]: `settle` follows
        for rows that may get several."""
        self.append(rows, most)
        self.num_unsettled[rows[most > 1]] += 1

    def append_sampled(self, rows: Tensor, token_ids: Tensor) -> None:
        """Give the rows (int64 [n]) on the device a token each, int64 [n]."""
        append_tokens(self.token_ids, self.scalars.num_tokens, rows, token_ids)
