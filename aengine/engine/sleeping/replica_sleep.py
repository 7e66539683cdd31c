"""`ReplicaSleep`: the workers of one replica, which give their memory back or end, and take it again or are started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ...errors import EngineError, NotEnoughMemoryError
from ..replicas.replica import Replica
from ..worker_control import LONG_CALL_SECONDS

logger = logging.getLogger("aengine")

TAGS = ("weights", "kv_cache")
"""What can be woken by itself."""
ASLEEP = "the engine is asleep: wake_up() wakes it"


class Ended(EngineError):
    """A worker was ended as its engine fell asleep."""


class ReplicaSleep:
    """What has become of a replica's workers while its engine sleeps. A task of the engine's tells it what to do."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._worker = replica.worker
        self._parked: asyncio.Future[None] | None = None  # its step loop waits for it, as it has no worker
        self._has_parked = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether there is no worker."""
        return self._parked is not None

    async def park(self, error: EngineError) -> None:
        """Hold up the replica, whose worker has ended, until `wake` has started another."""
        if not isinstance(error, Ended):
            name = self._worker.name
            logger.warning("%s has died asleep, and is started again when the engine is woken: %s", name, error)
        self._parked = asyncio.get_running_loop().create_future()
        self._worker.resting = ASLEEP
        self._has_parked.set()
        try:
            await self._parked
        finally:
            self._parked = None
            self._has_parked.clear()

    def forget_kv(self) -> None:
        """Have all requests computed again; what is kept beyond the device stays."""
        if not self.has_ended:
            self.replica.recompute_all()
            self.replica.reset_prefix_cache(everywhere=False)

    async def sleep(self, level: int) -> None:
        """Have the workers give their memory back, or end them. Raises NotEnoughMemoryError: they go on as before."""
        worker = self._worker
        if self.has_ended:
            return
        if level == 1 and worker.ready.get("can_sleep") and worker.recovering is None:
            worker.resting = ASLEEP
            if await self.told("sleep", TAGS):
                return
        elif level == 1:
            logger.info("%s ends, as its memory can't be given back otherwise: waking starts another", worker.name)
        worker.executor.fail(Ended("the engine sleeps"))
        await worker.executor.aclose(0)  # wait until it has gone, and its memory is free
        await self._has_parked.wait()

    async def wake(self, tags: Sequence[str], is_wanted: Callable[[], bool]) -> None:
        """Have the workers take their memory again, or start others. Raises NotEnoughMemoryError, and what a start
        raises: they sleep on."""
        if not self.has_ended and await self.told("wake_up", tags):
            return
        await self._has_parked.wait()
        if "weights" not in tags or not is_wanted():
            return
        if (error := await self._worker.start_another()) is not None:
            await self._worker.executor.aclose(0)  # it may have run before it failed
            raise error
        assert self._parked is not None
        self._parked.set_result(None)
        self._has_parked.clear()
        self._parked = None

    async def told(self, method: str, tags: Sequence[str]) -> bool:
        """Make a call of all ranks. Returns whether they live; else the replica is parked. Raises NotEnoughMemoryError:
        one of them can't do it, and none has."""
        worker, executor = self._worker, self._worker.executor
        try:
            problems = await worker.call_ranks(method, list(tags), timeout=LONG_CALL_SECONDS)
            if not any(problems):
                return True
            back = {"sleep": "wake_up", "wake_up": "sleep"}[method]
            undone = await worker.call_ranks(back, list(tags), timeout=LONG_CALL_SECONDS)
        except EngineError as error:
            executor.fail(error)  # if it lives, what has become of its memory is not known
            await self._has_parked.wait()
            return False
        if any(undone):
            executor.fail(Ended("not all of its ranks did the same"))
            await self._has_parked.wait()
        raise NotEnoughMemoryError(f"{worker.name}: {next(filter(None, problems))}")
