"""The worker processes of one executor, by rank: they get the same frames in the same order, and end together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from ..config import EngineConfig
from ..errors import EngineClosedError, EngineError, WorkerDiedError
from ..ipc.channel import HostChannel
from ..ipc.messages import Kind
from ..threads.pools import run_in_thread
from .rank import Rank
from .supervisor import WorkerProcess

__all__ = ["WorkerGroup"]


class WorkerGroup:
    """The worker processes of all ranks. Used on one loop; `kill` also from other threads."""

    def __init__(self) -> None:
        self._workers: list[WorkerProcess] = []
        self.failure: EngineError | None = None
        """Why nothing can be asked of the workers any more; it is raised when something is."""
        self._turn = asyncio.Lock()  # of frames for several ranks
        self._unfinished: set[asyncio.Task[None]] = set()  # that publish one

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, index: int) -> WorkerProcess:
        return self._workers[index]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._workers)

    async def start(
        self,
        config: EngineConfig,
        rank: Rank,
        target: str,
        bitmask_bytes: int,
        on_frames: Callable[[WorkerProcess], None],
        on_death: Callable[[WorkerProcess, WorkerDiedError], None],
    ) -> None:
        """Add the worker of ``rank``, which begins to start. ``target``: the ``module:function`` that loads its model.

        Raises EngineError; `failure` if there is one meanwhile.
        """
        channel = await _new_channel(config.ring_bytes, bitmask_bytes)
        if self.failure is not None:
            channel.close()
            raise self.failure
        loop = asyncio.get_running_loop()
        self._workers.append(WorkerProcess(config, rank.index, channel, loop, on_frames, on_death, target))

    def check(self) -> None:
        """Raise `failure` if there is one."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # it may be raised often, and would gather all of them

    async def publish(self, index: int, kind: Kind, step_id: int, payload: bytes) -> None:
        """Publish to one rank, awaiting room. Raises as `broadcast` does."""
        channel = self._workers[index].channel
        try:
            if not channel.try_publish(kind, step_id, payload):
                await channel.publish(kind, step_id, payload)
        except EngineClosedError:
            self.check()
            raise

    async def broadcast(self, kind: Kind, step_id: int, payload: bytes) -> None:
        """Publish to all ranks, in the same order; once rank 0 has it, it comes to the others also if this is
        cancelled. Raises `failure` if there is one, also when it comes meanwhile."""
        if len(self._workers) == 1:
            await self.publish(0, kind, step_id, payload)
            return
        await self._turn.acquire()
        try:
            await self.publish(0, kind, step_id, payload)
        except BaseException:
            self._turn.release()
            raise
        others = asyncio.get_running_loop().create_task(self._publish_to_others(kind, step_id, payload))
        self._unfinished.add(others)
        others.add_done_callback(self._end_turn)
        await asyncio.shield(others)

    async def _publish_to_others(self, kind: Kind, step_id: int, payload: bytes) -> None:
        for index in range(1, len(self._workers)):
            await self.publish(index, kind, step_id, payload)

    def _end_turn(self, published: asyncio.Task[None]) -> None:
        self._unfinished.discard(published)
        self._turn.release()
        if not published.cancelled():
            published.exception()  # that of a closed channel: who has been cancelled does not ask

    def heartbeats(self) -> int:
        """Return the least number of heartbeats of all workers."""
        return min(worker.channel.num_heartbeats for worker in self._workers)

    def memory(self) -> tuple[int, int]:
        """Bytes that all have: resident, and on their devices; the latter is some seconds old."""
        return (
            sum(worker.resident_bytes() for worker in self._workers),
            sum(worker.channel.device_bytes for worker in self._workers),
        )

    async def wait(self, timeout: float | None) -> None:
        """Wait until all processes have ended, at most ``timeout`` seconds."""
        await asyncio.gather(*(worker.wait(timeout) for worker in self._workers))

    def kill(self) -> None:
        """SIGKILL to all."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """Release everything of the host's, see `WorkerProcess.close`."""
        for worker in self._workers:
            worker.close()


async def _new_channel(ring_bytes: int, bitmask_bytes: int) -> HostChannel:
    """Make a channel in a thread, as it takes milliseconds. If the caller is cancelled meanwhile, it is closed."""
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
