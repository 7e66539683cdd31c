"""Blocking work off the host's loop, without leaving threads behind."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, TypeVar

from ...errors import EngineClosedError, EngineOverloadedError
from ...ipc.thread_calls import no_thread, outcome_of, run_in_thread, settle, tell
from .turns import Turns

T = TypeVar("T")
Job = tuple[float, Callable[[bool], None]]
"""Work for a thread, which tells it whether the pool was closed before it had its turn; with its turn (`Turns`)."""
_END_SECONDS = 1.0  # seconds for which closing waits for work that has begun


class ThreadPool:
    """A few threads for the work of one kind, begun in its order, or, where it is done for several accounts, by
    `Turns`; started when needed, ended by `close`.

    They are daemons, other than those of ``concurrent.futures``, which refuse work once the main thread has ended,
    though other threads of the host may still use the engine. All methods but `close` are for the loop's thread.

    There are no locks, because finalisers close pools. An order of steps replaces them: a job is queued before its
    ticket, and a thread counts as idle until it has taken a ticket, so a job never waits while a thread could be
    started.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = f"aengine-{name}"
        self._num_threads = num_threads
        self._work = _Work()
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, self._work.close, num_threads)
        self._end.atexit = False

    @property
    def num_queued(self) -> int:
        """Number of jobs that no thread has begun."""
        return len(self._work.jobs)

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Begin ``function(*args)`` in a thread. A future that is cancelled before its turn takes the work back.

        Raises EngineOverloadedError when there is no thread and none can be started, EngineClosedError when closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = self._put(partial(_do, loop, future, partial(function, *args)))
        future.add_done_callback(partial(_take_back, self._work.jobs, job))
        if self._work.is_closed:  # another thread has closed it, and no thread may be left to take the job
            future.cancel()
        return future

    def submit(self, job: Callable[[], object]) -> Job:
        """Begin ``job()``, which may not raise, in a thread; it is dropped when the pool is closed before. Errors as of
        `run`."""
        return self._put(partial(_unless_closed, job))

    def discard(self, job: Job) -> bool:
        """Take back a job that no thread has begun. Returns whether it could."""
        return _removed(self._work.jobs, job)

    def begin(self) -> None:
        """Start the first thread now; then `run` never lacks one. Raises EngineOverloadedError."""
        if not self._threads:
            self._add_thread()

    def _put(self, call: Callable[[bool], None]) -> Job:
        work = self._work
        if work.is_closed:
            raise EngineClosedError(f"the engine is closed, and {self._name} with it")
        job = work.turns.next(is_idle=not work.jobs), call
        _insert(work.jobs, job)
        if len(work.jobs) > len(work.idle) and len(self._threads) < self._num_threads:
            try:
                self._add_thread()
            except EngineOverloadedError:
                self.discard(job)
                raise
        work.tickets.put(None)
        return job

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work.do, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:  # with other threads in the pool, these do the work
                raise EngineOverloadedError(no_thread(error), retry_after=1.0) from error
        else:
            self._threads.append(thread)

    def close(self) -> None:
        """Drop or cancel the jobs that were not begun, without waiting for those that were."""
        self._end()

    async def aclose(self) -> None:
        """Close, and wait for the threads, a second at most: see `end_pools`."""
        await end_pools(self)


async def end_pools(*pools: ThreadPool) -> None:
    """Close pools, and wait for what their threads do, a second at most. A thread that takes longer, as for a chat
    template without an end, is left to end by itself; as a daemon it keeps no process alive."""
    for pool in pools:
        pool.close()
    deadline = time.monotonic() + _END_SECONDS
    threads = [thread for pool in pools for thread in pool._threads if thread.is_alive()]

    def join() -> None:
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    if threads:
        await run_in_thread("pool-end", join)


class _Work:
    """State that the threads of a pool share with it. They don't hold the pool, which is closed when it is dropped."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.turns = Turns()
        self.tickets: SimpleQueue[None] = SimpleQueue()  # one for each job, even if discarded; at the end one a thread
        self.idle: deque[None] = deque()  # an entry for each thread that waits for a ticket
        self.is_closed = False

    def do(self) -> None:
        """Run jobs until the pool is closed: the body of each thread."""
        while True:
            self.idle.append(None)
            self.tickets.get()
            self.idle.pop()
            try:
                job = self.jobs.popleft()
            except IndexError:
                if self.is_closed:
                    return
                continue  # the job of this ticket was discarded
            self.turns.now, call = job
            call(self.is_closed)
            del job, call  # an idle thread must not keep the last job alive

    def close(self, num_threads: int) -> None:
        self.is_closed = True
        for _ in range(num_threads):
            self.tickets.put(None)


def _insert(jobs: deque[Job], job: Job) -> None:
    """Put a job behind those whose turn is before its own. A thread may take some meanwhile: then it is a place or two
    off."""
    try:
        is_last = jobs[-1][0] <= job[0]
        place = 0 if is_last else bisect_right(jobs, job[0], key=itemgetter(0))
    except IndexError:  # they were all taken
        is_last = True
    if is_last:
        jobs.append(job)
    else:
        jobs.insert(place, job)


def _removed(jobs: deque[Job], job: Job) -> bool:
    try:
        jobs.remove(job)
    except ValueError:
        return False
    return True


def _take_back(jobs: deque[Job], job: Job, future: asyncio.Future[Any]) -> None:
    """Drop the job of a future that was cancelled, and what it holds, unless a thread has begun it."""
    if future.cancelled():
        _removed(jobs, job)


def _unless_closed(job: Callable[[], object], is_closed: bool) -> None:
    if not is_closed:
        job()


def _do(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], call: Callable[[], T], is_closed: bool) -> None:
    if is_closed:
        tell(loop, future.cancel)
    elif not future.cancelled():
        tell(loop, settle, future, *outcome_of(call))
