"""The shared memory: made, handed over to one child, labelled, and never left behind.

The segment has a name only within `Segment.create`; the child gets the descriptor by inheritance, so no other process
can attach by guessing and nothing is left in /dev/shm, however either side dies. A POSIX semaphore exists by name only:
the host makes it when the child's process is there, and either of them unlinks it (workers/entry.py attaches before it
asks to be killed with the host). `sweep_stale_names` removes those of hosts that died together with their child.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import time
from dataclasses import dataclass

import posix_ipc

from aengine.errors import EngineError
from aengine.limits.ulimits import is_out_of_files, memory_ulimit_hint, open_files_hint

from .layout import (
    CONTROL_BYTES,
    HEARTBEAT,
    LABEL,
    LABEL_BYTES,
    LABEL_MAGIC,
    NOTHING_WANTED,
    VERSION,
    WANTED,
    FrameError,
    bitmask_span,
    ring_span,
    round_capacity,
    segment_bytes,
)

PREFIX = "aengine-"
_VOID = b"\xff" * 8  # written over the magic of a label that is not valid any more
STALE_SECONDS = 60.0
"""Age at which a dead host's name is swept; a live one is unlinked within a second of its making. The age guards
hosts that share /dev/shm but not the pid namespace (containers): theirs look dead."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """All that a child needs to attach, as one word for its argv; useless without the inherited descriptors."""

    shm_fd: int
    event_fd: int
    semaphore: str
    capacity: int
    bitmask_bytes: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.shm_fd},{self.event_fd},{self.semaphore},{self.capacity},{self.bitmask_bytes},{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Parse what ``str`` made of a ticket. Raises ValueError for any other text."""
        try:
            shm_fd, event_fd, semaphore, capacity, bitmask_bytes, nonce = text.split(",")
            return cls(int(shm_fd), int(event_fd), semaphore, int(capacity), int(bitmask_bytes), nonce)
        except ValueError:
            raise ValueError(f"not the description of a channel: {text!r}") from None


