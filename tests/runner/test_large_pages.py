"""Memory of a file without a name: its bytes are the file's, in large pages or small ones."""

from __future__ import annotations

import errno
import os
import random

import pytest

from aengine.runner.tiers.large_pages import SIZE, make_pages, map_file


def test_bytes_are_those_of_the_file(rng: random.Random) -> None:
    num_bytes = 3 * SIZE + 5 * 4096
    fd = os.memfd_create("test-pages", os.MFD_CLOEXEC)
    os.truncate(fd, num_bytes)
    os.pwrite(fd, b"before", SIZE - 3)
    memory, other = map_file(fd, num_bytes), map_file(fd, num_bytes)
    assert memory.nbytes == num_bytes and memory.data_ptr() % SIZE == 0
    borders = [0, *sorted(rng.sample(range(4096, num_bytes, 4096), 2)), num_bytes]
    for begin, end in zip(borders, borders[1:], strict=False):
        make_pages(fd, memory, begin, end)
    assert os.fstat(fd).st_blocks * 512 >= num_bytes
    assert bytes(memory[SIZE - 3 : SIZE + 3].tolist()) == b"before"
    place = rng.randrange(num_bytes - 8)
    memory[place : place + 8] = 7
    assert os.pread(fd, 8, place) == b"\7" * 8 and other[place] == 7
    make_pages(fd, memory, 0, num_bytes)  # as by the next worker
    assert os.pread(fd, 8, place) == b"\7" * 8
    os.close(fd)


def test_a_file_that_can_not_be_mapped_is_an_error() -> None:
    fd = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    with pytest.raises(OSError) as caught:
        map_file(fd, 4096)
    assert caught.value.errno in (errno.ENODEV, errno.EACCES)
    os.close(fd)
