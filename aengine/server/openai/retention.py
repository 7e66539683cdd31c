"""Sessions over HTTP: whose turn a request is, and for how long its KV is kept after it.

prompt_cache_key, previous_response_id ──> session_id, one of this caller's own
prompt_cache_retention, cache_control  ──> keep, at most what the application allows
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple


class Asker(NamedTuple):
    """Whose the key is that a request has shown."""

    cache_root: str | None = None
    """What those have in common that find each other's prefixes; None: the body's ``cache_salt`` alone says it."""
    tenant: str | None = None

    def options(self, salt: str | None) -> dict[str, Any]:
        """Return the options of a request. Nobody of another root has the same salt, whatever bodies say."""
        if self.cache_root is None:
            return {}
        said = json.dumps([self.cache_root, salt]).encode()
        return {"tenant": self.tenant, "cache_salt": hashlib.sha256(said).hexdigest()}


ANYBODY = Asker()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and for how long its KV may be kept."""

    key: bytes = b""
    """The API key that was shown."""
    max_keep: float = 0.0
    asker: Asker = ANYBODY

    def seconds(self, wanted: float | None) -> float | None:
        """Return for how long KV is kept of those that are wanted. None: not at all."""
        return None if wanted is None else min(wanted, self.max_keep) or None

    def options(self, salt: str | None, session: str | None, wanted: float | None) -> dict[str, Any]:
        """Return the options of a request. ``session``: what the caller calls it; nobody with another key or salt can
        name the same."""
        own = self.asker.options(salt)
        if not self.max_keep:
            return own
        named = None if session is None else self._named(salt, session)
        return own | {"session_id": named, "keep": self.seconds(wanted)}

    def _named(self, *parts: str | None) -> str:
        texts = [self.key, *((part or "").encode("utf-8", "surrogatepass") for part in parts)]
        digest = hashlib.blake2b(digest_size=20)
        for text in texts:
            digest.update(len(text).to_bytes(8, "little") + text)
        return f"http-{digest.hexdigest()}"
