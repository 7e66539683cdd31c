"""Invariants of a `Scheduler`, which hold between any two calls."""

from __future__ import annotations

from aengine.engine.scheduler.request import Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.scheduler.waiting_queue import ServingOrder
from aengine.engine.tiers.kv_tiers import KVTiers

_CATCHING_UP, _DECODING, _DRAINING = RequestStatus.CATCHING_UP, RequestStatus.DECODING, RequestStatus.DRAINING


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises AssertionError. Walks over everything."""
    rows, waiting, parallel_sampling = scheduler.rows, scheduler.waiting, scheduler.parallel_sampling
    leaving = [request for step in rows.steps for request in step.leavers]
    rows.kv.check((*rows.running, *leaving), rows.elsewhere.held())
    if isinstance(rows.elsewhere, KVTiers):
        rows.elsewhere.check()
    used = [request.req_idx for request in rows.running]
    apart = (*parallel_sampling.waiting, *rows.prefixes.waiting, *rows.elsewhere.waiting)
    unfinished = (*rows.running, *rows.held, *waiting, *apart)
    assert scheduler.num_constrained == sum(request.grammar is not None for request in unfinished)
    assert sorted(used + rows.free_rows) == list(range(scheduler.num_rows)), "a row was lost or given twice"
    assert rows.held == {request for request in leaving if request.finish_reason is None}
    assert all(r.status is _CATCHING_UP for r in rows.running if r.is_paused)
    by_status = {status: {r for r in rows.running if r.status is status} for status in RequestStatus}
    decoding: list[Request] = []
    for batch in rows.batches:
        own = [r for r in batch.requests if r.status is _DECODING and r.batch_index == batch.index]
        assert batch._is_stale or own == batch.requests  # who left, perhaps for another batch, is in it until its turn
        assert batch.num_rows == sum(r.batch_index == batch.index for r in rows.running)
        decoding += own
    assert len(decoding) == len(by_status[_DECODING]) and set(decoding) == by_status[_DECODING]
    assert len(rows.catching_up) == len(by_status[_CATCHING_UP])
    assert set(rows.catching_up) == by_status[_CATCHING_UP]
    assert sum(map(len, by_status.values())) == len(decoding) + len(rows.catching_up) + len(by_status[_DRAINING])
    for request in rows.running:
        assert 0 < request.num_computed_tokens <= rows.kv.room(request), f"{request} has no block for what it computed"
        assert len(request.token_ids) + request.num_pending <= request.max_num_tokens
    for account in {request.account for request in waiting}:
        keys = [request.sort_key for request in waiting if request.account is account]
        assert keys == sorted(keys)
    assert len(list(waiting)) == len(waiting) and all(r.status is RequestStatus.WAITING for r in waiting)
    if type(rows.order) is not ServingOrder:
        check_accounts(scheduler, unfinished)
    parallel_sampling.check()
    rows.prefixes.check()


def check_accounts(scheduler: Scheduler, unfinished: tuple[Request, ...]) -> None:
    """Assert that each account of requests knows how many have a row and how many wait, if there is one scheduler."""
    rows = scheduler.rows
    for account in {request.account for request in unfinished} - {None}:
        assert account.num_running == sum(request.account is account for request in rows.running)
        assert account.num_waiting == sum(request.account is account for request in scheduler.waiting)
        assert account.is_queued == (account.num_waiting > 0 and account.has_room)
