"""Preempted requests whose KV is kept in the host's memory, and what happens where it is not."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_harness import Driver
from test_scheduler import make, reply, step

from aengine.engine.scheduler.rows import forget_prefixes
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.scheduler.swapped_requests import SwappedRequests
from aengine.ipc.messages import KV_LOST, KVCacheGroup, RowError
from aengine.outputs import FinishReason

FULL = KVCacheGroup("full", 4)
SMALL: dict[str, Any] = {"num_blocks": 12, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}


def run_of_many(
    num_places: int, groups: list[KVCacheGroup] | None = None, *, loses: bool = False, **changes: Any
) -> Driver:
    """Requests that grow until the pool has room for one or two of them."""
    limits = SMALL | changes
    limits["kv_groups"] = groups or [KVCacheGroup("full", limits["block_size"])]
    del limits["block_size"]
    driver = Driver(num_places=num_places, enable_prefix_caching=False, **limits)
    driver.worker.lose_next = loses
    for i in range(6):
        driver.add([i + 1] * 9, max_tokens=24, min_tokens=24, seed=i, arrival_time=i)
    driver.drain()
    assert driver.scheduler.rows.num_preemptions > 0
    return driver


def test_nothing_is_computed_twice() -> None:
    without, driver = run_of_many(0), run_of_many(48)
    assert driver.worker.num_restored > 0
    assert driver.worker.num_computed == 6 * (9 + 24 - 1) < without.worker.num_computed


@pytest.mark.parametrize("num_places", [1, 5])
def test_who_has_no_place_is_computed_again(num_places: int) -> None:
    driver = run_of_many(num_places)
    assert (driver.worker.num_restored > 0) == (num_places == 5)
    assert driver.worker.num_computed > 6 * (9 + 24 - 1)


def test_blocks_that_have_left_a_window_do_not_come_back() -> None:
    window = KVCacheGroup("window", 4, 7)
    driver = run_of_many(48, [window, FULL], num_blocks=20)
    assert driver.worker.num_restored > 0
    assert driver.worker.num_computed == 6 * (9 + 24 - 1)


def preempted(num_places: int = 8) -> tuple[Scheduler, SwappedRequests, list[Any]]:
    """Two requests of 6 blocks on 7: the second was preempted, and its copies are in the step that is returned."""
    kept = SwappedRequests(num_places, [FULL])
    scheduler = Scheduler(
        num_blocks=7,
        kv_groups=[FULL],
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=24,
        enable_prefix_caching=False,
        preempted=kept,
    )
    requests = [make(10, 14, name=name) for name in ("first", "second")]
    for request in requests:
        scheduler.add_request(request)
    out = step(scheduler)
    while not out.page_copies:
        reply(scheduler, out, [7] * len(out.req_idx))
        out = step(scheduler)
    assert requests[1].is_preempted and kept.num_kept == 3
    return scheduler, kept, [*requests, out]


def test_an_aborted_request_leaves_its_places() -> None:
    scheduler, kept, (first, second, out) = preempted()
    assert list(out.page_copies[1::2]) == [12, 13, 14] and max(out.page_copies[::2]) < 7
    scheduler.finish(second, FinishReason.ABORT)
    assert kept.num_kept == 0


def test_no_prefix_is_kept_over_a_reset() -> None:
    """The weights may be others by then."""
    scheduler, kept, _ = preempted()
    forget_prefixes(scheduler.rows)
    assert kept.num_kept == 0


def test_a_new_worker_has_none_of_it() -> None:
    scheduler, kept, (first, second, _) = preempted()
    scheduler.preempt_all()
    assert kept.num_kept == 0
    out = step(scheduler)
    assert not out.page_copies and [new.num_computed_tokens for new in out.new_requests] == [0]


def test_a_request_whose_pages_are_lost_is_computed_anew() -> None:
    scheduler, kept, (first, second, out) = preempted()
    while first.finish_reason is None:
        reply(scheduler, out, [7] * len(out.req_idx))
        out = step(scheduler)
    (new,) = out.new_requests
    num_tokens = len(second.token_ids)
    assert new.num_computed_tokens == num_tokens - 1 and list(out.page_copies[::2]) == [12, 13, 14]
    assert kept.num_kept == 0
    lost = [RowError(0, KV_LOST, "gone")]
    later = step(scheduler)  # in flight with it, and as wrong
    assert reply(scheduler, out, [-1], lost) == ([], [])
    assert second.finish_reason is None and second.is_preempted
    assert reply(scheduler, later, [-1], lost) == ([], [])
    out = step(scheduler)
    (new,) = out.new_requests
    assert new.num_computed_tokens == 0 and not out.page_copies
    while second.finish_reason is None:
        reply(scheduler, out, [7])
        out = out if second.finish_reason is not None else step(scheduler)
    assert second.num_output_tokens == 14 and scheduler.num_free_blocks == 7


def test_pages_of_a_window_are_lost_while_no_other_step_is_in_flight() -> None:
    """Then the request has no blocks any more when the rest of that answer is read."""
    driver = run_of_many(48, [KVCacheGroup("window", 4, 7), FULL], num_blocks=18, depth=1, loses=True)
    assert driver.worker.num_lost == 1
