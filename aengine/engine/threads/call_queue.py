"""Calls for an event loop from other threads: all that gather before it gets its turn cost it one wake-up.

    any thread --post()--> [ call, call, call, ... ] --one call_soon_threadsafe--> deliver(), on the loop

There are no locks, because finalisers post too, and the garbage collector may run them anywhere. An order of steps
replaces them: `post` appends the call, then checks whether a delivery is scheduled; `deliver` clears that mark, then
takes the calls. So each call is taken by the delivery that was scheduled, or schedules one.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("aengine")

_PostedCall = tuple[Callable[..., object], tuple[Any, ...]]


class CallQueue:
    """Calls for one event loop, which makes them in order and each exactly once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[_PostedCall] = deque()
        self._is_scheduled = False
        self._context = contextvars.Context()  # an empty context: the loop keeps no caller's variables alive

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        return self._loop() is loop

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` on the loop, from any thread; it may not raise.

        Once the loop is closed it is called at once, in this thread.
        """
        try:
            self._calls.append((function, args))
            if not self._is_scheduled or self._is_closed():
                self._is_scheduled = True
                self._schedule()
        except BaseException:  # a KeyboardInterrupt may come at any line; a delivery too many does no harm
            self._schedule()
            raise

    def _is_closed(self) -> bool:
        loop = self._loop()
        return loop is None or loop.is_closed()

    def _schedule(self) -> None:
        loop = self._loop()
        try:
            if loop is None:
                raise RuntimeError("the loop has gone")
            loop.call_soon_threadsafe(self.deliver, context=self._context)
        except RuntimeError:  # the loop was closed
            self.deliver()

    def deliver(self) -> None:
        self._is_scheduled = False
        calls = self._calls
        for _ in range(len(calls)):  # calls that are added meanwhile have scheduled their own delivery
            try:
                function, args = calls.popleft()
            except IndexError:  # after the end of the loop several threads may take calls from here
                return
            try:
                function(*args)
            except Exception:
                logger.exception("a call from another thread failed")


_queues: weakref.WeakValueDictionary[int, CallQueue] = weakref.WeakValueDictionary()
"""Queues by the ids of their loops. Weak: a queue is held by those that wait on it, and goes with them."""


def call_queue_of(loop: asyncio.AbstractEventLoop) -> CallQueue:
    """Return the queue that all waits on this loop share. Call it on the loop, and hold it while waiting."""
    queue = _queues.get(id(loop))
    if queue is None or not queue.serves(loop):
        _queues[id(loop)] = queue = CallQueue(loop)
    return queue
