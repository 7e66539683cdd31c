"""`WorkerControl`: calls an engine's workers, and replaces them when they die.

StepLoop.run ends with an error ──replace──> RestartBudget: when ──> another executor ──> StepLoop.restart with it
                                                          or never ──> the error that the engine fails with
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..errors import (
    EngineClosedError,
    EngineError,
    InternalError,
    InvalidRequestError,
    NotEnoughMemoryError,
    WorkerDiedError,
)
from ..ipc.messages import Kind, MessageError, pack, unpack
from ..telemetry.metrics import Counters, WorkerRestart
from .executor import Executor
from .recovery import RestartBudget
from .step_loop import StepLoop
from .threads.futures import error_for_waiter

logger = logging.getLogger("aengine")

NUM_RESTARTS_TOLD = 5
LONG_CALL_SECONDS = 300.0  # seconds that a call may take which handles all weights, and which no caller limits
_REASON_CHARACTERS = 500  # characters of an error's text that the statistics show

Restart = Callable[[], tuple[Executor, Callable[[], Awaitable[dict[str, Any]]]]]
"""Makes an executor that is not started, and what starts it."""


class WorkerControl:
    """Holds the running executor of a replica and its workers' READY message, and replaces the executor when it
    fails."""

    def __init__(
        self,
        executor: Executor,
        ready: dict[str, Any],
        restart: Restart,
        steps: StepLoop,
        budget: RestartBudget,
        counters: Counters,
        name: str,
        *,
        reports_deaths: bool = True,
    ) -> None:
        """``name``: what logs and errors call the worker. ``reports_deaths``: it counts and logs deaths; False: another
        replica's, whose workers live and die with these, does."""
        self.name = name
        self._reports_deaths = reports_deaths
        self.executor = executor
        self.ready = ready
        self.restarts: deque[WorkerRestart] = deque(maxlen=NUM_RESTARTS_TOLD)  # the latest restarts
        self.num_restarts = 0
        self.recovering: EngineError | None = None  # the error of the worker that died, until the next one runs
        self.resting = ""  # why workers that are wanted and well can't be called now; empty: they can
        self.on_restarted: Callable[[Executor], Awaitable[None]] = _nothing_lost
        """Gives new workers, before their first step, what those before them were given beside their model."""
        self._restart = restart
        self._steps = steps
        self._budget = budget
        self._counters = counters

    def note_death(self, error: EngineError) -> None:
        """Put all requests back into the queue after a death, and fail those that are the cause of several deaths."""
        self.recovering = error
        raised = str(error) if getattr(error, "worker_traceback", "") else ""
        for request in self._steps.preempt_all(raised):
            blame = WorkerDiedError(
                f"workers died again and again while they computed request {request.request_id}, also when it was "
                f"the only suspect: {error}",
                is_of_request=True,
            )
            blame.__cause__ = error
            request.sink.fail(blame)
            self._budget.forgive()  # what they died of is gone

    async def replace(self, error: EngineError, is_wanted: Callable[[], bool]) -> EngineError | None:
        """Start another worker instead of the one that has failed, again and again while the budget allows.

        Returns what went wrong last if it gave up. Ends early, with None, once ``is_wanted`` says no.
        """
        begun = time.monotonic()
        while True:
            delay = self._budget.next_delay(time.monotonic())
            if delay is None:
                return _given_up(error, self._budget)
            self.num_restarts += 1
            if self._reports_deaths:
                logger.warning("%s is started again%s: %s", self.name, f" in {delay:g} s" if delay else "", error)
                self._counters.num_restarts += 1
                self.restarts.append(WorkerRestart(time.time(), str(error)[:_REASON_CHARACTERS]))
            await self.executor.aclose(0)  # wait until the dead worker has gone: its memory is needed
            await asyncio.sleep(delay)
            if not is_wanted():
                return None
            again = await self.start_another()
            if again is None:
                break
            if not is_wanted():
                return None
            again.__cause__ = again.__cause__ or error
            error = again
        if self._reports_deaths:
            logger.warning("%s runs again after %.1f s; all requests go on", self.name, time.monotonic() - begun)
        return None

    async def start_another(self) -> EngineError | None:
        """Start another worker in the place of one that has gone. Returns what went wrong; None: it runs."""
        self.executor, start = self._restart()
        try:
            ready = await start()
            await self.on_restarted(self.executor)
        except EngineError as error:
            return error
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
            failure = EngineError(f"the worker could not be started again: {error}")
            failure.__cause__ = error
            return failure
        num_blocks = self._steps.scheduler.num_blocks
        if ready["num_blocks"] < num_blocks:
            lacking = NotEnoughMemoryError(
                f"the worker that was started again has memory for {ready['num_blocks']} KV blocks, and the one "
                f"before had {num_blocks}: something else has taken the device's memory"
            )
            self.executor.fail(lacking)
            return lacking
        self._steps.restart(self.executor)
        self.recovering, self.ready = None, ready
        return None

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Make a collective call of the workers, and return the first one's reply. Raises InternalError if it takes
        longer than ``timeout`` seconds."""
        return (await self.call_ranks(method, *args, timeout=timeout))[0]

    async def call_ranks(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Make a collective call as `call` does, and return the replies of all ranks, in their order. Raises
        InternalError."""
        self._steps.in_flight.cancel_queued()  # the call's frame is handled after the steps that were given before
        try:
            return await self.executor.call(method, *args, timeout=timeout)
        except TimeoutError:
            raise InternalError(f"{self.name} did not answer {method} within {timeout:g} s") from None

    async def long_call(self, method: str, *args: Any, timeout: float) -> Any:
        """Make a call that stops steps and heartbeats; the watchdog is suspended meanwhile."""
        with self._steps.watchdog.suspended():
            return await self.call(method, *args, timeout=timeout)

    async def call_all(self, method: str, args: Sequence[Any], timeout: float) -> list[Any]:
        """Make a call that every rank answers, see `Executor.call_all`. Steps and heartbeats may stop for as long as it
        takes, also when the caller is cancelled meanwhile."""
        self.check()
        self._steps.in_flight.cancel_queued()
        call = asyncio.get_running_loop().create_task(self._call_all(method, args, timeout), name="aengine-call")
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # the caller may have gone
        return await asyncio.shield(call)

    async def _call_all(self, method: str, args: Sequence[Any], timeout: float) -> list[Any]:
        with self._steps.watchdog.suspended():
            return await self.executor.call_all(method, args, timeout=timeout)

    def check(self) -> None:
        """Raise WorkerDiedError while the worker is being started again, EngineClosedError while it rests."""
        if self.resting:
            raise EngineClosedError(self.resting)
        if self.recovering is not None:
            raise WorkerDiedError(f"{self.name} is being started again: {self.recovering}")

    async def check_health(self, timeout: float) -> float:
        """See `AsyncLLM.check_health`."""
        if self.resting and self.executor.failure is not None:
            return 0.0  # nothing is wrong, and there is nobody to ask
        if not self.resting:
            self.check()
        begun = time.perf_counter()  # uvloop's time() counts whole milliseconds
        await self.call("ping", timeout=timeout)
        return time.perf_counter() - begun


async def _nothing_lost(executor: Executor) -> None:
    """Workers are given nothing beside their model."""


def check_arguments(method: str, args: Sequence[Any]) -> None:
    """Raise InvalidRequestError unless a worker can be sent these arguments of ``method``."""
    for index, arg in enumerate(args):
        try:
            unpack(Kind.CALL, pack(arg))  # the worker decodes it too, and not all that can be packed can be unpacked
        except (MessageError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(
                f"argument {index} of {method} can't be sent to a worker ({error!s:.200}): it must be plain data "
                f"(None, bool, int of 64 bits, float, str, bytes, list, dict)",
                param="args",
            ) from None


def _given_up(error: EngineError, budget: RestartBudget) -> EngineError:
    """Return the cause of a worker's death, and that it is not started again, as an error of the same class."""
    failure = error_for_waiter(error)
    assert isinstance(failure, EngineError)
    failure.args = (f"{error}; the engine gave up after {budget} (max_restarts, restart_window)", *error.args[1:])
    failure.__cause__ = error
    return failure
