"""The host's side of workers on other machines: each has a proxy with the interface of `WorkerProcess`.

RemoteGroup ── ClusterNodes: takes room for the ranks, starts a `Node` for each pipeline stage, gives room back
    └── one _NodeLink a node ── its RemoteWorkers
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakMethod

from ...config import EngineConfig
from ...errors import EngineClosedError, EngineError, WorkerDiedError
from ...ipc.channel import Frame
from ...ipc.link import Link, LinkFrame, authenticate, watch_silence
from ...ipc.thread_calls import run_in_thread, tell
from ..host.group import OnDeath, OnFrames, WorkerGroup
from ..rank import Rank
from .node import DIED, STATUS

_CONNECT_SECONDS = 10.0
_REAP_SECONDS = 5.0  # seconds that a node may take to end its workers
_CLOCK_SAMPLES = 120  # samples of a clock's offset that are kept: those of the last 30 seconds


@dataclass(frozen=True, slots=True)
class StartedNode:
    """What `Node.start` returns, and the ranks that it starts."""

    ranks: Sequence[Rank]
    address: str
    port: int
    meeting_port: int
    places: Sequence[dict[str, Any]]


class ClusterNodes(Protocol):
    """Where the ranks of one engine are started. Its methods block, and are called in threads."""

    def start(self, config: EngineConfig, ranks: Sequence[Rank], target: str, token: bytes) -> list[StartedNode]:
        """Take room for all ranks and start a `Node` for those of each pipeline stage, in order. Raises EngineError, at
        once when `release` is called meanwhile."""

    def release(self) -> None:
        """End all nodes that are left, and give back the room. Idempotent, from any thread."""


class RemoteGroup(WorkerGroup):
    """Workers of several ranks, each pipeline stage on a node of its own."""

    def __init__(self, cluster: ClusterNodes) -> None:
        super().__init__()
        self._cluster = cluster
        self._links: list[_NodeLink] = []
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()  # guards the connections until they are closed
        # done when all was released; a future of the loop that called `launch`; None before
        self._released: asyncio.Future[None] | None = None
        self._is_closed = False
        self._pid = os.getpid()

    async def launch(
        self,
        config: EngineConfig,
        ranks: Sequence[Rank],
        target: str,
        bitmask_bytes: int,
        on_frames: OnFrames,
        on_death: OnDeath,
    ) -> list[dict[str, Any]]:
        """See `WorkerGroup.launch`. Memory for bitmasks is not shared with other machines."""
        self.check()
        loop = asyncio.get_running_loop()
        self._released = loop.create_future()
        token = os.urandom(32)
        nodes = await run_in_thread("nodes", self._cluster.start, config, ranks, target, token)
        self.check()
        connections = await run_in_thread("connect", self._connect_all, nodes, token)
        self.check()
        places = []
        meeting = f"{nodes[0].address}:{nodes[0].meeting_port}" if nodes[0].meeting_port else ""
        for node, connection in zip(nodes, connections, strict=True):
            link = _NodeLink(node, connection, loop, on_frames, on_death)
            self._links.append(link)
            self._workers += link.workers.values()
            for place in node.places:
                place["rank"] |= {"address": node.address, "stages_meet_at": meeting}
                places.append(place)
        return places

    async def wait(self, timeout: float | None) -> None:
        """See `WorkerGroup.wait`; after `close` also until the cluster has its room back."""
        if self._is_closed and self._released is not None:
            await asyncio.wait([self._released], timeout=timeout)
        await super().wait(timeout)

    def close(self) -> None:
        """See `WorkerGroup.close`. A thread waits until the nodes have ended their workers."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        connections = self._connections
        for link in self._links:
            link.detach()
        super().close()
        if os.getpid() != self._pid:
            for connection in connections:
                os.close(connection.detach())  # closes this fork's copy of the descriptor; the host's stays open
            return
        try:
            threading.Thread(target=self._release, args=(connections,), name="aengine-release", daemon=True).start()
        except RuntimeError:  # the interpreter ends, and the connections and the cluster's jobs end with it
            for connection in connections:
                connection.close()

    def _connect_all(self, nodes: Sequence[StartedNode], token: bytes) -> list[socket.socket]:
        """Connect to all nodes; blocks. Raises EngineError if a node can't be reached or is another, and after
        `close`."""
        for node in nodes:
            connection = _connect(node, token)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    raise EngineClosedError("the engine is closed")
                self._connections.append(connection)
        return self._connections

    def _release(self, connections: Sequence[socket.socket]) -> None:
        until = time.monotonic() + _REAP_SECONDS
        for connection in connections:
            _await_end(connection, until)
        self._cluster.release()
        released = self._released
        if released is not None:
            tell(
                released.get_loop(),
                _done,
                released,
                [worker for link in self._links for worker in link.workers.values()],
            )


