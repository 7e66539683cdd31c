"""The start of all ranks, seen from the host: progress, offers, the agreed plan, and what the ranks then have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import EngineError
from ...ipc.messages import Kind
from ...outputs import StartupProgress
from ..agreement import agree, merge
from ..rank import Rank

logger = logging.getLogger("aengine")


class Handshake:
    """Takes the frames of a start, on the loop. See agreement.py for what is agreed."""

    KINDS = (Kind.PROGRESS, Kind.PROFILED, Kind.READY)

    def __init__(self, ranks: Sequence[Rank], on_progress: Callable[[StartupProgress], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ranks = ranks
        self._on_progress = on_progress
        self._offers: list[asyncio.Future[dict[str, Any]]] = [loop.create_future() for _ in ranks]
        self._readies: list[asyncio.Future[dict[str, Any]]] = [loop.create_future() for _ in ranks]
        self._agreed: dict[str, Any] = {}
        self._stages: list[str] = []  # names of the stages, in the order in which the first rank reached them
        self._now: dict[int, StartupProgress] = {}  # the last report of each rank
        self._reports: dict[str, dict[int, StartupProgress]] = {}  # the last report by stage and rank

    def take(self, index: int, kind: Kind, message: dict[str, Any]) -> None:
        """Handle a frame that the rank ``index`` has sent."""
        if kind is Kind.PROGRESS:
            self._progress(index, StartupProgress(**message))
            return
        future = (self._offers if kind is Kind.PROFILED else self._readies)[index]
        if not future.done():
            future.set_result(message)

    async def agreed(self) -> dict[str, int]:
        """Return the plan, when all ranks have been profiled. Raises what `fail` was given, or ModelLoadError."""
        offers = await asyncio.gather(*self._offers)
        plan = agree(self.ranks, offers)
        self._agreed = {**offers[0], **plan}
        return plan

    async def ready(self, replica: int | None = None) -> dict[str, Any]:
        """Return what was agreed and the READYs of all ranks, or those of a replica, merged, when all are ready. Raises
        as `agreed` does."""
        own = [rank for rank in self.ranks if replica in (None, rank.dp_rank)]
        readies = await asyncio.gather(*self._readies)
        return merge(own, self._agreed, [readies[rank.index] for rank in own])

    def fail(self, error: EngineError) -> None:
        """Fail everything that waits with ``error``. Idempotent."""
        for future in (*self._offers, *self._readies):
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
                future.exception()  # retrieved here: asyncio would warn about it if nobody waits

    def slowest(self) -> tuple[int, str]:
        """Return the rank that is furthest behind, and the stage that it last reported."""
        silent = [rank.index for rank in self.ranks if rank.index not in self._now]
        if silent:
            return silent[0], "exec"
        index = min(self._now, key=lambda index: self._stages.index(self._now[index].stage))
        return index, self._now[index].stage

    def _progress(self, index: int, progress: StartupProgress) -> None:
        """Report how far all are with what the slowest of those that have begun does: ``done`` and ``total`` are
        sums."""
        self._now[index] = progress
        if progress.stage not in self._stages:
            self._stages.append(progress.stage)
        reports = self._reports.setdefault(progress.stage, {})
        reports[index] = progress
        if len(self.ranks) > 1:
            stage = min((report.stage for report in self._now.values()), key=self._stages.index)
            reports = self._reports[stage]
            done, total = (sum(getattr(r, name) for r in reports.values()) for name in ("done", "total"))
            at = sum(report.stage == stage for report in self._now.values())
            unit = next(iter(reports.values())).unit
            progress = StartupProgress(stage, done, total, unit, f"{at} of {len(self.ranks)} ranks")
        try:
            self._on_progress(progress)
        except Exception:
            logger.exception("the callback for the progress of the start failed")
