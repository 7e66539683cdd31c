"""The channel between two real processes: volume, lost wake-ups, and death on either side."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys

import pytest
from ipc_helpers import own_names, start_child, turns

from aengine.errors import EngineClosedError
from aengine.ipc.channel import Frame, HostChannel

PEER = """
import hashlib, random, sys
from aengine.ipc import channel as module
channel = module.WorkerChannel.attach(sys.argv[1], spin_us=int(sys.argv[2]))
heavy = {"asyncio", "numpy", "torch", "msgpack"} & set(sys.modules)
assert not heavy, heavy
module.PARK_SECONDS = 600.0  # a lost wake-up is a hang, not a delay
"""

# Sends its own stream of messages while it takes in the host's; both sum up what they got.
EXCHANGE = (
    PEER
    + """
rng = random.Random(int(sys.argv[3]))
num, digest = int(sys.argv[4]), hashlib.blake2b()
sent = got = 0
while sent < num or got < num:
    if sent < num:
        channel.publish(18, sent, rng.randbytes(rng.choice((0, 1, 40, 200, 900, 5000)))) ; sent += 1
    while got < num and (frame := channel.consume(0 if sent < num else None)) is not None:
        assert frame.step_id == got, (frame.step_id, got)
        digest.update(frame.payload) ; got += 1
channel.publish(19, 0, digest.digest())
channel.consume(None)
"""
)

ECHO = (
    PEER
    + """
while (frame := channel.consume(None)).kind != 5:
    channel.publish(frame.kind, frame.step_id, frame.payload)
"""
)


class Inbox:
    def __init__(self, host: HostChannel) -> None:
        self.host = host
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        host.open(asyncio.get_running_loop(), self.on_readable)

    def on_readable(self) -> None:
        for frame in self.host.drain():
            self.frames.put_nowait(frame)

    async def get(self) -> Frame:
        return await asyncio.wait_for(self.frames.get(), 60)


async def ended(child: subprocess.Popen[str]) -> str:
    """Wait for the child; its standard error."""
    _, errors = await asyncio.to_thread(child.communicate, timeout=60)
    return errors


@pytest.mark.parametrize("spin_us", [0, 100])
async def test_twenty_thousand_messages_both_ways(rng: random.Random, spin_us: int) -> None:
    num, seed = 20_000, rng.randrange(2**32)
    host = HostChannel.create(16 * 1024)
    child = start_child(EXCHANGE, host, spin_us, seed, num)
    inbox = Inbox(host)
    digest = hashlib.blake2b()

    async def send() -> None:
        for step_id in range(num):
            payload = rng.randbytes(rng.choice((0, 1, 40, 200, 900, 5000)))
            digest.update(payload)
            await host.publish(2, step_id, payload)

    sending = asyncio.create_task(send())
    theirs = random.Random(seed)
    for step_id in range(num):
        expected = theirs.randbytes(theirs.choice((0, 1, 40, 200, 900, 5000)))
        assert await inbox.get() == Frame(18, step_id, expected)
    await sending
    assert (await inbox.get()).payload == digest.digest()
    assert own_names() == [], "the child has unlinked the name"
    await host.publish(5, 0, b"")
    assert await ended(child) == "" and child.returncode == 0
    host.close()


@pytest.mark.parametrize("spin_us", [0, 20])
async def test_no_wake_up_is_lost(rng: random.Random, spin_us: int) -> None:
    """The worker parks after every frame, at a moment that shifts against the host's publish."""
    host = HostChannel.create(4096)
    child = start_child(ECHO, host, spin_us)
    inbox = Inbox(host)
    for step_id in range(5_000):
        for _ in range(rng.randrange(200)):
            pass
        await host.publish(2, step_id, b"ping")
        assert (await inbox.get()).step_id == step_id
    await host.publish(5, 0, b"")
    assert await ended(child) == ""
    host.close()


