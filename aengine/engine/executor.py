"""The seam between the step loop and the workers: frames out, awaitable futures back.

`Executor` is what the step loop needs; `ProcessExecutor` gives it with one process a rank. Every future made here ends
in exactly one of answer, error and cancelled: an ERROR frame, a nonsensical frame or a death reaches all of them with
its cause, through `_fail`, the one place where the executor breaks.

    running --aclose()--> closing ---+
       |                             v
       +--_fail(), terminate()--> released: workers killed, channels closed; `_failure` says why

An executor that broke is of no further use: the host holds every request's tokens, and makes a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from ..config import EngineConfig, StartupProgress
from ..errors import EngineClosedError, EngineError, InternalError, ModelLoadError, WorkerDiedError
from ..ipc.channel import Frame, HostChannel
from ..ipc.messages import GrammarOutput, Kind, MessageError, ModelRunnerOutput, SchedulerOutput, pack, unpack
from ..system.ulimits import memory_ulimit_hint
from ..telemetry.worker_logs import level_for_workers, log_for_worker
from ..threads.pools import run_in_thread
from ..workers.supervisor import DEFAULT_RUNNER, WorkerProcess

__all__ = ["Executor", "ProcessExecutor"]

logger = logging.getLogger("aengine")

ProgressCallback = Callable[[StartupProgress], None]

_MOST_MASKED_ROWS = 512  # as the largest graph of decodes; 10 MB for 151,936 tokens
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGTRAP, 127)  # 127: the dynamic linker
_REAP_SECONDS = 5.0  # how long to wait for a killed process; one that hangs in the kernel (a GPU driver) takes longer


class Executor(Protocol):
    """What runs the steps. Its methods are called on one event loop."""

    async def start(self, load: dict[str, Any], on_progress: ProgressCallback) -> dict[str, Any]:
        """Start and load; returns what READY says. ``load``: the wire forms of "config" and "source"."""

    async def execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput | None]:
        """Publish a step, awaiting room for it; the future is its answer, None if it is revoked."""

    def try_execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput | None] | None:
        """Publish a step without awaiting: None if that can't be done at once, and then it has not been."""

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        """Tell the worker to drop all leased steps that it has not begun. ``on_revoked`` gets their number, before
        their futures are resolved. False if it can't be told at once, and then it has not been."""

    def bitmask(self, num_bytes: int) -> memoryview | None:
        """Memory that the worker sees too, for the next `send_grammar`, which then gives ``num_bytes`` for a bitmask.
        None: there is none, and the bitmask itself is sent."""

    async def send_grammar(self, out: GrammarOutput) -> None:
        """Publish the bitmask of a step that was published with ``sample_now=False``."""

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """A collective call: every rank executes it, rank 0 replies."""

    def heartbeats(self) -> int:
        """A number that grows while all workers live."""

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes that the workers have: resident in the host's memory, and on their devices. None: not known."""

    def fail(self, error: EngineError) -> None:
        """Break it, as a death does: whoever waits gets ``error``. Idempotent."""

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
        self._answers: dict[int, asyncio.Future[ModelRunnerOutput | None]] = {}  # by step id, in the order of the steps
        self._on_revoked: Callable[[int], None] | None = None
        self._replies: dict[int, asyncio.Future[Any]] = {}  # by call id
        self._next_call = 1
        self._ready: list[asyncio.Future[dict[str, Any]]] = []  # by rank
        self._failure: EngineError | None = None
        self._on_failure: Callable[[EngineError], None] | None = None
        self._on_progress: ProgressCallback = lambda progress: None
        self._stage = "exec"  # what rank 0 last said that it was doing
        self._loop: asyncio.AbstractEventLoop | None = None  # since start()
        self._pid = os.getpid()
        self._released = False
        self._turn = asyncio.Lock()  # of frames for several ranks
        self._unfinished: set[asyncio.Task[None]] = set()  # that publish one

    def __del__(self) -> None:
        if getattr(self, "_workers", None) and not self._released:
            if os.getpid() == self._pid:
                warnings.warn("a ProcessExecutor was not closed", ResourceWarning, source=self, stacklevel=2)
            self.terminate()

    # -- life

    async def start(self, load: dict[str, Any], on_progress: ProgressCallback) -> dict[str, Any]:
        """See `Executor`. Raises what the worker raised while it loaded, WorkerDiedError, or ModelLoadError for a
        start that takes longer than ``startup_timeout``. A failed start leaves nothing behind."""
        assert self._loop is None, "an executor is started once"
        self._loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        try:
            async with asyncio.timeout(self._config.startup_timeout):
                await self._spawn(load)
                ready = await asyncio.gather(*self._ready)
        except TimeoutError:
            failure = self._took_too_long()
            self.terminate()
            raise failure from None
        except WorkerDiedError as died:
            self.terminate()
            hint = memory_ulimit_hint() if died.exit_code in _CRASHES else ""
            if hint:
                raise ModelLoadError(f"the worker crashed while it loaded{hint}\n{died}") from died
            raise
        except BaseException:
            self.terminate()
            raise
        return ready[0]

    async def _spawn(self, load: dict[str, Any]) -> None:
        assert self._loop is not None
        world_size = self._config.tensor_parallel_size
        bitmask_bytes = _bitmask_bytes(self._config, load) if world_size == 1 else 0
        for rank in range(world_size):
            channel = await _new_channel(self._config.ring_bytes, bitmask_bytes)
            if self._failure is not None:
                channel.close()
                raise self._failure
            worker = WorkerProcess(
                self._config, rank, channel, self._loop, self._on_frames, self._on_death, self._runner
            )
            self._workers.append(worker)
            self._ready.append(self._loop.create_future())
        for worker in self._workers:
            message = {**load, "rank": worker.rank, "world_size": world_size, "log_level": level_for_workers()}
            await self._publish(worker, Kind.LOAD, 0, pack(message))

    def _took_too_long(self) -> ModelLoadError:
        tail = self._workers[0].stderr_tail() if self._workers else ""
        return ModelLoadError(
            f"the worker was not ready after startup_timeout={self._config.startup_timeout:g} s; "
            f"it was busy with: {self._stage}{'; it last wrote: ' + tail if tail else ''}{memory_ulimit_hint()}"
        )

    def heartbeats(self) -> int:
        """See `Executor`. Of the slowest heart."""
        return 0 if self._released else min(worker.channel.num_heartbeats for worker in self._workers)

    def memory(self) -> tuple[int | None, int | None]:
        """See `Executor`. The devices' is some seconds old."""
        if self._released:
            return None, None
        resident = sum(worker.resident_bytes() for worker in self._workers)
        on_devices = sum(worker.channel.device_bytes for worker in self._workers)
        return resident or None, on_devices or None

    def fail(self, error: EngineError) -> None:
        """See `Executor`."""
        self._fail(error)

    def set_on_failure(self, callback: Callable[[EngineError], None]) -> None:
        self._on_failure = callback
        if self._failure is not None and not isinstance(self._failure, EngineClosedError):
            callback(self._failure)

    async def aclose(self, timeout: float) -> None:
        """See `Executor`. Takes at most ``timeout`` seconds, and then what the kernel takes to end a process."""
        if self._loop is not asyncio.get_running_loop():  # never started, or on a loop that can't tell of anything now
            self.terminate()
            return
        try:
            if self._failure is None:
                self._failure = _closed_error()
                self._fail_waiters()
                async with asyncio.timeout(timeout):
                    for worker in self._workers:
                        await worker.channel.publish(Kind.SHUTDOWN, 0, b"")
                    await asyncio.gather(*(worker.wait(None) for worker in self._workers))
        except TimeoutError:
            logger.warning("a worker did not end within %g s and is killed", timeout)
        except EngineClosedError:  # somebody else called terminate() meanwhile
            pass
        finally:
            self.terminate()
        await asyncio.gather(*(worker.wait(_REAP_SECONDS) for worker in self._workers))

    def terminate(self) -> None:
        """See `Executor`. From any thread, also while the loop runs in another; in a fork of the host it leaves the
        workers alone."""
        if self._released:
            return
        self._released = True
        self._failure = self._failure or _closed_error()
        if os.getpid() != self._pid:
            for worker in self._workers:
                worker.close()
            return
        for worker in self._workers:
            worker.kill()
        if self._loop is not None and self._loop.is_running() and not _is_current(self._loop):
            self._loop.call_soon_threadsafe(self._let_go)
        else:
            self._let_go()

    def _let_go(self) -> None:
        self._fail_waiters()
        for worker in self._workers:
            worker.close()

    # -- frames out

    async def execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput | None]:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self._check()
        future: asyncio.Future[ModelRunnerOutput | None] = asyncio.get_running_loop().create_future()
        self._answers[out.step_id] = future
        try:
            await self._broadcast(Kind.STEP, out.step_id, pack(out))
        except BaseException:
            self._answers.pop(out.step_id, None)
            raise
        return future

    def try_execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput | None] | None:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self._check()
        if len(self._workers) > 1:  # all of them must get it, or none
            return None
        future: asyncio.Future[ModelRunnerOutput | None] = asyncio.get_running_loop().create_future()
        self._answers[out.step_id] = future
        if self._workers[0].channel.try_publish(Kind.STEP, out.step_id, pack(out)):
            return future
        del self._answers[out.step_id]
        return None

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        """See `Executor`. Raises the executor's failure, if it has failed. With several ranks nothing may be leased:
        each would drop other steps."""
        self._check()
        assert len(self._workers) == 1 and self._on_revoked is None
        if not self._workers[0].channel.try_publish(Kind.REVOKE, 0, b""):
            return False
        self._on_revoked = on_revoked
        return True

    def bitmask(self, num_bytes: int) -> memoryview | None:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self._check()
        # A step's bitmask is filled when the step before was answered: the one before that has been read.
        return self._workers[0].channel.bitmask(num_bytes) if len(self._workers) == 1 else None

    async def send_grammar(self, out: GrammarOutput) -> None:
        self._check()
        await self._broadcast(Kind.GRAMMAR, out.step_id, pack(out))

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """See `Executor`. Raises TimeoutError after ``timeout`` seconds; InternalError when it failed in the worker,
        which goes on."""
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
        """To all ranks, in the same order; once rank 0 has it, it comes to the others also if this is cancelled."""
        if len(self._workers) == 1:
            await self._publish(self._workers[0], kind, step_id, payload)
            return
        await self._turn.acquire()
        try:
            await self._publish(self._workers[0], kind, step_id, payload)
        except BaseException:
            self._turn.release()
            raise
        others = asyncio.get_running_loop().create_task(self._publish_to_others(kind, step_id, payload))
        self._unfinished.add(others)
        others.add_done_callback(self._end_turn)
        await asyncio.shield(others)

    async def _publish_to_others(self, kind: Kind, step_id: int, payload: bytes) -> None:
        for worker in self._workers[1:]:
            await self._publish(worker, kind, step_id, payload)

    def _end_turn(self, published: asyncio.Task[None]) -> None:
        self._unfinished.discard(published)
        self._turn.release()
        if not published.cancelled():
            published.exception()  # that of a closed channel: who has been cancelled does not ask

    async def _publish(self, worker: WorkerProcess, kind: Kind, step_id: int, payload: bytes) -> None:
        try:
            if not worker.channel.try_publish(kind, step_id, payload):
                await worker.channel.publish(kind, step_id, payload)
        except EngineClosedError:
            self._check()
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # it may be raised often, and would gather all of them

    # -- frames in

    def _on_frames(self, worker: WorkerProcess) -> None:
        try:
            self._take_frames(worker)
        except Exception as error:
            failure = InternalError(f"worker {worker.rank} sent nonsense: {error!r}")
            failure.__cause__ = error
            self._fail(failure)

    def _take_frames(self, worker: WorkerProcess) -> None:
        for frame in worker.channel.drain():
            if self._released:  # by the frame before
                return
            self._handle(worker, frame)

    def _handle(self, worker: WorkerProcess, frame: Frame) -> None:
        """Raises anything when the frame is not one that a worker sends."""
        kind = Kind(frame.kind)
        message = unpack(kind, frame.payload)
        if kind is Kind.OUTPUT:
            if message.step_id != frame.step_id or (frame.step_id not in self._answers and self._failure is None):
                raise MessageError(f"an answer to step {frame.step_id}, which was not asked")
            future = self._answers.pop(frame.step_id, None)  # not before: what fails has to reach who waits
            if future is not None and not future.done():
                future.set_result(message)
        elif kind is Kind.REPLY:
            self._settle_reply(worker, self._replies.get(frame.step_id), message)
        elif kind is Kind.REVOKED:
            self._take_back(message)
        elif kind is Kind.PROGRESS:
            worker.channel.unlink()
            if worker.rank == 0:
                self._report(StartupProgress(**message))
        elif kind is Kind.READY:
            worker.channel.unlink()
            if not self._ready[worker.rank].done():
                self._ready[worker.rank].set_result(message)
        elif kind is Kind.LOG:
            log_for_worker(worker.rank, worker.pid, message)
        elif kind is Kind.ERROR:
            self._fail(_reported_error(worker.rank, message))
        else:
            raise MessageError(f"a {kind.name} message is not for the host")

    def _take_back(self, num_steps: int) -> None:
        on_revoked, self._on_revoked = self._on_revoked, None
        if on_revoked is None or num_steps > len(self._answers):
            raise MessageError(f"{num_steps} steps were dropped unasked")
        futures = [self._answers.popitem()[1] for _ in range(num_steps)]
        on_revoked(num_steps)
        for future in futures:
            if not future.done():
                future.set_result(None)

    def _settle_reply(self, worker: WorkerProcess, reply: asyncio.Future[Any] | None, message: dict[str, Any]) -> None:
        if reply is None or reply.done():  # its caller did not wait so long
            return
        if "error" in message:
            reply.set_exception(_reported_error(worker.rank, message["error"]))
        else:
            reply.set_result(message["value"])

    def _report(self, progress: StartupProgress) -> None:
        self._stage = progress.stage
        try:
            self._on_progress(progress)
        except Exception:
            logger.exception("the callback for the progress of the start failed")

    def _on_death(self, worker: WorkerProcess, error: WorkerDiedError) -> None:
        try:
            self._take_frames(worker)  # its last words may explain it better
        except Exception:
            logger.debug("worker %d left nonsense behind", worker.rank, exc_info=True)
        self._fail(error)

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self.terminate()
        if self._on_failure is not None:
            self._on_failure(error)

    def _fail_waiters(self) -> None:
        assert self._failure is not None
        waiters: list[asyncio.Future[Any]] = [*self._ready, *self._answers.values(), *self._replies.values()]
        self._answers.clear()
        for future in waiters:
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(self._failure)
                future.exception()  # whoever still awaits it gets it; nobody else need be warned


