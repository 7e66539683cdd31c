"""Which row each token of a step belongs to, for products that differ by request, as adapters' do.

A product is given x alone, and no layer knows whose its tokens are. Where that matters, the engine's formats have a
`StepRows` of their own: `wrap` puts a format of its own around that of each matrix; `add_request` tells what is asked
for in each row, such as an adapter; and `begin` is called before the layers of each step, so that the weights so made
find the rows of x's tokens. What `begin` queues is captured with the step, over memory that the graph replays. Without
one there is nothing around a format, and nothing is queued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...ipc.messages import NewRequest
    from .weight import WeightFormat


class StepRows:
    """Products depend on x alone."""

    extras: frozenset[str] = frozenset()
    """The names of what it reads of a request's extras."""

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        """Note the request of a new row, before the first step in which the row has tokens. What it queues for the
        device is done by that step. Returns the type and the message of what is wrong with its extras."""
        return None

    def remove_request(self, row: int) -> None:
        """Note that the row is free, which another request may get in the same step."""

    def wrap(self, name: str, form: WeightFormat) -> WeightFormat:
        """Return the format of the matrix of this name, which the checkpoint keeps in ``form``. A weight that asks for
        rows must be multiplied by all tokens of a step: that of the head is not."""
        return form

    def begin(self, rows: Tensor, query_start_loc: Tensor | None = None, num_tokens: int = 0) -> None:
        """Queue what the layers of a step need that are run next.

        Args:
            rows: int64 [n], on the device: the row of each token, or with ``query_start_loc`` of each request; -1 for
                padding
            query_start_loc: int32 [n + 1]: where each request's tokens begin and the last one's end
            num_tokens: tokens of the step with ``query_start_loc``; those past its end are padding
        """


ROWS_UNSEEN = StepRows()


class TokenRows(StepRows):
    """The row of each token of the step that is run."""

    def __init__(self) -> None:
        self.of_tokens: Tensor  # int64 [num_tokens], on the device; -1 for padding

    def begin(self, rows: Tensor, query_start_loc: Tensor | None = None, num_tokens: int = 0) -> None:
        self.of_tokens = rows
        if query_start_loc is not None:
            tokens = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
            request = torch.searchsorted(query_start_loc[1:], tokens, right=True)
            self.of_tokens = torch.where(
                tokens < query_start_loc[-1], rows.index_select(0, request.clamp_(max=len(rows) - 1)), -1
            )
