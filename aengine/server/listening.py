"""Sockets that are bound before an engine starts, so that an address in use is known at once."""

from __future__ import annotations

import errno
import os
import socket
import stat

from ..errors import EngineError

__all__ = ["bind_tcp", "bind_unix", "url_of"]


def bind_tcp(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Bind ``count`` sockets to one address; several share its connections evenly. Nobody can connect before `listen`.

    Args:
        port: 0: any that is free.

    Raises:
        EngineError: the address is in use, or no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise EngineError(f"{host}:{port} is no address to listen on: {error.strerror or error}") from None
    sockets: list[socket.socket] = []
    try:
        # Without SO_REUSEPORT: another server of this user could share the port otherwise, and nobody would know.
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            address = trial.getsockname()
        for _ in range(count):
            sockets.append(listener := socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if count > 1:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise EngineError(_reason(f"{host}:{port}", error)) from None
    return sockets


def _reason(address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another program: stop it, or choose another --port"
    return f"can't listen on {address}: {error.strerror or error}"


def bind_unix(path: str, mode: int) -> socket.socket:
    """Bind a Unix socket whose file has ``mode``. The file of a program that is gone is replaced.

    Raises:
        EngineError: a program listens on it, it is a file of another kind, or it can't be made.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, mode)  # before it listens
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


def url_of(listener: socket.socket) -> str:
    """Return where a client finds it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
