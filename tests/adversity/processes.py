"""Hosts that are killed, and the search for what they leave behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import psutil

HERE = Path(__file__).parent
_PR_SET_CHILD_SUBREAPER = 36
MOST_SECONDS = 60.0
"""Longest wait for what should take two: the machine may be busy with other things."""


@contextmanager
def subreaper() -> Iterator[None]:
    """Within: orphans become this process's children, so that none can hide."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Host:
    """``host_program.py`` in a process of its own. One at a time: an orphan does not tell whose it is.

    ``with``: nothing of it is left at the end, whatever happens.
    """

    def __init__(self, scenario: str, *options: object) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._before = _descendants()
        command = [sys.executable, str(HERE / "host_program.py"), scenario, *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self.pid = self.process.pid

    def until(self, word: str) -> None:
        """Read on until it has said ``word``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(f"the host ended before it said {word!r}; on stderr:\n{self.errors()}")

    def rest(self) -> list[str]:
        """What it still says, to its end."""
        assert self.process.stdout is not None
        return self.process.stdout.read().split("\n")[:-1]

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(60)

    def others(self) -> list[psutil.Process]:
        """Its descendants and its orphans that are alive, or its own zombies."""
        found = []
        for process in _descendants() - self._before:
            try:
                orphaned = process.ppid() == os.getpid()
                if process.pid != self.pid and not (orphaned and process.status() == psutil.STATUS_ZOMBIE):
                    found.append(process)
            except psutil.NoSuchProcess:
                pass
        return found

    def names(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if f"aengine-{self.pid}-" in name]

    def descriptors(self) -> list[str]:
        folder = f"/proc/{self.pid}/fd"
        return [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]

    def seconds_until_nothing_is_left(self, but: int = 0) -> float:
        """No process (``but`` so many of the host's own) and no name in /dev/shm."""
        begun = time.monotonic()
        while True:
            others, names = self.others(), self.names()
            seconds = time.monotonic() - begun
            if len(others) <= but and not names:
                return seconds
            assert seconds < MOST_SECONDS, f"left after {seconds:.1f} s: {others}, {names}; stderr:\n{self.errors()}"
            time.sleep(0.005)

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine = [process for process in _descendants() - self._before if process.pid != self.pid]
        self.process.kill()
        self.process.wait()
        for process in mine:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for process in _descendants() - self._before:  # orphans: ours to bury
            try:
                process.wait(10)
            except (psutil.NoSuchProcess, psutil.TimeoutExpired):
                pass
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
