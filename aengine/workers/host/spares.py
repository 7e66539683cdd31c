"""`SpareWorkers`: processes that have imported what a worker needs, before there is a worker to be started.

    SpareWorkers ──exec──> entry.py spare: imports torch and the runner ──> waits
         │                                                                    │
    WorkerProcess ── arguments, environment, descriptors by a socket ───────> entry.main: a worker as any other

A spare has touched no device and holds none of its memory. It is started by exec, by a thread that lives as long as it
does, as that thread's end is the signal by which a worker ends with its host; see supervisor.py. It may become the
worker of any engine of this process that would begin with the same environment.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from ...config import PACKAGE_FOLDER, worker_environment
from ...errors import InvalidRequestError
from .supervisor import DEFAULT_TARGET, interpreter

_MOST = 64  # spares
_REST = 5.0  # seconds after which one that was taken is replaced: its worker has most of its start behind it then
_LOAD_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""What torch's libraries read as they are loaded. How many threads compute, a worker sets when it knows its engine."""


class Spare:
    """A process that waits to become a worker."""

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        self.environment = environment
        self._socket, self._other = socket.socketpair()
        self.process: subprocess.Popen[bytes] | None = None  # None: it could not be started
        is_begun = threading.Event()
        watch = threading.Thread(target=self._live, args=(python, is_begun), name="aengine-spare-worker", daemon=True)
        watch.start()
        is_begun.wait()

    def _live(self, python: str, is_begun: threading.Event) -> None:
        path = os.pathsep.join([str(PACKAGE_FOLDER.parent), *(folder for folder in sys.path if os.path.isabs(folder))])
        entry = str(PACKAGE_FOLDER / "workers" / "entry.py")
        numbers = [str(os.getpid()), str(self._other.fileno())]
        command = [python, "-P", "-Xfaulthandler", entry, "spare", *numbers, DEFAULT_TARGET, path]
        how: dict[str, Any] = {"env": self.environment | _LOAD_THREADS, "start_new_session": True}
        how |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with suppress(OSError):
            self.process = subprocess.Popen(command, cwd="/", pass_fds=[self._other.fileno()], **how)
        self._other.close()
        is_begun.set()
        if self.process is not None:
            self.process.wait()

    def is_ready(self) -> bool:
        """Wait for its imports. Returns False if they, or the process, have ended in an error."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b"r"
        except OSError:  # it was ended meanwhile
            return False

    def begin(self, argv: list[str], environment: dict[str, str], folder: str, fds: list[int]) -> bool:
        """Have it become the worker that entry.py would be with these arguments; ``fds`` have the same numbers there,
        the first also as stdout and stderr. Returns False if it can't."""
        parts = {"argv": argv, "env": environment, "cwd": folder, "fds": fds}
        data = json.dumps(parts).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with suppress(OSError), self._socket:
            self._socket.sendmsg([len(data).to_bytes(4, "little")], rights)
            self._socket.sendall(data)
            return self._socket.recv(2, socket.MSG_WAITALL) == b"ry"
        return False

    def end(self) -> None:
        self._socket.close()
        if self.process is not None:
            self.process.kill()


class SpareWorkers:
    """Processes that the application keeps ready for workers to come, for as long as it likes.

        with SpareWorkers() as spares:  # imports torch, beside whatever is done next
            async with AsyncLLM("smollm2-135m", spare_workers=spares) as engine: ...

    Args:
        count: processes that are ready at a time; each takes some 300 MB of memory, and none of a GPU.

    One that an engine has taken, for its start, for a restart or because it wakes up, is replaced after some seconds.
    May be given to several engines, and closed while they run. An engine that finds none ready starts a new process.

    Raises:
        InvalidRequestError: ``count`` is not from 1 to 64.
        EngineError: there is no Python to run.
    """

    def __init__(self, count: int = 1) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
            raise InvalidRequestError(f"count={count!r:.80} is not valid: it must be from 1 to {_MOST}", param="count")
        self._count, self._pid, self._python = count, os.getpid(), interpreter()
        self._lock = threading.Lock()
        self._is_closed = False
        self._spares: list[Spare] = []
        self._timers: list[threading.Timer] = []
        self._fill()

    def __enter__(self) -> SpareWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that no engine has taken. Idempotent; does nothing in a fork."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closed = True
            spares, self._spares = self._spares, []
            timers, self._timers = self._timers, []
        for timer in timers:
            timer.cancel()
        for spare in spares:
            spare.end()

    @property
    def pids(self) -> list[int]:
        """The processes that are there, imports done or not."""
        return [spare.process.pid for spare in tuple(self._spares) if spare.process is not None]

    def wait(self) -> None:
        """Wait until those that are there are ready. Blocking."""
        for spare in tuple(self._spares):
            spare.is_ready()

    def _fill(self) -> None:
        with self._lock:
            self._timers = [timer for timer in self._timers if timer.is_alive()]
            while not self._is_closed and len(self._spares) < self._count:
                self._spares.append(Spare(self._python, worker_environment()))

    def take(self, environment: dict[str, str]) -> Spare | None:
        """Return a spare whose environment is this one, when its imports are done; None: there is none."""
        with self._lock:
            if not self._spares or self._is_closed or os.getpid() != self._pid:
                return None
            spare = self._spares.pop(0)
            timer = threading.Timer(_REST, self._fill)
            timer.daemon = True
            self._timers.append(timer)
            timer.start()
        if spare.environment == environment and spare.is_ready():
            return spare
        spare.end()
        return None