def _done(released: asyncio.Future[None], workers: Sequence[RemoteWorker]) -> None:
    if not released.done():
        released.set_result(None)
    for worker in workers:
        worker.note_end()


class RemoteWorker:
    """Proxy of a worker process on another machine."""

    def __init__(self, rank: int, link: _NodeLink, loop: asyncio.AbstractEventLoop) -> None:
        self.rank = rank
        self.pid: int | None = None  # pid on the node's machine; None before the first STATUS
        self.channel = RemoteChannel(rank, link)
        self.clock_offset = 0.0
        self._link = link
        self._exit: asyncio.Future[None] = loop.create_future()
        self.resident = 0

    def stderr_tail(self) -> str:
        """See `WorkerProcess`; it stays on the other machine, but for what the error of a death quotes."""
        return ""

    def resident_bytes(self) -> int:
        """Return the process' resident memory, as its node told last."""
        return 0 if self._exit.done() else self.resident

    def note_end(self) -> None:
        """Note that the process has ended."""
        if not self._exit.done() and not self._exit.get_loop().is_closed():
            self._exit.set_result(None)

    async def wait(self, timeout: float | None) -> bool:
        """See `WorkerProcess.wait`."""
        if not self._exit.done():
            await asyncio.wait([self._exit], timeout=timeout)
        return self._exit.done()

    def kill(self) -> None:
        """Send SIGKILL to the worker and to all others of its node. May be called from any thread."""
        self._link.kill()

    def close(self) -> None:
        """Send nothing to the worker any more."""
        self.channel.is_closed = True


