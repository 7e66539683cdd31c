"""`bind_tcp`: sockets that are bound before an engine starts, so that an address in use is known at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

from ..errors import EngineError


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
        # SO_REUSEPORT is not set: another server of this user could share the port unnoticed.
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


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only programs of this machine, browsers among them, reach the address over TCP."""
    if listener.family == socket.AF_UNIX:
        return False
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def url_of(listener: socket.socket) -> str:
    """Return where a client finds it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
