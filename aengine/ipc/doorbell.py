"""Wake-ups between the two sides: a semaphore for the worker, an eventfd for the host's loop; and the memory fence.

The worker's semaphore is kept at 0 or 1, and its value is all the "parked" flag there is: 1 means *rung and not yet
answered*. A worker about to sleep takes the 1 away and looks at the ring again; only at 0 does it sleep. So the host
posts only where it reads 0, which costs no system call unless the worker really sleeps, and posts can't pile up:

    host, ring()                                worker, wait() then look
      store head                                  semaphore 1 -> 0, or sleep at 0
      fence                                       fence
      value == 0 ?  -> post                       load head

Both sides store, fence, then load what the other stores. So at least one of them sees the other: the host reads 0 and
posts, or the worker finds the frame. Neither order of events loses a wake-up. Reading the value takes 25 ns; measured
over whole round trips it can't be told from posting always (7.0 us each, benchmarks/ring.py).

The worker's waits are measured by the monotonic clock (`sem_clockwait`, glibc 2.30): `sem_timedwait`, which posix_ipc
calls, waits for a time of day, and a clock that is set back by an hour makes it an hour longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import threading
import time
from collections.abc import Callable

import posix_ipc


def is_weakly_ordered() -> bool:
    """Return whether this processor may reorder stores with stores and loads with loads, which is assumed of all but
    x86."""
    return platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")


def new_fence() -> Callable[[], None]:
    """Return a full memory fence, to be called from one thread at a time.

    It releases a private lock and acquires it again. *Release then acquire* is what makes it full: nothing moves
    down past a release or up past an acquire, and the two don't pass each other (store-release and load-acquire are
    RCsc on ARMv8; on x86 both are locked instructions). Acquire then release would let both neighbours in between.
    CPython's lock is a POSIX semaphore (3.13 and before) or a sequentially consistent compare-and-swap, and, unlike
    a named semaphore's acquire, an uncontended one doesn't give up the GIL, so other threads can't hold up a publish.
    """
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release
    acquire()

    def fence() -> None:
        try:
            release()
        except RuntimeError:  # a KeyboardInterrupt has fallen between the two calls before
            acquire()
            release()
        acquire()

    return fence


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library; None when its semaphores can't be awaited by the monotonic clock."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "sem_clockwait"):
        return None
    libc.sem_open.restype = ctypes.c_void_p
    return libc


_MONOTONIC = time.CLOCK_MONOTONIC
_LOOK_AGAIN = 0.001  # seconds between two looks for a name that the host is about to make


class WorkerBell:
    """Wakes a worker. The host makes and rings it; the worker opens it by name, unlinks the name, and waits."""

    def __init__(self, name: str, fence: Callable[[], None]) -> None:
        self._name = name
        self._fence = fence
        self._semaphore: posix_ipc.Semaphore | None = None  # None before `make` and after `close`
        self._monotonic: _MonotonicSemaphore | None = None  # the same, waited for by the monotonic clock where it can

    def make(self) -> None:
        """Give it its name. The worker's process must exist by now: the one that lives longer removes the name."""
        self._semaphore = posix_ipc.Semaphore(self._name, posix_ipc.O_CREX, mode=0o600, initial_value=0)
        self.ring()  # for calls of `ring` that came before there was a semaphore

    @classmethod
    def attach(cls, name: str, fence: Callable[[], None], host_gone: Callable[[], bool]) -> WorkerBell:
        """Open and unlink, as soon as the host has made it. Raises FileNotFoundError once the host has gone."""
        bell = cls(name, fence)
        while bell._semaphore is None:
            gone = host_gone()  # read first: if the host has gone by now, it makes nothing later
            try:
                bell._semaphore = posix_ipc.Semaphore(name)
            except posix_ipc.ExistentialError:
                if gone:
                    raise FileNotFoundError(f"the semaphore {name} does not exist: the host has gone") from None
                time.sleep(_LOOK_AGAIN)
        libc = _libc()
        if libc is not None:
            bell._monotonic = _MonotonicSemaphore(libc, name)
        bell.unlink()
        return bell

    def ring(self) -> None:
        """Wake the worker, or keep it from going to sleep. The caller has fenced since its last store."""
        semaphore = self._semaphore
        if semaphore is not None and semaphore.value == 0:
            semaphore.release()

    def wait(self, timeout: float) -> bool:
        """Sleep until rung, at most ``timeout`` seconds. True: rung (or interrupted), look again."""
        assert self._semaphore is not None
        try:
            if self._monotonic is not None:
                return self._monotonic.acquire(timeout)
            self._semaphore.acquire(timeout)
        except posix_ipc.BusyError:
            return False
        except posix_ipc.SignalError:
            return True
        finally:
            self._fence()
        return True

    def unlink(self) -> None:
        """Remove the name; idempotent, either side may have been first."""
        if self._semaphore is not None:
            with contextlib.suppress(posix_ipc.ExistentialError):
                self._semaphore.unlink()

    def close(self) -> None:
        if self._semaphore is not None:
            self._semaphore.close()
            self._semaphore = None
        if self._monotonic is not None:
            self._monotonic.close()
            self._monotonic = None


class _MonotonicSemaphore:
    """A named semaphore that exists, opened once more by the C library, which gives the same mapping to all."""

    def __init__(self, libc: ctypes.CDLL, name: str) -> None:
        self._libc = libc
        self._address = ctypes.c_void_p(libc.sem_open(name.encode(), 0))
        self._clockwait = libc.sem_clockwait
        self._timespec = (ctypes.c_long * 2)()

    def acquire(self, timeout: float) -> bool:
        """Take 1, waiting at most ``timeout`` seconds. True also when a signal interrupted it. For one thread."""
        clock, timespec = time.monotonic_ns, self._timespec
        deadline = clock() + int(timeout * 1e9)
        timespec[0], timespec[1] = divmod(deadline, 1_000_000_000)
        return not self._clockwait(self._address, _MONOTONIC, timespec) or clock() < deadline

    def close(self) -> None:
        self._libc.sem_close(self._address)


class LoopBell:
    """Wakes the host's event loop. An eventfd, as a loop can't poll a semaphore; the worker inherits it.

    It is rung for every frame. To ring only for the first frame of a burst would save the worker 0.2 us a frame of
    the rest, and cost the host that an exception between clear() and drain() loses the wake-up; counts add up in the
    eventfd anyway.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> LoopBell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        try:  # contextlib.suppress would take longer than the call
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:  # the counter is full (2**64 - 2 rings), so the descriptor is readable anyway
            pass

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # nobody has rung
            pass

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
