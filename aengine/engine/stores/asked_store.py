"""`AskedStore`: a store as the engine's loop asks it, in threads, for a limited time.

A call that fails, or takes longer, costs its requests what they would cost without the store; then the store is left
alone for a while, with a line in the log. A call that hangs keeps its thread, and what its pages lie in, until it
returns: nothing is given to others that it may still write to.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ...errors import EngineError, RequestError
from ...ipc.thread_calls import outcome_of
from ..threads.pools import ThreadPool
from .store import KVStore

T = TypeVar("T")

logger = logging.getLogger("aengine")

NUM_THREADS = 8
"""Calls of a store that run at a time: each has its own part of a checksum's work and of a disk's waiting."""
_NEWEST = 0.3  # weight of the newest load among those that say how long a page takes
_PAUSE = 30.0  # seconds for which a store is left alone


class AskedStore:
    """One store of one replica. Its methods are for the loop's thread."""

    def __init__(self, name: str, store: KVStore) -> None:
        """``name``: as the log and the statistics call it."""
        self.name = name
        self.store = store
        self.num_saved = self.num_fetched = self.num_lost = 0  # pages, see `KeptPages`
        self.page_seconds = 0.0  # seconds that a page of late took to come, beside others; 0: none has come yet
        self._pool = ThreadPool("kv-store", NUM_THREADS)
        self._loop = asyncio.get_running_loop()
        self._again = 0.0  # time from which on it is asked
        self._lock = threading.Lock()
        self._num_users = 1  # calls under way, and this object until it is closed

    @property
    def is_asked(self) -> bool:
        return self._loop.time() >= self._again

    def note_loaded(self, num_pages: int, seconds: float) -> None:
        """Note that so many pages were loaded at a time, in so many seconds."""
        own = seconds / num_pages
        self.page_seconds += (own - self.page_seconds) * (_NEWEST if self.page_seconds else 1.0)

    def begin(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Begin a call of the store, in a thread."""
        try:
            future = self._pool.run(self._counted, call, *args)
        except (EngineError, RequestError) as error:  # no thread can be started
            future = self._loop.create_future()
            future.set_exception(error)
        future.add_done_callback(_note_error)
        return future

    async def answer(self, future: asyncio.Future[T], seconds: float) -> T | None:
        """Return what a call returns; None: it has failed, or takes longer."""
        await asyncio.wait({future}, timeout=seconds)
        if not future.done():
            self._leave_alone(f"it has not answered for {seconds:g} s")
        elif not future.cancelled():
            error = future.exception()
            if error is None:
                return future.result()
            self._leave_alone(f"{type(error).__name__}: {error!s:.200}")
        return None

    def _leave_alone(self, reason: str) -> None:
        if self.is_asked:
            self._again = self._loop.time() + _PAUSE
            text = "The KV tier %s is left alone for %g s, and what it may have is computed meanwhile: %s"
            logger.warning(text, self.name, _PAUSE, reason)

    def close(self) -> None:
        """Drop the calls that were not begun, and close the store when the others have returned."""
        self._pool.close()
        threading.Thread(target=self._leave, name="aengine-kv-store-end", daemon=True).start()

    def _counted(self, call: Callable[..., T], *args: Any) -> T:
        with self._lock:
            self._num_users += 1
        try:
            return call(*args)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            _, error = outcome_of(self.store.close)
            if error is not None:
                logger.warning("The KV tier %s could not be closed: %s", self.name, error)


def _note_error(future: asyncio.Future[Any]) -> None:
    """Read the error of a call for whose answer nobody waits any longer."""
    if not future.cancelled():
        future.exception()
