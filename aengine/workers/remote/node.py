"""`Node`: starts some ranks of an engine on the machine that it runs on, for a host elsewhere.

    host                            node                                    its workers
    ┌───────────────────┐   TCP     ┌─────────────────────────────┐  rings  ┌────────────────┐
    │ RemoteWorker  ────┼───────────┼─> Node ─> WorkerProcess ────┼────────>│ WorkerChannel  │
    └───────────────────┘           └─────────────────────────────┘         └────────────────┘

To its workers a node is what the host is on one machine: they are its children, and end with it. It copies frames
between their rings and one connection, which the host opens to it. When that ends, in whatever way, the workers are
killed; then the node closes its side, by which the host knows that their memory is free.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ...__version__ import __version__
from ...config import EngineConfig
from ...errors import EngineError, WorkerDiedError
from ...ipc.link import Link, LinkFrame, authenticate, watch_silence
from ...ipc.thread_calls import run_in_thread
from ...limits.cgroups import num_usable_cpus
from ..host.group import RankWorker, WorkerGroup
from ..rank import Rank

logger = logging.getLogger("aengine.workers")

STATUS, DIED = 64, 65
"""Kinds of a node's own frames: how its workers are, and the end of one. Their payloads are JSON."""

_PERIOD = 0.25  # seconds between two STATUS frames
_HOST_SECONDS = 60.0  # seconds that the host may take to connect
_PROOF_SECONDS = 10.0  # seconds that a caller may take to prove that it is the host
_REAP_SECONDS = 5.0


