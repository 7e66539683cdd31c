"""The vector of a request that gets one rather than tokens: the last hidden state of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .input_batch import BatchPlan, Rows
from .request_state import RequestState
from .transfer import to_device

__all__ = ["PooledTensors", "pool"]


@dataclass(slots=True)
class PooledTensors:
    """The vectors of m requests."""

    batch_idx: Rows  # host int64 [m]: positions in the SchedulerOutput
    vectors: Tensor  # float32 [m, hidden_size]


def pool(plan: BatchPlan, hidden: Tensor, requests: RequestState) -> PooledTensors | None:
    """Pool the prompts that end in this step; None if none does. hidden: [num_tokens, hidden_size]."""
    if not requests.num_pooled:
        return None
    pooled = np.flatnonzero(requests.is_pooled[plan.rows] & (plan.seq_lens == requests.num_tokens[plan.rows]))
    if not len(pooled):
        return None
    last = np.cumsum(plan.query_lens)[pooled] - 1
    vectors = hidden.index_select(0, to_device(last, hidden.device)).float()
    return PooledTensors(plan.batch_idx[pooled], vectors)
