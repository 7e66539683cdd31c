"""`SamplingFeature`: what changes logits, as a state object; each feature has a file of its own beside this one.

A feature keeps what it needs of the rows that use it, on the device, so that `apply` asks nothing of the host and a
graph may hold it. It is skipped in a step that runs op by op where no sampling row uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....errors import InvalidRequestError
from ....ipc.messages import NewRequest
from ...input_batch import Rows
from ...request_state import RequestState, Scalars
from ...speculation.positions import SpecDecode
from ...transfer import to_device


class SamplingFeature:
    """A feature that no row uses: what a verb does of which a feature says nothing."""

    extra = ""
    """The name of what it reads of a request's extras; empty: it reads none."""
    is_in_graphs = True
    """Whether graphs hold its ops, which a step with any such feature then runs. Those of another feature run op by op,
    and so does all sampling of the steps in which a row uses it, but not their layers."""

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        # [max_num_seqs], on the host: the rows on which `apply` acts in every step
        self.uses = np.zeros(len(requests.in_use), dtype=bool)

    def reserve(self) -> None:
        """Allocate the memory that graphs refer to."""

    def add_request(self, request: NewRequest) -> None:
        """Note what the request of a new row asks for. Nothing may be written to the device yet.

        Raises InvalidRequestError or MessageError for a request that can't be served: it fails, and the row is as after
        `remove_request`.
        """

    def remove_request(self, row: int) -> None:
        """Note that the row is free."""
        self.uses[row] = False

    def apply_staged_writes(self) -> list[int]:
        """Write what the feature needs of the new rows, which are on the device now. Returns the rows for which there
        is no memory; what they ask for is dropped."""
        return []

    def is_pending(self, rows: Rows) -> bool:
        """Return whether `apply` acts on some of these rows at their present lengths, beyond those in ``uses``."""
        return False

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        """Change logits float32 [n, vocab_size] in place. ``rows``: int64 [n], the row of each, several times if it has
        guesses to be verified, which are ``spec_decode``; ``rows_device``: the same on the device, -1 for padding;
        ``scalars``: of the same rows, where num_tokens counts the guesses before each. What graphs hold may not look at
        ``rows``, which are empty there."""

    def take_faults(self) -> dict[int, str]:
        """Return what went wrong in `apply` since the last call, by row: the request fails for it."""
        return {}

    def commit(self, sampled: Tensor, rows: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        """Note the tokens, int64 [n], that were sampled for the rows (int64 [n], on the device)."""


class OpByOpFeature(SamplingFeature):
    """A feature that no graph holds: it keeps one tensor for each row whose request has its extra."""

    is_in_graphs = False

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        self._new: dict[int, Any] = {}  # arrays of numpy that are not on the device yet, by row
        self._of_row: dict[int, Tensor] = {}  # the same on the device, by row

    def read(self, columns: list[bytes]) -> Any:
        """Return the array of numpy that `apply` needs of a request with these columns. Raises as `add_request`."""
        raise NotImplementedError

    def add_request(self, request: NewRequest) -> None:
        row = request.req_idx
        self.uses[row] = self.extra in request.extras
        if self.uses[row]:
            self._new[row] = self.read(request.extras[self.extra])

    def remove_request(self, row: int) -> None:
        super().remove_request(row)
        self._new.pop(row, None)
        self._of_row.pop(row, None)

    def apply_staged_writes(self) -> list[int]:
        new, self._new = self._new, {}
        try:
            self._of_row |= {row: to_device(array, self._requests.token_ids.device) for row, array in new.items()}
        except torch.OutOfMemoryError:
            self.uses[list(new)] = False
            return list(new)
        return []


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for an id that the model does not have. The host has checked them, but a wrong index
    would kill the worker, and every other request with it."""
    ids = np.asarray(token_ids)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequestError(f"{name} names token id {wrong}, but this model's are 0 to {vocab_size - 1}")
