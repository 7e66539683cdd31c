"""Trials: grammars that may take llguidance long are compiled in a process first, which is killed when they do.

    host, a pool thread                                  child: child.py, run by path
    Trials.run ── the grammar and the vocabulary, ─────> reads both, builds the library's tables
        │         in a file without a name: its stdin    │
        │ <────── READY ─────────────────────────────────┤
        │ <────── DONE and what the library says, or ────┘ compiles
        └─ kill   the end of the pipe

A compile can't be stopped inside a process. What is compiled can't be sent to another process, so a grammar that passes
its trial is compiled once more in the host, where it takes about as long. Few grammars are tried, two of a thousand
schemas of MaskBench, so each has a process of its own, which takes half a second to start; nothing stays.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack

from ....config import PACKAGE_FOLDER
from ..backend import OnWait
from ..vocabulary import Vocabulary, in_turns

READY, DONE = b"r", b"d"
MAX_BYTES = 1 << 30
"""What a compile may take: a grammar that passes takes as much in the host."""
_START_SECONDS = 20.0
"""A child that is not ready after this long is taken for dead."""


class TrialError(Exception):
    """The grammar took too long or too much memory, or there is no process to try it in."""


class Trials:
    """Runs trials, one in each thread that calls `run`. Starts no process before the first."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        """``seconds``: that a compile may take, counted from when its process is ready."""
        self.seconds = seconds
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def run(self, grammar: str, on_wait: OnWait | None = None) -> str:
        """Return the library's error message for ``grammar``; "" if it compiles. Blocking. Raises TrialError.

        ``on_wait``: told True when it begins to wait for the process to start, and False when it waits no more.
        """
        if self._closed:
            raise TrialError("it may take long, and the engine is closed")
        try:
            process = self._start(grammar)
        except OSError as error:
            raise TrialError(f"it may take long, and the process to try that in does not start ({error})") from error
        assert process.stdout is not None
        with process.stdout as answer:
            try:
                return self._result(process, answer.fileno(), on_wait)
            finally:
                with self._lock:
                    self._running.discard(process)
                process.kill()
                process.wait()

    def close(self) -> None:
        """Kill what runs; from any thread. Further trials fail."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def _start(self, grammar: str) -> subprocess.Popen[bytes]:
        """Start a child process that compiles ``grammar``. Raises OSError."""
        search_path = [str(PACKAGE_FOLDER.parent), *(folder for folder in sys.path if os.path.isabs(folder))]
        command = [_interpreter(), "-P", str(Path(__file__).with_name("child.py")), str(os.getpid()), str(MAX_BYTES)]
        command.append(os.pathsep.join(search_path))
        with open(os.memfd_create("trial"), "w+b") as file:
            file.writelines(_packed(grammar, self._vocabulary))
            file.seek(0)
            process = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with self._lock:
            self._running.add(process)
            if self._closed:
                process.kill()
        return process

    def _result(self, process: subprocess.Popen[bytes], source: int, on_wait: OnWait | None) -> str:
        if on_wait is not None:
            on_wait(True)
        try:
            first = _read(source, 1, _START_SECONDS)
        finally:
            if on_wait is not None:
                on_wait(False)
        if first != READY:
            why = "is not ready in time" if first is None else f"ended with code {process.wait()}"
            raise TrialError(f"it may take long, and the process to try that in {why}")
        answer = _read(source, -1, self.seconds)
        if answer is None:
            raise TrialError(f"it takes longer than {self.seconds:g} s to compile")
        if not answer.startswith(DONE):
            code = process.wait()
            if code == -signal.SIGSEGV:
                raise TrialError("its references lead too deep")
            raise TrialError(f"compiling it takes more than {MAX_BYTES >> 30} GB (code {code})")
        return answer[1:].decode(errors="replace")


def _packed(grammar: str, vocabulary: Vocabulary) -> Iterator[bytes]:
    """Yield both in pieces, as packing all tokens at once would hold the GIL for 10 ms."""
    texts, special_ids = vocabulary.token_bytes, list(vocabulary.special_ids)
    header = {"vocab_size": vocabulary.vocab_size, "eos_ids": vocabulary.eos_ids, "special_ids": special_ids}
    yield msgpack.packb(grammar)
    yield msgpack.packb(header)
    for i in in_turns(range(len(texts))):
        yield msgpack.packb(texts[i])


def _read(source: int, size: int, seconds: float) -> bytes | None:
    """Return ``size`` bytes, or what comes until the end (-1; or sooner); None after ``seconds``."""
    deadline = time.monotonic() + seconds
    poll = select.poll()  # unlike select(), it takes any descriptor
    poll.register(source, select.POLLIN)
    data = b""
    while len(data) != size:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        part = os.read(source, 65536 if size < 0 else size)
        if not part:
            break
        data += part
    return data


def _interpreter() -> str:
    """Return a Python of the host's installation: sys.executable, unless the host is a program that embeds Python."""
    if os.path.basename(sys.executable or "").startswith("python"):
        return sys.executable
    return os.path.join(sys.exec_prefix, "bin", "python3")
