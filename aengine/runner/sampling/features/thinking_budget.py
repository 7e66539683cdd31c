"""`ThinkingBudget`: the reasoning of an answer ends after a number of tokens; what follows it, a grammar too, goes on.

    ... <think> a b c d </think> The answer      tokens: 3, begin: [<think>], end: [</think>]
                └─────┘ d and what follows is not sampled: </think> is

Reasoning is open where the last ``begin`` of the row, in the prompt or in the completion, has no ``end`` behind it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...request_state import RequestState
from ..processors import LogitsProcessor, ProcessedRows
from .feature import check_token_ids

_MOST = 16  # tokens of what begins or ends reasoning
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": _MOST}


class ThinkingBudget(LogitsProcessor):
    name = "thinking_budget"
    arguments: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"tokens": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "begin": _IDS, "end": _IDS},
        "required": ["tokens", "begin", "end"],
    }

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        self._most = 1  # tokens of the longest begin or end so far

    def prepare(self, arguments: Any) -> npt.NDArray[np.int64]:
        """Return int64 [3, _MOST]: the number of tokens, begin and end; -1 behind these."""
        state = np.full((3, _MOST), -1, dtype=np.int64)
        state[0] = arguments["tokens"]
        for row, key in enumerate(("begin", "end"), 1):
            check_token_ids(f"{self.name}.{key}", arguments[key], self._vocab_size)
            self._most = max(self._most, len(arguments[key]))
            state[row, : len(arguments[key])] = arguments[key]
        return state

    def process(self, logits: Tensor, rows: ProcessedRows) -> None:
        budget, begin, end = torch.stack(rows.states).unbind(1)
        opened, closed = (_after_last(one, self._most, rows) for one in (begin, end))
        is_over = (opened > closed) & (rows.num_tokens - opened >= budget[:, 0])
        # The end may have several tokens, of which the text has some.
        forced = end.gather(1, _num_begun(end, self._most, rows)[:, None])[:, 0]
        value = torch.where(is_over, 0.0, logits[rows.places, forced])
        logits[rows.places] += torch.where(is_over, -torch.inf, 0.0)[:, None]
        logits[rows.places, forced] = value


def _after_last(sequence: Tensor, most: int, rows: ProcessedRows) -> Tensor:
    """Return int64 [m]: the position after the last occurrence of each row's ``sequence``, [m, _MOST] of which ``most``
    are used; 0: there is none."""
    longest = rows.token_ids.shape[1]
    start = torch.arange(longest, device=sequence.device)
    length = (sequence >= 0).sum(1)
    is_here = start + length[:, None] <= rows.num_tokens[:, None]
    for k in range(min(most, longest)):
        wanted, shifted = sequence[:, k, None], rows.token_ids[:, k:]
        is_here[:, : longest - k] &= (shifted == wanted) | (wanted < 0)
    return torch.where(is_here, start + length[:, None], 0).amax(1)


def _num_begun(sequence: Tensor, most: int, rows: ProcessedRows) -> Tensor:
    """Return int64 [m]: of how many of the first tokens of its ``sequence``, not of all, the end of each row
    consists."""
    found = torch.zeros_like(sequence[:, 0])
    length = (sequence >= 0).sum(1)
    for count in range(1, most):
        place = rows.num_tokens[:, None] - count + torch.arange(count, device=sequence.device)
        last = rows.token_ids.gather(1, place.clamp(0, rows.token_ids.shape[1] - 1))
        is_begun = (last == sequence[:, :count]).all(1) & (place[:, 0] >= 0) & (count < length)
        found = torch.where(is_begun, count, found)
    return found
