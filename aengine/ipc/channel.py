"""The two ends of the bridge between a host and one worker: messages of bytes, in order, both ways.

    host process                                                        worker process
    HostChannel.publish --> ring host -> worker, semaphore if asleep --> WorkerChannel.consume
    HostChannel.drain <--- eventfd, ring worker -> host <--------------- WorkerChannel.publish

The host never blocks: it awaits room in a full ring, and its loop wakes it for frames. The worker spins, then parks.
A message that doesn't fit into a quarter of the ring travels in fragments and arrives as one. Every wait of the worker
is bounded, so that it can ask ``peer_gone``; the host learns of a worker's death elsewhere
(workers/host/supervisor.py).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import posix_ipc

from aengine.errors import EngineClosedError

from .doorbell import LoopBell, WorkerBell, new_fence
from .layout import WHOLE, FrameError, frame_bytes
from .ring import Assembler, Consumer, Frame, Producer
from .shm import Segment, Ticket, new_name, sweep_stale_names, unusable

if TYPE_CHECKING:
    import asyncio

Payload = bytes | bytearray | memoryview

MAX_MESSAGE_BYTES = 1024**3
"""Most bytes of one message; the receiver assembles no more than that, whatever the other side claims."""
PARK_SECONDS = 0.5
"""Longest sleep of a worker, in seconds, before it checks whether the host still runs."""


class PeerGoneError(ConnectionError):
    """The host has gone while the worker waited for it."""


class HostChannel:
    """The host's end. Everything but create() runs on the loop given to open()."""

    def __init__(self, segment: Segment, loop_bell: LoopBell, worker_bell: WorkerBell, description: str) -> None:
        from asyncio import Lock  # imported here: workers import this file too, and have no loop

        self.description = description
        self.inherit_fds: tuple[int, ...] = (segment.fd, loop_bell.fd)
        self._segment = segment
        self._loop_bell = loop_bell
        self._worker_bell = worker_bell
        fence = new_fence()
        self._producer = Producer(segment.ring(0), fence)
        self._consumer = Consumer(segment.ring(1), fence)
        self._assembler = Assembler(MAX_MESSAGE_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_readable: Callable[[], None] = lambda: None
        self._turn = Lock()  # held while a message is published: fragments of two messages must not mix
        self._num_publishing = 0  # calls of `publish` that wait for room or for their turn
        self._room: asyncio.Future[None] | None = None
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def create(cls, ring_bytes: int, bitmask_bytes: int = 0) -> HostChannel:
        """Make the shared memory, ``ring_bytes`` each way and the bitmask's, and the doorbells. Takes milliseconds:
        call it in a thread.

        Raises EngineError when there is no shared memory, or none left.
        """
        sweep_stale_names()
        segment = Segment.create(ring_bytes, bitmask_bytes)
        try:
            loop_bell = LoopBell.create()
        except BaseException:
            segment.close()
            raise
        name = new_name()
        ticket = Ticket(segment.fd, loop_bell.fd, name, segment.capacity, bitmask_bytes, segment.nonce)
        return cls(segment, loop_bell, WorkerBell(name, new_fence()), str(ticket))

    def offer(self) -> None:
        """Offer the channel to the child. Call it when its process exists, once, from any thread: from now on a name
        is in /dev/shm, which goes when the child has attached, or with the end of whichever lives longer.

        Raises EngineError when no semaphore can be made.
        """
        try:
            self._worker_bell.make()
        except (posix_ipc.Error, OSError) as error:
            raise unusable(error) from error

    def unlink(self) -> None:
        """Remove the name by which a child can attach. Call it as soon as the child has attached, or has failed to."""
        self._segment.close_fd()
        self._worker_bell.unlink()

    def open(self, loop: asyncio.AbstractEventLoop, on_readable: Callable[[], None]) -> None:
        """Register ``on_readable``, called on the loop when there is something to drain, also if it came before."""
        self._check_open()
        self._loop = loop
        self._on_readable = on_readable
        loop.add_reader(self._loop_bell.fd, self._on_bell)

    @property
    def num_heartbeats(self) -> int:
        """Number of heartbeats of the worker so far."""
        self._check_open()
        return self._segment.heartbeat[0]

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in use, as the worker reported with its last heartbeats."""
        self._check_open()
        return self._segment.heartbeat[1]

    @property
    def device_word(self) -> int:
        """The state of the device's oldest step, as the worker reported with its last heartbeat."""
        self._check_open()
        return self._segment.heartbeat[2]

    def bitmask(self, size: int) -> memoryview | None:
        """Return the first ``size`` bytes of the memory for bitmasks; None if there is not so much. Who holds them
        keeps them mapped. A frame tells the worker when to read them; until it has answered, they may not change."""
        self._check_open()
        return self._segment.bitmask()[:size] if size <= self._segment.bitmask_bytes else None

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `try_publish` would send a message of ``size`` bytes now."""
        self._check_open()
        producer = self._producer
        fits = not self._num_publishing and num_bytes <= producer.fragment_length
        return fits and producer.has_room(frame_bytes(num_bytes))

    def try_publish(self, kind: int, step_id: int, payload: Payload) -> bool:
        """Send, unless the ring has no room for it now, or it needs fragments, or others wait: then False."""
        data = _flat(payload)
        if not self.has_room(len(data)):
            return False
        self._producer.write(kind, step_id, WHOLE, data)
        self._worker_bell.ring()
        return True

    async def publish(self, kind: int, step_id: int, payload: Payload) -> None:
        """Send, awaiting room. Messages arrive in the order of the calls; a cancelled one doesn't arrive at all.

        Raises EngineClosedError when the channel is closed, before or meanwhile; ValueError for more than
        MAX_MESSAGE_BYTES. ``payload`` may not change until it returns.
        """
        if self.try_publish(kind, step_id, payload):
            return
        data = _flat(payload)
        self._num_publishing += 1
        try:
            async with self._turn:
                for flags, part in _frames(self._producer, data):
                    await self._await_room(frame_bytes(len(part)))
                    self._producer.write(kind, step_id, flags, part)
                    self._worker_bell.ring()
        finally:
            self._num_publishing -= 1

    def drain(self) -> list[Frame]:
        """Return all messages that are complete by now.

        Raises FrameError when the ring holds what the worker can't have written; the channel is of no use then.
        """
        self._check_open()
        consumer, assembler = self._consumer, self._assembler
        frames: list[Frame] = []
        if not consumer.refresh():
            return frames
        # As far as refresh() looked, no further: the worker rings for what comes later, and the loop gets its turn.
        while (raw := consumer.read()) is not None:
            frame = assembler.add(*raw)
            if frame is not None:
                frames.append(frame)
            if consumer.producer_waits():
                self._worker_bell.ring()
        return frames

    def close(self) -> None:
        """Release everything. Pending publish() calls raise EngineClosedError. Idempotent; works on a closed loop.

        In a fork of the host only the fork's copies go: the loop's epoll and the names are the host's, too.
        """
        if self._closed:
            return
        self._closed = True
        loop = self._loop
        if self._pid == os.getpid():
            if loop is not None and not loop.is_closed():
                loop.remove_reader(self._loop_bell.fd)
                if self._room is not None and not self._room.done():
                    self._room.set_exception(_closed_error())
            self._segment.void()
            self._worker_bell.unlink()
        self._worker_bell.close()
        self._loop_bell.close()
        self._producer.release()
        self._consumer.release()
        self._segment.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn("a HostChannel was not closed", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def _on_bell(self) -> None:
        self._loop_bell.clear()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if not self._consumer.is_empty():
            self._on_readable()

    async def _await_room(self, size: int) -> None:
        self._check_open()
        if self._producer.has_room(size):
            return
        assert self._loop is not None, "open() comes before the first publish() that has to wait"
        self._producer.want_room(size)
        try:
            while not self._producer.has_room(size):
                self._room = self._loop.create_future()
                await self._room
                self._check_open()
        finally:
            self._room = None
            if not self._closed:
                self._producer.stop_wanting()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()


class WorkerChannel:
    """The worker's end, for one thread; `beat` and `nudge` are for others."""

    def __init__(
        self,
        segment: Segment,
        loop_bell: LoopBell,
        worker_bell: WorkerBell,
        spin_us: int,
        peer_gone: Callable[[], bool],
    ) -> None:
        self.peer_gone = peer_gone
        self._segment = segment
        self._loop_bell = loop_bell
        self._worker_bell = worker_bell
        fence = new_fence()
        self._consumer = Consumer(segment.ring(0), fence)
        self._producer = Producer(segment.ring(1), fence)
        self._assembler = Assembler(MAX_MESSAGE_BYTES)
        self._spin = spin_us * 1e-6
        self._is_publishing = False
        self._is_nudged = False
        self._closed = False

    @classmethod
    def attach(
        cls, description: str, spin_us: int = 100, peer_gone: Callable[[], bool] = lambda: False
    ) -> WorkerChannel:
        """Take over the inherited descriptors, await the host's offer, and unlink the name. Call it first thing, once.

        ``peer_gone`` is called at least every PARK_SECONDS while waiting; True raises PeerGoneError.
        Raises ValueError for a malformed description, FileNotFoundError or FrameError for one that isn't (or is no
        longer) this process' to use.
        """
        ticket = Ticket.parse(description)
        segment = Segment.attach(ticket)
        try:
            worker_bell = WorkerBell.attach(ticket.semaphore, new_fence(), lambda: segment.is_void or peer_gone())
        except BaseException:
            segment.close()
            raise
        segment.void()
        os.set_inheritable(ticket.event_fd, False)
        return cls(segment, LoopBell(ticket.event_fd), worker_bell, spin_us, peer_gone)

    def consume(self, timeout: float | None, *, spins: bool = True) -> Frame | None:
        """Return the next message; None when there is none within ``timeout`` seconds (None: wait for ever), or after a
        `nudge`. ``spins``: look for it for a while before sleeping.

        Raises FrameError when the ring holds what the host can't have written, PeerGoneError when it has gone.
        """
        frame = self._next()
        if frame is not None or timeout == 0:
            return frame
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if not (spins and self._consumer.spin(min(self._spin, left))):
                self._park(max(0.0, deadline - time.monotonic()))
            frame = self._next()
            if frame is not None:
                return frame
            if self._is_nudged:
                self._is_nudged = False
                return None

    def nudge(self) -> None:
        """Make a waiting `consume` return within PARK_SECONDS. From any thread."""
        self._is_nudged = True

    def try_publish(self, kind: int, step_id: int, payload: Payload) -> bool:
        """Send, unless the ring has no room for it now, it needs fragments, or a `publish` is under way: then False."""
        data = _flat(payload)
        size = frame_bytes(len(data))
        producer = self._producer
        if self._is_publishing or len(data) > producer.fragment_length or not producer.has_room(size):
            return False
        producer.write(kind, step_id, WHOLE, data)
        self._loop_bell.ring()
        return True

    def publish(self, kind: int, step_id: int, payload: Payload) -> None:
        """Send, waiting for room. Raises PeerGoneError when the host goes meanwhile, ValueError as HostChannel's."""
        data = _flat(payload)
        producer = self._producer
        self._is_publishing = True
        try:
            for flags, part in _frames(producer, data):
                size = frame_bytes(len(part))
                if not producer.has_room(size):
                    self._wait_for_room(size)
                producer.write(kind, step_id, flags, part)
                self._loop_bell.ring()
        finally:
            self._is_publishing = False

    def beat(self, device_bytes: int = 0, device_word: int = 0) -> None:
        """Show the host that this process lives, has so much of its device's memory, and how far the device is with its
        oldest step (`DeviceWatch.word`). For one thread of its own, until `close`."""
        if not self._closed:
            heartbeat = self._segment.heartbeat
            heartbeat[0] = (heartbeat[0] + 1) % 2**64
            heartbeat[1] = device_bytes
            heartbeat[2] = device_word

    def bitmask(self, size: int | None = None) -> memoryview:
        """Return the first ``size`` bytes of the memory for bitmasks, or all. Raises FrameError when it is shorter."""
        if size is None:
            size = self._segment.bitmask_bytes
        if not 0 <= size <= self._segment.bitmask_bytes:
            raise FrameError(f"a bitmask of {size} bytes: there is memory for {self._segment.bitmask_bytes}")
        return self._segment.bitmask()[:size]

    def close(self) -> None:
        """Release the rings, the semaphores and the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._worker_bell.close()
        self._loop_bell.close()
        self._consumer.release()
        self._producer.release()
        self._segment.close()

    def _next(self) -> Frame | None:
        consumer = self._consumer
        while True:
            raw = consumer.read()
            if raw is None:
                if not consumer.refresh():
                    return None
                continue
            if consumer.producer_waits():
                self._loop_bell.ring()
            frame = self._assembler.add(*raw)
            if frame is not None:
                return frame

    def _wait_for_room(self, size: int) -> None:
        producer = self._producer
        spin_until = time.monotonic() + self._spin
        while time.monotonic() < spin_until:
            if producer.has_room(size):
                return
        producer.want_room(size)
        try:
            while not producer.has_room(size):
                self._park(PARK_SECONDS)
        finally:
            producer.stop_wanting()

    def _park(self, timeout: float) -> None:
        """Sleep until the host rings; the caller then looks what has come."""
        if not self._worker_bell.wait(min(timeout, PARK_SECONDS)) and self.peer_gone():
            raise PeerGoneError("the host has gone")


def _flat(payload: Payload) -> bytes | memoryview:
    """Return a view of any contiguous buffer as bytes, without a copy."""
    if type(payload) is bytes:
        data: bytes | memoryview = payload
    else:
        view = memoryview(payload)
        data = view.cast("B") if view.nbytes else b""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} can be sent")
    return data


def _frames(producer: Producer, data: bytes | memoryview) -> Iterable[tuple[int, bytes | memoryview]]:
    """Yield flags and payload of each frame that a message takes."""
    if len(data) <= producer.fragment_length:
        return ((WHOLE, data),)
    return producer.fragments(data)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the channel to the worker is closed")