async def test_megabytes_through_a_small_ring(rng: random.Random) -> None:
    host = HostChannel.create(64 * 1024)
    child = start_child(ECHO, host, 100)
    inbox = Inbox(host)
    for size in (64 * 1024, 1_000_003, 4 * 1024 * 1024):
        payload = rng.randbytes(size)
        await host.publish(2, size, payload)
        assert await inbox.get() == Frame(2, size, payload)
    await host.publish(5, 0, b"")
    assert await ended(child) == ""
    host.close()


async def test_a_worker_killed_while_it_writes(rng: random.Random) -> None:
    flood = PEER + "n = 0\nwhile True: channel.publish(18, n, n.to_bytes(8, 'little') * 100) ; n += 1"
    for _ in range(5):
        host = HostChannel.create(32 * 1024)
        child = start_child(flood, host, 100)
        inbox = Inbox(host)
        expected = 0
        for _ in range(rng.randrange(1, 2000)):
            assert (await inbox.get()).step_id == expected
            expected += 1
        child.kill()
        await ended(child)
        for frame in [inbox.frames.get_nowait() for _ in range(inbox.frames.qsize())] + host.drain():
            assert frame == Frame(18, expected, expected.to_bytes(8, "little") * 100)
            expected += 1
        # The ring fills, nobody reads it: whoever waits is freed by close().
        task = asyncio.create_task(host.publish(2, 0, bytes(100_000)))
        await turns()
        host.close()
        with pytest.raises(EngineClosedError):
            await task
    assert own_names() == []


HOST = """
import os, subprocess, sys, time
from aengine.ipc.channel import HostChannel
host = HostChannel.create(8192)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], host.description, str(os.getpid())],
                         pass_fds=host.inherit_fds)
host.offer()
print("started", flush=True)
time.sleep(600)
"""

ORPHAN = """
import os, sys
from aengine.ipc.channel import PeerGoneError, WorkerChannel
host_pid = int(sys.argv[2])
channel = WorkerChannel.attach(sys.argv[1], peer_gone=lambda: os.getppid() != host_pid)
print("attached", flush=True)
try:
    {wait}
except PeerGoneError:
    print("gone", flush=True)
"""


@pytest.mark.parametrize("wait", ["channel.consume(None)", "channel.publish(18, 0, bytes(100_000))"])
def test_a_host_killed_frees_the_worker(wait: str) -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST, ORPHAN.format(wait=wait)], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    assert [host.stdout.readline(), host.stdout.readline()] == ["started\n", "attached\n"]
    names = [name for name in os.listdir("/dev/shm") if f"aengine-{host.pid}-" in name]
    os.kill(host.pid, signal.SIGKILL)
    rest = host.stdout.read()  # until the worker has ended, too
    host.stdout.close()
    host.wait()
    assert names == [], "nothing can be left behind once the child has attached"
    assert rest == "gone\n"


async def test_a_child_that_starts_after_its_host_gave_up() -> None:
    host = HostChannel.create(4096)
    go, hold = os.pipe()
    code = f"import os; os.read({go}, 1)\n" + PEER
    child = subprocess.Popen(
        [sys.executable, "-c", code, host.description, "0"],
        pass_fds=(*host.inherit_fds, go),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    host.close()
    os.write(hold, b"x")
    assert "the host has gone" in await ended(child)
    os.close(go)
    os.close(hold)


def test_the_descriptors_go_no_further_than_the_child() -> None:
    """A process that the worker starts inherits neither bell nor memory, even with close_fds=False."""
    host = HostChannel.create(4096)
    code = PEER + (
        "import os, subprocess\n"
        "fds = [int(x) for x in sys.argv[3:]]\n"
        "probe = 'import os, sys; print([fd for fd in sys.argv[1:] if os.path.exists(\"/proc/self/fd/\" + fd)])'\n"
        "subprocess.run([sys.executable, '-c', probe, *map(str, fds)], close_fds=False, check=True)\n"
    )
    child = start_child(code, host, 0, *host.inherit_fds)
    out, errors = child.communicate(timeout=60)
    host.close()
    assert (out, errors) == ("[]\n", "")
