"""Workers as forks of one process that has imported torch: `make test` starts hundreds, and each would import it for a
second.

A program: reads a request for each fork from the socket whose descriptor is its argument, and answers with the fork's
pid. The fork is a child of the test process, by PR_SET_CHILD_SUBREAPER, and executes `entry.main` with the arguments,
environment and descriptors that the started process would have had. Workers whose loader needs no torch are started as
ever, as are all of `make test-all`, and of the programs that tests run.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from aengine.config import worker_environment
from aengine.limits.registry import target_of

_PR_SET_CHILD_SUBREAPER = 36
_FIRST_FREE = 500  # descriptors that came with a request lie from here on, above those that they become
_HEAD = struct.Struct("II")  # bytes of the request, number of descriptors


WITH_TORCH = ("meeting_runner:load_model", "lockstep_runner:load_model", "beside_a_driver:load_model")
"""Loaders of tests that import torch."""


class ForkedWorker:
    """Of `subprocess.Popen`, what the host's side of a worker uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # `wait` in another thread may have seen its end just now
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


class Forks:
    """Takes the place of the module `subprocess` in supervisor.py."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._targets = {target_of("aengine.workers", "default"), *WITH_TORCH}

    def Popen(self, command: list[str], **how: Any) -> ForkedWorker | subprocess.Popen[bytes]:
        if command[0] != sys.executable or not self._targets.intersection(command):
            return subprocess.Popen(command, **how)
        script = command.index(next(part for part in command if part.endswith("entry.py")))
        parts = {"argv": command[script + 1 :], "env": how["env"], "fds": how["pass_fds"], "cwd": os.getcwd()}
        request = json.dumps(parts).encode()
        with self._lock, open(os.devnull) as nothing:
            if self._socket is None:
                self._socket = self._start()
            fds = array.array("i", [nothing.fileno(), how["stdout"], how["stderr"], *how["pass_fds"]])
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                self._socket.sendmsg([_HEAD.pack(len(request), len(fds))], rights)
                self._socket.sendall(request)
                answer = self._socket.recv(4)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) < 4:
            raise OSError("the process that forks workers has ended")
        return ForkedWorker(*struct.unpack("I", answer))

    def _start(self) -> socket.socket:
        own, other = socket.socketpair()
        command = [sys.executable, "-P", "-Xfaulthandler", __file__, str(other.fileno())]
        environment = worker_environment() | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._template = subprocess.Popen(command, env=environment, pass_fds=[other.fileno()], start_new_session=True)
        TEMPLATES.add(self._template.pid)
        DESCRIPTORS.add(own.fileno())
        other.close()
        return own

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._template.wait()


TEMPLATES: set[int] = set()
"""pid of the process that forks, for tests that look for children."""
DESCRIPTORS: set[int] = set()
"""Of the socket to it, for tests that look for what was left open."""


def serve(requests: socket.socket) -> None:
    """Fork for each request, until the other end is closed."""
    while True:
        head, fds, *_ = socket.recv_fds(requests, _HEAD.size, 64)
        if not head:
            os._exit(0)
        size, num_fds = _HEAD.unpack(head)
        data = b""
        while len(data) < size:
            if not (more := requests.recv(size - len(data))):
                os._exit(0)
            data += more
        assert len(fds) == num_fds
        read, write = os.pipe()
        between = os.fork()
        if not between:
            if not (worker := os.fork()):
                _work(json.loads(data), fds)
            os.write(write, struct.pack("I", worker))
            os._exit(0)  # from now on the worker is a child of the test process
        os.waitpid(between, 0)
        requests.sendall(os.read(read, 4))
        for fd in (read, write, *fds):
            os.close(fd)


def _work(request: dict[str, Any], fds: list[int]) -> None:
    import fcntl

    from aengine.workers import entry

    code = 1
    try:
        os.setsid()
        while os.getppid() != int(request["argv"][0]):  # until the process between has ended
            os.sched_yield()
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE) for fd in fds]
        os.closerange(0, _FIRST_FREE)
        for fd, wanted in zip(moved, (0, 1, 2, *request["fds"]), strict=True):
            os.dup2(fd, wanted)
            os.close(fd)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = [entry.__file__, *request["argv"]]
        code = entry.main(request["argv"])
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import importlib

    importlib.import_module(str(target_of("aengine.workers", "default")).partition(":")[0])
    importlib.import_module("aengine.runner.startup.load")
    importlib.import_module("aengine.runner.models")
    importlib.import_module("aengine.workers.worker")
    gc.collect()
    gc.freeze()  # else the forks' first collections would copy every page
    serve(socket.socket(fileno=int(sys.argv[1])))
