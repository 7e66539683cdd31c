"""The seam between the step loop and the workers: frames out, awaitable futures back.

`Executor` is what the step loop needs; `ProcessExecutor` gives it with one process a rank. Every future made here ends
in exactly one of answer, error and cancelled: an ERROR frame, a nonsensical frame or a death reaches all of them with
its cause, through `_fail`, the one place where the executor breaks.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from .. import errors
from ..config import EngineConfig, StartupProgress
from ..errors import AEngineError, EngineClosedError, EngineError, InternalError, ModelLoadError, WorkerDiedError
from ..ipc.channel import Frame, FrameError, HostChannel
from ..ipc.messages import GrammarOutput, Kind, MessageError, ModelRunnerOutput, SchedulerOutput, pack, unpack
from ..workers.supervisor import DEFAULT_RUNNER, WorkerProcess
from .threads import run_in_thread

__all__ = ["Executor", "ProcessExecutor"]

logger = logging.getLogger("aengine")

ProgressCallback = Callable[[StartupProgress], None]


class Executor(Protocol):
    """What runs the steps. Its methods are called on one event loop."""

    async def start(self, load: dict[str, Any], on_progress: ProgressCallback) -> dict[str, Any]:
        """Start and load; returns what READY says. ``load``: the wire forms of "config" and "source"."""

    async def execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        """Publish a step, awaiting room for it; the future is its answer."""

    async def send_grammar(self, out: GrammarOutput) -> None:
        """Publish the bitmask of a step that was published with ``sample_now=False``."""

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """A collective call: every rank executes it, rank 0 replies."""

    def set_on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """``callback`` gets the error that broke the executor, at most once."""

    async def aclose(self, timeout: float) -> None:
        """Let the workers end, at most ``timeout`` seconds, then kill them. Idempotent."""

    def terminate(self) -> None:
        """Kill the workers at once. Idempotent, synchronous, from any state."""


class ProcessExecutor:
    """One worker process a rank, over the rings. ``runner``: what makes the runner in a worker, see worker.py."""

    def __init__(self, config: EngineConfig, runner: str = DEFAULT_RUNNER) -> None:
        self._config = config
        self._runner = runner
        self._workers: list[WorkerProcess] = []
        self._answers: dict[int, asyncio.Future[ModelRunnerOutput]] = {}  # by step id
        self._replies: dict[int, asyncio.Future[Any]] = {}  # by call id
        self._next_call = 1
        self._ready: list[asyncio.Future[dict[str, Any]]] = []  # by rank
        self._failure: EngineError | None = None
        self._on_failure: Callable[[EngineError], None] | None = None
        self._on_progress: ProgressCallback = lambda progress: None
        self._stage = "exec"  # what rank 0 last said that it was doing
        self._closed = False

    def __del__(self) -> None:
        if self._workers and not self._closed:
            warnings.warn("a ProcessExecutor was dropped without aclose()", ResourceWarning, source=self, stacklevel=2)
            self.terminate()

    # -- life

    async def start(self, load: dict[str, Any], on_progress: ProgressCallback) -> dict[str, Any]:
        """See `Executor`. Raises what the worker raised while it loaded, WorkerDiedError, or ModelLoadError for a
        start that takes longer than ``startup_timeout``. A failed start leaves nothing behind."""
        assert not self._workers, "an executor is started once"
        self._on_progress = on_progress
        try:
            await self._spawn()
            world_size = len(self._workers)
            for worker in self._workers:
                message = {**load, "rank": worker.rank, "world_size": world_size}
                await worker.channel.publish(Kind.LOAD, 0, pack(message))
            async with asyncio.timeout(self._config.startup_timeout):
                ready = await asyncio.gather(*self._ready)
        except TimeoutError:
            tail = self._workers[0].stderr_tail() if self._workers else ""
            self.terminate()
            raise ModelLoadError(
                f"the worker was not ready after startup_timeout={self._config.startup_timeout:g} s; "
                f"it was busy with: {self._stage}{'; it last wrote: ' + tail if tail else ''}"
            ) from None
        except BaseException:
            self.terminate()
            raise
        return ready[0]

    async def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        for rank in range(self._config.tensor_parallel_size):
            channel = await run_in_thread("channel", HostChannel.create, self._config.ring_bytes)
            self._ready.append(loop.create_future())
            worker = WorkerProcess(self._config, rank, channel, loop, self._on_frames, self._on_death, self._runner)
            self._workers.append(worker)

    def set_on_failure(self, callback: Callable[[EngineError], None]) -> None:
        self._on_failure = callback
        if self._failure is not None and not self._closed:
            callback(self._failure)

    async def aclose(self, timeout: float) -> None:
        """See `Executor`."""
        if self._closed:
            return
        if self._failure is None:
            self._failure = EngineClosedError("the engine is closed")
            self._fail_waiters(self._failure)
            for worker in self._workers:
                worker.channel.try_publish(Kind.SHUTDOWN, 0, b"")
            ended = await asyncio.gather(*(worker.wait(timeout) for worker in self._workers))
            if not all(ended):
                logger.warning("a worker did not end within %g s and is killed", timeout)
        self.terminate()
        await asyncio.gather(*(worker.wait(timeout) for worker in self._workers))

    def terminate(self) -> None:
        """See `Executor`."""
        if self._closed:
            return
        self._closed = True
        failure = self._failure or EngineClosedError("the engine is closed")
        self._failure = failure
        for worker in self._workers:
            worker.kill()
        self._fail_waiters(failure)
        for worker in self._workers:
            worker.close()

    # -- frames out

    async def execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self._check()
        future: asyncio.Future[ModelRunnerOutput] = asyncio.get_running_loop().create_future()
        self._answers[out.step_id] = future
        try:
            await self._broadcast(Kind.STEP, out.step_id, pack(out))
        except BaseException:
            self._answers.pop(out.step_id, None)
            future.cancel()
            raise
        return future

    async def send_grammar(self, out: GrammarOutput) -> None:
        self._check()
        await self._broadcast(Kind.GRAMMAR, out.step_id, pack(out))

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """See `Executor`. Raises TimeoutError after ``timeout`` seconds."""
        self._check()
        call_id = self._next_call
        self._next_call += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[call_id] = future
        try:
            async with asyncio.timeout(timeout):
                await self._broadcast(Kind.CALL, call_id, pack([method, 0, *args]))
                return await future
        finally:
            self._replies.pop(call_id, None)

    async def _broadcast(self, kind: Kind, step_id: int, payload: bytes) -> None:
        for worker in self._workers:
            if not worker.channel.try_publish(kind, step_id, payload):
                await worker.channel.publish(kind, step_id, payload)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- frames in

    def _on_frames(self, worker: WorkerProcess) -> None:
        try:
            for frame in worker.channel.drain():
                self._handle(worker, frame)
                if self._closed:
                    return
        except (FrameError, MessageError, ValueError) as error:
            failure = InternalError(f"worker {worker.rank} sent nonsense: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _handle(self, worker: WorkerProcess, frame: Frame) -> None:
        kind = Kind(frame.kind)
        message = unpack(kind, frame.payload)
        if kind is Kind.OUTPUT:
            future = self._answers.pop(frame.step_id, None)
            if future is None or message.step_id != frame.step_id:
                raise MessageError(f"an answer to step {frame.step_id}, which was not asked")
            if not future.done():
                future.set_result(message)
        elif kind is Kind.REPLY:
            reply = self._replies.get(frame.step_id)  # None: its caller did not wait so long
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif kind is Kind.PROGRESS:
            worker.channel.unlink()
            if worker.rank == 0:
                self._stage = message["stage"]
                self._on_progress(StartupProgress(**message))
        elif kind is Kind.READY:
            worker.channel.unlink()
            if not self._ready[worker.rank].done():
                self._ready[worker.rank].set_result(message)
        elif kind is Kind.ERROR:
            self._fail(_reported_error(worker.rank, message))
        else:
            raise MessageError(f"a {kind.name} message is not for the host")

    def _on_death(self, worker: WorkerProcess, error: WorkerDiedError) -> None:
        self._on_frames(worker)  # its last words may explain it better
        self._fail(error)

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._fail_waiters(error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _fail_waiters(self, error: EngineError) -> None:
        waiters: list[asyncio.Future[Any]] = [*self._ready, *self._answers.values(), *self._replies.values()]
        self._answers.clear()
        for future in waiters:
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
                future.exception()  # whoever still awaits it gets it; nobody else need be warned


def _reported_error(rank: int, message: dict[str, Any]) -> EngineError:
    """The error of an ERROR frame, of the class that the worker raised if that is one of ours."""
    text, trace = str(message["message"]), str(message["traceback"])
    cls = getattr(errors, str(message["type"]), None)
    if cls is ModelLoadError:
        error: EngineError = ModelLoadError(text)
    elif isinstance(cls, type) and issubclass(cls, AEngineError) and cls is not InternalError:
        error = InternalError(f"worker {rank}: {cls.__name__}: {text}", worker_traceback=trace)
    else:
        error = InternalError(f"worker {rank}: {text}", worker_traceback=trace)
    if trace:
        error.add_note(f"in worker {rank}:\n{trace}")
    return error
