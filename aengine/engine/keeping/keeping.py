"""`Keeping`: for how long the KV of sessions is kept, on the engine's loop.

    a request begins    what its session keeps is kept until it ends, however long it waits
    it ends             what a next request with its tokens would find is kept from now on, for as long as it asks
    the time has come   one timer for all sessions has the pools forget those that were kept for too long

All that is kept is known to the pools alone (`KeptBlocks`): a new worker has a new one, in which nothing is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from .kept_blocks import KeptBlocks, Session

if TYPE_CHECKING:
    from ...params import CallOptions
    from ..scheduler.request import Request
    from ..scheduler.scheduler import Scheduler
    from ..user_request import UserRequest

_TICK = 0.25
"""Least seconds from one look at all sessions to the next."""


class HasScheduler(Protocol):
    """A replica."""

    @property
    def scheduler(self) -> Scheduler: ...


class Turn(Protocol):
    """What a request has to do with its session."""

    def __call__(self, request: UserRequest) -> None:
        """Called once, when the request ends, while its tokens are known."""


def no_turn(request: UserRequest) -> None:
    """Keep nothing."""


class Keeping:
    """Keeps the KV of requests that ask for it, in the pools of all replicas."""

    def __init__(self, loop: asyncio.AbstractEventLoop, replicas: Iterable[HasScheduler]) -> None:
        self._loop = loop
        self._replicas = replicas
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf  # when the timer goes off

    def begin(self, options: CallOptions, request_id: str) -> Turn:
        """Note that a request begins. Returns what is to be called at its end."""
        if options.session_id is None and not options.keep:
            return no_turn
        session = _session(options.cache_salt, options.session_id or "", "" if options.session_id else request_id)
        for blocks in self._pools():
            blocks.keep_until(session, math.inf)
        return partial(self._end_turn, session, options.keep or 0.0)

    def keep(self, session_id: str, seconds: float, *, cache_salt: str | None = None) -> bool:
        """Keep what the session keeps for ``seconds`` from now; 0: no more. Returns whether there was anything.

        While a turn of it waits or runs, its own ``keep`` counts from its end on.
        """
        session, until = _session(cache_salt, session_id), self._loop.time() + seconds
        if not seconds:
            return any(blocks.end(session) for blocks in self._pools())
        self._wake_at(until)
        return any(blocks.change(session, until) for blocks in self._pools())

    def _end_turn(self, session: Session, seconds: float, request: UserRequest) -> None:
        until = self._loop.time() + seconds
        if not request.requests:  # it has never had tokens, so what was kept is as good as before
            for blocks in self._pools():
                blocks.keep_until(session, until)
        else:
            for blocks in self._pools():
                blocks.end(session)
            replica = request.replica
            if seconds and replica is not None:
                kept = blocks_to_keep(replica.scheduler, request.requests)
                _blocks_of(replica).keep(session, kept, until, request.account)
        self._wake_at(until)

    def _pools(self) -> Sequence[KeptBlocks]:
        return [_blocks_of(replica) for replica in self._replicas]

    def _wake_at(self, time: float) -> None:
        """Look at all sessions at that time, if not before."""
        time = max(time, self._loop.time() + _TICK)
        if time < self._looks_at:
            self.close()
            self._looks_at = time
            self._timer = self._loop.call_at(time, self._expire)

    def _expire(self) -> None:
        self._timer, self._looks_at = None, math.inf
        now = self._loop.time()
        self._wake_at(min(blocks.expire(now) for blocks in self._pools()))

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._looks_at = None, math.inf


def blocks_to_keep(scheduler: Scheduler, requests: Iterable[Request]) -> list[int]:
    """Return the blocks with which next requests could begin that continue these, those of their beginnings first."""
    found = [scheduler.rows.kv.match(request) for request in requests]
    block_ids = [block_id for prefix in found for table in prefix.tables for block_id in table.block_ids]
    block_ids += [page for prefix in found for page in prefix.kept]
    return list(dict.fromkeys(block_ids))


def _session(cache_salt: str | None, name: str, request_id: str = "") -> Session:
    return (cache_salt or "").encode(), name, request_id


def _blocks_of(replica: HasScheduler) -> KeptBlocks:
    blocks = replica.scheduler.rows.kv.pool.idle
    assert isinstance(blocks, KeptBlocks)
    return blocks
