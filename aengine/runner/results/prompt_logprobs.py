"""Log-probabilities of a prompt's tokens, from the hidden states of its chunks.

    position      0      1      2  ....  n - 1          NewRequest.results_from = 0: a request that asks for all
    hidden        h0     h1     h2 ....  h[n-1]
    is asked of   t1     t2     t3 ....  (sampled)

Logits are made of some rows at a time, so that a long chunk takes no more memory than a batch that samples.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...ipc.messages import MessageError, ModelRunnerOutput, NewRequest, RowError, int32_of
from ...kernels.logprobs import keep_logits, token_logprobs
from ..async_output import NO_SIDE_OUTPUT, HostOutput, SideOutput, add_results
from ..input_batch import BatchPlan, Rows
from ..request_state import RequestState
from ..sampling.vocabulary import Vocabulary
from ..transfer import to_device

_LOGITS = 1 << 24
"""Logits that are made at once: 64 MB."""


class HeadModel(Protocol):
    """A model that has an output matrix."""

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class PromptLogprobs:
    """Gives the prompts' tokens their log-probabilities, chunk by chunk."""

    extra = "prompt_logprobs"

    def __init__(self, model: HeadModel, requests: RequestState, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._model, self._requests, self._vocabulary = model, requests, vocabulary
        self._vocab_size = vocab_size
        self._rows_at_once = max(1, _LOGITS // vocab_size)
        self._num_asked = np.full(len(requests.in_use), -1, dtype=np.int64)  # alternatives, by row; -1: none is asked
        self._begins = np.zeros(len(requests.in_use), dtype=np.int64)  # `results_from`, by row
        self._asking: set[int] = set()

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        """See `ResultFeature`. The extra is int32: the number of alternatives to each token, and whether the request
        samples no tokens."""
        row = request.req_idx
        self._num_asked[row] = -1
        self._asking.discard(row)
        if self.extra not in request.extras:
            return None
        try:
            (column,) = int32_of(request.extras[self.extra], 1)
            num_asked, is_exempt = column
        except (MessageError, ValueError) as error:
            return "InternalError", f"what the request asks of its prompt's log-probabilities can't be read: {error}"
        self._num_asked[row] = min(max(num_asked, 0), self._vocab_size)
        self._begins[row] = request.results_from
        self._asking.add(row)
        if is_exempt:
            self._requests.exempt(row)
        return None

    def commit(self) -> None:
        """See `ResultFeature`."""

    def compute(self, plan: BatchPlan, hidden: Tensor) -> SideOutput:
        """See `ResultFeature`."""
        if not self._asking:
            return NO_SIDE_OUTPUT
        requests, rows = self._requests, plan.rows
        begins = plan.seq_lens - plan.query_lens
        first = np.maximum(begins, self._begins[rows])
        counts = np.maximum(np.minimum(plan.seq_lens, requests.num_prompt_tokens[rows] - 1) - first, 0)
        is_end = requests.is_exempt[rows] & (plan.seq_lens == requests.num_tokens[rows])
        own = np.flatnonzero((self._num_asked[rows] >= 0) & ((counts > 0) | is_end))
        if not len(own):
            return NO_SIDE_OUTPUT
        num_asked = self._num_asked[rows[own]]
        pieces = np.stack((plan.batch_idx[own], first[own] + 1, counts[own], num_asked))
        owner = np.repeat(own, counts[own])
        places = np.arange(len(owner)) - np.repeat(np.cumsum(counts[own]) - counts[own], counts[own]) + first[owner]
        tokens = (np.cumsum(plan.query_lens) - plan.query_lens - begins)[owner] + places
        columns = np.stack((tokens, rows[owner], places + 1, np.repeat(num_asked + 1, counts[own])))
        return _Scored(pieces, self._score(hidden, columns, int(num_asked.max())))

    def _score(self, hidden: Tensor, columns: Rows, most: int) -> Tensor:
        """Return int32 [n, 2 + 2 * most]: a token's id, then its row of `token_logprobs`. columns: host int64 [4, n],
        the token of the batch whose hidden state it is asked of, its request's row, its position, and what is asked."""
        n = columns.shape[1]
        source, rows, positions, asked = to_device(columns, hidden.device).unbind()
        targets, asked = self._requests.token_ids[rows, positions].long(), asked.int()
        words = torch.zeros((1, n, 1 + 2 * most), dtype=torch.int32, device=hidden.device)
        slot = torch.zeros(1, dtype=torch.int32, device=hidden.device)
        for begin in range(0, n, self._rows_at_once):
            some = slice(begin, begin + self._rows_at_once)
            logits = self._vocabulary.whole(self._model.compute_logits(hidden.index_select(0, source[some])))
            token_logprobs(keep_logits(logits, asked[some]), targets[some], asked[some], words[:, some], slot)
        return torch.cat((targets[:, None].int(), words[0]), 1)


class _Scored(SideOutput):
    """The rows of m requests. pieces: host int64 [4, m], the position of each in the batch, that of its first token in
    its prompt, the number of its tokens, and of the alternatives to each. A piece is the last three, then its rows."""

    def __init__(self, pieces: Rows, words: Tensor) -> None:
        self._pieces = pieces
        self._width = words.shape[1]
        self.tensors = {"side": words.view(torch.float32).flatten()}

    def add_to(self, output: ModelRunnerOutput, host: HostOutput, errors: dict[int, RowError]) -> None:
        """Add the pieces; of one that has NaN an error instead."""
        assert host.side is not None, "it was copied"
        words = host.side.view(np.int32).reshape(-1, self._width)
        most, begin = self._width // 2 - 1, 0
        for batch_idx, first, count, num_asked in self._pieces.T.tolist():
            rows = words[begin : begin + count]
            begin += count
            if batch_idx in errors:
                continue
            if np.isnan(rows[:, 1].copy().view(np.float32)).any():
                message = "the model's logits hold NaN for a token of this prompt; others are unharmed"
                errors[batch_idx] = RowError(batch_idx, "InternalError", message)
                continue
            kept = np.concatenate((rows[:, : 2 + num_asked], rows[:, 2 + most : 2 + most + num_asked]), axis=1)
            head = np.array((first, count, num_asked), dtype=np.int32)
            add_results(output, [batch_idx], [3 + kept.size], np.concatenate((head, kept.ravel())).view(np.float32))
