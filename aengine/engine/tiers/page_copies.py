"""`PageCopies`: has a replica's workers make the copies that its `KVTiers` asks for, beside their steps.

KVTiers.on_work ──> call "copy_pages" of all ranks ──> on a side stream ──> replies ──> KVTiers.end ──> it wakes
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

from ...errors import EngineError
from ..executor import Executor
from .host_memory import HostMemory
from .kv_tiers import KVTiers, PageJob

logger = logging.getLogger("aengine")

_SAVE_SECONDS = 0.1  # seconds for which pages to save are gathered, unless there are many
_PINNING_SECONDS = 0.1  # seconds between two looks at how much is pinned
_MOST_SAVING = 2  # jobs that save at a time: one waits for the steps under way, which may be long
_TIMEOUT = 60.0  # seconds that a copy takes at most; a worker that takes longer is ended


class PageCopies:
    """Runs on the engine's loop."""

    def __init__(
        self, tiers: KVTiers, memory: HostMemory, executor: Callable[[], Executor], wake: Callable[[bool], None]
    ) -> None:
        """``executor``: returns that of the workers that run now; ``wake``: called when there are free blocks that were
        held, and with whether requests need not wait any longer."""
        self._tiers = tiers
        self._memory = memory
        self._executor = executor
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_urgent = False  # the timer is due at once
        self._num_saving = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._mapped: Executor | None = None  # the workers that have mapped the memory, or are told to
        tiers.on_work, tiers.on_close = self._note_work, self.close
        tiers.unusable = tiers.places.allocate(tiers.places.num_free)
        self._start(self._prepare())

    def close(self) -> None:
        """End, and let go of the memory."""
        self._tiers.on_work = lambda: None
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._memory.close()

    async def _prepare(self) -> None:
        """Have the memory mapped, and use what the workers have pinned of it."""
        while self._tiers.unusable:
            try:
                executor = self._executor()
                await self._map(executor)
                self._tiers.use_places(min(await executor.call("pinned_pages", timeout=_TIMEOUT)))
            except (EngineError, TimeoutError) as error:  # they are being started again, say
                logger.debug("the host's memory for KV is not ready: %s", error)
            await asyncio.sleep(_PINNING_SECONDS)

    async def _map(self, executor: Executor) -> None:
        if self._mapped is not executor:
            self._mapped = executor
            where = os.getpid(), list(self._memory.fds), self._memory.num_places
            await executor.call("map_pages", *where, timeout=_TIMEOUT)

    def _note_work(self) -> None:
        may_save = self._tiers.has_many_unsaved and self._num_saving < _MOST_SAVING
        is_urgent = may_save or bool(self._tiers.fetches)
        if is_urgent and not self._is_urgent:
            if self._timer is not None:
                self._timer.cancel()
            self._is_urgent, self._timer = True, self._loop.call_later(0, self._send)
        elif self._timer is None:
            self._timer = self._loop.call_later(_SAVE_SECONDS, self._send)

    def _send(self) -> None:
        self._is_urgent, self._timer = False, None
        jobs = self._tiers.take_fetches()
        if self._num_saving < _MOST_SAVING and (saves := self._tiers.take_saves()) is not None:
            self._num_saving += 1
            jobs.append(saves)
        for job in jobs:
            self._start(self._copy(job))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name="aengine-page-copies")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _copy(self, job: PageJob) -> None:
        executor, lost = self._executor(), set(range(len(job.names)))
        columns = array("i", job.pages).tobytes(), array("i", job.places).tobytes()
        try:
            await self._map(executor)
            lost = set().union(*await executor.call("copy_pages", job.is_fetch, *columns, timeout=_TIMEOUT))
        except TimeoutError:
            executor.fail(EngineError(f"a copy of {len(job.pages)} pages of KV took more than {_TIMEOUT:g} s"))
        except EngineError as error:
            if executor.failure is None:
                logger.warning("%d pages of KV were not copied: %s", len(job.pages), error)
        finally:
            self._num_saving -= not job.is_fetch
            self._tiers.end(job, lost)
            if self._tiers.unsaved:
                self._note_work()
        self._wake(bool(job.requests))
