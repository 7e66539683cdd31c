"""`KVStore`: the interface of what keeps pages of KV outside of an engine.

A package adds a store by an entry point, which names a class; the options of its `StoreTier` are its arguments:

    [project.entry-points."aengine.kv_stores"]
    mine = "mine.stores:MyStore"

``AsyncLLM(model, kv_tiers=[HostTier("40GB"), StoreTier("mine", url="...")])`` then makes ``MyStore(url="...")``.

A key says all that a page depends on: the model's weights and their version, what they are computed in, the rank, the
tokens from the first one on, the caller's ``cache_salt``. So what has a key never changes, whoever saves it, and a
store may drop any page at any time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

KEY_BYTES = 32
"""Bytes of a key."""


class KVStore(Protocol):
    """Keeps pages by key. Its methods block, and are called in threads, several at a time. What they raise is logged,
    and the store is left alone for a while; so it is when a call takes too long."""

    def query(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys have a page here."""

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bool]:
        """Fill the page of each key. Returns which of them were filled, with every byte as it was saved; what else was
        written to a page is of no account."""

    def save(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        """Keep a copy of each page. The memory is another's when this returns."""

    # A store that knows how many bytes it has may say so by an attribute ``num_bytes``, which statistics show.

    def close(self) -> None:
        """Let go of all that the store holds here. No other call runs then, and none follows."""


def checksum(key: bytes, page: memoryview | bytes) -> int:
    """Return the CRC-32 of a page and its key. It finds what a disk or a network has damaged, at 3.9 GiB a second; of
    blake2b, which also finds what was forged, it would be 0.9."""
    return zlib.crc32(page, zlib.crc32(key))
