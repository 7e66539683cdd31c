"""`Lanes`: two pools of threads for work of one kind, so that long work holds up its like only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from .pools import ThreadPool

T = TypeVar("T")


class Lanes:
    """A lane for short work and one for long. As of `ThreadPool`, all methods but `close` are for the loop's thread."""

    def __init__(self, name: str, num_short_threads: int = 1) -> None:
        """Start no thread yet. The lane for long work has one, so that short work and the loop go on beside it."""
        self._short = ThreadPool(name, num_short_threads)
        self._long = ThreadPool(f"{name}-long")

    def run(self, function: Callable[..., T], *args: Any, is_long: bool) -> asyncio.Future[T]:
        """Begin ``function(*args)`` in a thread. Cancelling the future before its turn saves the work. Errors as of
        `ThreadPool.run`."""
        return (self._long if is_long else self._short).run(function, *args)

    def num_queued(self, *, is_long: bool) -> int:
        """Return how many calls of one lane no thread has begun."""
        return (self._long if is_long else self._short).num_queued

    def close(self) -> tuple[ThreadPool, ...]:
        """Begin no more work. Returns the pools, for `end_pools`. From any thread."""
        pools = self._short, self._long
        for pool in pools:
            pool.close()
        return pools
