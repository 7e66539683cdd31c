"""`UnreadWatch`: ends streams that somebody holds and nobody reads, as the ``Out[]`` of a notebook does.

Four times in ``unread_timeout`` it looks at the oldest token that each stream has not been asked for. One that it has
met in five looks in a row, while nobody waited, was left lying for so long by a reader whose loop had its turns. A
token costs nothing, an engine without streams neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ..errors import AEngineError, DeadlineExceededError
from ..outputs import Token
from .user_request import Call

__all__ = ["UnreadWatch"]

_LOOKS = 4


class UnreadWatch:
    """Watches ``calls``. ``timeout`` in seconds, None: never; ``fail`` ends one of them with an error."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float | None,
        calls: Mapping[str, Call],
        fail: Callable[[Call, AEngineError], None],
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._calls = calls
        self._fail = fail
        self._timer: asyncio.TimerHandle | None = None
        self._met: dict[Call, tuple[Token, int]] = {}  # the oldest unread token, and how often it was met again

    def begin(self) -> None:
        """There is a stream."""
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout / _LOOKS, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        met, self._met = self._met, {}
        for call in [call for call in self._calls.values() if not call.mailbox.final_only]:
            self.begin()
            oldest = call.mailbox.oldest_unread()
            if oldest is None:
                continue
            token, count = met.get(call, (None, -1))
            count = count + 1 if token is oldest else 0
            if count < _LOOKS:
                self._met[call] = oldest, count
            else:
                self._end(call)

    def _end(self, call: Call) -> None:
        assert self._timeout is not None
        error = DeadlineExceededError(
            f"request {call.request_id}: its stream was not read for unread_timeout={self._timeout:g} s: read it, "
            "close it, or drop it (a notebook's Out[] holds what a cell ends with)",
            deadline=self._timeout,
        )
        self._fail(call, error)
