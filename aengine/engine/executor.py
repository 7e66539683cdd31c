"""The seam between the step loop and the workers: frames out, awaitable futures back.

`Executor` is what the step loop needs; `ProcessExecutor` gives it with one process a rank. Every future made here ends
in exactly one of answer, error and cancelled: an ERROR frame, a nonsensical frame or a death reaches all of them with
its cause, through `fail`, the one place where the executor breaks.

    running --aclose()--> closing ---+
       |                             v
       +--fail(), terminate()----> released: workers killed, channels closed; `workers.failure` says why

An executor that broke is of no further use: the host holds every request's tokens, and makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..checkpoint.early_checks import check_start
from ..config import EngineConfig
from ..errors import EngineClosedError, EngineError, InternalError, ModelLoadError, WorkerDiedError
from ..ipc.liveness import Liveness
from ..ipc.messages import GrammarOutput, Kind, MessageError, SchedulerOutput, pack, unpack
from ..limits.registry import WORKERS, target_of
from ..limits.ulimits import limit_hint, memory_ulimit_hint
from ..outputs import StartupProgress
from ..telemetry.worker_logs import level_for_workers, log_for_worker
from ..workers.host.answers import AnswerFuture, PendingAnswers, reported_error
from ..workers.host.group import RankWorker, WorkerGroup
from ..workers.host.handshake import Handshake
from ..workers.rank import ranks_of
from .threads.loop_ownership import loop_here
from .threads.pools import run_in_thread

logger = logging.getLogger("aengine")

ProgressCallback = Callable[[StartupProgress], None]
FailureCallback = Callable[[], object]

_MOST_MASKED_ROWS = 512  # rows of bitmasks in shared memory, as in the largest decode graph; 10 MB for 151,936 tokens
# exit codes of a crash; 127: the dynamic linker failed
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGTRAP, 127)
_SOON = 0.5  # seconds to wait, after the error of a rank, for the death of another rank that may have caused it
_REAP_SECONDS = 5.0  # seconds to wait for a killed process; one that hangs in the kernel (a GPU driver) takes longer


class Executor(Protocol):
    """Interface of what runs the steps. Its methods are called on one event loop."""

    @property
    def failure(self) -> EngineError | None:
        """The error that broke the executor, EngineClosedError if it was closed or terminated; None while it runs."""

    async def start(
        self, load: dict[str, Any], on_progress: ProgressCallback, on_failure: FailureCallback
    ) -> dict[str, Any]:
        """Start and load; returns what the workers say of themselves. ``load``: the wire forms of "config" and
        "source"; ``on_failure`` is called at most once, when `failure` is set by anything but an end that was asked
        for."""

    async def execute_model(self, out: SchedulerOutput) -> AnswerFuture:
        """Publish a step, awaiting room for it; the future is its answer, None if it is revoked."""

    def try_execute_model(self, out: SchedulerOutput) -> AnswerFuture | None:
        """Publish a step without awaiting: None if that can't be done at once, and then it has not been."""

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        """Publish a request to drop all leased steps that were not begun. ``on_revoked`` gets their number, before
        their futures are resolved. False if that can't be done at once, and then it has not been."""

    def bitmask(self, num_bytes: int) -> memoryview | None:
        """Return memory shared with the worker for the bitmask of the next `send_grammar`, which then gives its size as
        ``num_bytes``. None: there is no such memory, and the bitmask itself is sent."""

    async def send_grammar(self, out: GrammarOutput) -> None:
        """Publish the bitmask of a step that was published with ``sample_now=False``."""

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Make a collective call. Returns the replies, by rank."""

    async def call_all(self, method: str, args: Sequence[Any], *, timeout: float) -> list[Any]:
        """Call a method of the worker extension on every rank. Returns their answers, by rank.

        Raises InvalidRequestError if there is none, WorkerCallError if it fails or takes longer than ``timeout``
        seconds; the workers go on."""

    def liveness(self) -> Liveness:
        """Return the heartbeats and overdue seconds that the workers publish in shared memory; sends nothing."""

    def memory(self) -> tuple[int | None, int | None]:
        """Return the bytes that the workers have, resident in the host's memory and on their devices; None: not
        known."""

    def fail(self, error: EngineError) -> None:
        """Fail the executor, as a worker's death does: all that waits gets ``error``. Idempotent."""

    async def aclose(self, timeout: float) -> None:
        """Shut the workers down, wait at most ``timeout`` seconds, then kill them. Idempotent."""

    def terminate(self) -> None:
        """Kill the workers at once. Idempotent, synchronous, from any state."""


