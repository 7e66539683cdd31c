"""`DiskStore`: pages in files of a folder, which outlive the process and may be shared by several.

    <folder>, 0700, ours     kv-pages        bytes that the files take, and the lock of who writes
                             00 ... ff/      named by the first byte of a key
                                 <key>       header and page, 0600
                                 <key>.new   the page that is being written, renamed when it is whole

The folder is the index: what is there is asked of the file system, which takes 3 us a key, so nothing is read at the
start, several processes agree, and a process may be killed at any moment. A file is one page, which costs 40 us more
than a part of a larger file would, beside 110 us for writing 256 KiB; and each page can be dropped by itself.

The time of a file's last change is that of its last use. When the files would take more than the store may, the longest
unused go, for room that is a twentieth of it at least: the files are listed for that, which takes 0.3 s of 100,000.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ...errors import ModelLoadError
from .store import KEY_BYTES, checksum

logger = logging.getLogger("aengine")

_HEADER = struct.Struct("<8sIIQ40s")  # magic, version, checksum, bytes of the page, key
_MAGIC, _VERSION = b"aenginKV", 1
_COUNT, _COUNT_NAME = struct.Struct("<Q"), "kv-pages"
_BLOCK = 4096  # bytes that a file takes are a multiple of it
_SPARE = 20  # a full store makes room for this part of its size at least
_NEW = ".new"  # end of the name of a page that is being written


class DiskStore:
    """A `KVStore` in ``folder``, whose files take at most ``num_bytes`` bytes."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        """Blocking. Raises ModelLoadError: the folder can't be used, or is not this user's alone."""
        self._most_bytes = num_bytes
        self.num_bytes = 0
        """Bytes of the files, as of the last time when pages were saved here."""
        self._mutex = threading.Lock()  # a lock of the file is one of the process
        self._is_counted = False  # after a crash of the machine the count may be of another time than the files
        self._folder = _open_folder(folder)
        handles = [self._folder]
        self._end = weakref.finalize(self, _close, handles)
        try:
            self._count = _open_count(self._folder, folder)
            handles.append(self._count)
            for first in range(256):
                with suppress(FileExistsError):
                    os.mkdir(f"{first:02x}", 0o700, dir_fd=self._folder)
        except OSError as error:
            raise ModelLoadError(f"kv_tiers: DiskTier({folder!r}) can't be written to: {error}") from error

    # -- the interface

    def query(self, keys: Sequence[bytes]) -> int:
        for number, key in enumerate(keys):
            if not self._has(_name_of(key)):
                return number
        return len(keys)

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bool]:
        return [self._load(key, page) for key, page in zip(keys, pages, strict=True)]

    def save(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        with self._locked():
            missing = [(key, page) for key, page in zip(keys, pages, strict=True) if not self._has(_name_of(key))]
            while (needed := sum(_size_of(page) for _, page in missing)) > self._most_bytes:
                missing.pop()
            total = self._make_room(needed)
            self._set_count(total + needed)  # should the process be killed, more is counted than there is
            try:
                for key, page in missing:
                    self._write(key, page)
                    total += _size_of(page)
            finally:
                self._set_count(total)

    def close(self) -> None:
        self._end()

    # -- files

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _load(self, key: bytes, page: memoryview) -> bool:
        name = _name_of(key)
        try:
            self._read(name, key, page)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("A page of the disk tier is removed, and computed again: %s: %s", name, error)
            with suppress(OSError):
                os.unlink(name, dir_fd=self._folder)
            return False
        return True

    def _read(self, name: str, key: bytes, page: memoryview) -> None:
        """Fill the page. Raises OSError: the file can't be read, or is not as it was written."""
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)  # it may be a pipe
        try:
            header = bytearray(_HEADER.size)
            size = os.readv(file, [header, page])
            wanted = _HEADER.pack(_MAGIC, _VERSION, checksum(key, page), len(page), key)
            if not size == len(header) + len(page) == os.fstat(file).st_size or header != wanted:
                raise OSError("it is not as it was written")
            with suppress(OSError):  # the disk may have become one to read from only
                os.utime(file)
        finally:
            os.close(file)

    def _write(self, key: bytes, page: memoryview) -> None:
        name = _name_of(key)
        parts: list[memoryview] = [
            memoryview(_HEADER.pack(_MAGIC, _VERSION, checksum(key, page), len(page), key)),
            page.cast("B"),
        ]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        file = os.open(name + _NEW, flags, 0o600, dir_fd=self._folder)
        try:
            while parts:
                size = os.writev(file, parts)
                while parts and size >= len(parts[0]):
                    size -= len(parts.pop(0))
                if parts:  # as a rule the disk is full, which the next call says
                    parts[0] = parts[0][size:]
            os.rename(name + _NEW, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(name + _NEW, dir_fd=self._folder)
            raise
        finally:
            os.close(file)

    # -- their size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only one of all processes that writes."""
        with self._mutex:
            fcntl.flock(self._count, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._count, fcntl.LOCK_UN)

    def _set_count(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        os.pwrite(self._count, _COUNT.pack(num_bytes), 0)

    def _make_room(self, needed: int) -> int:
        """Remove the longest unused files where the store would have too many with ``needed`` bytes more. Returns the
        bytes of those that stay."""
        read = os.pread(self._count, _COUNT.size, 0)
        if self._is_counted and len(read) == _COUNT.size:
            total = int(_COUNT.unpack(read)[0])
            if total + needed <= self._most_bytes:
                return total
        files = self._listed()
        self._is_counted = True
        total = sum(size for _, size, _ in files)
        if total + needed <= self._most_bytes:
            return total
        most = self._most_bytes - max(needed, self._most_bytes // _SPARE)
        files.sort()
        for _, size, name in files:
            if total <= most:
                break
            with suppress(FileNotFoundError):  # another process has removed it
                os.unlink(name, dir_fd=self._folder)
            total -= size
        return total

    def _listed(self) -> list[tuple[int, int, str]]:
        """Return (time of the last use, bytes, name) of each page's file; what a killed process was writing is
        removed."""
        found = []
        for first in range(256):
            place = os.open(f"{first:02x}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._folder)
            try:
                with os.scandir(place) as entries:
                    for entry in entries:
                        name = f"{first:02x}/{entry.name}"
                        if not (_OWN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
                            continue
                        with suppress(FileNotFoundError):  # a damaged one, which another process has removed
                            if name.endswith(_NEW):
                                os.unlink(name, dir_fd=self._folder)
                            else:
                                state = entry.stat(follow_symlinks=False)
                                found.append((state.st_mtime_ns, _rounded(state.st_size), name))
            finally:
                os.close(place)
        return found


_OWN = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}({re.escape(_NEW)})?")
"""The name of a page's file, or of one that is being written."""


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def _name_of(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}"


def _size_of(page: memoryview) -> int:
    return _rounded(_HEADER.size + len(page))


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _open_folder(folder: str) -> int:
    """Open it, or make it. Everything below is reached by this handle, so it does not matter who may rename the folders
    above. Raises ModelLoadError."""
    where = f"kv_tiers: DiskTier({folder!r})"
    try:
        with suppress(FileExistsError):
            os.makedirs(folder, mode=0o700)
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ModelLoadError(f"{where} is no folder, or a symbolic link: name a folder itself") from error
        raise ModelLoadError(f"{where} can't be opened: {error}; name a folder that this user may write to") from error
    try:
        state = os.fstat(place)
        if state.st_uid != os.geteuid():
            raise ModelLoadError(f"{where} belongs to the user {state.st_uid}: name a folder of this user's own")
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ModelLoadError(
                f"{where} can be written by other users: name another one, or make it anew (mode 0700)"
            )
        if _COUNT_NAME not in (names := os.listdir(place)) and names:
            raise ModelLoadError(f"{where} has other files, and no pages of KV: name an empty folder, or a new one")
        os.fchmod(place, 0o700)
    except BaseException:
        os.close(place)
        raise
    return place


def _open_count(place: int, folder: str) -> int:
    """Open the file that counts. Raises OSError, or ModelLoadError."""
    count = os.open(_COUNT_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
    if not stat.S_ISREG(os.fstat(count).st_mode):
        os.close(count)
        raise ModelLoadError(f"kv_tiers: {folder}/{_COUNT_NAME} is no file: name an empty folder, or a new one")
    return count
