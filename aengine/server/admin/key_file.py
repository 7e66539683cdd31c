"""`KeyFile`: keys of tenants, in a file that may change while it is served.

    [[keys]]                            # TOML; the file should be readable by its owner alone (chmod 600)
    sha256 = "9f86d081884c7d65..."      # of the key, in hex; or the key itself: key = "sk-..."
    tenant = "acme"                     # whose requests those with this key are; without: nobody's, as with --api-key
    cache_group = "friends"             # keys of the same group find each other's prefixes in the cache

    [tenants.acme]                      # as of the setting `tenants`
    weight = 2

What a key's requests leave in the prefix cache is found by those of its tenant, or its group, alone: their salts, with
what a body says in ``cache_salt``, are made here.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ...engine.threads.pools import run_in_thread
from ...errors import AEngineError, InvalidRequestError
from ...limits.bounds import MAX_NAME_CHARACTERS, MAX_TENANTS
from ...limits.tenants import checked_tenants, read_toml
from ...limits.values import is_unicode
from ..http import HTTPError
from ..openai.retention import Asker
from .keys import ApiKeys, shown_key

logger = logging.getLogger("aengine.server")

_LOOK_SECONDS = 1.0
"""At most so often it is looked whether the file has changed."""
_DIGEST = re.compile("[0-9a-f]{64}")
_NO_KEY = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    asker: Asker


class KeyFile(ApiKeys):
    """Opens for each key of the file, and for ``keys`` beside them. Blocking: reads it. Raises InvalidRequestError."""

    def __init__(self, path: str | os.PathLike[str], keys: Sequence[str] = ()) -> None:
        super().__init__(keys)
        self._path = os.fspath(path)
        self._seen: object = None  # what the file was when it was read last
        self._looked = time.monotonic()
        self._loading: asyncio.Future[None] | None = None
        self._entries: Sequence[_Entry] = ()
        self._load()

    @property
    def has_keys(self) -> bool:
        """See `ApiKeys`."""
        return True

    def knows(self, key: str) -> bool:
        """See `ApiKeys`."""
        return super().knows(key) or self._asker_of(key.encode("utf-8", "surrogateescape")) is not None

    def check(self, request: Request) -> None:
        """See `Lock`. The time that it takes says nothing of the keys. Who asks is noted in the request's state."""
        if time.monotonic() - self._looked > _LOOK_SECONDS and self._loading is None:
            self._looked = time.monotonic()
            if self._state() != self._seen:
                self._loading = asyncio.ensure_future(self._reload())
        asker = self._asker_of(shown_key(request))
        if asker is None:
            if not self.keys:
                raise self.refused()
            super().check(request)
            asker = Asker("")
        elif asker.tenant is not None and request.scope["path"].rstrip("/").endswith(("/metrics", "/stats")):
            message = "this key is a tenant's, and that tells of all of them: show one without a tenant"
            raise HTTPError(403, message, kind="permission_error", code="not_for_tenants")
        request.state.asker = asker

    def _asker_of(self, key: bytes) -> Asker | None:
        digest, found = hashlib.sha256(key).digest(), None
        for entry in self._entries:  # all of them: where it was found is not to be timed
            if hmac.compare_digest(digest, entry.digest):
                found = entry.asker
        return found

    def _state(self) -> object:
        try:
            found = os.stat(self._path)
        except OSError as error:
            return error.errno
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode

    async def _reload(self) -> None:
        try:
            await run_in_thread("keys", self._load)
            logger.info("the keys of %s were read anew: there are %d", self._path, len(self._entries))
        except AEngineError as error:
            logger.error("%s; those that were read before hold on", error)
        finally:
            self._loading = None

    def _load(self) -> None:
        self._seen = self._state()
        content = read_toml(self._path, "api_keys_file")
        checked_tenants(content.get("tenants"))
        listed = content.get("keys")
        if not isinstance(listed, list) or not 0 < len(listed) <= MAX_TENANTS:
            raise self._wrong(f"it needs 1 to {MAX_TENANTS} tables [[keys]]")
        entries = [self._entry(number, one) for number, one in enumerate(listed, 1)]
        if len({entry.digest for entry in entries}) < len(entries):
            raise self._wrong("two of its keys are the same")
        if isinstance(self._seen, tuple) and self._seen[3] & 0o077:
            logger.warning("%s can be read by other users of this machine: chmod 600 it", self._path)
        self._entries = entries

    def _entry(self, number: int, given: Any) -> _Entry:
        """Return an entry. Errors say its place alone: what it has may be a key in the wrong field."""
        known = {"key", "sha256", "tenant", "cache_group"}
        if not isinstance(given, Mapping) or not given.keys() <= known:
            raise self._wrong(f"key {number}: there may be {', '.join(sorted(known))}, and nothing else")
        key, digest = given.get("key"), given.get("sha256")
        if (key is None) == (digest is None):
            raise self._wrong(f"key {number}: it needs key or sha256, and not both")
        if key is not None:
            if not isinstance(key, str) or not key or key != key.strip() or "\n" in key or not is_unicode(key):
                raise self._wrong(f"key {number}: it must be a text without white space at its ends")
            made = hashlib.sha256(key.encode()).digest()
        elif not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
            raise self._wrong(f"key {number}: sha256 must be 64 hexadecimal digits")
        elif (made := bytes.fromhex(digest)) == _NO_KEY:
            raise self._wrong(f"key {number}: that is no key's sha256, but that of nothing")
        for name in ("tenant", "cache_group"):
            value = given.get(name)
            if value is None:
                continue
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS or not is_unicode(value):
                raise self._wrong(f"key {number}: {name} must be a text of 1 to {MAX_NAME_CHARACTERS} characters")
        tenant, group = given.get("tenant"), given.get("cache_group")
        root = "" if tenant is group is None else json.dumps(["group", group] if group else ["tenant", tenant])
        return _Entry(made, Asker(root, tenant))

    def _wrong(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"the file of keys {self._path!r} is wrong: {what}", param="api_keys_file")
