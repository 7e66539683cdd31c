"""Requests that workers may have died of, and how the one at fault is found.

A worker's death does not name its cause: any request of its steps may be it. A request that was there at several
deaths, and hardly got a token in between, is put into quarantine. Quarantined requests are let in before all others,
and one at a time, until each has got a few tokens; then it runs on beside the next. The one that is let in while worker
after worker dies is at fault.

Workers may also be killed by something that has nothing to do with any request, and often. So only a death before the
second token counts (a request that kills by a prefill gets none in each life, one that kills by a decode one), and a
death without the first of the quarantine in a step speaks for it.

A worker that ends by an exception says more. One that raises the same twice running in steps of the same request alone
would go on so: that request is at fault at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .request import Request

_DEATHS_TO_ENTER = 2
_MOST_DEATHS_ALONE = 4
_TOKENS_TO_LEAVE = 4
"""Tokens that a request must get to leave: it has then passed a prefill and some decode steps."""
_TOKENS_OF_A_CRASH = 1
"""A death after more than so many tokens says nothing."""


class CrashQuarantine:
    """The requests in quarantine. The first one runs, or comes next."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def first(self) -> Request:
        return self._requests[0]

    def note_death(self, in_flight: Iterable[Request], exception: str = "") -> list[Request]:
        """Note that a worker died while ``in_flight``, unfinished requests, were in its steps. ``exception``: what it
        raised, if it could say. Returns the requests at fault, which must not run again."""
        first = self._requests[0] if self._requests else None
        present = list(in_flight)
        if first is not None and first not in present:
            first.num_deaths_alone = 0
        for request in present:
            gained = len(request.token_ids) - request.num_tokens_at_death
            if gained >= _TOKENS_TO_LEAVE:
                request.num_deaths = request.num_deaths_alone = 0
            is_the_same = exception and exception == request.exception_alone and gained <= _TOKENS_OF_A_CRASH
            request.exception_alone = exception if len(present) == 1 else ""
            request.num_tokens_at_death = len(request.token_ids)
            if is_the_same and len(present) == 1:
                return [request]
            request.num_deaths += 1
            request.num_deaths_alone += request is first and gained <= _TOKENS_OF_A_CRASH
            if request.num_deaths >= _DEATHS_TO_ENTER and request not in self._requests:
                self._requests.append(request)
        return [request for request in self._requests if request.num_deaths_alone >= _MOST_DEATHS_ALONE]

    def holds(self, request: Request) -> bool:
        """Return whether the request is still in quarantine. It leaves it here once it has got a few tokens."""
        if request not in self._requests:
            return False
        if len(request.token_ids) >= request.num_tokens_at_death + _TOKENS_TO_LEAVE:
            self._requests.remove(request)
        return request in self._requests

    def discard(self, request: Request) -> None:
        """Drop a request that has ended."""
        if request in self._requests:
            self._requests.remove(request)
