"""The script that a worker process executes:

    python -P entry.py HOST_PID DEATH_FD RANK SPIN_US CHANNEL TARGET SEARCH_PATH
    python -P entry.py spare HOST_PID SOCKET_FD TARGET SEARCH_PATH    gets the other arguments later, see host/spares.py

Before anything heavy is imported it attaches to the rings, whose names are gone from then on, and makes sure that it
can't outlive the host. In this order: if the host was killed before, this process alone can still remove the name.
From then on the host's death ends it at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK = 1000  # nanoseconds by which a sleep may be too long (default: 50,000, a large part of a step)
_EXIT_HOST_GONE = 3
_TRIM_PERIOD = 30_000  # milliseconds between two looks at how much was written to stdout and stderr
_FIRST_OWN = 512  # descriptors of a spare that no worker has
_MOST_FDS = 64
_TRIM_BYTES = 1024 * 1024  # bytes of output that are kept: they are memory, and only their end is ever shown


def die_with_parent(host_pid: int) -> None:
    """End this process with the thread of the host that has started it."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != host_pid:  # the host died before the line above
        os._exit(_EXIT_HOST_GONE)


def die_with_host(host_pid: int, death_fd: int) -> None:
    """End this process with its host, by the kernel's signal and by the end of the death pipe; see supervisor.py."""
    die_with_parent(host_pid)
    os.set_inheritable(death_fd, False)
    threading.Thread(target=_guard, args=(death_fd,), name="aengine-host-guard", daemon=True).start()


def _guard(death_fd: int) -> None:
    pipe = select.poll()
    pipe.register(death_fd)  # nobody writes to it: its one event comes when the last write end is closed
    while not pipe.poll(_TRIM_PERIOD):
        if os.fstat(2).st_size > _TRIM_BYTES:
            os.ftruncate(2, 0)
    os._exit(_EXIT_HOST_GONE)


def sleep_exactly() -> None:
    """Let this thread's sleeps end when they should: the worker sleeps while the device computes a step."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK, 0, 0, 0)


def import_host_package(search_path: list[str]) -> None:
    """Import the very aengine of the host, which lies in ``search_path[0]``; then let the rest of the path follow
    this interpreter's own, so that what the host can import can be imported here, and nothing shadows anything."""
    sys.path.insert(0, search_path[0])
    import aengine  # noqa: F401

    del sys.path[0]
    sys.path.extend(folder for folder in search_path if folder not in sys.path)


def wait_to_work(host_pid: str, socket_fd: str, target: str, search_path: str) -> list[str]:
    """Import what ``target`` needs to load a model, and wait until this process is to be one: its arguments."""
    import fcntl
    import json
    import socket
    from pkgutil import resolve_name

    die_with_parent(int(host_pid))
    own = fcntl.fcntl(int(socket_fd), fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN)  # above the numbers that a worker's have
    os.close(int(socket_fd))
    import_host_package(search_path.split(os.pathsep))
    from aengine.config import take_environment

    resolve_name(target.partition(":")[0]).import_all()
    with socket.socket(fileno=own) as host:
        host.send(b"r")
        head, fds, *_ = socket.recv_fds(host, 4, _MOST_FDS)
        size, data = int.from_bytes(head, "little"), b""
        while head and len(data) < size and (more := host.recv(size - len(data))):
            data += more
        if not data or len(data) < size:
            os._exit(_EXIT_HOST_GONE)
        request = json.loads(data)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN) for fd in fds]
        for fd in fds:
            os.close(fd)
        wanted = [*request["fds"], 1, 2]
        free = [fd for fd in wanted if not os.path.exists(f"/proc/self/fd/{fd}")]
        if len(free) < len(wanted) - 2 or max(wanted) >= _FIRST_OWN:
            os._exit(1)  # a library has opened what the worker would call otherwise
        for fd, number in zip([*moved, moved[0], moved[0]], wanted, strict=True):
            os.dup2(fd, number)
        for fd in moved:
            os.close(fd)
        os.chdir(request["cwd"])
        take_environment(request["env"])
        host.send(b"y")
    arguments: list[str] = request["argv"]
    return arguments


def main(argv: list[str]) -> int:
    host_pid, death_fd, rank, spin_us, description, target, search_path = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host decides when a worker ends
    import_host_package(search_path.split(os.pathsep))

    from aengine.ipc.channel import PeerGoneError, WorkerChannel

    try:
        channel = WorkerChannel.attach(description, int(spin_us), lambda: os.getppid() != int(host_pid))
    except FileNotFoundError:
        return _EXIT_HOST_GONE
    die_with_host(int(host_pid), int(death_fd))
    sleep_exactly()

    from aengine.workers.logs import WorkerLogs
    from aengine.workers.worker import Worker

    logs = WorkerLogs(channel)
    logs.install()
    try:
        return Worker(channel, int(rank), target, logs).run()
    except PeerGoneError:
        return _EXIT_HOST_GONE


if __name__ == "__main__":
    code = main(wait_to_work(*sys.argv[2:]) if sys.argv[1] == "spare" else sys.argv[1:])
    # Not sys.exit: torch's own threads and finalisers have been seen to crash or hang at an interpreter's end, and
    # nothing here is left to be saved.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
