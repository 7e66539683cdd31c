"""The requests that decode, as the batches of the steps to come.

With one pipeline stage there is one batch, which is in every step. With several, the requests that have a row are
divided among as many, the micro-batches, whose steps follow each other: so each stage computes another one's at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import cycle

from ...ipc.messages import int32
from .request import Request, RequestStatus


class DecodeBatch:
    """The requests that are in every step of a batch with one token each, and the columns that say so.

    While no request joins or leaves, each step has the same list and the same columns. They are replaced, never changed
    in place, since steps in flight and their messages hold them too.
    """

    __slots__ = ("_is_stale", "index", "num_rows", "num_scheduled", "req_idx", "requests")

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_rows = 0  # number of requests of this batch that have a row, whether they decode or not
        self.requests: list[Request] = []
        self.req_idx: array[int] = int32()  # row of each request
        self.num_scheduled: array[int] = int32()  # a 1 for each request
        self._is_stale = False

    def leave(self) -> None:
        """Note that one of them is not DECODING any more: `refresh` leaves it out."""
        self._is_stale = True

    def join(self, requests: list[Request]) -> None:
        self.requests = self.requests + requests
        self.req_idx = self.req_idx + int32([request.req_idx for request in requests])
        self.num_scheduled = int32((1,)) * len(self.requests)

    def refresh(self) -> list[Request]:
        if self._is_stale:
            self._is_stale = False
            here, decoding = self.index, RequestStatus.DECODING  # one that left may decode in another batch by now
            self.requests = [one for one in self.requests if one.status is decoding and one.batch_index == here]
            self.req_idx = int32([request.req_idx for request in self.requests])
            self.num_scheduled = int32((1,)) * len(self.requests)
        return self.requests


class DecodeBatches:
    """All of them, which take turns."""

    def __init__(self, count: int) -> None:
        self._all = [DecodeBatch(index) for index in range(count)]
        self._turns = cycle(self._all)
        self.take_turns()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[DecodeBatch]:
        return iter(self._all)

    def take_turns(self) -> None:
        """Go on to the next batch: the next step is made for it, and newly admitted requests join it."""
        self.current = next(self._turns)

    def room(self, num_requests: int) -> int:
        """Return how many more requests the current batch may have, for its equal share of so many in all."""
        return -(-num_requests // len(self._all)) - self.current.num_rows

    def here(self, requests: Iterable[Request]) -> list[Request]:
        """Return those of the requests that belong to the current batch."""
        return [request for request in requests if request.batch_index == self.current.index]

    def add(self, request: Request) -> None:
        """Note that the request, which has got a row, belongs to the current batch."""
        request.batch_index = self.current.index
        self.current.num_rows += 1

    def of(self, request: Request) -> DecodeBatch:
        """Return the batch to which a request with a row belongs."""
        return self._all[request.batch_index]
