"""The worker processes of one executor, by rank: they get the same frames in the same order, and end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ...config import EngineConfig
from ...errors import EngineClosedError, EngineError, WorkerDiedError
from ...ipc.channel import Frame, HostChannel
from ...ipc.lead import new_lead
from ...ipc.liveness import Liveness
from ...ipc.messages import Kind
from ...ipc.thread_calls import run_in_thread
from ...limits.ulimits import limit_hint
from ..device_watch import overdue_seconds
from ..rank import Rank
from .supervisor import WorkerProcess

_BEATS_BEHIND = 4  # heartbeats, of a second, by which a worker may lag behind the others


class RankChannel(Protocol):
    """The host's end of the bridge to one worker, see `HostChannel`."""

    @property
    def num_heartbeats(self) -> int:
        """See `HostChannel`, as of all that follow."""

    @property
    def device_bytes(self) -> int: ...
    @property
    def device_word(self) -> int: ...
    def bitmask(self, size: int) -> memoryview | None: ...
    def unlink(self) -> None: ...
    def has_room(self, num_bytes: int) -> bool: ...
    def try_publish(self, kind: int, step_id: int, payload: bytes) -> bool: ...
    async def publish(self, kind: int, step_id: int, payload: bytes) -> None: ...
    def drain(self) -> list[Frame]: ...


class RankWorker(Protocol):
    """The host's side of one worker: a `WorkerProcess`, or one on another machine."""

    rank: int
    pid: int | None
    clock_offset: float
    """Seconds by which the host's monotonic clock is ahead of the worker's."""

    @property
    def channel(self) -> RankChannel:
        """See `WorkerProcess`, as of all that follow."""

    def stderr_tail(self) -> str: ...
    def resident_bytes(self) -> int: ...
    async def wait(self, timeout: float | None) -> bool: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


OnFrames = Callable[[RankWorker], None]
OnDeath = Callable[[RankWorker, WorkerDiedError], None]


class _Broadcast(NamedTuple):
    kind: Kind
    step_id: int
    payload: bytes
    done: asyncio.Future[None]
    ranks: range  # ranks that get the message


