"""What a worker process executes, as a script:

    python -P entry.py PACKAGE_PARENT HOST_PID DEATH_FD RANK SPIN_US CHANNEL RUNNER

Before anything heavy is imported it makes sure that it can't outlive the host, and attaches to the rings, whose names
are gone from then on. The host's death ends it at once, whatever it is doing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_EXIT_HOST_GONE = 3


def die_with_host(host_pid: int, death_fd: int) -> None:
    """By the kernel's signal, and by the end of the death pipe (for what the signal misses: see supervisor.py)."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != host_pid:  # it died before the line above
        os._exit(_EXIT_HOST_GONE)
    os.set_inheritable(death_fd, False)

    def guard() -> None:
        os.read(death_fd, 1)  # nobody writes: it returns when the last write end is closed
        os._exit(_EXIT_HOST_GONE)

    threading.Thread(target=guard, name="aengine-host-guard", daemon=True).start()


def main(argv: list[str]) -> int:
    package_parent, host_pid, death_fd, rank, spin_us, description, runner = argv
    die_with_host(int(host_pid), int(death_fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host decides when a worker ends
    sys.path.insert(0, package_parent)

    from aengine.ipc.channel import PeerGoneError, WorkerChannel

    try:
        channel = WorkerChannel.attach(description, int(spin_us), lambda: os.getppid() != int(host_pid))
    except FileNotFoundError:
        return _EXIT_HOST_GONE

    from aengine.workers.worker import Worker

    try:
        return Worker(channel, int(rank), runner).run()
    except PeerGoneError:
        return _EXIT_HOST_GONE


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Not sys.exit: torch's own threads and finalisers have been seen to crash or hang at an interpreter's end, and
    # nothing here is left to be saved.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
