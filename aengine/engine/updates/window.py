"""A bounded piece of memory through which tensors go to the workers of this machine."""

from __future__ import annotations

import mmap
import os

WINDOW_BYTES = 64 << 20
"""However large a tensor is, no more of it is on its way: it comes in pieces."""


class Window:
    """A file in memory without a name: workers open it by this process' id and descriptor, and nothing is left of it
    when either ends."""

    def __init__(self, num_bytes: int = WINDOW_BYTES) -> None:
        """Raises OSError: no descriptor or no memory is left."""
        self.fd = os.memfd_create("aengine-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, num_bytes)
            self._map = mmap.mmap(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view.release()
            self._map.close()
