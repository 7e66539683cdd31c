"""KV beyond the pool, for whoever begins with it: what the scheduler asks of it.

    offered in the pool ──> kept elsewhere            a waiting request whose prefix goes on there ──fetch──> its pages
    evicted from the pool                             are on their way, WAITING_FOR_PAGES ──> cached, and it waits again

A request that waits for pages has no row, and holds up nobody: others are admitted past it. Its pages come as blocks
of the pool that are cached, so that it begins with them as with any other prefix, and what did not come is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from .kv_cache_manager import KVCacheManager, Prefix
from .request import Request


class KeptPages(NamedTuple):
    """Numbers of one place where KV is kept; counts are since the engine's start."""

    where: str
    num_pages: int
    num_bytes: int
    num_saved: int  # pages that were brought there
    num_fetched: int  # pages that came from there because a request began with them
    num_lost: int  # pages that should have come, and were computed again


class KVElsewhere:
    """Here: nothing is kept."""

    waiting: Collection[Request] = ()
    """Requests that wait for pages."""

    def begin_worker(self, kv: KVCacheManager, wake: Callable[[Request], None]) -> None:
        """Take a new worker's blocks, all of them empty; copies under way have come to nothing. ``wake`` is called with
        each request that need not wait any longer."""

    def fetch(self, request: Request, prefix: Prefix, spare: int) -> bool:
        """Make a request that is in no queue wait for pages, if its prefix goes on elsewhere after ``prefix``, which
        the pool has. At most ``spare`` blocks may be taken. False: it should begin with that."""
        return False

    def discard(self, request: Request) -> None:
        """Drop a request that ended while it waited."""

    def forget(self, *, everywhere: bool) -> None:
        """Forget what the pool has; ``everywhere``: and what is kept here."""

    def held(self) -> Iterable[list[int]]:
        """Return the blocks of the pool that copies under way hold, as tables."""
        return ()

    def counts(self) -> Sequence[KeptPages]:
        """Return how much is kept where, nearest first."""
        return ()

    def close(self) -> None:
        """Give all memory back: nothing will be asked any more."""
