"""Copies of pages that a replica's workers are asked for, on both kinds of loops."""

from __future__ import annotations

from typing import Any

from conftest_api import until

from aengine.engine.scheduler.kv_cache_manager import KVCacheManager
from aengine.engine.tiers.host_memory import HostMemory
from aengine.engine.tiers.kv_tiers import KVTiers
from aengine.engine.tiers.page_copies import PageCopies
from aengine.errors import WorkerDiedError
from aengine.ipc.messages import KVCacheGroup


class Workers:
    """The executor of workers that copy at once, or are dead."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        self.calls.append(method)
        if self.failure is not None:
            raise self.failure
        return [8] if method == "pinned_pages" else [[]]


async def test_pages_are_saved_soon_if_they_are_many() -> None:
    tiers, workers, woken = KVTiers(8), Workers(), []
    kv = KVCacheManager(8, [KVCacheGroup("full", 4)], 8)
    tiers.begin_worker(kv, lambda request: None)
    copies = PageCopies(tiers, HostMemory(8 * 16, [16]), lambda: workers, woken.append)
    for number, block_id in enumerate(kv.pool.allocate(3)):
        kv.pool.offer(block_id, bytes([number]))
    await until(lambda: tiers.num_saved == 3)
    assert workers.calls == ["map_pages", "pinned_pages", "copy_pages"] and woken == [False]
    workers.failure = WorkerDiedError("gone")
    kv.pool.offer(kv.pool.allocate(1)[0], b"other")
    await until(lambda: len(workers.calls) == 4)
    await until(lambda: not tiers.jobs)
    assert tiers.num_kept == 3 and woken == [False, False]
    copies.close()