class Segment:
    """A mapping of one segment (see `layout`)."""

    def __init__(self, memory: mmap.mmap, capacity: int, bitmask_bytes: int, nonce: str, fd: int = -1) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self.heartbeat = self._view[HEARTBEAT].cast("Q")
        self.capacity = capacity
        self.bitmask_bytes = bitmask_bytes
        self.nonce = nonce
        self.fd = fd  # descriptor of the segment; -1 once it was handed over

    @classmethod
    def create(cls, ring_bytes: int, bitmask_bytes: int = 0) -> Segment:
        """Create the segment in /dev/shm, in some milliseconds. Raises EngineError when there is no room for it, or it
        can't be used."""
        capacity = round_capacity(ring_bytes)
        size = segment_bytes(capacity, bitmask_bytes)
        try:
            # Made empty and unlinked at once: a kill in between leaves an empty name, which the sweep finds.
            shared = posix_ipc.SharedMemory(new_name(), posix_ipc.O_CREX, mode=0o600, size=0)
        except (posix_ipc.Error, OSError) as error:
            raise unusable(error) from error
        try:
            shared.unlink()
            # Takes the pages now. Otherwise a full /dev/shm (64 MB in a container) is a SIGBUS at some later write.
            os.posix_fallocate(shared.fd, 0, size)
            memory = _map(shared.fd, size)
        except OSError as error:
            shared.close_fd()
            if is_out_of_files(error):
                raise unusable(error) from error
            if error.errno == errno.EFBIG:
                limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
                hint = f"`ulimit -f` (RLIMIT_FSIZE) allows files of {limit} bytes: lift it with `ulimit -f unlimited`"
                raise EngineError(f"no shared memory for the rings, {size} bytes ({error}): {hint}") from error
            if error.errno == errno.ENOMEM:
                raise EngineError(f"no memory for {size} bytes of rings ({error}){memory_ulimit_hint()}") from error
            raise EngineError(
                f"no shared memory for the rings, {size} bytes in /dev/shm ({error}): make it larger (docker run "
                f"--shm-size=64m; in Kubernetes mount an emptyDir with medium: Memory there), or use a smaller "
                f"ring_bytes (it is {capacity}, each way)"
            ) from error
        nonce = os.urandom(8).hex()
        segment = cls(memory, capacity, bitmask_bytes, nonce, shared.fd)
        LABEL.pack_into(memory, 0, LABEL_MAGIC, VERSION, capacity, bitmask_bytes, nonce.encode())
        for index in (0, 1):
            region = segment.ring(index)
            with region[:CONTROL_BYTES].cast("Q") as words:
                words[WANTED] = NOTHING_WANTED
            region.release()
        return segment

    @classmethod
    def attach(cls, ticket: Ticket) -> Segment:
        """Map the inherited descriptor and close it. Raises FrameError when it is not the segment of the ticket,
        FileNotFoundError when it is not to be attached to any more."""
        size = segment_bytes(ticket.capacity, ticket.bitmask_bytes)
        try:
            if os.fstat(ticket.shm_fd).st_size != size:
                raise FrameError(f"descriptor {ticket.shm_fd} is not a segment of {size} bytes")
            memory = _map(ticket.shm_fd, size)
        finally:
            os.close(ticket.shm_fd)
        label = LABEL.unpack_from(memory, 0)
        if memory[:8] == _VOID:
            memory.close()
            raise FileNotFoundError("the segment has been taken back: the host has gone, or somebody has attached")
        if label != (LABEL_MAGIC, VERSION, ticket.capacity, ticket.bitmask_bytes, ticket.nonce.encode()):
            memory.close()
            raise FrameError(f"the segment is labelled {label}, which is not the ticket's")
        return cls(memory, ticket.capacity, ticket.bitmask_bytes, ticket.nonce)

    def ring(self, index: int) -> memoryview:
        """Return the memory of ring 0 (host -> worker) or 1 (worker -> host)."""
        return self._view[ring_span(index, self.capacity)]

    def bitmask(self) -> memoryview:
        """Return the ``bitmask_bytes`` after the rings. Whoever holds it keeps it mapped, also past `close`."""
        return memoryview(self._memory)[bitmask_span(self.capacity, self.bitmask_bytes)]

    @property
    def is_void(self) -> bool:
        return self._view[:8] == _VOID

    def void(self) -> None:
        """Invalidate the label: no process can attach from now on."""
        self._view[:8] = _VOID

    def close_fd(self) -> None:
        """Close the descriptor, so that no further child inherits it; the mapping stays. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def close(self) -> None:
        """Unmap the segment. The rings' ends must have been released. Idempotent."""
        self.close_fd()
        self.heartbeat.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a thread still writes a bitmask: it unmaps the memory when done
            self._memory.close()


def _map(fd: int, size: int) -> mmap.mmap:
    assert size > LABEL_BYTES
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def unusable(error: Exception) -> EngineError:
    """Return the error to raise, with its cure, when nothing can be made in /dev/shm."""
    if is_out_of_files(error):
        return EngineError(f"no descriptor is left for shared memory ({error}){open_files_hint()}")
    cause = str(error) if os.path.isdir("/dev/shm") else "there is no such folder"
    return EngineError(
        f"/dev/shm can't be used ({cause}): the engine and its worker share memory by it, so it must be a tmpfs that "
        f"this user may write to. Mount one there: docker run --tmpfs /dev/shm:rw,mode=1777,size=64m, in Kubernetes an "
        f"emptyDir with medium: Memory, elsewhere mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
    )


def new_name() -> str:
    """Return a name for a semaphore or a segment that names its owner and can't be guessed."""
    return f"/{PREFIX}{os.getpid()}-{os.urandom(12).hex()}"


def sweep_stale_names(folder: str = "/dev/shm") -> int:
    """Remove what this user's dead hosts left behind; returns how many names. Never raises."""
    swept = 0
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    for name in names:
        owner = name.removeprefix("sem.").removeprefix(PREFIX).partition("-")[0]
        if not name.startswith((PREFIX, "sem." + PREFIX)) or not owner.isdecimal():
            continue
        with contextlib.suppress(OSError):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE_SECONDS and _is_dead(int(owner)):
                os.unlink(path)
                swept += 1
    return swept


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False
