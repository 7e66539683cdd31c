"""What host and worker share is theirs alone."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import posix_ipc
import pytest
from worker_helpers import leftovers, make, running, start, step

from aengine.ipc.channel import HostChannel
from aengine.ipc.shm import Segment, Ticket

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(attempt: Callable[[], object]) -> int:
    """The exit code of a fork that tries as another user: 0 if it could, 13 if it was not allowed, else 1."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attempt()
            code = 0
        except (PermissionError, posix_ipc.PermissionsError):
            code = 13
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def own_names() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"aengine-{os.getpid()}-" in name]


@needs_root
def test_another_user_can_not_attach() -> None:
    """Not in the milliseconds in which the semaphore has a name, and not by way of /proc."""
    host = HostChannel.create(4096)
    host.offer()
    (name,) = own_names()
    path = Path("/dev/shm") / name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ticket = Ticket.parse(host.description)
    process = f"/proc/{os.getpid()}"
    assert as_nobody(lambda: posix_ipc.Semaphore(ticket.semaphore)) == 13
    assert as_nobody(lambda: path.open("rb")) == 13
    assert as_nobody(lambda: path.unlink()) == 13
    assert as_nobody(lambda: open(f"{process}/fd/{ticket.shm_fd}", "r+b")) == 13
    assert as_nobody(lambda: os.listdir(f"{process}/map_files")) == 13
    host.close()
    assert own_names() == []


def test_names_can_not_be_guessed() -> None:
    """Random ones of 96 bits, which nobody who made one before can wait for; the segment has none at all."""
    names = []
    for _ in range(20):
        host = HostChannel.create(4096)
        assert own_names() == [], "before there is a child, there is nothing to attach to"
        names.append(Ticket.parse(host.description).semaphore)
        host.close()
    randoms = {name.rpartition("-")[2] for name in names}
    assert len(randoms) == 20 and all(len(bytes.fromhex(text)) == 12 for text in randoms)


def test_a_label_that_is_guessed_wrong_is_refused() -> None:
    """Whoever holds the memory but not the ticket: a nonce of 64 bits is in the label."""
    one, two = Segment.create(4096), Segment.create(4096)
    assert one.nonce != two.nonce and len(bytes.fromhex(one.nonce)) == 8
    guess = Ticket(os.dup(one.fd), 0, "/none", one.capacity, 0, two.nonce)
    with pytest.raises(ValueError, match="not the ticket's"):
        Segment.attach(guess)
    one.close()
    two.close()


async def test_a_running_engine_has_no_name() -> None:
    async with running(tensor_parallel_size=2) as executor:
        assert not leftovers()
        for worker in executor.workers:
            assert not [line for line in Path(f"/proc/{worker.pid}/maps").read_text().splitlines()
                        if "aengine-" in line and "(deleted)" not in line]  # fmt: skip


PROBE = """
import os
for fd in os.listdir("/proc/self/fd"):
    if int(fd) > 2 and os.path.lexists(f"/proc/self/fd/{fd}"):  # not of the listing
        print(os.readlink(f"/proc/self/fd/{fd}"))
"""


def inherited() -> list[str]:
    """What a child of this process has open, if nothing is closed for it."""
    command = [sys.executable, "-S", "-c", PROBE]
    return subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True).stdout.splitlines()


async def test_other_children_inherit_nothing() -> None:
    """Neither the memory nor a bell nor the death pipe, even of a host that closes no descriptors for its children."""
    before = await asyncio.to_thread(inherited)
    async with running() as executor:
        await (await executor.execute_model(step(0, [5])))
        assert await asyncio.to_thread(inherited) == before


async def test_a_child_started_meanwhile_inherits_nothing() -> None:
    """While the worker is being started, its descriptors are inheritable by that one child only."""
    before = await asyncio.to_thread(inherited)
    executor = make()
    starting = asyncio.create_task(start(executor))
    while not starting.done():
        assert await asyncio.to_thread(inherited) == before
    await starting
    await executor.aclose(5)
