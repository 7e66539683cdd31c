"""Single rules of a tier in the host's memory; that tokens are right is shown by test_scheduler_properties.py."""

from __future__ import annotations

from scheduler_harness import Driver
from test_scheduler import make

from aengine.engine.scheduler.request import RequestStatus
from aengine.outputs import FinishReason

PROMPT = list(range(1, 33))


def driver_of(**changes: int) -> Driver:
    limits = {"num_blocks": 12, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64} | changes
    return Driver(num_tier_places=64, **limits)


def evicted(num_others: int = 1, **changes: int) -> Driver:
    """Whose tier has a prompt that the pool has not."""
    driver = driver_of(**changes)
    driver.add(PROMPT, max_tokens=1)
    driver.drain()
    for i in range(num_others):
        driver.add([49 - (token + i) % 49 for token in PROMPT], max_tokens=9, min_tokens=9)
        driver.drain()
    assert driver.tiers is not None and driver.tiers.num_kept >= 8
    return driver


def test_who_waits_for_pages_holds_up_nobody() -> None:
    driver = evicted()
    (waiting,) = driver.add(PROMPT, max_tokens=2, min_tokens=2)
    driver.schedule()
    assert waiting.status is RequestStatus.WAITING_FOR_PAGES and waiting.req_idx < 0
    (other,) = driver.add([7] * 5, max_tokens=2, min_tokens=2, arrival_time=1)
    while other.finish_reason is None:
        driver.schedule()
        driver.answer()
    assert waiting.status is RequestStatus.WAITING_FOR_PAGES
    driver.drain()
    assert waiting.num_cached_tokens == 28


def test_others_wait_for_the_same_copy() -> None:
    driver = evicted(3, num_blocks=24)
    first, second = (driver.add(PROMPT, max_tokens=2, min_tokens=2, seed=seed)[0] for seed in range(2))
    driver.schedule()
    driver.take_jobs()
    assert len(driver.jobs) == 1 and first.status is second.status is RequestStatus.WAITING_FOR_PAGES
    driver.scheduler.finish(first, FinishReason.ABORT)
    driver.drain()
    assert second.num_cached_tokens == 28


def test_what_does_not_come_is_computed_and_forgotten() -> None:
    driver = evicted()
    (request,) = driver.add(PROMPT, max_tokens=2, min_tokens=2)
    driver.schedule()
    driver.take_jobs()
    driver.end_job(loses=True)
    assert driver.tiers is not None and driver.tiers.num_lost == 1
    driver.drain()
    assert request.num_cached_tokens < 28


def test_what_is_not_saved_yet_is_no_more_than_the_pool_has() -> None:
    driver = driver_of()
    assert driver.tiers is not None
    for turn in range(9):
        driver.scheduler.add_request(make(21, 1, name=str(turn), seed=turn))
        while driver.scheduler.num_running or driver.scheduler.num_waiting:
            driver.schedule()
            driver.answer()
        driver.scheduler.rows.kv.pool.forget_all()
        assert len(driver.tiers.unsaved) <= driver.scheduler.num_blocks
