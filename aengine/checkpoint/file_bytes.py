"""`FileBytes`: the beginning of a file, read as far as it is needed, and parts of the rest.

Read, not mapped: a map of a file that is cut short meanwhile ends the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref
from pathlib import Path

from ..errors import ModelLoadError

_FIRST_READ = 1 << 20


class FileBytes:
    """``data`` is what has been read, from the start on; ``size`` is the file's.

    Every method raises ModelLoadError, naming the file, where it can't be read. `read_to` reads no further than
    ``most`` bytes.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self.data = b""
        self._most = most
        self._map: mmap.mmap | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would be waited for
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from error
        self._close = weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise ModelLoadError(f"can't read {path}: it is a directory, a pipe or a device")
        self.size = found.st_size
        self.read_to(min(_FIRST_READ, self.size))

    def close(self) -> None:
        """Close the file. Views of its map keep that alive. Idempotent."""
        self._close()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is in use; the map goes with it
                self._map.close()

    def read_to(self, end: int) -> None:
        """Read on, at least to ``end``, which lies within the file."""
        if end > self._most:
            raise ModelLoadError(f"{self.path} is damaged: its header has more than {self._most} bytes")
        wanted = min(max(end, 4 * len(self.data)), self.size, self._most)
        if len(self.data) < end:
            self.data += self.read(len(self.data), wanted - len(self.data))

    def read(self, start: int, count: int) -> bytes:
        """Return ``count`` bytes from ``start`` on, which lie within the file."""
        parts, end = [], start + count
        while start < end:
            try:
                part = os.pread(self._fd, end - start, start)
            except OSError as error:
                raise ModelLoadError(f"can't read {self.path}: {error.strerror or error}") from error
            if not part:
                raise ModelLoadError(f"{self.path} was cut short while it was read: fetch it again")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def mapped(self) -> mmap.mmap:
        """Return a map of the whole file, for processes that may be ended by it: workers."""
        if self._map is None:
            try:
                self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"can't map {self.path}: {error}") from error
        return self._map
