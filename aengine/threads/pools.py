"""Blocking work off the host's loop, without leaving threads behind."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ..errors import EngineClosedError, EngineError, EngineOverloadedError

__all__ = ["Lane", "run_in_thread"]

T = TypeVar("T")


async def run_in_thread(name: str, function: Callable[..., T], *args: Any) -> T:
    """Run ``function(*args)`` in a thread of its own that ends with it.

    Unlike ``asyncio.to_thread`` it makes no pool on the host's loop that would outlive the engine. When the caller is
    cancelled the thread, a daemon, runs on and its result is dropped. Raises EngineError when none can be started.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def body() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop was closed meanwhile: nobody is left to tell
            pass

    try:
        threading.Thread(target=body, name=f"aengine-{name}", daemon=True).start()
    except RuntimeError as error:
        raise EngineError(_no_thread(error)) from error
    return await result


def _no_thread(error: RuntimeError) -> str:
    return (
        f"no thread can be started ({error}): this process, user or container has as many as it may have; raise "
        f"`ulimit -u` or the container's pids limit"
    )


class Lane:
    """A few threads for the work of one kind, in its order; started when needed, ended by `close`.

    They are daemons, other than those of ``concurrent.futures``, which refuse work once the main thread has ended,
    though other threads of the host may still use the engine. `run` is for the loop's thread, the rest for any.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = f"aengine-{name}"
        self._num_threads = num_threads
        self._jobs: SimpleQueue[Callable[[bool], None] | None] = SimpleQueue()
        self._closed: list[bool] = []  # not empty: it is closed; a plain thing, as finalisers close, too
        self._threads: list[threading.Thread] = []
        self._num_pending = 0
        self._end = weakref.finalize(self, _end, self._jobs, self._closed, num_threads)
        self._end.atexit = False

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Begin ``function(*args)`` in a thread. A future that is cancelled before saves it the work.

        Raises EngineOverloadedError when there is no thread and none can be started, EngineClosedError when closed.
        """
        if self._closed:
            raise EngineClosedError(f"the engine is closed, and {self._name} with it")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._num_pending >= len(self._threads) < self._num_threads:
            self._add_thread()
        self._num_pending += 1
        future.add_done_callback(self._note_done)
        self._jobs.put(partial(_do, loop, future, partial(function, *args)))
        if self._closed:  # from another thread, meanwhile: nobody may be there to take it
            future.cancel()
        return future

    def begin(self) -> None:
        """Start the first thread now; then `run` never lacks one. Raises EngineOverloadedError."""
        if not self._threads:
            self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=_work, args=(self._jobs, self._closed), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:  # else those that there are do the work
                raise EngineOverloadedError(_no_thread(error), retry_after=1.0) from error
        else:
            self._threads.append(thread)

    def close(self) -> None:
        """What was not begun is cancelled. Nothing is awaited."""
        self._end()

    async def aclose(self) -> None:
        """The same, and wait for the threads."""
        self.close()
        for thread in self._threads:
            await run_in_thread("lane-end", thread.join)

    def _note_done(self, future: asyncio.Future[Any]) -> None:
        self._num_pending -= 1


def _work(jobs: SimpleQueue[Callable[[bool], None] | None], closed: list[bool]) -> None:
    while (job := jobs.get()) is not None:
        job(bool(closed))
        del job  # not to be held while idle


def _end(jobs: SimpleQueue[Callable[[bool], None] | None], closed: list[bool], num_threads: int) -> None:
    closed.append(True)
    for _ in range(num_threads):
        jobs.put(None)


def _do(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], call: Callable[[], T], is_closed: bool) -> None:
    value, error = None, None
    if not is_closed and not future.cancelled():
        try:
            value = call()
        except BaseException as caught:
            error = caught
    try:
        loop.call_soon_threadsafe(_settle, future, value, error, is_closed)
    except RuntimeError:  # the loop was closed meanwhile: nobody is left to tell
        pass


def _settle(future: asyncio.Future[Any], value: object, error: BaseException | None, is_closed: bool) -> None:
    if future.done():
        return
    if is_closed:
        future.cancel()
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