class WorkerGroup:
    """The worker processes of all ranks. Used on one loop; `kill` also from other threads."""

    def __init__(self) -> None:
        self._workers: list[RankWorker] = []
        self.failure: EngineError | None = None
        """Why nothing can be asked of the workers any more; it is raised when something is."""
        self._shared_fds: tuple[int, ...] = ()  # descriptors that all workers inherit
        # messages that wait for room in several rings; the first is being sent
        self._waiting: deque[_Broadcast] = deque()
        self._publisher: asyncio.Task[None] | None = None  # sends what is in ``_waiting``; None while that is empty
        self._num_beats = 0  # heartbeats of the group, see `liveness`
        self._beats: list[int] = []  # heartbeats of each worker when the group's number last grew

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, index: int) -> RankWorker:
        return self._workers[index]

    def __iter__(self) -> Iterator[RankWorker]:
        return iter(self._workers)

    async def launch(
        self,
        config: EngineConfig,
        ranks: Sequence[Rank],
        target: str,
        bitmask_bytes: int,
        on_frames: OnFrames,
        on_death: OnDeath,
    ) -> list[dict[str, Any]]:
        """Begin to start the workers of ``ranks``. ``target``: the ``module:function`` that loads the model there.

        What several of them share has no name: a file in memory in which they meet, and what the first of each replica
        shows its others (`Lead`).

        Returns what the LOAD message of each says of its place: "rank"; of several "lead", the latter's descriptor.
        Raises EngineError; `failure` if there is one meanwhile.
        """
        self.check()  # `close` may have been called: what is made below it would never be closed
        leads: list[int] = []  # descriptor of the `Lead` of each replica
        if len(ranks) > 1:
            try:
                rendezvous = os.memfd_create("aengine-rendezvous", os.MFD_CLOEXEC)
                self.share_fd(rendezvous)
                for _ in range(0, len(ranks), config.num_ranks):
                    leads.append(new_lead())
                    self.share_fd(leads[-1])
            except OSError as error:
                raise EngineError(f"the workers can't be started: {error}{limit_hint(str(error))}") from error
            ranks = [replace(rank, rendezvous=f"/proc/self/fd/{rendezvous}") for rank in ranks]
        loop, shared = asyncio.get_running_loop(), self._shared_fds
        for rank in ranks:
            channel = await _new_channel(config.ring_bytes, bitmask_bytes)
            if self.failure is not None:
                channel.close()
                raise self.failure
            self._workers.append(WorkerProcess(config, rank.index, channel, loop, on_frames, on_death, target, shared))
        places: list[dict[str, Any]] = [{"rank": rank.to_wire()} for rank in ranks]
        for place, rank in zip(places, ranks, strict=True):
            if leads:
                place["lead"] = leads[rank.index // config.num_ranks]
        return places

    def share_fd(self, fd: int) -> None:
        """Have the workers that are started from now on inherit a descriptor, by the same number; `close` closes it."""
        self._shared_fds += (fd,)

    def check(self) -> None:
        """Raise `failure` if there is one."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # its traceback would grow each time that it is raised

    async def publish(self, index: int, kind: Kind, step_id: int, payload: bytes) -> None:
        """Publish to one rank, awaiting room. Raises as `broadcast` does."""
        channel = self._workers[index].channel
        try:
            if not channel.try_publish(kind, step_id, payload):
                await channel.publish(kind, step_id, payload)
        except (EngineClosedError, WorkerDiedError):
            self.check()
            raise

    def try_to_lead(self, kind: Kind, step_id: int, payload: bytes) -> bool:
        """Publish to the first rank alone, after all that was published to it before. False if it has no room now, or
        others wait for room. Raises as `broadcast` does."""
        self.check()
        return not self._waiting and self._workers[0].channel.try_publish(kind, step_id, payload)

    def try_broadcast(self, kind: Kind, step_id: int, payload: bytes, ranks: range | None = None) -> bool:
        """Publish to all ranks, or to these, without awaiting. False if one has no room for it now, or others wait for
        room: then none has got it. Raises as `broadcast` does."""
        workers = self._workers if ranks is None else self._workers[ranks.start : ranks.stop]
        try:
            if self._waiting or not all(worker.channel.has_room(len(payload)) for worker in workers):
                return False
            for worker in workers:
                worker.channel.try_publish(kind, step_id, payload)
        except (EngineClosedError, WorkerDiedError):
            self.check()
            raise
        return True

    async def broadcast(self, kind: Kind, step_id: int, payload: bytes, ranks: range | None = None) -> None:
        """Publish to all ranks, or to these, in the order of the calls; once the first have it, it comes to the others
        also if this is cancelled. Raises `failure` if there is one, also when it comes meanwhile."""
        if len(self._workers) == 1:
            await self.publish(0, kind, step_id, payload)
            return
        if self.try_broadcast(kind, step_id, payload, ranks):
            return
        to = ranks or range(len(self._workers))
        broadcast = _Broadcast(kind, step_id, payload, asyncio.get_running_loop().create_future(), to)
        self._publish_in_turn(broadcast)
        try:
            await broadcast.done
        except asyncio.CancelledError:
            if broadcast in self._waiting and broadcast is not self._waiting[0]:
                self._waiting.remove(broadcast)
            raise

    def follow(self, kind: Kind, step_id: int, payload: bytes, ranks: range | None = None) -> None:
        """Publish to all ranks but the first, or to these, as soon as they have room."""
        if ranks is not None and self.try_broadcast(kind, step_id, payload, ranks):
            return
        to = ranks or range(1, len(self._workers))
        self._publish_in_turn(_Broadcast(kind, step_id, payload, asyncio.get_running_loop().create_future(), to))

    def _publish_in_turn(self, broadcast: _Broadcast) -> None:
        self._waiting.append(broadcast)
        if self._publisher is None:
            loop = asyncio.get_running_loop()
            self._publisher = loop.create_task(self._publish_waiting(), name="aengine-broadcasts")

    async def _publish_waiting(self) -> None:
        """Publish what waits for room, one after the other."""
        while self._waiting:
            kind, step_id, payload, done, ranks = self._waiting[0]
            failure: Exception | None = None
            for index in ranks:
                try:
                    await self.publish(index, kind, step_id, payload)
                except Exception as error:
                    failure = error
                    break
            self._waiting.popleft()
            if not done.done():
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(failure)
                    done.exception()  # retrieved here: asyncio would warn about it if nobody waits
        self._publisher = None

    def liveness(self) -> Liveness:
        """Return what all ranks show of themselves. A heartbeat of the group is one of each rank: ranks begin to beat
        when each is ready, and a rank that was stopped for a while has fewer than the others for ever."""
        beats = [worker.channel.num_heartbeats for worker in self._workers]
        if len(beats) != len(self._beats):
            self._beats = beats
        elif beats and all(now > then for now, then in zip(beats, self._beats, strict=True)):
            self._num_beats, self._beats = self._num_beats + 1, beats
        overdue = overdue_seconds(worker.channel.device_word for worker in self._workers)
        return Liveness(self._num_beats, overdue, self._slowest(beats))

    def _slowest(self, beats: Sequence[int]) -> str:
        """Return the name of the worker that hangs: one that has not beaten while another has for a second, or any."""
        if len(beats) <= 1:
            return "the worker"
        since = [now - then for now, then in zip(beats, self._beats, strict=True)]
        if min(since) > 0 or max(since) < _BEATS_BEHIND:
            return f"one of {len(beats)} workers"
        worker = self._workers[since.index(min(since))]
        return f"worker {worker.rank} (pid {worker.pid})"

    def memory(self) -> tuple[int, int]:
        """Return the bytes that all ranks have, resident and on their devices; the latter are some seconds old."""
        return (
            sum(worker.resident_bytes() for worker in self._workers),
            sum(worker.channel.device_bytes for worker in self._workers),
        )

    async def wait(self, timeout: float | None) -> None:
        """Wait until all processes have ended, at most ``timeout`` seconds."""
        await asyncio.gather(*(worker.wait(timeout) for worker in self._workers))

    def kill(self) -> None:
        """Send SIGKILL to all processes of the group."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """Release everything of the host's, see `WorkerProcess.close`."""
        for worker in self._workers:
            worker.close()
        fds, self._shared_fds = self._shared_fds, ()
        for fd in fds:
            os.close(fd)


async def _new_channel(ring_bytes: int, bitmask_bytes: int) -> HostChannel:
    """Make a channel in a thread, as it takes milliseconds. If the caller is cancelled meanwhile, it is closed."""
    made: list[HostChannel] = []
    given_up = threading.Event()

    def take_back() -> None:
        given_up.set()
        with contextlib.suppress(IndexError):  # one of the two threads finds the channel
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
