"""Both ends of a channel in one process; the host's on a loop."""

from __future__ import annotations

import array
import asyncio
import gc
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ipc_helpers import attach_here, own_names, turns

from aengine.errors import EngineClosedError
from aengine.ipc import channel as channel_module
from aengine.ipc.channel import Frame, FrameError, HostChannel, PeerGoneError, WorkerChannel
from aengine.ipc.layout import CONTROL_BYTES, HEAD, NOTHING_WANTED, WANTED
from aengine.ipc.shm import Ticket

RING_BYTES = 4096


@pytest.fixture
def ends() -> Iterator[tuple[HostChannel, WorkerChannel]]:
    host = HostChannel.create(RING_BYTES)
    worker = attach_here(host)
    host.unlink()
    yield host, worker
    worker.close()
    host.close()
    assert own_names() == []


def use(host: HostChannel) -> asyncio.Queue[Frame | FrameError]:
    """Open on the running loop; frames go to the queue, and a FrameError too."""
    inbox: asyncio.Queue[Frame | FrameError] = asyncio.Queue()

    def on_readable() -> None:
        try:
            frames: list[Frame] = host.drain()
        except FrameError as error:
            inbox.put_nowait(error)
            host.close()
            return
        for frame in frames:
            inbox.put_nowait(frame)

    host.open(asyncio.get_running_loop(), on_readable)
    return inbox


def words_of(end: HostChannel | WorkerChannel) -> Any:
    """The control words of the ring into which an end writes: to damage them, as no call does."""
    return end._producer._words


async def soon(awaitable):  # type: ignore[no-untyped-def]
    return await asyncio.wait_for(awaitable, 30)


async def test_there_and_back(ends: tuple[HostChannel, WorkerChannel], no_blocking: None) -> None:
    host, worker = ends
    inbox = use(host)
    assert worker.consume(0) is None
    assert worker.consume(0.001) is None
    for payload in (b"", b"x", bytearray(b"yy"), memoryview(b"zzz"), array.array("i", [1, 2]), array.array("i")):
        await host.publish(2, 3, payload)
        frame = worker.consume(0)
        assert frame == Frame(2, 3, bytes(payload)) and type(frame.payload) is bytes
        worker.publish(18, 4, payload)
        assert await soon(inbox.get()) == Frame(18, 4, bytes(payload))


