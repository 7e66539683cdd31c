"""Compile each kernel once among the processes that start together and share Triton's cache: ranks, replicas, engines.

Whoever compiles a kernel has the lock of a file by its key meanwhile. Who finds it taken goes on with its next kernel;
a thread beside waits for that one, and then finds it in the cache. So processes that walk through the same kernels in
the same order divide them. The system frees the locks of a process that ends; and nobody waits for long, or where there
is no place for locks: then a kernel is compiled twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import triton

LONGEST_WAIT = 60.0  # seconds; a kernel compiles in one to ten, more only where the process is stopped
_PAUSE = 0.02  # seconds between two looks at a lock
_FOLDER = "aengine-locks"  # folder within Triton's cache


class CompileOnce(triton.AsyncCompileMode):
    """Compiles in threads of ``executor``, ``num_threads`` kernels at a time. The executor has more threads than that,
    as some of them wait for other processes."""

    def __init__(self, executor: Executor, num_threads: int) -> None:
        super().__init__(executor)
        self._places = threading.Semaphore(num_threads)

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """See AsyncCompileMode. ``key``: what Triton's cache finds the kernel by, the same in all processes."""

        def compile_once() -> Any:
            name = hashlib.sha256(str(key).encode()).hexdigest()
            with self._places, _locked(name) as is_mine:
                if is_mine:
                    return self.compiled(compile_fn)
            with _locked(name, LONGEST_WAIT), self._places:
                return self.compiled(compile_fn)

        return super().submit(key, compile_once, finalize_fn)

    def compiled(self, compile_kernel: Callable[[], Any]) -> Any:
        """Return the kernel that ``compile_kernel`` makes, or finds in the cache."""
        return compile_kernel()


@contextmanager
def _locked(name: str, longest_wait: float = 0.0) -> Iterator[bool]:
    """Take the lock ``name``; whether it was free, or became so in ``longest_wait`` seconds. Where none can be made, it
    passes for free."""
    try:
        folder = os.path.join(triton.knobs.cache.dir, _FOLDER)
        os.makedirs(folder, exist_ok=True)
        file = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # the cache's folder can't be written to
        yield True
        return
    try:
        yield _take(file, time.monotonic() + longest_wait)
    finally:
        os.close(file)  # frees the lock


def _take(file: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)
        except OSError:  # a file system without locks
            return True
        else:
            return True
