"""Logits to tokens: the order of SamplingParams' docstring, each op skipped when no row asks for it.

logits ─> log-probabilities' rows kept ─> bias, min tokens, bitmask, penalties ─┬─> greedy rows: the maximum
                                          (features.py, in that order)          └─> others: / temperature, cutoff
                                                                                    (top-k, top-p, min-p), draw
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ipc.messages import NewRequest
from ..kernels.gumbel import gumbel_sample
from ..kernels.logprobs import top_logprobs
from ..kernels.top_k_top_p import apply_cutoff, min_p_cutoff, top_k_top_p_cutoff
from .features import make_features
from .input_batch import Rows, SampleBatch, to_device
from .request_state import RequestState, Scalars

__all__ = ["LogprobTensors", "Sampler", "SamplerOutput"]


@dataclass(slots=True)
class LogprobTensors:
    """Of the m rows that asked; row i wants only the first counts[i] of its k alternatives."""

    batch_idx: Rows  # host int64 [m]: positions in the step's batch
    counts: Rows  # host int64 [m]
    sampled: Tensor  # float32 [m]
    token_ids: Tensor  # int64 [m, k]
    values: Tensor  # float32 [m, k]


@dataclass(slots=True)
class SamplerOutput:
    token_ids: Tensor  # int64 [n], always ids of the vocabulary
    checks: Tensor  # float32 [n]: finite if the row could be sampled; NaN or +inf: bad logits; -inf: all tokens banned
    logprobs: LogprobTensors | None


class Sampler:
    """Samples for whole steps; keeps which rows want log-probabilities, and the features' state."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        self._features = make_features(requests, vocab_size)
        self._num_logprobs = np.full(len(requests.in_use), -1, dtype=np.int64)  # [max_num_seqs]; -1: none

    def add_request(self, request: NewRequest) -> None:
        self._num_logprobs[request.req_idx] = request.logprobs
        for feature in self._features:
            feature.add_request(request)

    def remove_request(self, row: int) -> None:
        for feature in self._features:
            feature.remove_request(row)

    def apply_staged_writes(self) -> None:
        for feature in self._features:
            feature.apply_staged_writes()

    def sample(self, logits: Tensor, batch: SampleBatch) -> SamplerOutput:
        """One token for each row of logits float32 [n, vocab_size], which are used up."""
        wants = np.flatnonzero(self._num_logprobs[batch.rows] >= 0)
        untouched = logits.index_select(0, to_device(wants, logits.device)) if len(wants) else None
        for feature in self._features:
            feature.apply(logits, batch)
        token_ids, checks = self._choose(logits, batch)
        for feature in self._features:
            feature.commit(token_ids, batch)
        logprobs = None
        if untouched is not None:
            logprobs = self._logprobs(untouched, token_ids, wants, batch)
        return SamplerOutput(token_ids, checks, logprobs)

    def _choose(self, logits: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor]:
        """(ids int64 [n], checks float32 [n])"""
        is_random = self._requests.is_random[batch.rows]
        if not is_random.any():
            return _greedy(logits)
        if is_random.all():
            return self._draw(logits, batch.scalars, batch.rows)
        token_ids = torch.empty(len(batch.rows), dtype=torch.int64, device=logits.device)
        checks = torch.empty(len(batch.rows), dtype=torch.float32, device=logits.device)
        random_rows, greedy_rows = np.flatnonzero(is_random), np.flatnonzero(~is_random)
        index = to_device(random_rows, logits.device)
        drawn = self._draw(logits.index_select(0, index), batch.scalars.select(index), batch.rows[random_rows])
        token_ids[index], checks[index] = drawn
        index = to_device(greedy_rows, logits.device)
        token_ids[index], checks[index] = _greedy(logits.index_select(0, index))
        return token_ids, checks

    def _draw(self, logits: Tensor, scalars: Scalars, rows: Rows) -> tuple[Tensor, Tensor]:
        """The same for rows of which none is greedy; logits and scalars are theirs alone."""
        logits.div_(scalars.temperature[:, None])
        cutoff = None
        top_k = self._requests.top_k[rows]
        top_k = np.where(top_k < self._vocab_size, top_k, 0)
        chosen = np.flatnonzero((top_k > 0) | self._requests.has_top_p[rows])
        if len(chosen):
            cutoff = self._top_cutoff(logits, scalars, chosen, int(top_k[chosen].max()))
        if self._requests.has_min_p[rows].any():
            lowest = min_p_cutoff(logits, scalars.min_p)
            cutoff = lowest if cutoff is None else torch.maximum(cutoff, lowest)
        if cutoff is not None:
            apply_cutoff(logits, cutoff)
        return gumbel_sample(logits, scalars.seed, scalars.num_tokens.long())

    def _top_cutoff(self, logits: Tensor, scalars: Scalars, chosen: Rows, max_top_k: int) -> Tensor:
        """float32 [n, 1]: top-k's and top-p's of the chosen rows, -inf for the others."""
        if len(chosen) == len(logits):
            return top_k_top_p_cutoff(logits, scalars.top_k, scalars.top_p, max_top_k)
        index = to_device(chosen, logits.device)
        few = scalars.select(index)
        cutoff = torch.full((len(logits), 1), -torch.inf, device=logits.device)
        found = top_k_top_p_cutoff(logits.index_select(0, index), few.top_k, few.top_p, max_top_k)
        return cutoff.index_copy_(0, index, found)

    def _logprobs(self, logits: Tensor, token_ids: Tensor, wants: Rows, batch: SampleBatch) -> LogprobTensors:
        counts = np.minimum(self._num_logprobs[batch.rows[wants]], self._vocab_size)
        chosen = token_ids.index_select(0, to_device(wants, logits.device))
        sampled, ids, values = top_logprobs(logits, chosen, int(counts.max()))
        return LogprobTensors(batch.batch_idx[wants], counts, sampled, ids, values)


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the likeliest tokens of each row."""
    best = logits.max(dim=1)
    return best.indices, best.values
