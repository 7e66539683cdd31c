"""`LocalHandle`: an engine on the event loop that starts it, from one start to the next close, again and again.

AsyncLLM --> LocalHandle --> EngineCore (one life of the engine)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ...errors import EngineClosedError, EngineError
from ...limits.ulimits import is_out_of_memory, limit_hint, memory_ulimit_hint
from ...telemetry.listeners import Listeners
from ..threads.loop_ownership import foreign_process, loop_here, other_loop, running_loop
from .handle import CoreHandle, Submission

if TYPE_CHECKING:
    from ...config import EngineConfig
    from ...outputs import StartupProgress
    from ..core import EngineCore
    from ..executor import Executor
    from ..streams.token_stream import TokenStream
    from .start import EngineStart

logger = logging.getLogger("aengine")

T = TypeVar("T")


class Owner(Protocol):
    """Interface of the user's object that has a handle: the seams for tests and for executors of other kinds."""

    def _start_class(self) -> type[EngineStart]:
        """Import the class of its starts. Called by each start, in a thread."""
        ...

    def _make_executor(self, config: EngineConfig) -> Executor: ...


class StartAdvice(NamedTuple):
    """The user's object in error messages: its name, and how to start it."""

    name: str = "AsyncLLM"
    first: str = "use `async with AsyncLLM(...) as engine`, or `await engine.start()`"
    again: str = "`await engine.start()` starts it again"


