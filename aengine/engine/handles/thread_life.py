"""`ThreadLife`: an engine's starts and ends on a thread that is there from the one to the other.

any loop        start, aclose                     ──Job──> LocalHandle, on the thread's loop
a plain thread  start_and_wait, close_and_wait    ──Job──>
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING

from ...errors import AEngineError, EngineClosedError
from ...outputs import ALIVE_STATES
from ...telemetry.listeners import Listeners
from ..threads.loop_ownership import running_loop
from ..threads.loop_thread import LoopEndedError, LoopThread
from .local import LocalHandle, Owner, StartAdvice

if TYPE_CHECKING:
    from ...config import EngineConfig
    from ..core import EngineCore

_ADVICE = StartAdvice(
    first="use `async with AsyncLLM(...) as engine`, `await engine.start()`, or the blocking `engine.sync.start()`",
    again="`await engine.start()` or `engine.sync.start()` starts it again",
)


class ThreadLife:
    """Starts, closes and drops an engine that has a thread of its own; from any loop in any thread, and from none."""

    def __init__(self, owner: Owner, config: EngineConfig) -> None:
        self.local = LocalHandle(owner, config, _ADVICE)  # used on the thread; calls that only read are made from any
        self.config = config
        self.thread: LoopThread | None = None
        self._is_changing = threading.Lock()  # held while ``thread`` is replaced
        self._starters: set[object] = set()  # one token for each call of `start` that has not returned
        self._has_caller = False  # a call of `start` has returned: the engine is in use

    def __repr__(self) -> str:
        return repr(self.local)

    @property
    def state(self) -> str:
        """See `AsyncLLM.state`."""
        return self.local.state

    @property
    def listeners(self) -> Listeners:
        return self.local.listeners

    @property
    def core(self) -> EngineCore | None:
        """The core that was started last."""
        return self.local.core

    # -- life

    async def start(self) -> None:
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
                return
            except LoopEndedError as ended:
                self._begin_again_after(ended)
            except asyncio.CancelledError:
                if self._starters == {me}:
                    await self._close_unless_started()
                raise
            finally:
                self._starters.discard(me)

    async def _close_unless_started(self) -> None:
        """Close an engine that came up while its last caller was cancelled."""
        if self.state == "running" and not self._has_caller:
            try:
                await self.aclose(0.0)
            except BaseException:
                self.terminate()
                raise

    def start_and_wait(self) -> None:
        """Start it for a thread that blocks meanwhile."""
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
            except AEngineError:
                _join_if_stopping(thread)  # a failed start must leave no thread behind
                raise

    def _thread_to_start_on(self, like: asyncio.AbstractEventLoop | None) -> LoopThread | None:
        """Return the thread that there is, or a new one; None while another caller makes one. There are never two at
        a time."""
        if not self._is_changing.acquire(blocking=False):
            return None
        try:
            if self.thread is None or self.thread.has_ended:
                self.thread = LoopThread("aengine", like, partial(_fail_left, self.local))
                self._has_caller = False
            self.thread.check_process()
            return self.thread
        finally:
            self._is_changing.release()

    def _begin_again_after(self, ended: LoopEndedError) -> None:
        """Return if the start should be tried on another thread. Raises EngineClosedError if the engine was closed
        during the start."""
        if ended.begun:
            raise EngineClosedError(f"{self!r} was closed while it started") from None

    async def aclose(self, drain: float) -> None:
        """See `AsyncLLM.aclose`. The thread has ended, too."""
        thread = self.thread
        if thread is None or thread.is_foreign:
            return
        try:
            await thread.run(partial(self._close_on, thread, drain))
        except LoopEndedError:  # another call has closed the loop
            pass
        if thread.is_stopping and asyncio.get_running_loop() is not thread.loop:
            await thread.ended()

    def close_and_wait(self, drain: float) -> None:
        """Close it for a thread that blocks meanwhile."""
        thread = self.thread
        if thread is None or thread.is_foreign:
            return
        try:
            thread.wait(partial(self._close_on, thread, drain))
        except LoopEndedError:
            pass
        _join_if_stopping(thread)

    def terminate(self) -> None:
        """See `AsyncLLM.terminate`. From any thread; the engine's ends by itself."""
        thread = self.thread
        if thread is not None and not thread.is_foreign:
            self.local.terminate()
            thread.stop()

    def drop(self, engine: object) -> None:
        """End what is still open when ``engine``, the owner, is garbage-collected, and warn about it."""
        thread = self.thread
        if thread is None or thread.is_stopping or thread.is_foreign:
            return
        is_open = self.state in ALIVE_STATES
        message = f"{self!r} was dropped without being closed" if is_open else ""
        # This may be the engine's own thread, within a step: it ends everything at its next turn.
        thread.stop()
        if message:
            warnings.warn(message, ResourceWarning, source=engine, stacklevel=3)

    # -- on the engine's thread

    async def _start_on(self, thread: LoopThread) -> None:
        try:
            await self.local.start()
        finally:
            self._stop_unless_used(thread)

    async def _close_on(self, thread: LoopThread, drain: float) -> None:
        try:
            await self.local.aclose(drain)
        finally:
            self._stop_unless_used(thread)

    def _stop_unless_used(self, thread: LoopThread) -> None:
        is_closing = self.core is not None and self.core.is_closing
        if self.state not in ("starting", *ALIVE_STATES) and not is_closing:
            thread.stop()

    def _ended_meanwhile(self) -> EngineClosedError:
        return _closed_meanwhile(self.local)


def _fail_left(local: LocalHandle) -> None:
    """Fail the requests that are left when the thread ends."""
    if local.core is not None:
        local.core.admission.fail_all(_closed_meanwhile(local))


def _closed_meanwhile(local: LocalHandle) -> EngineClosedError:
    return EngineClosedError(f"{local!r} was closed meanwhile")


def _join_if_stopping(thread: LoopThread) -> None:
    if thread.is_stopping:
        thread.join()
