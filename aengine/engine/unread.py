"""`UnreadWatch`: ends streams that are held and not read, as by the ``Out[]`` of a notebook.

Four times in ``unread_timeout`` it checks the oldest unread token of each stream. One that it finds in five checks in
a row, while no reader waited, was left for that long though the reader's loop could run. Tokens cost nothing, and
neither does an engine without streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ..errors import DeadlineExceededError
from ..outputs import Token
from .user_request import UserRequest

_LOOKS = 4


class UnreadWatch:
    """Ends those of ``requests`` whose tokens lie unread for ``timeout`` seconds; None: it ends none."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout: float | None, requests: Mapping[str, UserRequest]
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._requests = requests
        self._timer: asyncio.TimerHandle | None = None
        # for each request its oldest unread token, and how many looks in a row have found it
        self._met: dict[UserRequest, tuple[Token, int]] = {}

    def begin(self) -> None:
        """Start to look at regular intervals, as there is a stream."""
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout / _LOOKS, self._look)

    def stop(self) -> None:
        """Stop looking, until the next `begin`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        met, self._met = self._met, {}
        for request in [request for request in self._requests.values() if not request.mailbox.final_only]:
            self.begin()
            oldest = request.mailbox.oldest_unread()
            if oldest is None:
                continue
            token, count = met.get(request, (None, -1))
            count = count + 1 if token is oldest else 0
            if count < _LOOKS:
                self._met[request] = oldest, count
            else:
                self._end(request)

    def _end(self, request: UserRequest) -> None:
        assert self._timeout is not None
        error = DeadlineExceededError(
            f"request {request.request_id}: its stream was not read for unread_timeout={self._timeout:g} s: read it, "
            "close it, or drop it (a notebook's Out[] holds what a cell ends with)",
            deadline=self._timeout,
        )
        request.mailbox.fail(error)
