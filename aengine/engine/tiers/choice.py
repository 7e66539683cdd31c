"""The tiers of one replica, as the setting ``kv_tiers`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...config import EngineConfig
from ..executor import Executor
from ..scheduler.kv_elsewhere import KVElsewhere
from .host_memory import HostMemory, page_bytes_of
from .kv_tiers import KVTiers
from .page_copies import PageCopies


def new_tiers(
    config: EngineConfig, ready: dict[str, Any], executor: Callable[[], Executor], wake: Callable[[], None]
) -> KVElsewhere:
    """Return what keeps a replica's KV beyond its device. ``ready``: what its workers say of themselves; ``executor``:
    returns that of the workers that run; ``wake``: called when requests need not wait for pages any longer. Raises
    NotEnoughMemoryError."""
    page_bytes = page_bytes_of(ready)
    if not config.kv_tiers or not all(page_bytes):  # an encoder, or a worker of another kind, keeps no KV
        return KVElsewhere()
    host = config.kv_tiers[0]
    memory = HostMemory(host.num_bytes // config.data_parallel_size, page_bytes)
    tiers = KVTiers(memory.num_places)
    PageCopies(tiers, memory, executor, wake)
    return tiers
