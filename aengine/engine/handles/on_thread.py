"""`ThreadHandle`: an engine on an event loop of its own, in a thread; its users on any other loop, or on none.

    your loops and threads                                    the engine's thread
    start, aclose, drain, ...            ── Job ───────────>  LocalHandle
    stream, generate ─> CrossThreadStream ── CallQueue ────>  Admission.submit
                        CrossThreadStream <─────────────────  Mailbox

The thread is there from `start` to `aclose` or `terminate`. It holds the engine's core, not the `AsyncLLM`: one that is
dropped without being closed takes the thread along.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..streams.cross_thread_stream import CrossThreadStream
from ..streams.token_stream import Buffer, Mailbox
from ..structured.output_type import with_output_type
from ..threads.loop_thread import LoopEndedError, LoopThread
from .handle import CoreHandle, Submission
from .local import Owner
from .thread_life import ThreadLife

if TYPE_CHECKING:
    from ...config import EngineConfig
    from ..core import EngineCore

T = TypeVar("T")
S = TypeVar("S", bound=CrossThreadStream)


class ThreadHandle(ThreadLife, CoreHandle):
    """A proxy of a `LocalHandle` that runs on a thread of its own; each call may come from any loop in any thread.

    What differs from a `LocalHandle`: `submit` and `abort` return before the engine has seen them, so a request_id that
    is in use, or a queue that others fill at this moment, is an error of the stream.

    `wait` and the methods with ``_and_wait`` block the calling thread.
    """

    def __init__(self, owner: Owner, config: EngineConfig) -> None:
        super().__init__(owner, config)
        self._arriving: set[str] = set()  # ids of requests that are on their way to the engine's thread
        self._leaving: set[str] = set()  # ids of requests whose abort is on its way to the engine's thread
        self._ids = itertools.count(1)

    # -- the core

    def open_core(self) -> EngineCore:
        """Return the core for calls that any thread may make. Raises EngineClosedError if none runs."""
        return self.local.open_core()

    def running_core(self) -> EngineCore:
        """Return the core for calls that any thread may make. Raises EngineClosedError if none runs, and in a fork."""
        if self.thread is not None and not self.thread.has_ended:
            self.thread.check_process()
        return self.local.open_core()

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await ``function(core, *args)`` on the engine's loop. Raises what it does, and EngineClosedError."""
        thread = self._running()[1]
        try:
            return await thread.run(partial(self.local.run, function, *args))
        except LoopEndedError:
            raise self._ended_meanwhile() from None

    def wait(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run ``function(core, *args)`` as `run` does, blocking this thread."""
        thread = self._running()[1]
        try:
            return thread.wait(partial(self.local.run, function, *args))
        except LoopEndedError:
            raise self._ended_meanwhile() from None

    # -- requests

    def submit(
        self,
        asked: Submission,
        stream_class: type[S] = CrossThreadStream,  # type: ignore[assignment]
    ) -> S:
        """Register a request, and return a stream of this class."""
        core, thread = self._running()
        core.sleeping.check_takes_requests()
        options = asked.options
        params, shape = with_output_type(asked.params, asked.output_type, options.on_unsupported)
        part = core.admission.check(asked.prompt, params, options)
        core.admission.check_room(self._arriving, options.tenant)
        request_id = options.request_id or f"own-{next(self._ids)}"
        named = replace(options, request_id=request_id)
        stream = stream_class(thread, self.local.owner(), request_id)
        context = self.local.listeners.context()

        def submit(buffer: Buffer) -> Mailbox:
            if not core.is_alive:
                raise self._ended_meanwhile()
            core.sleeping.check_takes_requests()
            how = {"final_only": asked.final_only, "buffer": buffer, "context": context, **shape}
            return core.admission.submit(part, params, named, **how).mailbox

        def begin() -> None:
            """Begin the stream, on the engine's thread."""
            try:
                stream.begin(submit, core.admission.abort)
            finally:
                self._arriving.discard(request_id)

        try:
            self._arriving.add(request_id)
            self._leaving.discard(request_id)  # a pending abort of this id meant an earlier request
            thread.post(begin)
        except BaseException:  # a KeyboardInterrupt, for example
            self._arriving.discard(request_id)
            raise
        return stream

    def abort(self, request_id: str) -> bool:
        """See `AsyncLLM.abort`. Whether it was running when this was called; the engine ends it at its next turn."""
        core, thread = self._running()
        admission = core.admission
        if not isinstance(request_id, str) or request_id in self._leaving:
            return False
        if request_id not in self._arriving and not admission.has(request_id):
            return False

        def abort() -> None:
            admission.abort(request_id)
            self._leaving.discard(request_id)

        self._leaving.add(request_id)
        thread.post(abort)
        return True

    def abort_all(self) -> int:
        """See `AsyncLLM.abort_all`. How many there were when this was called; the engine ends them at its next turn."""
        core, thread = self._running()
        number = core.admission.count(self._arriving)
        thread.post(core.admission.abort_all)
        return number

    # -- internals

    def _running(self) -> tuple[EngineCore, LoopThread]:
        """Return the core, and the thread that it runs on."""
        core, thread = self.running_core(), self.thread
        if thread is None or thread.loop is not core.loop:
            raise self._ended_meanwhile()
        return core, thread