async def test_frames_published_before_open_are_seen(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    worker.publish(1, 0, b"early")
    inbox = use(host)
    assert await soon(inbox.get()) == Frame(1, 0, b"early")


def test_a_heartbeat_tells_of_the_devices_memory(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    assert (host.num_heartbeats, host.device_bytes) == (0, 0)
    worker.beat()
    worker.beat(141 * 10**9)
    assert (host.num_heartbeats, host.device_bytes, host.device_word) == (2, 141 * 10**9, 0)
    worker.beat(5, 77)
    assert (host.num_heartbeats, host.device_bytes, host.device_word) == (3, 5, 77)


def test_both_ends_see_the_memory_for_bitmasks() -> None:
    host = HostChannel.create(RING_BYTES, 96)
    worker = attach_here(host)
    own, whole = host.bitmask(64), worker.bitmask()
    assert own is not None and (len(own), len(whole), len(worker.bitmask(0))) == (64, 96, 0)
    own[:] = bytes(range(64))
    assert bytes(whole) == bytes(range(64)) + bytes(32) and bytes(worker.bitmask(8)) == bytes(range(8))
    assert host.bitmask(97) is None
    last = host.bitmask(96)
    assert last is not None and len(last) == 96
    for size in (97, -1):
        with pytest.raises(FrameError, match="memory for 96"):
            worker.bitmask(size)
    host.close()
    worker.close()
    with pytest.raises(EngineClosedError):
        host.bitmask(1)


def test_the_host_sends_what_there_is_room_for(ends: tuple[HostChannel, WorkerChannel]) -> None:
    """And says so before: `has_room` and `try_publish` agree on every length."""
    host, worker = ends
    longest = max(length for length in range(RING_BYTES) if host.has_room(length))
    assert longest == RING_BYTES // 4 - 40, "a longer one goes in fragments"
    for length in (longest, 0, 23, 24, longest, longest + 1, longest, longest, 0, 500, 500):
        fits = host.has_room(length)
        assert host.try_publish(2, 3, bytes(length)) is fits
        if fits and length == 23:
            assert worker.consume(0) == Frame(2, 3, bytes(longest))
    assert not worker.try_publish(2, 3, bytes(longest + 1)) and worker.try_publish(2, 3, bytes(longest))


def test_a_host_whose_child_never_came_leaves_no_name() -> None:
    host = HostChannel.create(RING_BYTES)
    num_fds = len(os.listdir("/proc/self/fd"))
    host.offer()
    assert len(own_names()) == 1
    host.unlink()
    assert own_names() == [] and len(os.listdir("/proc/self/fd")) == num_fds - 1, "no other child can inherit it"
    host.close()


def test_a_worker_that_waits_can_be_nudged(ends: tuple[HostChannel, WorkerChannel]) -> None:
    _, worker = ends
    threading.Timer(0.05, worker.nudge).start()
    assert worker.consume(None) is None


def test_a_message_is_sent_only_if_there_is_room(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    num_sent = 0
    while worker.try_publish(1, num_sent, bytes(100)):
        num_sent += 1
    assert [frame.step_id for frame in host.drain()] == list(range(num_sent)) and num_sent > 0
    assert not worker.try_publish(1, 0, bytes(1 << 20)), "it would need fragments"
    assert worker.try_publish(1, 7, b"")


async def test_a_burst_is_drained_at_once(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    calls = []
    host.open(asyncio.get_running_loop(), lambda: calls.append(host.drain()))
    for step_id in range(10):
        worker.publish(1, step_id, b"burst")
    while not calls:
        await asyncio.sleep(0)
    await turns()
    assert [[frame.step_id for frame in frames] for frames in calls] == [list(range(10))]


@pytest.mark.parametrize("size", [RING_BYTES // 4 - 40, RING_BYTES // 4 - 39, RING_BYTES, RING_BYTES * 9 + 5])
async def test_messages_larger_than_the_ring(ends: tuple[HostChannel, WorkerChannel], size: int) -> None:
    host, worker = ends
    inbox = use(host)
    down, up = os.urandom(size), os.urandom(size)

    def echo() -> Frame | None:
        frame = worker.consume(30)
        worker.publish(18, 2, up)
        return frame

    received = asyncio.get_running_loop().run_in_executor(None, echo)
    await soon(host.publish(2, 1, down))
    assert await soon(inbox.get()) == Frame(18, 2, up)
    assert await soon(received) == Frame(2, 1, down)


async def test_a_full_ring_is_awaited_and_order_kept(
    ends: tuple[HostChannel, WorkerChannel], no_blocking: None
) -> None:
    host, worker = ends
    use(host)
    num_sent = 0
    while host.try_publish(2, num_sent, bytes(500)):
        num_sent += 1
    waiting = [asyncio.create_task(host.publish(2, num_sent + i, bytes(500 + 2000 * (i % 2)))) for i in range(6)]
    await turns()
    assert not any(task.done() for task in waiting)
    assert not host.try_publish(2, 99, b""), "no one overtakes those who wait"
    steps = []
    while len(steps) < num_sent + 6:
        frame = worker.consume(0)
        if frame is not None:
            steps.append(frame.step_id)
        await asyncio.sleep(0)
    assert steps == list(range(num_sent + 6))
    await soon(asyncio.gather(*waiting))
    assert host.try_publish(2, 99, b"")
    assert words_of(host)[WANTED] == NOTHING_WANTED, "or the worker would ring for every frame it takes"


async def test_waiting_for_room_does_not_spin(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    use(host)
    while host.try_publish(2, 0, bytes(500)):
        pass
    looks = 0
    has_room = host._producer.has_room  # counted here, as nobody is told of a look

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(producer, name)

        def has_room(self, size: int) -> bool:
            nonlocal looks
            looks += 1
            return has_room(size)

    producer = host._producer
    host._producer = Counting()  # type: ignore[assignment]
    task = asyncio.create_task(host.publish(2, 1, bytes(1000)))
    await turns()
    assert looks <= 4 and not task.done()
    while worker.consume(0):
        pass
    await soon(task)
    host._producer = producer


async def test_a_cancelled_message_does_not_arrive(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    use(host)
    task = asyncio.create_task(host.publish(2, 1, bytes(RING_BYTES * 3)))
    await turns()
    behind = asyncio.create_task(host.publish(2, 2, b"behind"))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.consume(0) is None
    await soon(behind)
    assert worker.consume(0) == Frame(2, 2, b"behind")
    assert host.try_publish(2, 3, b"after")
    assert worker.consume(0) == Frame(2, 3, b"after")


async def test_close_while_a_publish_waits(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, _worker = ends
    use(host)
    tasks = [asyncio.create_task(host.publish(2, i, bytes(RING_BYTES * 2))) for i in range(3)]
    await turns()
    host.close()
    for task in tasks:
        with pytest.raises(EngineClosedError):
            await soon(task)
    with pytest.raises(EngineClosedError):
        await host.publish(2, 0, b"")
    with pytest.raises(EngineClosedError):
        host.try_publish(2, 0, b"")
    with pytest.raises(EngineClosedError):
        host.drain()
    with pytest.raises(EngineClosedError):
        host.open(asyncio.get_running_loop(), lambda: None)
    host.close()
    host.unlink()


async def test_a_torn_frame_reaches_the_host_as_an_error(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    inbox = use(host)
    words_of(worker)[HEAD] = 64
    worker._loop_bell.ring()  # as publishing does, which would notice that the ring is damaged
    assert isinstance(await soon(inbox.get()), FrameError)


def test_a_torn_frame_reaches_the_worker_as_an_error(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    words_of(host)[HEAD] = 33
    with pytest.raises(FrameError):
        worker.consume(None)


def test_foreign_bytes_over_the_whole_segment(ends: tuple[HostChannel, WorkerChannel], rng: random.Random) -> None:
    host, worker = ends
    for index in (0, 1):
        with host._segment.ring(index) as region:  # its name is gone: nobody else can map it
            region[:CONTROL_BYTES] = rng.randbytes(CONTROL_BYTES)
            region[CONTROL_BYTES:] = rng.randbytes(len(region) - CONTROL_BYTES)
    with pytest.raises(FrameError):
        host.drain()
    with pytest.raises(FrameError):
        worker.consume(None)
    with pytest.raises(FrameError):
        while True:
            host.try_publish(1, 1, bytes(500))
    with pytest.raises(FrameError):
        while True:
            worker.publish(1, 1, bytes(500))


def test_a_full_ring_makes_the_worker_wait_for_the_host(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    frames: list[Frame] = []
    up = os.urandom(RING_BYTES * 5)
    thread = threading.Thread(target=worker.publish, args=(18, 1, up))
    thread.start()
    while not frames:
        frames = host.drain()
    thread.join(30)
    assert frames == [Frame(18, 1, up)]
    assert words_of(worker)[WANTED] == NOTHING_WANTED


def test_the_worker_gives_up_when_the_host_has_gone(
    ends: tuple[HostChannel, WorkerChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    _host, worker = ends
    monkeypatch.setattr(channel_module, "PARK_SECONDS", 0.01)
    asked = []
    worker.peer_gone = lambda: len(asked) == 3 or asked.append(None)  # type: ignore[func-returns-value]
    with pytest.raises(PeerGoneError):
        worker.publish(18, 1, bytes(RING_BYTES * 2))
    with pytest.raises(PeerGoneError):
        worker.consume(None)
    assert len(asked) == 3


def test_a_message_over_the_limit_is_refused(
    ends: tuple[HostChannel, WorkerChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, worker = ends
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ValueError, match="1001 bytes"):
        host.try_publish(2, 0, bytes(1001))
    with pytest.raises(ValueError, match="1001 bytes"):
        worker.publish(2, 0, bytes(1001))


def test_what_does_not_fit_a_header_changes_nothing(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    for kind, step_id in ((256, 0), (-1, 0), (1, -1), (1, 2**64)):
        with pytest.raises(Exception, match="range|format"):
            host.try_publish(kind, step_id, b"no")
    assert host.try_publish(1, 1, b"yes")
    assert worker.consume(0) == Frame(1, 1, b"yes")


def test_a_second_attach_is_refused() -> None:
    host = HostChannel.create(RING_BYTES)
    ticket = Ticket.parse(host.description)
    late = str(replace(ticket, shm_fd=os.dup(ticket.shm_fd), event_fd=os.dup(ticket.event_fd)))
    worker = attach_here(host)
    with pytest.raises(FileNotFoundError, match="somebody has attached"):
        WorkerChannel.attach(late)
    os.close(Ticket.parse(late).event_fd)
    worker.close()
    host.close()


def test_close_after_the_loop_was_closed() -> None:
    host = HostChannel.create(RING_BYTES)
    loop = asyncio.new_event_loop()
    host.open(loop, lambda: None)
    loop.close()
    host.close()
    assert own_names() == []


def test_dropping_it_unclosed_warns_and_closes() -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    host = HostChannel.create(RING_BYTES)
    with pytest.warns(ResourceWarning, match="HostChannel was not closed"):
        del host
        gc.collect()
    assert own_names() == []
    assert len(os.listdir("/proc/self/fd")) == num_fds


async def test_nothing_is_left(rng: random.Random) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        host = HostChannel.create(rng.randrange(1, 100_000))
        worker = attach_here(host)
        use(host)
        await host.publish(1, 1, b"x")
        worker.close()
        worker.close()
        host.close()
    assert own_names() == []
    assert len(os.listdir("/proc/self/fd")) == num_fds


async def test_a_fork_closes_only_its_own_copies(ends: tuple[HostChannel, WorkerChannel]) -> None:
    host, worker = ends
    inbox = use(host)
    host._pid = -1  # what os.getpid() would differ from in a fork
    removed = []
    loop = asyncio.get_running_loop()
    host._loop = type("Loop", (), {"is_closed": lambda self: False, "remove_reader": removed.append})()  # type: ignore
    fd = host._loop_bell.fd
    host.close()
    assert removed == []
    loop.remove_reader(fd)
    assert inbox.empty()
