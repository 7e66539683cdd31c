"""What keeps the KV of one replica beyond its device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..executor import Executor
from ..scheduler.kv_elsewhere import KVElsewhere
from ..stores.asked_store import AskedStore
from .host_memory import HostMemory
from .kv_tiers import KVTiers
from .page_copies import PageCopies
from .stored_pages import StoredPages


def new_tiers(
    memory: HostMemory | None,
    executor: Callable[[], Executor],
    wake: Callable[[bool], None],
    seconds_of: Callable[[int], float],
) -> KVElsewhere:
    """Return the tiers over ``memory``; None: nothing is kept. ``executor``, ``wake``: see `PageCopies`;
    ``seconds_of``: see `StoredPages`."""
    if memory is None:
        return KVElsewhere()
    tiers = KVTiers(memory.num_places, page_bytes=memory.page_bytes)
    PageCopies(tiers, memory, executor, wake)
    if memory.stores:
        stores = [AskedStore(*one) for one in memory.stores]
        StoredPages(tiers, memory, stores, partial(wake, True), seconds_of)
    return tiers
