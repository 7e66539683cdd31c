"""Memory of a file, in pages of 2 MB where the system makes some: pinning it then takes a tenth of the time.

The driver looks at each page that it pins, and no step is launched meanwhile: on an H100's host 3 GB a second of pages
of 4 KB, and 35 of these. Linux makes large ones of a file without a name on request alone (MADV_COLLAPSE, since 6.1),
where the mapping and the file are aligned alike. Where it makes none there are small ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

SIZE = 2 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_file(fd: int, num_bytes: int) -> Tensor:
    """Return a file's first bytes as uint8 [num_bytes], at an address that is a multiple of a large page's size. Raises
    OSError."""
    reserved = torch.frombuffer(mmap.mmap(-1, num_bytes + SIZE), dtype=torch.uint8)  # unmapped with its last view
    memory = reserved[-reserved.data_ptr() % SIZE :][:num_bytes]
    how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(memory.data_ptr(), num_bytes, *how, fd, 0) != memory.data_ptr():
        raise OSError(ctypes.get_errno(), "the host's memory can't be mapped")
    return memory


def make_pages(fd: int, memory: Tensor, begin: int, end: int) -> None:
    """Have the system make the pages of these bytes of `map_file`'s memory. Raises OSError: there are not so many."""
    first, last = -(-begin // SIZE) * SIZE, end // SIZE * SIZE
    for place in range(first, last, SIZE):  # a large page is made around what is there
        os.posix_fallocate(fd, place, 1)
    if first < last:
        _libc.madvise(memory.data_ptr() + first, last - first, _MADV_COLLAPSE)
    os.posix_fallocate(fd, begin, end - begin)
