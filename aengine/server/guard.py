"""`Guard`: which Host and which Origin a request may come with, for servers of which only the machine is the key.

Any web page that its user opens may send requests to an address of the user's machine, and by a name of its own that
leads there (DNS rebinding) it may also read the answers. A browser says where the page is from, and which name it asked
for: `Origin` and `Host`, which no page can set.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from ..errors import InvalidRequestError
from .http import HTTPError

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d*)?", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")


def checked_hosts(hosts: Iterable[str]) -> list[str]:
    """Return the names as requests show them, or raise InvalidRequestError."""
    for host in hosts:
        if host != "*" and not _HOST.fullmatch(host):
            message = f"{host!r} is no host: a name such as llm.example, without scheme and path, or '*'"
            raise InvalidRequestError(message, param="allow_hosts")
    return [host.lower() for host in hosts]


def checked_origins(origins: Iterable[str]) -> list[str]:
    """Return the origins as browsers show them, or raise InvalidRequestError."""
    shown = [origin.lower().removesuffix("/") for origin in origins]
    for origin in shown:
        if not _ORIGIN.fullmatch(origin):
            message = f"{origin!r} is no origin: scheme and host as in https://chat.example, without a path, or '*'"
            raise InvalidRequestError(message, param="allow_origins")
    return shown


class Guard:
    """Checks the headers of requests.

    Args:
        hosts: names that a request may ask for, beside localhost and IP addresses; "*": all. From `checked_hosts`.
        origins: of pages elsewhere that may send requests, as "https://chat.example"; "*": all. From `checked_origins`.
    """

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._hosts = set(hosts)
        self._origins = set(origins)

    def check(self, headers: Headers) -> None:
        """Raise HTTPError 403 for a foreign Host or Origin."""
        hosts = [host.strip().lower() for host in headers.getlist("host")]
        for host in hosts:
            if not self._is_known(host):
                message = f"requests for the host {host[:100]!r} are refused: --allow-host (allow_hosts) admits it"
                raise HTTPError(403, message, kind="permission_error", code="host_not_allowed")
        for origin in headers.getlist("origin"):
            if not self._is_own(origin.strip().lower(), hosts):
                message = f"requests of pages of {origin[:100]!r} are refused: --allow-origin (allow_origins) admits it"
                raise HTTPError(403, message, kind="permission_error", code="origin_not_allowed")

    def _is_known(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").removesuffix(".")
        return name == "localhost" or _is_address(name) or not self._hosts.isdisjoint(("*", name, host))

    def _is_own(self, origin: str, hosts: list[str]) -> bool:
        """Return whether a page is the server's own, by whichever scheme a proxy shows it, or of an origin that is
        allowed."""
        if not self._origins.isdisjoint(("*", origin)):
            return True
        try:
            scheme, place, *rest = urlsplit(origin)
        except ValueError:
            return False
        return scheme in ("http", "https") and not any(rest) and place in hosts


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
