"""`Sleeping`: an engine that gives the memory of its workers back, and takes it again when it is woken.

    sleep ──> steps held up, none in flight ──> KV forgotten ──> workers give memory back, or end
    wake_up ──> workers take memory again, or others are started ──> steps go on, and requests are let in
    a worker's death meanwhile ──> asleep without a worker: another is started at waking

All that a request needs to go on is its ids, which the host holds. Sleeping and waking are tasks of their own, one
after the other: a caller who stops waiting changes nothing about them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from ...config import EngineConfig
from ...errors import EngineClosedError, EngineError, WorkerDiedError
from ..admission import Admission
from ..executor import Executor
from ..pacing.holds import Hold, Holds
from ..replicas.replica import Replica
from ..threads.futures import all_ended, error_for_waiter
from ..user_request import UserRequest
from .replica_sleep import ASLEEP, TAGS, ReplicaSleep

logger = logging.getLogger("aengine")

_SLEEP = Hold("sleep", "asleep")


class Engine(Protocol):
    """What sleeping asks of the engine's core."""

    config: EngineConfig
    holds: Holds
    admission: Admission

    @property
    def state(self) -> str: ...
    @property
    def is_alive(self) -> bool: ...
    def check_accepts(self) -> None: ...


class _OneByOne:
    """Tasks of which each begins when the one before has ended."""

    def __init__(self) -> None:
        self.all: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    def begin(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def alone() -> None:
            async with self._lock:
                await work()

        task = asyncio.get_running_loop().create_task(alone(), name="aengine-sleep")
        self.all.add(task)
        task.add_done_callback(self.all.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits
        return task

    async def wait(self, task: asyncio.Task[None]) -> None:
        """Wait for a task, which goes on if the caller doesn't. Raises its error, and EngineClosedError if it was
        cancelled."""
        await asyncio.wait([task])
        if task.cancelled():
            raise EngineClosedError("the engine ended meanwhile")
        if (error := task.exception()) is not None:
            raise error_for_waiter(error) if isinstance(error, EngineError) else error


class Sleeping:
    """Which memory of the engine's workers is there, and who waits for it. On the engine's loop."""

    def __init__(
        self, engine: Engine, replicas: Iterable[Replica], restore: Callable[[Executor], Awaitable[None]]
    ) -> None:
        """``restore``: gives workers that have slept what they were to be given meanwhile."""
        self._engine = engine
        self._restore = restore
        self._sleeps = [ReplicaSleep(replica) for replica in replicas]
        self._loop = asyncio.get_running_loop()
        self._asleep: set[str] = set()  # tags of memory that is not there
        self._tasks = _OneByOne()
        self._waking: asyncio.Task[None] | None = None  # for requests
        self._callers: list[UserRequest] = []  # requests for which it wakes
        self._timer: asyncio.TimerHandle | None = None
        self._num_holding_awake = 0
        self.note_idle()

    # -- what others ask

    @property
    def level(self) -> int:
        """0: awake; 1: asleep, with workers; 2: asleep, and a worker at least has ended."""
        return 0 if not self._asleep else 2 if any(one.has_ended for one in self._sleeps) else 1

    @property
    def _alive(self) -> list[ReplicaSleep]:
        return [one for one in self._sleeps if one.replica.failure is None]

    @property
    def _begun(self) -> bool:
        """Whether some step of falling asleep has been taken, and the engine is not awake since."""
        return _SLEEP in self._engine.holds

    def check_takes_requests(self) -> None:
        """Raise EngineClosedError if requests are refused now, by a drain or this sleep. From any thread."""
        self._engine.check_accepts()
        if self._begun and self._engine.config.when_asleep == "error":
            raise EngineClosedError(f"{ASLEEP}, and when_asleep='wake' lets requests do so")

    def note_request(self, request: UserRequest) -> None:
        """A request has come: it wakes the engine, if it may."""
        self._stop_timer()
        if self._begun and self._engine.config.when_asleep == "wake":
            self._callers.append(request)
            self._wake_for_requests()

    def note_idle(self) -> None:
        """The last request has ended: the engine falls asleep after a while, if it is to."""
        self._stop_timer()
        if self._engine.config.sleep_after is not None and not self._num_holding_awake:
            self._timer = self._loop.call_later(self._engine.config.sleep_after, self._note_time)

    def hold_awake(self, change: int) -> None:
        """Let so many more hold the engine awake, or, below 0, fewer."""
        self._num_holding_awake += change
        if self._engine.admission.is_empty:
            self.note_idle()

    def note_drain(self) -> None:
        """Requests are to be computed to their ends, whoever let the engine sleep."""
        if self._begun and not self._engine.admission.is_empty:
            self._wake_for_requests()

    # -- calls

    async def sleep(self, level: int) -> None:
        """See `AsyncLLM.sleep`."""
        self._engine.check_accepts()
        await self._tasks.wait(self._tasks.begin(lambda: self._fall_asleep(level)))

    async def wake_up(self, tags: Sequence[str]) -> None:
        """See `AsyncLLM.wake_up`."""
        await self._tasks.wait(self._tasks.begin(lambda: self._awake(tags)))

    def cancel(self) -> None:
        """The engine has ended, and with it all that is under way."""
        self._stop_timer()
        for task in self._tasks.all:
            task.cancel()

    async def aclose(self) -> None:
        """`cancel`, and wait for the end of that."""
        self.cancel()
        if self._tasks.all:
            await asyncio.wait(self._tasks.all)

    async def replace(self, replica: Replica, error: EngineError, is_wanted: Callable[[], bool]) -> EngineError | None:
        """Start another worker in place of one that has failed; while the engine sleeps, when it is woken. Returns and
        ends as `WorkerControl.replace`."""
        if not self._begun:
            failure = await replica.worker.replace(error, lambda: is_wanted() and not self._begun)
            if failure is not None or replica.worker.recovering is None or not is_wanted():
                return failure
        self._asleep.add("weights")
        await self._sleeps[replica.index].park(error)
        return None

    # -- tasks

    async def _fall_asleep(self, level: int) -> None:
        engine = self._engine
        engine.check_accepts()
        engine.holds.stop(_SLEEP)
        try:
            await engine.holds.at_rest()
            for one in self._alive:
                one.forget_kv()
            await all_ended(one.sleep(level) for one in self._alive)
        except EngineError as error:
            if engine.is_alive:
                try:
                    await self._awake(TAGS)
                except EngineError:
                    self._asleep = set(TAGS)
                    logger.error("the engine could not fall asleep, nor wake again; it can be woken later: %s", error)
            raise
        self._asleep = set(TAGS)
        logger.info("%s is asleep, at level %d", engine.config.model, self.level)

    async def _awake(self, tags: Sequence[str]) -> None:
        if not self._begun:
            return
        engine = self._engine
        have_lived = [one for one in self._alive if not one.has_ended]
        try:
            await all_ended(one.wake(tags, lambda: engine.is_alive) for one in self._alive)
            if self._asleep <= set(tags):  # what was to be loaded meanwhile has found no workers
                await all_ended(self._restore(one.replica.worker.executor) for one in have_lived if not one.has_ended)
            if "weights" in tags and any(one.has_ended for one in self._alive):
                raise WorkerDiedError("a worker died as the engine was being woken: it can be woken again")
        except EngineError:
            again = [tag for tag in tags if tag in self._asleep]
            await all_ended(one.told("sleep", again) for one in have_lived if not one.has_ended)
            raise
        self._asleep -= set(tags)
        if "weights" in tags:
            for one in self._alive:
                one.replica.worker.resting = ""
        if self._asleep:
            return
        self._callers.clear()
        engine.holds.release(_SLEEP)
        if engine.admission.is_empty:
            self.note_idle()
        logger.info("%s is awake", engine.config.model)

    # -- requests and time

    def _wake_for_requests(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = self._tasks.begin(lambda: self._awake(TAGS))
            self._waking.add_done_callback(self._note_woken)

    def _note_woken(self, task: asyncio.Task[None]) -> None:
        """Fail the requests for which the engine should have woken, if it could not."""
        callers, self._callers = self._callers, []
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the engine could not be woken for its requests: %s", error)
        for request in callers:
            request.mailbox.fail(error_for_waiter(error) if isinstance(error, EngineError) else EngineError(str(error)))

    def _note_time(self) -> None:
        self._timer = None
        if not self._engine.admission.is_empty or self._begun:
            return
        if self._engine.state == "running":
            self._tasks.begin(self._fall_asleep_if_idle)
        elif self._engine.is_alive:  # paused, say
            self.note_idle()

    async def _fall_asleep_if_idle(self) -> None:
        if self._engine.admission.is_empty and self._engine.state == "running" and not self._num_holding_awake:
            try:
                await self._fall_asleep(1)
            except EngineError as error:
                logger.warning("the idle engine could not fall asleep: %s", error)
                self.note_idle()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
