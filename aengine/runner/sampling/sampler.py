"""Logits to tokens: the order of SamplingParams' docstring, each op skipped when no row needs it.

logits ─> log-probabilities' rows kept ─> bias, min tokens, bitmask, penalties ─> cutoff ─────> / temperature, draw;
                                          (features.py, in that order)    (top-k, top-p, min-p)  greedy: the maximum
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...ipc.messages import NewRequest
from ...kernels.gumbel import gumbel_sample
from ...kernels.logprobs import top_logprobs
from ...kernels.top_k_top_p import find_cutoff
from ..input_batch import Rows, SampleBatch, to_device
from ..request_state import RequestState
from .bitmask_memory import HostBitmasks
from .features import make_features

__all__ = ["LogprobTensors", "Sampler", "SamplerOutput"]


@dataclass(slots=True)
class LogprobTensors:
    """Log-probabilities for the m rows that asked; row i wants only the first counts[i] of its k alternatives."""

    rows: Rows  # host int64 [m]: which rows of logits these are
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

    def __init__(self, requests: RequestState, vocab_size: int, bitmasks: HostBitmasks) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        self._features = make_features(requests, vocab_size, bitmasks)
        max_num_seqs = len(requests.in_use)
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)  # -1: none
        self._cuts = np.zeros(max_num_seqs, dtype=bool)  # random, with top-k, top-p or min-p
        self._altered = np.zeros(max_num_seqs, dtype=bool)  # a feature acts in every step
        self._special = np.zeros(max_num_seqs, dtype=bool)  # one of the three

    def add_request(self, request: NewRequest) -> None:
        row = request.req_idx
        greedy = request.temperature == 0 or request.top_k == 1
        cuts = 0 < request.top_k < self._vocab_size or request.top_p < 1 or request.min_p > 0
        for feature in self._features:
            feature.add_request(request)
        self._num_logprobs[row] = request.logprobs
        self._cuts[row] = cuts and not greedy
        self._altered[row] = any(feature.uses[row] for feature in self._features)
        self._special[row] = self._altered[row] or self._cuts[row] or request.logprobs >= 0

    def remove_request(self, row: int) -> None:
        for feature in self._features:
            feature.remove_request(row)

    def apply_staged_writes(self) -> list[int]:
        """Returns the new rows for which there was no memory; what they ask for is left out."""
        return [row for feature in self._features for row in feature.apply_staged_writes()]

    def is_plain(self, rows: Rows) -> bool:
        """Whether temperature and seed say all of these rows in the step to come, if it has no grammar.

        Then `sample` is `gumbel_sample` without a cutoff, and needs nothing of the host.
        """
        return not self._special[rows].any() and not self._is_pending(rows)

    def sample(self, logits: Tensor, batch: SampleBatch) -> SamplerOutput:
        """Sample one token for each row of logits float32 [n, vocab_size], which are overwritten."""
        rows = batch.rows
        wants = np.flatnonzero(self._num_logprobs[rows] >= 0)
        index = to_device(wants, logits.device) if 0 < len(wants) < len(rows) else None
        raw_logits = None
        if batch.grammar is not None or self._altered[rows].any() or self._is_pending(rows):
            if len(wants):
                raw_logits = logits.clone() if index is None else logits.index_select(0, index)
            for feature in self._features:
                feature.apply(logits, batch)
        token_ids, checks = self._choose(logits, batch)
        for feature in self._features:
            feature.commit(token_ids, batch)
        logprobs = None
        if len(wants):
            if raw_logits is None:
                raw_logits = logits if index is None else logits.index_select(0, index)
            chosen = token_ids if index is None else token_ids.index_select(0, index)
            logprobs = self._logprobs(raw_logits, chosen, wants, batch)
        return SamplerOutput(token_ids, checks, logprobs)

    def needs_memory(self, batch: SampleBatch) -> npt.NDArray[np.bool_]:
        """[n]: which of the rows may need memory to be sampled, for more than temperature and seed."""
        if batch.grammar is not None or self._is_pending(batch.rows):
            return np.ones(len(batch.rows), dtype=bool)
        return self._special[batch.rows]

    def sample_plainly(self, logits: Tensor, batch: SampleBatch) -> SamplerOutput:
        """Sample by temperature and seed alone: right for rows without other parameters."""
        scalars = batch.scalars
        ids, checks = gumbel_sample(logits, scalars.temperature, scalars.seed, scalars.num_tokens)
        return SamplerOutput(ids, checks, None)

    def _is_pending(self, rows: Rows) -> bool:
        return any(feature.is_pending(rows) for feature in self._features)

    def _choose(self, logits: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor]:
        """(ids int64 [n], checks float32 [n])"""
        scalars, cutoff = batch.scalars, None
        if self._cuts[batch.rows].any():
            cutoff = find_cutoff(logits, scalars.temperature, scalars.top_k, scalars.top_p, scalars.min_p)
        return gumbel_sample(logits, scalars.temperature, scalars.seed, scalars.num_tokens, cutoff)

    def _logprobs(self, logits: Tensor, sampled: Tensor, wants: Rows, batch: SampleBatch) -> LogprobTensors:
        """Find them for the rows of the batch that ``wants`` names, in its order; logits and sampled are theirs."""
        counts = np.minimum(self._num_logprobs[batch.rows[wants]], self._vocab_size)
        of_sampled, ids, values = top_logprobs(logits, sampled, int(counts.max()))
        return LogprobTensors(wants, batch.batch_idx[wants], counts, of_sampled, ids, values)
