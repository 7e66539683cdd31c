"""Both ends of a channel in one process, and children that run a snippet."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from aengine.ipc.channel import HostChannel, WorkerChannel
from aengine.ipc.shm import Ticket


def attach_here(host: HostChannel, spin_us: int = 0, peer_gone: Callable[[], bool] = lambda: False) -> WorkerChannel:
    """The worker's end in this process: it owns its descriptors, so it gets copies."""
    ticket = Ticket.parse(host.description)
    mine = replace(ticket, shm_fd=os.dup(ticket.shm_fd), event_fd=os.dup(ticket.event_fd))
    host.offer()
    return WorkerChannel.attach(str(mine), spin_us, peer_gone)


def start_child(code: str, host: HostChannel, *args: object) -> subprocess.Popen[str]:
    """Run ``code`` in a new interpreter; sys.argv[1] is the channel's description, then ``args``."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, host.description, *map(str, args)],
        pass_fds=host.inherit_fds,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    host.offer()
    return child


def own_names() -> list[str]:
    """What this process has left in /dev/shm."""
    return [name for name in os.listdir("/dev/shm") if f"aengine-{os.getpid()}-" in name]


async def turns(number: int = 20) -> None:
    """Let the loop do all that is ready: what has not come by then comes only by something else."""
    for _ in range(number):
        await asyncio.sleep(0)
