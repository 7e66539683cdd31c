"""Keys that requests show: `ApiKeys` of those who ask the model, `AdminKey` of who changes the engine."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request

from ...errors import InvalidRequestError
from ..http import HTTPError


class Lock(Protocol):
    """What a request needs to reach an endpoint."""

    def check(self, request: Request) -> None:
        """Raise HTTPError 401 or 403 unless the request shows what opens it."""


def shown_key(request: Request) -> bytes:
    """Return the key that a request shows, as the bytes that came. b"": none."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    given = shown.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return given.encode("latin-1")


class ApiKeys:
    """Opens for each of several keys; without any for everybody. Raises InvalidRequestError: nobody could show one."""

    def __init__(self, keys: Sequence[str], param: str = "api_keys", named: str = "the API key") -> None:
        self.keys, self._named = tuple(keys), named
        if not all(keys):
            message = f"an API key is empty: give none at all (None) instead of {param}=''"
            raise InvalidRequestError(message, param=param)
        if any(key != key.strip() or "\n" in key for key in keys):
            message = "an API key begins or ends with white space, which no header keeps"
            raise InvalidRequestError(message, param=param)

    @property
    def has_keys(self) -> bool:
        """Whether a request needs to show one."""
        return bool(self.keys)

    def knows(self, key: str) -> bool:
        """Whether it opens for this key."""
        return key in self.keys

    def check(self, request: Request) -> None:
        """See `Lock`. The time that it takes says nothing of the keys."""
        if not self.keys:
            return
        shown_bytes = shown_key(request)
        if not any(hmac.compare_digest(shown_bytes, key.encode("utf-8", "surrogateescape")) for key in self.keys):
            raise self.refused()

    def refused(self) -> HTTPError:
        """Return the error of a request without a key that opens."""
        message = f"{self._named} is wrong or missing: Authorization: Bearer KEY"
        return HTTPError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class AdminKey(ApiKeys):
    """Opens the routes that change the engine: for one key, which opens nothing else, and without it for nobody.

    Raises InvalidRequestError: the key is one of those that open the model.
    """

    def __init__(self, key: str | None, others: ApiKeys) -> None:
        super().__init__([] if key is None else [key], "admin_key", "the admin key")
        if key is not None and others.knows(key):
            raise InvalidRequestError("admin_key is one of api_keys: it must be another", param="admin_key")

    def check(self, request: Request) -> None:
        """See `Lock`."""
        if not self.keys:
            message = (
                "requests can't change this engine: start the server with --admin-key KEY or AENGINE_ADMIN_KEY "
                "(create_app(admin_key=...)), and show that key"
            )
            raise HTTPError(403, message, kind="permission_error", code="admin_key_not_set")
        super().check(request)
