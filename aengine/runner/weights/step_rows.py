"""Which row each token of a step belongs to, for products that differ by request, as adapters' do.

A product is given x alone, and no layer knows whose its tokens are. Where that matters, the engine's formats have a
`StepRows` of their own: `wrap` puts a weight of its own around each; `add_request` tells what is asked for in each row,
such as an adapter; `choose` is told which rows a step has; and `begin` is called before its layers, so that the weights
so made find the rows of x's tokens. What `begin` queues is captured with the step, over memory that the graph replays.
Without one there is nothing around a weight, and nothing is queued.

Steps may be of several kinds, of which each has graphs of its own: a step in which no row asks for anything need not
launch what others do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...ipc.messages import NewRequest
    from ..distributed.shares import Share
    from .weight import ExpertWeights, Weight

Rows = npt.NDArray[np.int64]


class StepRows:
    """Products depend on x alone."""

    extras: frozenset[str] = frozenset()
    """The names of what it reads of a request's extras."""

    kinds: tuple[int, ...] = (0,)
    """The kinds of steps that there are; what a step launches depends on its kind, and on the numbers of its tokens."""

    kind = 0
    """The kind of the step that is run."""

    calls: Mapping[str, Callable[..., Any]] = {}
    """Collective calls of the host that it answers, by name."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Plain data that the host should know of it, once the model is built."""
        return {}

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        """Note the request of a new row, before the first step in which the row has tokens. What it queues for the
        device is done by that step. Returns the type and the message of what is wrong with its extras."""
        return None

    def remove_request(self, row: int) -> None:
        """Note that the row is free, which another request may get in the same step."""

    def wrap(self, parts: Mapping[str, Sequence[Share]], columns: Sequence[Share]) -> Callable[[Weight], Weight]:
        """Return what is put around a weight that will be made of the checkpoint's matrices ``parts``: the name of each
        with this rank's share of its output features; ``columns``: of their input features. A weight that asks for rows
        must be multiplied by all tokens of a step: that of the head is not."""
        return lambda weight: weight

    def wrap_experts(
        self, parts: Mapping[str, Sequence[Share]], columns: Sequence[Share], experts: Share
    ) -> Callable[[ExpertWeights], ExpertWeights]:
        """See `wrap`: of weights of this rank's share of a layer's ``experts``, each of which has the matrices
        ``parts``; their names leave an expert's number out."""
        return lambda weights: weights

    def choose(self, rows: Rows) -> None:
        """Set the kind of the step that comes next, of these rows (host int64 [n])."""

    def settle(self) -> None:
        """Wait until no other thread writes to what weights have of it on the device."""

    def only(self, kind: int) -> AbstractContextManager[None]:
        """Within, every step is of this kind: for what is compiled, measured or captured."""
        return nullcontext()

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