class ProcessExecutor:
    """Runs one worker process a rank, over the rings. The setting ``worker`` names what loads the model there."""

    def __init__(self, config: EngineConfig, workers: WorkerGroup | None = None) -> None:
        """``workers``: starts them; None: as processes of this machine."""
        self._config = config
        self.workers = WorkerGroup() if workers is None else workers
        self._all_answers = [PendingAnswers() for _ in range(config.data_parallel_size)]  # one for each replica
        self._answers = self._all_answers[0]
        self._handshake: Handshake | None = None  # None before start()
        self._reports: dict[int, EngineError] = {}  # the error that each rank has reported, oldest first
        self._on_failure: FailureCallback = lambda: None  # the `on_failure` that was given to `start`
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that start() was called on; None before
        self._pid = os.getpid()
        self._released = False

    def __del__(self) -> None:
        if getattr(self, "workers", None) and not self._released:
            if os.getpid() == self._pid:
                warnings.warn("a ProcessExecutor was not closed", ResourceWarning, source=self, stacklevel=2)
            self.terminate()

    # -- life

    @property
    def failure(self) -> EngineError | None:
        """See `Executor`."""
        return self.workers.failure

    async def start(
        self, load: dict[str, Any], on_progress: ProgressCallback, on_failure: FailureCallback
    ) -> dict[str, Any]:
        """See `Executor`. Raises what a worker raised while it loaded, ModelLoadError where ranks can't agree or the
        start takes longer than ``startup_timeout``, WorkerDiedError. A failed start leaves nothing behind."""
        assert self._loop is None, "an executor is started once"
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        try:
            if self._config.worker == "default":
                await run_in_thread("worker", check_start, self._config, load["source"]["hf_config"])
            load = dict(load)
            ranks = ranks_of(self._config, *load.pop("replica", ()))
            handshake = self._handshake = Handshake(ranks, on_progress)
            async with asyncio.timeout(self._config.startup_timeout):
                await self._start_workers(load, handshake)
                plan = await handshake.agreed()
                await self.workers.broadcast(Kind.ALLOCATE, 0, pack(plan))
                return await handshake.ready()
        except TimeoutError:
            failure = _took_too_long(self._config, handshake, self.workers)
            self.terminate()
            raise failure from None
        except WorkerDiedError as died:
            self.terminate()
            hint = memory_ulimit_hint() if died.exit_code in _CRASHES else ""
            if died.exit_code is None:  # no process was started
                raise EngineError(str(died)) from died
            if hint := hint or limit_hint(str(died)):
                raise ModelLoadError(f"the worker crashed while it loaded{hint}\n{died}") from died
            raise
        except BaseException:
            self.terminate()
            raise

    async def _start_workers(self, load: dict[str, Any], handshake: Handshake) -> None:
        """Start a process for each rank and send each its LOAD. They load at the same time."""
        ranks = handshake.ranks
        bitmask_bytes = _bitmask_bytes(self._config, load) if len(ranks) == 1 else 0
        target = await run_in_thread("worker", _target_of, self._config.worker)
        launch = self.workers.launch
        places = await launch(self._config, ranks, target, bitmask_bytes, self._on_frames, self._on_death)
        for rank, place in zip(ranks, places, strict=True):
            message = {**load, **place, "log_level": level_for_workers()}
            await self.workers.publish(rank.index, Kind.LOAD, 0, pack(message))

    def liveness(self) -> Liveness:
        """See `Executor`."""
        return Liveness(0) if self._released else self.workers.liveness()

    def memory(self) -> tuple[int | None, int | None]:
        """See `Executor`. The devices' is some seconds old."""
        try:
            resident, on_devices = (0, 0) if self._released else self.workers.memory()
        except (EngineClosedError, ValueError):  # the workers are being ended by another thread
            resident, on_devices = 0, 0
        return resident or None, on_devices or None

    async def aclose(self, timeout: float) -> None:
        """See `Executor`. Takes at most ``timeout`` seconds, and then what the kernel takes to end a process."""
        if self._loop is not asyncio.get_running_loop():  # it was never started, or its loop is gone
            self.terminate()
            return
        try:
            if self.workers.failure is None:
                self.workers.failure = _closed_error()
                for answers in self._all_answers:
                    answers.fail(self.workers.failure)
                async with asyncio.timeout(timeout):
                    for worker in self.workers:
                        await worker.channel.publish(Kind.SHUTDOWN, 0, b"")
                    await self.workers.wait(None)
        except TimeoutError:
            logger.warning("a worker did not end within %g s and is killed", timeout)
        except (EngineClosedError, WorkerDiedError):  # another caller has terminated them, or they have died
            pass
        finally:
            self.terminate()
        await self.workers.wait(_REAP_SECONDS)

    def terminate(self) -> None:
        """See `Executor`. From any thread, also while the loop runs in another; in a fork of the host it leaves the
        workers alone."""
        if self._released:
            return
        self._released = True
        failure = self.workers.failure = self.workers.failure or _closed_error()
        if os.getpid() != self._pid:
            self.workers.close()
            return
        self.workers.kill()

        def release_all() -> None:
            for answers in self._all_answers:
                answers.fail(failure)
            if self._handshake is not None:
                self._handshake.fail(failure)
            self.workers.close()

        if self._loop is not None and self._loop.is_running() and loop_here() is not self._loop:
            self._loop.call_soon_threadsafe(release_all)
        else:
            release_all()

    # -- frames out

    async def execute_model(self, out: SchedulerOutput) -> AnswerFuture:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self.workers.check()
        future = self._answers.expect_answer(out.step_id)
        try:
            await self.workers.broadcast(Kind.STEP, out.step_id, pack(out))
        except BaseException:
            self._answers.steps.pop(out.step_id, None)
            raise
        return future

    def try_execute_model(self, out: SchedulerOutput) -> AnswerFuture | None:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self.workers.check()
        future = self._answers.expect_answer(out.step_id)
        if self.workers.try_broadcast(Kind.STEP, out.step_id, pack(out)):
            return future
        del self._answers.steps[out.step_id]
        return None

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        assert self._answers.on_revoked is None
        if not self.workers.try_to_lead(Kind.REVOKE, 0, b""):
            return False

        def tell(step_ids: Sequence[int]) -> None:
            if len(self.workers) > 1 and step_ids:  # the other ranks have not begun these steps, see `Lead`
                self.workers.follow(Kind.REVOKE, 0, pack([min(step_ids), max(step_ids)]))
            on_revoked(len(step_ids))

        self._answers.on_revoked = tell
        return True

    def bitmask(self, num_bytes: int) -> memoryview | None:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self.workers.check()
        # A step's bitmask is filled when the step before was answered: the one before that has been read.
        return self.workers[0].channel.bitmask(num_bytes) if len(self.workers) == 1 else None

    async def send_grammar(self, out: GrammarOutput) -> None:
        """See `Executor`. Raises the executor's failure, if it has failed."""
        self.workers.check()
        await self.workers.broadcast(Kind.GRAMMAR, out.step_id, pack(out))

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """See `Executor`. Raises TimeoutError after ``timeout`` seconds; InternalError when it failed in the worker,
        which goes on."""
        return await call_ranks(self.workers, self._answers, [method, True, *args], timeout)

    async def call_all(self, method: str, args: Sequence[Any], *, timeout: float) -> list[Any]:
        """See `Executor`."""
        return await call_ranks(self.workers, self._answers, [method, False, *args], timeout)

    # -- frames in

    def _on_frames(self, worker: RankWorker) -> None:
        try:
            self._take_frames(worker)
        except Exception as error:
            failure = InternalError(f"worker {worker.rank} sent nonsense: {error!r}")
            failure.__cause__ = error
            self.fail(failure)

    def _take_frames(self, worker: RankWorker) -> None:
        """Handle all frames of a worker that have come. Raises an error of any type for a frame that no worker
        sends."""
        assert self._handshake is not None
        for frame in worker.channel.drain():
            if self._released:  # a frame handled just before has released the workers
                return
            kind = Kind(frame.kind)
            message = unpack(kind, frame.payload)
            if kind in PendingAnswers.KINDS:
                if kind is Kind.OUTPUT:
                    if self._reports:  # the ranks start again; a failed one may have spoilt this answer
                        continue
                    message.answered_at += worker.clock_offset
                replica = worker.rank // self._config.num_ranks
                self._all_answers[replica].take(worker.rank, kind, frame.step_id, message)
            elif kind in Handshake.KINDS:
                worker.channel.unlink()
                self._handshake.take(worker.rank, kind, message)
            elif kind is Kind.LOG:
                log_for_worker(worker.rank, worker.pid, message)
            elif kind is Kind.ERROR:
                self._fail_by_report(worker.rank, reported_error(worker.rank, message))
            else:
                raise MessageError(f"a {kind.name} message is not for the host")

    def _on_death(self, worker: RankWorker, error: WorkerDiedError) -> None:
        try:
            self._take_frames(worker)  # the frames that it sent last may name the cause of its death
        except Exception:
            logger.debug("worker %d left nonsense behind", worker.rank, exc_info=True)
        if worker.rank not in self._reports:  # a reported error fails it by the report
            self.fail(error)

    def _fail_by_report(self, rank: int, error: EngineError) -> None:
        """Fail with the error that a rank has reported. With several ranks the report may only follow from another
        rank's death in the middle of an exchange: so wait a moment for such a death, which is then the cause."""
        self._reports.setdefault(rank, error)
        if not isinstance(error, InternalError) or len(self._reports) == len(self.workers):
            self.fail(next(iter(self._reports.values())))
        elif len(self._reports) == 1:
            asyncio.get_running_loop().call_later(_SOON, self.fail, error)

    def fail(self, error: EngineError) -> None:
        """See `Executor`."""
        if self.workers.failure is not None:
            return
        self.workers.failure = error
        self.terminate()
        self._on_failure()


