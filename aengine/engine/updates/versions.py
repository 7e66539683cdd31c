"""Which versions of the weights have computed each request."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

FIRST = "0"
"""Version of the weights that an engine starts with."""


class Versioned(Protocol):
    """A request's mailbox, as far as versions concern it."""

    weight_versions: tuple[str, ...]

    @property
    def done(self) -> bool: ...
    @property
    def has_tokens(self) -> bool: ...


class WeightVersions:
    """The version that computes now, and the requests that a next one will go on with."""

    def __init__(self) -> None:
        self.current = FIRST
        self._requests: WeakSet[Versioned] = WeakSet()

    def begin(self, request: Versioned) -> None:
        """Note a new request: the version of now computes it, unless another one comes before its first token."""
        request.weight_versions = (self.current,)
        self._requests.add(request)

    def change(self, version: str) -> None:
        """Let another version compute from now on."""
        self.current = version
        for request in list(self._requests):
            if not request.done:
                before = request.weight_versions if request.has_tokens else ()
                request.weight_versions = (*before, version)
