"""What holds of a `Scheduler` between any two calls, whatever was called before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import RequestStatus

if TYPE_CHECKING:
    from .scheduler import Scheduler

__all__ = ["check_scheduler"]

_CATCHING_UP, _DECODING, _DRAINING = RequestStatus.CATCHING_UP, RequestStatus.DECODING, RequestStatus.DRAINING


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises AssertionError. Walks over everything."""
    leaving = [request for step in scheduler._in_flight for request in step.leavers]
    scheduler._kv.check((*scheduler._running, *leaving))
    rows = [request.req_idx for request in scheduler._running]
    unfinished = (*scheduler._running, *scheduler._held, *scheduler._waiting, *scheduler._siblings.following)
    assert scheduler.num_constrained == sum(request.grammar is not None for request in unfinished)
    assert sorted(rows + scheduler._free_rows) == list(range(scheduler.num_rows)), "a row was lost or given twice"
    assert scheduler._held == {request for request in leaving if request.finish_reason is None}
    assert all(r.status is _CATCHING_UP for r in scheduler._running if r.is_paused)
    by_status = {status: {r for r in scheduler._running if r.status is status} for status in RequestStatus}
    decoding = [request for request in scheduler._decoding.requests if request.status is _DECODING]
    assert len(decoding) == len(by_status[_DECODING]) and set(decoding) == by_status[_DECODING]
    assert len(scheduler._catching_up) == len(by_status[_CATCHING_UP])
    assert set(scheduler._catching_up) == by_status[_CATCHING_UP]
    assert sum(map(len, by_status.values())) == len(decoding) + len(scheduler._catching_up) + len(by_status[_DRAINING])
    for request in scheduler._running:
        assert 0 < request.num_computed_tokens <= scheduler._kv.room(request), (
            f"{request} has no block for what it computed"
        )
        assert len(request.token_ids) + request.num_pending <= request.max_num_tokens
    keys = [request.sort_key for request in scheduler._waiting]
    assert keys == sorted(keys) and all(r.status is RequestStatus.WAITING for r in scheduler._waiting)
    scheduler._siblings.check()
