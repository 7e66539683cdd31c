"""The queue of requests that wait for a row: the most urgent first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from .request import Request, RequestStatus

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
