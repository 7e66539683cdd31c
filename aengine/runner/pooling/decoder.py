"""Vectors of a decoder's requests: of their last hidden state, of the mean of all, or the logits of some tokens.

A prompt may be computed in chunks, beside requests that generate. Of one whose mean is wanted, the sum of what has been
computed so far is kept on the device; its prefix is not looked up, so that all of it passes by here.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import InvalidRequestError
from ...ipc.messages import MessageError, NewRequest
from ..async_output import NO_SIDE_OUTPUT, SideOutput
from ..input_batch import BatchPlan, Rows
from ..request_state import RequestState
from ..sampling.features.feature import check_token_ids
from ..transfer import to_device
from .asked import EXTRA, AskedPooling
from .pooled_tensors import PooledTensors
from .vectors import VectorLayers


class PoolableModel(Protocol):
    """A model whose hidden states are pooled."""

    def final_hidden(self, hidden: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class DecoderPooling:
    """Pools the prompts that end in a step."""

    extra = EXTRA
    """The name of what it reads of a request's extras."""

    def __init__(self, model: PoolableModel, requests: RequestState, vectors: VectorLayers, vocab_size: int) -> None:
        self._model = model
        self._requests = requests
        self._vectors = vectors
        self._vocab_size = vocab_size
        self._sums: Tensor | None = None  # float32 [max_num_seqs, hidden_size]: sums of the rows whose mean is wanted
        self._next_sums: Tensor | None = None  # `_sums` with the tokens of the step being run
        self._is_pooled = np.zeros(len(requests.in_use), dtype=bool)  # whether each row has such a request
        self._token_ids: dict[int, Any] = {}  # ids whose logits a row's request wants, by row

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        """See `ResultFeature`."""
        self._token_ids.pop(request.req_idx, None)
        self._is_pooled[request.req_idx] = is_pooled = self.extra in request.extras
        if not is_pooled:
            return None
        self._requests.exempt(request.req_idx)
        try:
            asked = AskedPooling.of(request)
            check_token_ids(self.extra, asked.token_ids, self._vocab_size)
        except (InvalidRequestError, MessageError) as error:
            return "InternalError", f"what the request asks of pooling can't be read: {error}"
        if asked.token_ids:
            self._token_ids[request.req_idx] = np.array(asked.token_ids, dtype=np.int64)
        return None

    def commit(self) -> None:
        """See `ResultFeature`."""
        self._sums = self._next_sums

    def compute(self, plan: BatchPlan, hidden: Tensor) -> SideOutput:
        """Return the vectors of the prompts that end in this step."""
        self._next_sums = self._sums
        requests = self._requests
        if not requests.num_exempt:
            return NO_SIDE_OUTPUT
        is_pooled = self._is_pooled[plan.rows]
        gets_logits = np.isin(plan.rows, list(self._token_ids))
        if self._vectors.mode == "mean":
            self._add_to_sums(plan, np.flatnonzero(is_pooled & ~gets_logits), hidden)
        ends = is_pooled & (plan.seq_lens == requests.num_tokens[plan.rows])
        parts, found = [], []
        for which, make in ((ends & ~gets_logits, self._embed), (ends & gets_logits, self._logits)):
            own = np.flatnonzero(which)
            if len(own):
                vectors, sizes = make(plan, own, hidden)
                parts.append(vectors)
                found.append(np.stack((plan.batch_idx[own], sizes)))
        if not parts:
            return NO_SIDE_OUTPUT
        return PooledTensors(np.concatenate(found, axis=1), torch.cat(parts))

    def _embed(self, plan: BatchPlan, own: Rows, hidden: Tensor) -> tuple[Tensor, Rows]:
        if self._next_sums is not None:
            rows = to_device(plan.rows[own], hidden.device)
            lengths = to_device(plan.seq_lens[own], hidden.device)
            pooled = self._next_sums.index_select(0, rows) / lengths[:, None]
        else:
            pooled = self._model.final_hidden(_last(plan, own, hidden))
        vectors = self._vectors.finish(pooled)
        return vectors.flatten(), np.full(len(own), vectors.shape[1])

    def _logits(self, plan: BatchPlan, own: Rows, hidden: Tensor) -> tuple[Tensor, Rows]:
        logits = self._model.compute_logits(_last(plan, own, hidden))
        ids = [self._token_ids[int(row)] for row in plan.rows[own]]
        sizes = np.array([len(some) for some in ids])
        place = to_device(np.stack((np.repeat(np.arange(len(own)), sizes), np.concatenate(ids))), hidden.device)
        return logits[place[0], place[1]], sizes

    def _add_to_sums(self, plan: BatchPlan, own: Rows, hidden: Tensor) -> None:
        if not len(own):
            return
        if self._sums is None:
            sums = hidden.new_zeros((len(self._requests.in_use), hidden.shape[1]), dtype=torch.float32)
        else:
            sums = self._sums.clone()
        begins = np.cumsum(plan.query_lens) - plan.query_lens
        lengths = plan.query_lens[own]
        tokens = np.concatenate([np.arange(begins[i], begins[i] + plan.query_lens[i]) for i in own])
        sent = to_device(np.stack((tokens, np.repeat(plan.rows[own], lengths))), hidden.device)
        first = plan.rows[own[plan.seq_lens[own] == lengths]]  # rows whose request begins with this step
        sums.index_fill_(0, to_device(first, hidden.device), 0.0)
        states = self._model.final_hidden(hidden.index_select(0, sent[0])).float()
        self._next_sums = sums.index_add_(0, sent[1], states)


def _last(plan: BatchPlan, own: Rows, hidden: Tensor) -> Tensor:
    """Return the hidden states of the last tokens of some requests of the batch."""
    last = np.cumsum(plan.query_lens)[own] - 1
    return hidden.index_select(0, to_device(last, hidden.device))
