"""A few threads for work that can't be cancelled: daemons, so that a compile in progress never holds up the exit."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["CompilePool", "settle", "tell"]


class CompilePool:
    """Runs jobs in order in at most ``num_threads`` threads, which are started when needed and end with `close`."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._condition = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._num_idle = 0
        self._num_alive = 0
        self._closed = False
        self._on_ended: Callable[[], None] | None = None

    @property
    def num_alive(self) -> int:
        return self._num_alive

    @property
    def num_queued(self) -> int:
        """Jobs that no thread has begun."""
        return len(self._jobs)

    def submit(self, job: Callable[[], None]) -> None:
        """``job`` may not raise. Raises RuntimeError when closed, or no thread can be started."""
        with self._condition:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._jobs.append(job)
            if self._num_idle >= len(self._jobs) or self._num_alive == self._num_threads:
                self._condition.notify()
                return
            self._num_alive += 1
            try:
                threading.Thread(target=self._work, name="aengine-grammar", daemon=True).start()
            except RuntimeError:
                self._num_alive -= 1
                if not self._num_alive:
                    self._jobs.remove(job)
                    raise

    def discard(self, job: Callable[[], None]) -> bool:
        """Take a job back that no thread has begun; whether that was so."""
        with self._condition:
            try:
                self._jobs.remove(job)
            except ValueError:
                return False
            return True

    def close(self, on_ended: Callable[[], None] | None = None) -> None:
        """Drop what was not begun and let the threads end. ``on_ended`` is called by the last of them."""
        with self._condition:
            self._closed = True
            self._jobs.clear()
            self._condition.notify_all()
            if self._num_alive:
                self._on_ended = on_ended or self._on_ended
                return
        if on_ended is not None:
            on_ended()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # not to be held while idle: it holds a grammar

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            self._num_idle += 1
            while not self._jobs and not self._closed:
                self._condition.wait()
            self._num_idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._num_alive -= 1
            ended = None if self._num_alive else self._on_ended
        if ended is not None:
            ended()
        return None


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Have ``callback(*args)`` called on the loop, from any thread."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the loop is closed: nobody is left to tell
        pass


def settle(waiter: asyncio.Future[Any], result: object) -> None:
    """Give a waiter its result, or its error; one that was cancelled needs none."""
    if waiter.done():
        return
    if isinstance(result, BaseException):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)
