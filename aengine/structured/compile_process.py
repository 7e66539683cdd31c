"""Compilers in processes of their own, which can be killed; for any grammar library.

    host, a pool thread                                        child: this file, run by path
    CompilerProcess ──frame: vocabulary, once; a grammar──>    main ── `prepare` of the library's module, its answers
         │          <──frame: its answer───────────────────      │
         └─ kill, when it takes too long                         └─ guard thread: ends it with the host

A compile takes seconds for some grammars and can't be stopped inside a process. A frame is its length in 4 bytes, then
msgpack. The child imports the module that is named to it and calls its ``prepare(vocabulary)``, which returns what
answers a request; what that raises ends the child.
"""

from __future__ import annotations

import importlib
import os
import queue
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["CompileTimeoutError", "CompilerProcess", "CompilerProcesses", "CompilerStartError", "OnWait"]

_LENGTH = struct.Struct("<I")
_LONG_STR = struct.Struct(">BI")
"""How msgpack begins a string of 64 KiB or more."""
_LONG = 1 << 16
_MANY = 128
_START_SECONDS = 20.0
"""A child that is not ready after this long is taken for dead."""

Answer = dict[str, Any]
OnWait = Callable[[bool], None]
"""Told True when a compile begins to wait for its process to start, and False when it waits no more."""


class CompileTimeoutError(Exception):
    """The child took too long, and was killed."""


class CompilerStartError(EOFError):
    """There is no child to compile in."""


