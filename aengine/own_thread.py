"""`AsyncLLM(model, own_thread=True)`: the engine on an event loop of its own, in a thread; its users on any other.

    your loops and threads                              the engine's thread
    start, aclose, stream_chat, ...    ── Job ────────> AsyncLLM's own methods, as without this
    stream, generate ─> RemoteStream   ── Courier ────> Admission.submit
                        RemoteStream   <─────────────── Mailbox

The thread is there from `start` to `aclose` or `terminate`. It holds the engine's core, not the `AsyncLLM`: one that is
dropped without being closed takes the thread along.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakMethod

from .async_llm import AsyncLLM
from .engine.core import EngineCore
from .errors import EngineClosedError
from .params import SamplingParams
from .streams.cross_thread_stream import RemoteStream
from .structured.asked_type import with_output_type
from .threads.loop_ownership import running_loop
from .threads.loop_thread import LoopEndedError, LoopThread

if TYPE_CHECKING:
    from typing import Self

    from .config import EngineConfig, StartupProgress
    from .engine.executor import Executor
    from .engine.user_request import Call
    from .streams.chat_stream import ChatStream
    from .tokenizer.prompt import Prompt

__all__ = ["OwnThreadLLM", "give_own_thread"]

T = TypeVar("T")


class OwnThreadLLM(AsyncLLM):
    """What an `AsyncLLM` is with ``own_thread=True``: its methods mean the same, from any loop in any thread.

    What differs: `stream` and `abort` return before the engine has seen them, so a request_id that is in use, or a
    queue that others fill at this moment, is an error of the stream; ``config.progress`` is called in the engine's
    thread.

    `wait_for` and the methods with ``_and_wait`` are for threads without a loop, which they block.
    """

    stream_class: type[RemoteStream] = RemoteStream
    _thread: LoopThread | None
    _is_changing: threading.Lock  # of _thread
    _starters: set[object]  # calls of `start` that have not returned
    _has_caller: bool  # one has, and the engine runs for it
    _arriving: set[str]  # ids of requests that the engine has not seen yet
    _leaving: set[str]  # and of those that it is being told to abort
    _ids: itertools.count[int]

    # -- life

    async def start(self) -> Self:
        """See `AsyncLLM.start`. The thread's loop is of the kind of the caller's: asyncio's or uvloop's."""
        loop = running_loop()
        while True:
            thread = self._thread_to_start_on(loop)
            if thread is None:
                await asyncio.sleep(0.001)
                continue
            if thread.is_stopping:
                await thread.ended()
                continue
            me = object()
            self._starters.add(me)
            try:
                await thread.run(partial(self._start_on, thread))
                self._has_caller = True
                return self
            except LoopEndedError as ended:
                self._begin_again_after(ended)
            except asyncio.CancelledError:
                if self._starters == {me}:
                    await self._close_unless_started()
                raise
            finally:
                self._starters.discard(me)

    async def _close_unless_started(self) -> None:
        """It may have come up while its last caller was cancelled: nobody will close it."""
        if self.state == "running" and not self._has_caller:
            try:
                await self.aclose()
            except BaseException:
                self.terminate()
                raise

    def start_and_wait(self) -> None:
        while True:
            thread = self._thread_to_start_on(None)
            if thread is None:
                time.sleep(0.001)
                continue
            if thread.is_stopping:
                thread.join()
                continue
            try:
                thread.wait(partial(self._start_on, thread))
                self._has_caller = True
                return
            except LoopEndedError as ended:
                self._begin_again_after(ended)

    def _thread_to_start_on(self, like: asyncio.AbstractEventLoop | None) -> LoopThread | None:
        """The one that there is, or a new one; None while somebody else makes one. Never two: a life of the engine is
        over before the next begins."""
        if not self._is_changing.acquire(blocking=False):
            return None
        try:
            if self._thread is None or self._thread.has_ended:
                self._thread = LoopThread("aengine", like)
                self._has_caller = False
            self._thread.check_process()
            return self._thread
        finally:
            self._is_changing.release()

    def _begin_again_after(self, ended: LoopEndedError) -> None:
        """On another thread, if this one was about to end. Raises EngineClosedError if it was ended meanwhile."""
        if ended.begun:
            raise EngineClosedError(f"{self!r} was closed while it started") from None

    async def drain(self, timeout: float | None = None) -> bool:
        """See `AsyncLLM.drain`."""
        return await self._run(partial(super().drain, timeout))

    async def resume(self) -> None:
        """See `AsyncLLM.resume`."""
        await self._run(super().resume)

    async def aclose(self, *, drain: float = 0.0) -> None:
        """See `AsyncLLM.aclose`. The thread has ended, too."""
        thread = self._thread
        if thread is None or thread.is_foreign:
            return
        try:
            await thread.run(partial(self._close_on, thread, drain))
        except LoopEndedError:  # by somebody else
            pass
        if thread.is_stopping and asyncio.get_running_loop() is not thread.loop:
            await thread.ended()

    def close_and_wait(self, *, drain: float = 0.0) -> None:
        thread = self._thread
        if thread is None or thread.is_foreign:
            return
        try:
            thread.wait(partial(self._close_on, thread, drain))
        except LoopEndedError:
            pass
        if thread.is_stopping:
            thread.join()

    def terminate(self) -> None:
        """See `AsyncLLM.terminate`. From any thread; the engine's ends by itself."""
        thread = self._thread
        if thread is not None and not thread.is_foreign:
            super().terminate()
            thread.stop()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is None or thread.is_stopping or thread.is_foreign:
            return
        is_open = self.state in ("running", "draining")
        message = f"{self!r} was dropped without being closed" if is_open else ""
        # This may be the engine's own thread, in the midst of a step: it puts an end to everything when it gets to it.
        thread.stop()
        if message:
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    # -- requests

    async def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> ChatStream:
        """See `AsyncLLM.stream_chat`."""
        return await self._run(partial(super().stream_chat, messages, params, **options))

    def abort(self, request_id: str) -> bool:
        """See `AsyncLLM.abort`. Whether it was running when this was called; the engine ends it at its next turn."""
        core, thread = self._running()
        admission = core.admission
        if request_id in self._leaving or not (request_id in self._arriving or admission.has(request_id)):
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

    async def check_health(self, timeout: float = 10.0) -> float:
        """See `AsyncLLM.check_health`."""
        return await self._run(partial(super().check_health, timeout))

    async def start_profile(self, folder: str | os.PathLike[str] | None = None) -> str:
        """See `AsyncLLM.start_profile`."""
        return await self._run(partial(super().start_profile, folder))

    async def stop_profile(self) -> str:
        """See `AsyncLLM.stop_profile`."""
        return await self._run(super().stop_profile)

    def wait_for(self, function: Callable[[], Awaitable[T]]) -> T:
        """What ``function()``, awaited on the engine's loop, gives or raises; for a thread without a loop."""
        _, thread = self._running()
        try:
            return thread.wait(function)
        except LoopEndedError:
            raise self._ended_meanwhile() from None

    # -- internals

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, *, final_only: bool, **options: Any
    ) -> RemoteStream:
        core, thread = self._running()
        core.check_accepts()
        params, shape = with_output_type(params, options)
        prompt = core.admission.check(prompt, params, **options)
        core.admission.check_room(len(self._arriving))
        request_id = options["request_id"] = options["request_id"] or f"own-{next(self._ids)}"
        stream = self.stream_class(thread, self, request_id)

        def submit() -> None:
            """On the engine's thread; what it raises is the stream's."""
            try:
                if not core.is_alive:
                    raise self._ended_meanwhile()
                core.check_accepts()
                call = core.admission.submit(prompt, params, final_only=final_only, **shape, **options)
                stream.accept(call.mailbox, core.admission.abort)
            except Exception as error:
                stream.refuse(error)
            finally:
                self._arriving.discard(request_id)

        try:
            self._arriving.add(request_id)
            self._leaving.discard(request_id)  # that was another of this name
            thread.post(submit)
        except BaseException:  # a Ctrl-C
            self._arriving.discard(request_id)
            raise
        return stream

    def _stream_of(self, core: EngineCore, call: Call) -> RemoteStream:
        stream = self.stream_class(self._running()[1], self, call.request_id)
        stream.accept(call.mailbox, core.admission.abort)
        return stream

    def _running_core(self) -> EngineCore:
        """For what may be asked from any thread."""
        if self._thread is not None and not self._thread.has_ended:
            self._thread.check_process()
        return self._open_core()

    def _running(self) -> tuple[EngineCore, LoopThread]:
        """The core, and the thread that it runs on."""
        core, thread = self._running_core(), self._thread
        if thread is None or thread.loop is not core.loop:
            raise self._ended_meanwhile()
        return core, thread

    def _ended_meanwhile(self) -> EngineClosedError:
        return EngineClosedError(f"{self!r} was closed meanwhile")

    async def _run(self, function: Callable[[], Awaitable[T]]) -> T:
        _, thread = self._running()
        try:
            return await thread.run(function)
        except LoopEndedError:
            raise self._ended_meanwhile() from None

    # -- on the engine's thread

    async def _start_on(self, thread: LoopThread) -> None:
        try:
            await super().start()
            if self._core is not None:
                # Whoever still waits then is told, and until then the core is held.
                thread.at_end = partial(self._core.admission.fail_all, self._ended_meanwhile())
        finally:
            self._stop_unless_used(thread)

    async def _close_on(self, thread: LoopThread, drain: float) -> None:
        try:
            await super().aclose(drain=drain)
        finally:
            self._stop_unless_used(thread)

    def _stop_unless_used(self, thread: LoopThread) -> None:
        is_closing = self._core is not None and self._core.is_closing
        if self.state not in ("starting", "running", "draining") and not is_closing:
            thread.stop()

    async def _begin(self) -> None:
        report, make_executor = WeakMethod(self._report), WeakMethod(self._make_executor)

        def report_if_there(progress: StartupProgress) -> None:
            if (method := report()) is not None:
                method(progress)

        def make_if_there(config: EngineConfig) -> Executor:
            if (method := make_executor()) is None:
                raise EngineClosedError("the engine was dropped")
            return method(config)

        # The core is held by the thread, and may not hold what is to end both when it is dropped.
        self._core = await self._core_class().start(self.config, report_if_there, make_if_there)


def give_own_thread(engine: AsyncLLM) -> None:
    """Make a new engine, of whatever subclass, one with a thread of its own."""
    engine.__class__ = _with_own_thread(type(engine))
    assert isinstance(engine, OwnThreadLLM)
    engine._thread = None
    engine._is_changing = threading.Lock()
    engine._starters, engine._has_caller = set(), False
    engine._arriving, engine._leaving = set(), set()
    engine._ids = itertools.count(1)


def _with_own_thread(kind: type[AsyncLLM]) -> type[OwnThreadLLM]:
    if issubclass(kind, OwnThreadLLM):
        return kind
    if kind is AsyncLLM:
        return OwnThreadLLM
    return type(kind.__name__, (OwnThreadLLM, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
