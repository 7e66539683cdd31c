"""The n completions of one call: 1 .. n-1 wait until the prompt of index 0 is computed, then hit its blocks.

    index 0   prompt ................ first token committed (or gone)
                                       │ its full prompt blocks are in the prefix cache
    index 1   WAITING_FOR_PROMPT ..... └> WAITING -> finds them there, computes the tail of the prompt, samples

Where prefix caching is off, the call has a root hash of its own, so that it shares among its own requests alone.
"""

from __future__ import annotations

from .request import Request, RequestStatus


class ParallelSampling:
    """Requests that wait for the prompt of their call's index 0."""

    __slots__ = ("_first", "waiting")

    def __init__(self) -> None:
        self.waiting: set[Request] = set()
        self._first: dict[str, Request] = {}  # index 0 of each call, by request_id, until its prompt is computed

    def add_first(self, request: Request) -> None:
        """Note the completion of index 0 of a call with n > 1."""
        self._first[request.request_id] = request

    def wait_for_first(self, request: Request) -> bool:
        """Make the request wait for the prompt of its index 0. False: that prompt is computed already, or its request
        has ended."""
        first = self._first.get(request.request_id)
        if first is None:
            return False
        request.root_hash, request.is_long = first.root_hash, first.is_long
        request.status = RequestStatus.WAITING_FOR_PROMPT
        first.dependents.append(request)
        self.waiting.add(request)
        return True

    def discard(self, request: Request) -> None:
        """Drop a request that ended while it waited."""
        self.waiting.discard(request)
        self._first[request.request_id].dependents.remove(request)

    def release(self, first: Request) -> list[Request]:
        """Release the requests that wait for this one, and return them."""
        if self._first.get(first.request_id) is not first:
            return []
        del self._first[first.request_id]
        released, first.dependents = first.dependents, []
        self.waiting.difference_update(released)
        return released

    def check(self) -> None:
        """Assert that ``waiting`` and the dependents of each index 0 agree."""
        dependents = [request for first in self._first.values() for request in first.dependents]
        assert len(dependents) == len(self.waiting) and self.waiting == set(dependents)
        assert all(request.status is RequestStatus.WAITING_FOR_PROMPT for request in dependents)