def _is_current(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _bitmask_bytes(config: EngineConfig, load: dict[str, Any]) -> int:
    """For as many requests with a grammar in one step as are likely; more of them go through the ring."""
    vocab_size = load["source"].get("hf_config", {}).get("vocab_size")
    if not isinstance(vocab_size, int) or not 0 < vocab_size < 1 << 20:
        return 0
    return 4 * ((vocab_size + 31) // 32) * min(config.max_num_seqs, _MOST_MASKED_ROWS)


async def _new_channel(ring_bytes: int, bitmask_bytes: int) -> HostChannel:
    """Made in a thread, as it takes milliseconds. When the caller is cancelled meanwhile, it is closed again."""
    made: list[HostChannel] = []
    given_up = threading.Event()

    def take_back() -> None:
        given_up.set()
        with contextlib.suppress(IndexError):  # of the two threads one finds it
            made.pop().close()

    def make() -> HostChannel:
        channel = HostChannel.create(ring_bytes, bitmask_bytes)
        made.append(channel)
        if given_up.is_set():
            take_back()
        return channel

    try:
        return await run_in_thread("channel", make)
    except BaseException:
        take_back()
        raise


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the engine is closed")


def _reported_error(rank: int, message: dict[str, Any]) -> EngineError:
    """The error of an ERROR frame: of the class that the worker raised where that says whose fault it is."""
    kind, text, trace = str(message["type"]), str(message["message"]), str(message["traceback"])
    error: EngineError
    if kind == "ModelLoadError":
        error = ModelLoadError(text)
    else:
        shown = text if kind == "InternalError" else f"{kind}: {text}"
        error = InternalError(f"worker {rank}: {shown}", worker_traceback=trace)
    if trace:
        error.add_note(f"in worker {rank}:\n{trace}")
    return error
