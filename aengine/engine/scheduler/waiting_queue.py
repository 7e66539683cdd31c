"""The queue of requests that wait for a row: the most urgent first. And the order in which all are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from .request import Request, RequestStatus

if TYPE_CHECKING:
    from .rows import Rows

_sort_key = attrgetter("sort_key")


class WaitingQueue:
    """Waiting requests, sorted by ``Request.sort_key``, the most urgent first.

    It is a sorted list and not a heap: an aborted request must leave at once, and let go of its prompt, not when its
    turn would have come. Shifting ten thousand pointers costs about a microsecond.
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        insort(self._requests, request, key=_sort_key)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.pop(0)

    def discard(self, request: Request) -> None:
        place = bisect_left(self._requests, request.sort_key, key=_sort_key)
        if place < len(self._requests) and self._requests[place] is request:
            del self._requests[place]


class ServingOrder:
    """The order in which requests are served: by priority and arrival. Others count besides what was done for whom
    (engine/tenants/fair_share.py)."""

    def new_queue(self) -> WaitingQueue:
        """Return an empty queue, from which requests get a row in this order; false while none of it may have one."""
        return WaitingQueue()

    def begin_step(self) -> None:
        """Called before each step is planned."""

    def note_row(self, request: Request) -> None:
        """Called with each request that has got a row; what is computed of it was found."""

    def note_left(self, request: Request) -> None:
        """Called with each request that leaves its row, before it forgets what was computed."""

    def sort(self, requests: list[Request]) -> None:
        """Sort requests that have a row: the first gets tokens and blocks first."""
        requests.sort(key=_sort_key)

    def last(self, requests: Iterable[Request]) -> Request:
        """Return the one that gives its blocks to others first. Of requests that `sort` has put in order, it is the
        last one, up to the next step."""
        return max(requests, key=_sort_key)

    def room_for_waiting(self, request: Request, room: int, rows: Rows) -> int:
        """Return how many of ``room`` tokens, less than all, the chunk of ``request`` leaves to those that wait."""
        return 0