class Node:
    """Some ranks of one engine. `start` is called once; all else happens in a thread of the node's own."""

    def __init__(self, token: bytes, address: str) -> None:
        """``token``: what the host proves to know; ``address``: by which the host and other nodes reach this one."""
        self._token = token
        self._address = address
        self._workers = WorkerGroup()
        self._by_rank: dict[int, RankWorker] = {}
        self._link: Link | None = None
        self._inbox: deque[LinkFrame] = deque()  # frames of the host whose rings were full
        self._pump: asyncio.Task[None] | None = None  # passes on what is in ``_inbox``; None while that is empty
        self._early_deaths: list[tuple[int, bytes]] = []  # rank and payload of deaths before the host was connected
        self._end: asyncio.Event | None = None
        self.ended = threading.Event()
        """Set when the host has gone, and no worker is left."""

    def start(self, config: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], target: str) -> dict[str, Any]:
        """Begin to start workers, and to wait for the host's connection. Blocking.

        Args:
            config: the engine's, as plain data
            ranks: those that this node starts, likewise; with rank 0 among them also a port for the meeting of stages
            target: the ``module:function`` that loads the model

        Returns:
            "version", of aengine; "address", "port": where the host is to connect; "places": see `WorkerGroup.launch`;
            "meeting_port": see above, 0: none is needed. Or "error", why it failed.
        """
        started: Future[dict[str, Any]] = Future()
        work = (started, EngineConfig.from_wire(config), [Rank.from_wire(rank) for rank in ranks], target)
        threading.Thread(target=self._run, args=work, name="aengine-node", daemon=True).start()
        try:
            return {"version": __version__, **started.result()}
        except Exception as error:
            return {"version": __version__, "error": str(error) or repr(error)}

    def _run(self, started: Future[dict[str, Any]], *work: Any) -> None:
        try:
            asyncio.run(self._serve(started, *work))
        except Exception as error:
            logger.exception("a node failed")
            if not started.done():
                started.set_exception(error)
        finally:
            self.ended.set()

    # -- on its loop

    async def _serve(
        self, started: Future[dict[str, Any]], config: EngineConfig, ranks: Sequence[Rank], target: str
    ) -> None:
        self._end = asyncio.Event()
        try:
            with socket.create_server((self._address, 0)) as listener:
                meeting_port, meeting_fd = (
                    self._open_meeting() if ranks[0].index == 0 and ranks[0].pp_size > 1 else (0, -1)
                )
                config = config.replace(num_threads=_num_threads(config, len(ranks)))
                places = await self._workers.launch(config, ranks, target, 0, self._on_frames, self._on_death)
                self._by_rank = {worker.rank: worker for worker in self._workers}
                places[0]["rank"]["meeting_fd"] = meeting_fd
                facts = {"address": self._address, "port": listener.getsockname()[1], "meeting_port": meeting_port}
                started.set_result({**facts, "places": places})
                connection = await run_in_thread("accept", self._accept, listener)
            await self._relay(connection)
        finally:
            self._workers.kill()
            await self._workers.wait(_REAP_SECONDS)
            if self._link is not None:
                self._link.close()
            self._workers.close()

    def _open_meeting(self) -> tuple[int, int]:
        """Open the port where the stages meet, which the first worker serves. Returns its number and descriptor."""
        listener = socket.create_server((self._address, 0))
        port: int = listener.getsockname()[1]
        fd = listener.detach()
        self._workers.share_fd(fd)
        return port, fd

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Wait for the host, and for nobody else. Raises EngineError when it does not come."""
        until = time.monotonic() + _HOST_SECONDS
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                break
            try:
                connection.settimeout(_PROOF_SECONDS)
                authenticate(connection, self._token, is_host=False)
                watch_silence(connection)
                return connection
            except OSError as error:
                connection.close()
                logger.warning("refused a connection from %s: %s", peer, error)
        raise EngineError(f"the host did not connect within {_HOST_SECONDS:g} s")

    async def _relay(self, connection: socket.socket) -> None:
        assert self._end is not None
        link = self._link = Link(connection)
        link.open(asyncio.get_running_loop(), self._from_host, self._host_gone, self._on_room)
        self._send_status()
        self._on_room()
        for rank, payload in self._early_deaths:
            link.send(rank, DIED, 0, payload)
        while not self._end.is_set():
            self._send_status()
            try:
                await asyncio.wait_for(self._end.wait(), _PERIOD)
            except TimeoutError:
                pass

    def _host_gone(self, reason: str) -> None:
        assert self._end is not None
        self._end.set()

    def _from_host(self, frames: Sequence[LinkFrame]) -> None:
        for frame in frames:
            worker = self._by_rank.get(frame.rank)
            if worker is None:
                self._host_gone("it has sent nonsense")
            elif self._inbox or not worker.channel.try_publish(frame.kind, frame.step_id, frame.payload):
                self._inbox.append(frame)
        if self._inbox and self._pump is None:
            assert self._link is not None
            self._link.pause()
            self._pump = asyncio.get_running_loop().create_task(self._publish_inbox())

    async def _publish_inbox(self) -> None:
        """Publish in order what found no room. A worker that has died takes nothing any more: the host ends all."""
        assert self._link is not None
        while self._inbox:
            frame = self._inbox.popleft()
            await self._by_rank[frame.rank].channel.publish(frame.kind, frame.step_id, frame.payload)
        self._pump = None
        self._link.resume()

    def _on_frames(self, worker: RankWorker) -> None:
        """Pass on what a worker has sent. Raises FrameError for what it can't have."""
        link = self._link
        if link is None or link.is_congested:
            return  # the frames stay in the ring until `_on_room`
        for frame in worker.channel.drain():
            worker.channel.unlink()
            link.send(worker.rank, frame.kind, frame.step_id, frame.payload)

    def _on_room(self) -> None:
        for worker in self._workers:
            self._on_frames(worker)

    def _on_death(self, worker: RankWorker, error: WorkerDiedError) -> None:
        payload = json.dumps({"message": str(error), "exit_code": error.exit_code}).encode()
        if self._link is None:
            self._early_deaths.append((worker.rank, payload))
            return
        for frame in worker.channel.drain():  # the frames that a dead worker has left
            self._link.send(worker.rank, frame.kind, frame.step_id, frame.payload)
        self._link.send(worker.rank, DIED, 0, payload)

    def _send_status(self) -> None:
        assert self._link is not None
        workers = {
            str(worker.rank): [
                worker.pid,
                worker.channel.num_heartbeats,
                worker.channel.device_bytes,
                worker.channel.device_word,
                worker.resident_bytes(),
            ]
            for worker in self._workers
        }
        self._link.send(0, STATUS, 0, json.dumps({"now": time.monotonic(), "workers": workers}).encode())


def _num_threads(config: EngineConfig, num_ranks: int) -> int:
    """Return the setting's threads of each worker; on a CPU there are as many as cores asked of the cluster."""
    if config.num_threads is not None:
        return config.num_threads
    return 1 if config.device == "cpu" else max(1, num_usable_cpus() // num_ranks)