class CompilerProcess:
    """One child. For one thread at a time, but `kill` may come from any."""

    def __init__(self, module: str, vocabulary: Answer) -> None:
        """Starts it without waiting until it is ready. Raises OSError."""
        search_path = [str(Path(__file__).parents[2]), *(folder for folder in sys.path if os.path.isabs(folder))]
        command = [_interpreter(), "-P", __file__, str(os.getpid()), module, os.pathsep.join(search_path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._vocabulary: Answer | None = vocabulary  # to be sent first
        self._in_use = threading.Lock()  # its pipes are: a number that is closed may soon be another file's

    @property
    def is_ready(self) -> bool:
        return self._vocabulary is None

    def start(self, timeout: float) -> None:
        """Wait until it is ready: it imports the library and reads the vocabulary. Raises as `compile` does."""
        if self._vocabulary is not None:
            self._ask(self._vocabulary, timeout)
            self._vocabulary = None

    def compile(self, request: Answer, timeout: float) -> Answer:
        """The child's answer. Raises CompileTimeoutError, or EOFError when it died; then it is of no more use."""
        return self._ask(request, timeout)

    def _ask(self, message: Answer, timeout: float) -> Answer:
        deadline = time.monotonic() + timeout
        parts = _frame(message)
        try:
            with self._in_use:
                self._send(parts, deadline)
                (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
                body = self._receive(length, deadline)
        except (OSError, ValueError) as error:  # ValueError: its pipes were closed by kill() before
            raise EOFError(f"the compiler process is gone: {error}") from error
        answer: Answer = _unpack(body)
        return answer

    def kill(self) -> None:
        """At once; the rest, which may take a moment, in a thread. May be called twice."""
        self._process.kill()
        try:
            threading.Thread(target=self._bury, name="aengine-grammar-reaper", daemon=True).start()
        except RuntimeError:  # no thread to be had, as when the interpreter ends
            self._bury()

    def _bury(self) -> None:
        self._process.wait()
        with self._in_use:  # until whoever waits for its answer has seen that it is gone
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:  # what was in it has nowhere to go
                        pass

    def _send(self, parts: list[bytes], deadline: float) -> None:
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        os.set_blocking(fd, False)
        for part in parts:
            data = memoryview(part)
            while data:
                _wait(fd, select.POLLOUT, deadline)
                data = data[os.write(fd, data) :]

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        data = bytearray()
        fd = self._process.stdout.fileno()
        while len(data) < size:
            _wait(fd, select.POLLIN, deadline)
            part = os.read(fd, size - len(data))
            if not part:
                raise EOFError(f"the compiler process ended with code {self._process.poll()}")
            data += part
        return bytes(data)


class CompilerProcesses:
    """Children of one kind: as many as there are threads that compile at once; kept when idle."""

    def __init__(self, module: str, vocabulary: Callable[[], Answer]) -> None:
        """``module``: the child's, by its full name; ``vocabulary``: makes what its ``prepare`` is given."""
        self._module = module
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._idle: list[CompilerProcess] = []
        self._all: set[CompilerProcess] = set()
        self._closed = False

    def start(self) -> None:
        """Have one ready. Raises CompilerStartError."""
        self._give_back(self._ready(None))

    def compile(self, request: Answer, timeout: float, on_wait: OnWait | None = None) -> Answer:
        """A child's answer. The time limit counts from when it is ready, and so may the caller's: see `OnWait`.

        Raises CompileTimeoutError; EOFError when the child died of it; CompilerStartError.
        """
        process = self._ready(on_wait)
        try:
            answer = process.compile(request, timeout)
        except BaseException:
            self._discard(process)
            self._replace()
            raise
        self._give_back(process)
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            doomed, self._all, self._idle = self._all, set(), []
        for process in doomed:
            process.kill()

    def _ready(self, on_wait: OnWait | None) -> CompilerProcess:
        try:
            process = self._take()
        except (EOFError, OSError) as error:
            raise CompilerStartError(str(error)) from error
        if process.is_ready:
            return process
        if on_wait is not None:
            on_wait(True)
        try:
            process.start(_START_SECONDS)
        except BaseException as error:
            self._discard(process)
            if isinstance(error, CompileTimeoutError):
                raise CompilerStartError(f"it was not ready after {_START_SECONDS:g} s") from error
            if isinstance(error, EOFError):
                raise CompilerStartError(str(error)) from error
            raise
        finally:
            if on_wait is not None:
                on_wait(False)
        return process

    def _replace(self) -> None:
        """Start another one now, while nobody waits for it."""
        try:
            self._give_back(self._take())
        except (EOFError, OSError):  # closed, or no process to be had: the next compile says so
            pass

    def _take(self) -> CompilerProcess:
        with self._lock:
            if self._closed:
                raise EOFError("it was closed")
            if self._idle:
                return self._idle.pop()
        process = CompilerProcess(self._module, self._vocabulary())  # may take a while: close() does not wait for it
        with self._lock:
            was_closed: bool = self._closed
            if not was_closed:
                self._all.add(process)
        if was_closed:
            process.kill()
            raise EOFError("it was closed")
        return process

    def _give_back(self, process: CompilerProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)

    def _discard(self, process: CompilerProcess) -> None:
        with self._lock:
            self._all.discard(process)
        process.kill()


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()  # unlike select(), it takes any descriptor
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise CompileTimeoutError


def _interpreter() -> str:
    """A Python of the host's installation: sys.executable, unless the host is a program that embeds Python."""
    if os.path.basename(sys.executable or "").startswith("python"):
        return sys.executable
    return os.path.join(sys.exec_prefix, "bin", "python3")


def _frame(message: Answer) -> list[bytes]:
    """In parts. A vocabulary is packed piece by piece, since all of it would hold the GIL for 10 ms."""
    import msgpack

    packer = msgpack.Packer()
    parts: list[bytes] = [packer.pack_map_header(len(message))]
    for key, value in message.items():
        parts.append(packer.pack(key))
        if isinstance(value, str) and len(value) > _LONG:
            pieces = [value[i : i + _LONG].encode() for i in _in_breaths(len(value), _LONG)]
            parts += [_LONG_STR.pack(0xDB, sum(map(len, pieces))), *pieces]
        elif isinstance(value, list | tuple) and len(value) > _MANY:
            parts.append(packer.pack_array_header(len(value)))
            parts += [b"".join(map(packer.pack, value[i : i + _MANY])) for i in _in_breaths(len(value), _MANY)]
        else:
            parts.append(packer.pack(value))
    return [_LENGTH.pack(sum(map(len, parts))), *parts]


def _in_breaths(stop: int, step: int) -> Iterator[int]:
    for i in range(0, stop, step):
        time.sleep(0)  # as `breathe` does; a loop's thread never comes here
        yield i


def _unpack(body: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(body, strict_map_key=False)


# -- the child


def _main(host_pid: int, module: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else may write between frames
    requests: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=_guard, args=(host_pid, requests), daemon=True).start()
    prepare = importlib.import_module(module).prepare
    answer: Callable[[Answer], Answer] = prepare(requests.get())
    reply: Answer = {}
    while True:
        answers.writelines(_frame(reply))
        answers.flush()
        reply = answer(requests.get())


def _guard(host_pid: int, requests: queue.SimpleQueue[Answer]) -> None:
    """Reads requests; ends the process, whatever it is doing, when the host closes the pipe or is gone."""
    with os.fdopen(0, "rb", buffering=0) as source:
        try:
            while True:
                (length,) = _LENGTH.unpack(_read(source, _LENGTH.size, host_pid))
                requests.put(_unpack(_read(source, length, host_pid)))
        except BaseException:
            os._exit(0)


def _read(source: IO[bytes], size: int, host_pid: int) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while len(data) < size:
        while not poll.poll(1000):
            if os.getppid() != host_pid:  # its pipe may be held open by its forks
                raise EOFError
        part = source.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.path[:] = sys.argv[3].split(os.pathsep)
    _main(int(sys.argv[1]), sys.argv[2])
