"""A folder of compiled code, for which a later process need not compile again.

Its files are run, so none is read that somebody else could have written: folder and files belong to this user, and
nobody else may write to them. A file's name is its key; it begins with the SHA-256 of the key and the code. Where code
can't be kept or read (a full disk, no home, a damaged file), it is compiled anew, and one line is logged.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ....__version__ import __version__
from ....config import model_cache
from .target import Target

logger = logging.getLogger("aengine.runner")

MOST_FILES = 1024
"""Files that are kept; beyond, those that were not used for longest are removed."""

MOST_BYTES = 64 << 20
"""A larger file is not read; a module's code has some kilobytes."""

_DIGEST_BYTES = 32
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # to open a pipe would wait for its other end
_LINKS = {errno.ELOOP: "links are not followed", errno.ENOTDIR: "it is a link, or no folder"}


def digest_of_sources(folder: Path) -> str:
    """The SHA-256 of the Python files of a folder and those below it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


_FOLDER = Path(__file__).parents[1]
_SOURCES = digest_of_sources(_FOLDER)  # now, as they are being imported: they may be edited while a process runs


def code_key(names: Iterable[str], target: Target) -> str:
    """What a module's machine code depends on, as a file's name: the functions in it, the processor and its compiler,
    and the kernels' sources."""
    text = f"{__version__}\n{_SOURCES}\n{target.key}\n{' '.join(names)}"
    return hashlib.sha256(text.encode()).hexdigest()


class CodeCache:
    """Machine code by its key. Concurrent processes may share the folder. No method raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_logged = False

    def read(self, key: str) -> bytes | None:
        """Return the code that was written; None: there is none that can be trusted."""
        try:
            with self._opened() as folder, self._file(key, folder) as file:
                _check_owner(file.fileno())
                content = file.read(MOST_BYTES + 1)
                with suppress(OSError):
                    os.utime(file.fileno())  # it was used now
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log(error)
            return None
        code = content[_DIGEST_BYTES:]
        if len(content) > MOST_BYTES or content[:_DIGEST_BYTES] != _digest(key, code):
            self._log(f"{key} is damaged")
            return None
        return code

    def write(self, key: str, code: bytes) -> None:
        if digest_of_sources(_FOLDER) != _SOURCES:
            return  # the code may be of newer sources than the key
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder:
                temporary = f".{secrets.token_hex(8)}"
                try:
                    created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
                    with open(created, "wb") as file:
                        file.write(_digest(key, code) + code)
                    os.replace(temporary, key, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    with suppress(OSError):
                        os.unlink(temporary, dir_fd=folder)
                    raise
                _remove_oldest(folder)
        except OSError as error:
            self._log(error)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder's descriptor: what is done by it is done in the folder that was checked."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        try:
            _check_owner(folder)
            yield folder
        finally:
            os.close(folder)

    @staticmethod
    def _file(key: str, folder: int) -> BinaryIO:
        descriptor = os.open(key, os.O_RDONLY | _OPEN, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, f"{key} is no file")
        return open(descriptor, "rb")

    def _log(self, problem: OSError | str) -> None:
        if self._has_logged:
            return
        self._has_logged = True
        if isinstance(problem, OSError):
            why = _LINKS.get(problem.errno or 0) or problem.strerror
            problem = f"{why}: mend that, or set XDG_CACHE_HOME to a folder of your own"
        logger.info("kernels are compiled anew, for seconds, as code in %s is not usable: %s", self._folder, problem)


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _check_owner(descriptor: int) -> None:
    """Raises PermissionError: others may write to a file or folder."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to the user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others may write to it (chmod go-w)")


def _remove_oldest(folder: int) -> None:
    ages = []
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # another process has removed it
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages)[:-MOST_FILES]:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def code_cache() -> CodeCache:
    """The cache of this user, in the folder that has the one of models."""
    return CodeCache(model_cache().parent / "kernels")