class RemoteChannel:
    """The counterpart of `HostChannel` for a worker on another machine."""

    def __init__(self, rank: int, link: _NodeLink) -> None:
        self.is_closed = False
        self.received: list[Frame] = []
        self.num_heartbeats = 0
        self.device_bytes = 0
        self.device_word = 0
        self._rank = rank
        self._link = link

    def bitmask(self, size: int) -> memoryview | None:
        """Return None: no memory is shared between two machines, so bitmasks travel in messages."""
        return None

    def unlink(self) -> None:
        """Do nothing: a connection has no name in /dev/shm."""

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `try_publish` would send so many bytes now. Raises EngineClosedError."""
        self._check_open()
        return not self._link.link.is_congested

    def try_publish(self, kind: int, step_id: int, payload: bytes) -> bool:
        """See `HostChannel.try_publish`."""
        if not self.has_room(len(payload)):
            return False
        self._link.link.send(self._rank, kind, step_id, payload)
        return True

    async def publish(self, kind: int, step_id: int, payload: bytes) -> None:
        """See `HostChannel.publish`."""
        while not self.try_publish(kind, step_id, payload):
            await self._link.room()

    def drain(self) -> list[Frame]:
        """Return the messages that have come since the last call."""
        frames, self.received = self.received, []
        return frames

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineClosedError("the connection to the worker is closed")


class _NodeLink:
    """The connection to one node. Its methods run on the loop, but for `kill`."""

    def __init__(
        self,
        node: StartedNode,
        connection: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_frames: OnFrames,
        on_death: OnDeath,
    ) -> None:
        self.link = Link(connection)
        self.workers = {rank.index: RemoteWorker(rank.index, self, loop) for rank in node.ranks}
        self._address = node.address
        self._loop = loop
        self._on_frames = WeakMethod(on_frames)
        self._on_death = WeakMethod(on_death)
        self._clock_offsets: deque[float] = deque(maxlen=_CLOCK_SAMPLES)
        self._room: asyncio.Event = asyncio.Event()
        self._is_killed = False
        self.link.open(loop, self._receive, self._lost, self._room.set)

    async def room(self) -> None:
        """Wait until more can be sent, or nothing can any more."""
        self._room.clear()
        await self._room.wait()

    def kill(self) -> None:
        """End the node's workers; its side of the connection closes when they have. From any thread."""
        self._is_killed = True
        self.link.hang_up()

    def detach(self) -> None:
        """Ignore the connection from now on. It stays open."""
        self._room.set()
        self.link.detach()

    def _receive(self, frames: Sequence[LinkFrame]) -> None:
        receivers: dict[int, RemoteWorker] = {}
        for rank, kind, step_id, payload in frames:
            if kind == STATUS:
                self._note_status(json.loads(payload))
                continue
            worker = self.workers.get(rank)
            if worker is None:
                self._lost(f"it has sent a frame of rank {rank}")
                return
            if kind == DIED:
                self._note_death(worker, **json.loads(payload))
            else:
                worker.channel.received.append(Frame(kind, step_id, payload))
                receivers[rank] = worker
        on_frames = self._on_frames()
        if on_frames is not None:
            for worker in receivers.values():
                on_frames(worker)

    def _note_status(self, status: dict[str, Any]) -> None:
        # The sample that took the shortest time to arrive is the most exact. Clocks drift, so only recent ones count.
        self._clock_offsets.append(time.monotonic() - status["now"])
        offset = min(self._clock_offsets)
        for rank, (pid, heartbeats, device_bytes, device_word, resident) in status["workers"].items():
            worker = self.workers[int(rank)]
            worker.pid, worker.resident, worker.clock_offset = pid, resident, offset
            channel = worker.channel
            channel.num_heartbeats, channel.device_bytes, channel.device_word = heartbeats, device_bytes, device_word

    def _note_death(self, worker: RemoteWorker, message: str, exit_code: int | None) -> None:
        worker.note_end()
        self._tell(worker, WorkerDiedError(f"{message} (on {self._address})", rank=worker.rank, exit_code=exit_code))

    def _lost(self, reason: str) -> None:
        self._room.set()
        for worker in self.workers.values():
            worker.note_end()
        for worker in self.workers.values():
            message = f"the connection to worker {worker.rank} on {self._address} is lost: {reason}"
            self._tell(worker, WorkerDiedError(message, rank=worker.rank))

    def _tell(self, worker: RemoteWorker, error: WorkerDiedError) -> None:
        on_death = self._on_death()
        if on_death is not None and not self._is_killed and not worker.channel.is_closed:
            on_death(worker, error)


def _connect(node: StartedNode, token: bytes) -> socket.socket:
    place = f"{node.address}, port {node.port}"
    try:
        connection = socket.create_connection((node.address, node.port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        raise EngineError(
            f"the node that was started at {place} can't be reached from here ({error}): a firewall must let this "
            f"machine connect to the nodes, and these to each other, see https://github.com/aengine/aengine/blob/main/docs/parallel.md#several-machines"
        ) from error
    try:
        authenticate(connection, token, is_host=True)
        watch_silence(connection)
    except OSError as error:
        connection.close()
        raise EngineError(f"what answers at {place} is not the node that was started there: {error}") from error
    return connection


def _await_end(connection: socket.socket, until: float) -> None:
    """Read until the other side has closed, and close."""
    with connection:
        try:
            while (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                if not connection.recv(65536):
                    return
        except OSError:  # the connection was closed meanwhile
            pass
