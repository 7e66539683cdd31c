"""`LoopThread`: an event loop in a thread of its own, and the ways to have it do something.

    another loop      await thread.run(function)  --\
    a plain thread    thread.wait(function)       ---+--> CallQueue --> Job: a task on the thread's loop --> its outcome
    anybody           thread.post(function)       --/

The thread is a daemon, which a hook at the interpreter's exit ends in order. The event loop policy is not asked, and
the caller's context variables are not inherited. In a fork of the process, which has no such thread, calls raise
EngineClosedError instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ...errors import EngineError
from .call_queue import CallQueue, call_queue_of
from .futures import settle
from .loop_ownership import foreign_process, running_loop

T = TypeVar("T")
_EXIT_SECONDS = 5.0  # seconds that the interpreter's exit waits for the thread


class LoopEndedError(Exception):
    """The thread ended before the work was done. ``begun``: whether it had been begun."""

    def __init__(self, *, begun: bool) -> None:
        super().__init__("the engine's thread has ended")
        self.begun = begun


class LoopThread:
    """Runs from its making until `stop`, once.

    ``like``: a loop of the same kind (asyncio's, uvloop's) and debug mode; ``at_end`` is called on the thread when
    nothing runs on its loop any more, and held until then.

    Raises EngineError when there is no thread or descriptor left.
    """

    def __init__(
        self, name: str, like: asyncio.AbstractEventLoop | None = None, at_end: Callable[[], object] | None = None
    ) -> None:
        self.is_stopping = False
        self._at_end = at_end
        self.has_ended = False
        self._on_ended: deque[Callable[[], None]] = deque()
        self._deferred: list[Callable[[], object]] = []
        self._pid = os.getpid()
        body = partial(contextvars.Context().run, self._body)  # some Pythons would pass on the caller's context
        self._thread = threading.Thread(target=body, name=name, daemon=True)
        try:
            self.loop = _new_loop(like)
        except OSError as error:
            raise EngineError(f"no event loop could be made for the engine's thread: {error}") from error
        self._until_stopped = self.loop.create_future()
        self._calls = CallQueue(self.loop)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._end()
            raise EngineError(f"the engine's thread could not be started: {error}") from error
        atexit.register(self._at_exit)
        if self.has_ended:
            atexit.unregister(self._at_exit)

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that has the thread."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise EngineClosedError in a fork of the process that started the thread."""
        if self.is_foreign:
            raise foreign_process(self._pid)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call it on the loop, soon; see `CallQueue.post`. Raises EngineClosedError in a fork."""
        self.check_process()
        self._calls.post(function, *args)

    def defer(self, function: Callable[[], object]) -> None:
        """Call it after the loop's current callback; it may not raise. On the loop's thread only."""
        self._deferred.append(function)
        if len(self._deferred) > 1:
            return
        try:
            self.loop.call_soon(self._run_deferred)
        except RuntimeError:  # the loop is closed
            self._run_deferred()

    def _run_deferred(self) -> None:
        due, self._deferred = self._deferred, []
        for function in due:
            function()

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await ``function()`` on the thread's loop. To cancel it is to cancel that, and to wait for its end.

        Raises what it raises; LoopEndedError; EngineClosedError in a fork; InvalidRequestError without a loop.
        """
        loop = running_loop()
        if loop is self.loop:
            return await function()
        ended = loop.create_future()
        job = Job(self, function, partial(call_queue_of(loop).post, settle, ended))
        self.post(job.begin)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            self.post(job.cancel)
            await asyncio.wait([ended])
            raise
        return job.result()

    def wait(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run ``function()`` as `run` does, blocking a thread without a loop. An exception, as Ctrl-C's, cancels it."""
        self.check_process()
        # A SimpleQueue is in C: an exception within threading.Event's Python could leave its lock taken for ever.
        ended: SimpleQueue[None] = SimpleQueue()
        job = Job(self, function, partial(ended.put, None))
        try:
            self.post(job.begin)
            ended.get()
        except BaseException:
            self.post(job.cancel)
            if not job.has_ended:  # an ended job's one item in ``ended`` may be taken already
                ended.get()
            raise
        return job.result()

    def stop(self) -> None:
        """Cancel what runs on the loop, and end the thread. From any thread, also from a finaliser; returns at once."""
        if not self.is_foreign:
            self.is_stopping = True
            self._calls.post(settle, self._until_stopped)

    async def ended(self) -> None:
        """Wait until the thread has ended."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._when_ended(partial(call_queue_of(loop).post, settle, waiter))
        await waiter
        while self._thread.is_alive():  # noqa: ASYNC110  # no event can follow its last line
            await asyncio.sleep(0.001)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end as `ended` does, in a thread without a loop."""
        if not self.is_foreign:
            self._thread.join(timeout)

    # -- the thread's own

    def _body(self) -> None:
        try:
            self.loop.run_until_complete(self._until_stopped)
        finally:
            self.is_stopping = True
            try:
                self._shut_down()
            finally:
                self._end()

    def _shut_down(self) -> None:
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    def _end(self) -> None:
        self.is_stopping = True
        at_end, self._at_end = self._at_end, None
        if at_end is not None:
            at_end()
        self.loop.close()
        self._calls.deliver()  # calls that came too late for the loop; later callers find it closed
        self._run_deferred()
        atexit.unregister(self._at_exit)
        self.has_ended = True
        self._tell_ended()

    def _when_ended(self, tell: Callable[[], None]) -> None:
        self._on_ended.append(tell)
        if self.has_ended:
            self._tell_ended()

    def _tell_ended(self) -> None:
        while self._on_ended:
            try:
                tell = self._on_ended.popleft()
            except IndexError:  # the thread itself has reported it
                return
            tell()

    def _at_exit(self) -> None:
        """End the thread in order, before the interpreter's end stops it at whatever place it is."""
        self.stop()
        self.join(_EXIT_SECONDS)


class Job(Generic[T]):
    """One coroutine on the thread's loop. ``tell`` is called when it has ended, once, from whatever thread."""

    def __init__(self, thread: LoopThread, function: Callable[[], Awaitable[T]], tell: Callable[[], None]) -> None:
        self._thread = thread
        self._function: Callable[[], Awaitable[T]] | None = function
        self._tell: Callable[[], None] | None = tell
        self._task: asyncio.Task[T] | None = None
        self._has_begun = False
        self._value: T
        self._error: BaseException | None = None

    def begin(self) -> None:
        if self._tell is None:  # it was cancelled before
            return
        if self._thread.is_stopping:
            self._settle(LoopEndedError(begun=False))
            return
        self._task = self._thread.loop.create_task(self._body(), name="aengine-job")
        self._task.add_done_callback(self._done)

    @property
    def has_ended(self) -> bool:
        return self._tell is None

    async def _body(self) -> T:
        self._has_begun = True
        assert self._function is not None
        return await self._function()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._settle(LoopEndedError(begun=False))

    def _done(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._settle(LoopEndedError(begun=self._has_begun))
        elif (error := task.exception()) is not None:
            self._settle(error)
        else:
            self._value = task.result()
            self._settle(None)

    def _settle(self, error: BaseException | None) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            self._error = error
            self._function = self._task = None
            tell()

    def result(self) -> T:
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error  # the error's traceback refers to this frame, and the frame to the error


def _new_loop(like: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    uvloop = sys.modules.get("uvloop")  # looked up and not imported: it is there if a loop of its kind runs
    if uvloop is not None and isinstance(like, uvloop.Loop):
        loop: asyncio.AbstractEventLoop = uvloop.Loop()
    else:
        loop = asyncio.SelectorEventLoop()
    if like is not None:
        loop.set_debug(like.get_debug())
    return loop
