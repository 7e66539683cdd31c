"""`AwaitedIds`: sampled ids on their way from the last pipeline stage to the rows of the first."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ..distributed.pipeline import PipelineLink
from ..request_state import RequestState
from ..speculation.positions import Verification
from ..transfer import to_device

Rows = npt.NDArray[np.int64]


class AwaitedIds:
    """What the last stage has sampled, or will have, and the first has not received; of the first stage.

    Ids come in the order of the steps, and are received as late as may be: when a step needs one of them, or so many
    steps later that the host had been told of them before it gave the newest. Until then this stage computes the steps
    of other requests.
    """

    def __init__(self, requests: RequestState, link: PipelineLink) -> None:
        self._requests = requests
        self._link = link
        # For each step, oldest first: rows that it sampled for, whose they were, and at how many positions, if not one.
        self._steps: deque[tuple[Rows, Rows, Rows | None]] = deque()
        self._num_owners = np.zeros(len(requests.in_use), dtype=np.int64)  # number of requests that each row has had

    def expect(self, rows: Rows, counts: Rows | None = None) -> None:
        """Note that a step samples for each of these rows (int64 [n]) at ``counts`` [n] positions; None: at one."""
        if len(rows):
            self._steps.append((rows, self._num_owners[rows], counts))
        while len(self._steps) > self._link.sizes.steps_in_flight:
            self._receive()

    def note_new_owner(self, row: int) -> None:
        """Note that the row belongs to another request from now on: ids on their way to it are not that one's."""
        self._num_owners[row] += 1

    def receive_for(self, rows: Rows) -> None:
        """Write into the rows all ids up to the newest for any of ``rows``, int64 [m]."""
        needed = np.zeros(len(self._num_owners), dtype=bool)
        needed[rows] = True
        num_steps = 0
        for i, (sampled, owners, _) in enumerate(self._steps, 1):
            if (needed[sampled] & (owners == self._num_owners[sampled])).any():
                num_steps = i
        for _ in range(num_steps):
            self._receive()

    def _receive(self) -> None:
        rows, owners, counts = self._steps.popleft()
        token_ids = self._link.receive_ids(len(rows) if counts is None else int(counts.sum()))
        is_current = owners == self._num_owners[rows]
        if not is_current.all():
            kept = np.flatnonzero(is_current if counts is None else np.repeat(is_current, counts))
            token_ids = token_ids.index_select(0, to_device(kept, token_ids.device))
            rows, counts = rows[is_current], None if counts is None else counts[is_current]
        if not len(rows):
            return
        if counts is None:
            self._requests.append_sampled(to_device(rows, token_ids.device), token_ids)
        else:  # the rows have been left as they were: what is verified here is what was verified there
            each = to_device(np.repeat(rows, counts), token_ids.device)
            Verification.gather(rows, counts - 1, self._requests).commit(token_ids, each, self._requests)