async def call_ranks(
    workers: WorkerGroup, answers: PendingAnswers, message: list[Any], timeout: float, ranks: range | None = None
) -> list[Any]:
    """Make a collective call of all ranks, or of these, whose replies ``answers`` gets. Returns them, by rank.
    ``message``: of CALL.

    Raises the executor's failure; TimeoutError, of a method of the extension WorkerCallError; see `PendingCall`.
    """
    workers.check()
    ranks = range(len(workers)) if ranks is None else ranks
    method, is_own, *_ = message
    call = answers.expect_replies(ranks, "" if is_own else method)
    try:
        async with asyncio.timeout(timeout):
            await workers.broadcast(Kind.CALL, call.id, pack(message), ranks)
            return await call.replies
    except TimeoutError:
        if is_own:
            raise
        raise call.took_too_long(timeout) from None
    finally:
        answers.calls.pop(call.id, None)


def new_executor(config: EngineConfig) -> Executor:
    """Make the executor that the setting ``executor`` names."""
    if config.executor == "process":
        return ProcessExecutor(config)
    from ..workers.remote.group import RemoteGroup
    from ..workers.remote.ray_cluster import RayNodes

    return ProcessExecutor(config, RemoteGroup(RayNodes()))


def _target_of(worker: str) -> str:
    """Resolve the setting ``worker`` to a ``module:function``."""
    target = worker if ":" in worker else target_of(WORKERS, worker)
    assert target is not None, "the configuration has checked it"
    return target


def _took_too_long(config: EngineConfig, handshake: Handshake, workers: WorkerGroup) -> ModelLoadError:
    index, stage = handshake.slowest()
    tail = workers[index].stderr_tail() if index < len(workers) else ""
    who = "the worker" if len(handshake.ranks) == 1 else f"worker {index}"
    return ModelLoadError(
        f"{who} was not ready after startup_timeout={config.startup_timeout:g} s, which can be raised; it was busy "
        f"with: {stage}"
        f"{'; it last wrote: ' + tail if tail else ''}{memory_ulimit_hint()}"
    )


def _bitmask_bytes(config: EngineConfig, load: dict[str, Any]) -> int:
    """Return the bytes for as many bitmasks in one step as are likely; others go through the ring."""
    vocab_size = load["source"].get("hf_config", {}).get("vocab_size")
    if not isinstance(vocab_size, int) or not 0 < vocab_size < 1 << 20:
        return 0
    return 4 * ((vocab_size + 31) // 32) * min(config.max_num_seqs, _MOST_MASKED_ROWS)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the engine is closed")