class LocalHandle(CoreHandle):
    """Starts and closes the cores of one engine, and submits requests to the one that runs."""

    def __init__(self, owner: Owner, config: EngineConfig, advice: StartAdvice | None = None) -> None:
        """``owner`` is not held: an engine whose owner is dropped is to end."""
        self.config = config
        self.core: EngineCore | None = None
        self.listeners = Listeners()
        self.advice = advice or StartAdvice()
        self._owner = weakref.ref(owner)
        self._starting: asyncio.Task[None] | None = None
        self._num_starters = 0  # callers that wait for the start
        self._has_starter = False  # a call of `start` has returned: the engine is in use
        self._pid: int | None = None  # pid of the process that has started the engine

    def __repr__(self) -> str:
        return f"<{self.advice.name} {self.config.model} {self.state}>"

    @property
    def state(self) -> str:
        """See `AsyncLLM.state`."""
        if self.is_foreign:
            return "closed"
        if self.is_starting:
            return "starting"
        return "new" if self.core is None else self.core.state

    @property
    def is_starting(self) -> bool:
        return self._starting is not None and not self._starting.done()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that runs the engine: then nothing of it may be touched here."""
        if self._pid is None or self._pid == os.getpid():
            return False
        return self.is_starting or (self.core is not None and self.core.is_alive)

    # -- life

    async def start(self) -> None:
        """See `AsyncLLM.start`."""
        loop = running_loop()
        if self.is_foreign:
            raise foreign_process(self._pid or 0)
        self._pid = os.getpid()
        core = self.core
        if core is not None and not core.loop.is_closed():
            if core.is_closing:
                raise EngineClosedError(f"{self!r} is being closed: it can be started again once aclose() has returned")
            if core.is_alive:
                if core.loop is not loop:
                    raise other_loop(self, is_closed=False)
                core.check_accepts()
                self._has_starter = True
                return
        if core is not None:
            core.abandon()  # the core has failed or its loop was closed: free what it still holds
            self.core = None
        if self._starting is None or self._starting.done() or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self._begin(), name="aengine-start")
            self._num_starters, self._has_starter = 0, False
        await self._wait_started(self._starting)

    async def _begin(self) -> None:
        from ..threads.pools import run_in_thread

        start_class = await run_in_thread("import", self.owner()._start_class)  # takes long enough to block the loop
        owner, config = self._owner, self.config

        def make_executor(config: EngineConfig) -> Executor:
            """Make the core's executor. It holds the owner weakly: the core ends when that is dropped."""
            return _owner_of(owner)._make_executor(config)

        on_progress = config.progress

        def report(progress: StartupProgress) -> None:
            nonlocal on_progress
            logger.debug("%s: %s", config.model, progress)
            if on_progress is not None:
                try:
                    on_progress(progress)
                except Exception:
                    on_progress = None
                    logger.exception("the setting progress, a function of yours, failed; it is not called again")

        try:
            self.core = await start_class(config, report, make_executor).run(self.listeners)
        except (OSError, RuntimeError, MemoryError) as error:  # a limit of the shell (ulimit) is reached
            hint = limit_hint(str(error)) or (memory_ulimit_hint() if is_out_of_memory(error) else "")
            if not hint:
                raise
            raise EngineError(f"the engine can't be started: {str(error) or repr(error)}{hint}") from error

    def owner(self) -> Owner:
        """Return the user's object. Raises EngineClosedError if it was dropped."""
        return _owner_of(self._owner)

    async def _wait_started(self, starting: asyncio.Task[None]) -> None:
        """Wait for a start that several callers may share. It is cancelled when the last of them is."""
        self._num_starters += 1
        try:
            await asyncio.shield(starting)
            self._has_starter = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if starting.cancelled() and not (task is not None and task.cancelling()):
                raise EngineClosedError(f"{self!r} was closed while it started") from None
            if self._num_starters == 1:
                await _cancel(starting)
                await self._undo_start()
            raise
        finally:
            self._num_starters -= 1

    async def _undo_start(self) -> None:
        """Close an engine that came up in the turn of the loop in which its last caller was cancelled."""
        core = self.core
        if core is None or core.state != "running" or self._has_starter:
            return
        self.core = None
        try:
            await core.aclose(drain=0.0)
        finally:
            core.abandon()  # this frees everything, also when `aclose` above was cancelled

    async def aclose(self, drain: float) -> None:
        """See `AsyncLLM.aclose`."""
        if self.is_foreign:
            return
        starting = self._starting if self.is_starting else None
        loop = starting.get_loop() if starting is not None else self.core.loop if self.core is not None else None
        if loop is not None and loop is not asyncio.get_running_loop():
            is_over = starting is None and self.core is not None and not (self.core.is_alive or self.core.is_closing)
            if loop.is_closed() or is_over:
                self.terminate()  # free what a core without a running loop still holds
                return
            raise other_loop(self, is_closed=False)
        if starting is not None:
            await _cancel(starting)
        if self.core is not None:
            await self.core.aclose(drain=drain)

    def terminate(self) -> None:
        """See `AsyncLLM.terminate`."""
        if self.is_foreign:
            return
        starting = self._starting
        if starting is not None and not starting.done():

            def end() -> None:
                starting.cancel()
                if self.core is not None:  # the start has succeeded just before it was cancelled
                    self.core.abandon()

            with contextlib.suppress(RuntimeError):  # the loop was closed
                starting.get_loop().call_soon_threadsafe(end)
        if self.core is not None:
            self.core.abandon()

    def drop(self, engine: object) -> None:
        """End what is still open when ``engine``, the owner, is garbage-collected, and warn about it."""
        if self.core is not None and self.core.is_alive and not self.is_foreign:
            warnings.warn(f"{self!r} was dropped without aclose()", ResourceWarning, source=engine, stacklevel=3)
            self.core.abandon()

    # -- the core

    def open_core(self) -> EngineCore:
        """Return the core for calls that any loop may make. Raises EngineClosedError if none runs."""
        core = self.core
        if self.is_foreign:
            raise foreign_process(self._pid or 0)
        if core is None and self.is_starting:
            raise EngineClosedError(f"{self!r} has not started yet: that takes until start() has returned")
        if core is None:
            raise EngineClosedError(f"{self!r} was not started: {self.advice.first}")
        if not core.is_alive:
            if core.failure is not None:
                raise EngineClosedError(f"{self!r} failed: {core.failure}") from core.failure
            raise EngineClosedError(f"{self!r} is closed: {self.advice.again}")
        return core

    def running_core(self) -> EngineCore:
        """Return the core for calls that only its own loop may make. Raises EngineClosedError elsewhere."""
        core = self.open_core()
        if loop_here() is not core.loop:
            if core.loop.is_closed():
                core.abandon()
            raise other_loop(self, is_closed=core.loop.is_closed())
        return core

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await ``function(core, *args)`` on the engine's loop, which is the caller's."""
        return await function(self.running_core(), *args)

    # -- requests

    def submit(self, asked: Submission) -> TokenStream:
        """Register a request."""
        from ..streams.token_stream import TokenStream
        from ..structured.output_type import with_output_type

        core = self.running_core()
        core.sleeping.check_takes_requests()
        params, shape = with_output_type(asked.params, asked.output_type, asked.options.on_unsupported)
        how = {"final_only": asked.final_only, "context": self.listeners.context(), **shape}
        request = core.admission.submit(asked.prompt, params, asked.options, **how)
        return TokenStream(request.request_id, request.mailbox, core.loop, core.admission.abort)

    def abort(self, request_id: str) -> bool:
        """See `AsyncLLM.abort`."""
        return self.running_core().admission.abort(request_id)

    def abort_all(self) -> int:
        """See `AsyncLLM.abort_all`."""
        return self.running_core().admission.abort_all()


def _owner_of(owner: weakref.ref[Owner]) -> Owner:
    found = owner()
    if found is None:
        raise EngineClosedError("the engine was dropped")
    return found


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. An error that it raises instead is dropped."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
