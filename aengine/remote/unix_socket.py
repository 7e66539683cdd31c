"""Unix sockets: their paths, and one to listen on."""

from __future__ import annotations

import os
import socket
import stat

from ..errors import EngineError
from ..limits.values import not_valid


def socket_path(path: str | os.PathLike[str]) -> str:
    """Return the path as a text. Raises InvalidRequestError for what names no file."""
    try:
        place = os.fsdecode(path)
        if os.fsencode(place) and "\0" not in place:
            return place
    except (TypeError, UnicodeEncodeError):  # no path; a lone surrogate
        pass
    raise not_valid("path", path, "the path of a Unix socket")


def bind_unix(path: str, mode: int) -> socket.socket:
    """Bind a Unix socket whose file has ``mode``. The file of a program that is gone is replaced.

    Raises:
        EngineError: a program listens on it, it is a file of another kind, or it can't be made.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, mode)  # set before the socket listens
    except OSError as error:
        listener.close()
        what = "the path is too long" if "too long" in str(error) else error.strerror or error
        raise EngineError(f"can't listen on {path}: {what}") from None
    return listener


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise EngineError(f"can't listen on {path}: it is there, and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
            trial.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
        return
    except FileNotFoundError:
        return
    except OSError as error:
        raise EngineError(f"can't listen on {path}: {error.strerror or error}") from None
    raise EngineError(f"{path} is in use by another program")
