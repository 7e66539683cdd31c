"""Prefixes that are forgotten: later requests compute them anew, those that run go on."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_harness import VOCAB, Driver
from scheduler_invariants import check_scheduler

from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.rows import forget_prefixes
from aengine.ipc.messages import KVCacheGroup
from aengine.outputs import FinishReason

PROMPT = [1 + i * i % (VOCAB - 1) for i in range(300)]
KINDS = {
    "full": [KVCacheGroup("full", 4)],
    "window": [KVCacheGroup("full", 4), KVCacheGroup("window", 4, 8)],
    "state": [KVCacheGroup("state", 1 << 20), KVCacheGroup("full", 4)],
}


def make_driver(kind: str, **limits: Any) -> Driver:
    how = {"num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64, "least_awaited_prefix": 8}
    return Driver(kv_groups=KINDS[kind], **how | limits)


def add(driver: Driver, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
    (request, *_) = driver.add(prompt, max_tokens=max_tokens, min_tokens=max_tokens, **more)
    return request


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_computed_anew(kind: str) -> None:
    driver = make_driver(kind)
    scheduler = driver.scheduler
    for is_known in (False, True, False, True):
        before = scheduler.prefix_cache_hits
        if before and not is_known:
            assert forget_prefixes(scheduler.rows) > 0 and forget_prefixes(scheduler.rows) == 0
            check_scheduler(scheduler)
            assert scheduler.num_free_blocks == scheduler.num_blocks
        add(driver, PROMPT)
        driver.drain()
        hits = scheduler.prefix_cache_hits - before
        assert hits > 200 if is_known else hits == 0
    driver.expect_idle()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [0, 1, 3, 5, 9])
def test_what_runs_goes_on_and_is_found_by_nobody(kind: str, num_steps: int) -> None:
    """Reset in the middle of its prompt, or of its completion, with a step in flight."""
    driver = make_driver(kind)
    scheduler = driver.scheduler
    first = add(driver, PROMPT, max_tokens=20)
    for _ in range(num_steps):
        driver.schedule()
        driver.answer()
    driver.schedule()
    forget_prefixes(scheduler.rows)
    check_scheduler(scheduler)
    driver.drain()  # the harness knows what each has to get
    assert first.num_output_tokens == 20
    add(driver, first.token_ids)
    driver.drain()
    assert scheduler.prefix_cache_hits == 0
    driver.expect_idle()


def test_what_ran_does_not_go_on_from_what_a_later_one_computed() -> None:
    """The later one's blocks are those of the same tokens; those behind them were computed before the reset."""
    driver = make_driver("full")
    add(driver, PROMPT, max_tokens=20)
    for _ in range(3):
        driver.schedule()
        driver.answer()
    forget_prefixes(driver.scheduler.rows)
    add(driver, PROMPT[:128])
    driver.drain()
    add(driver, PROMPT)
    driver.drain()
    assert 0 < driver.scheduler.prefix_cache_hits <= 132
    driver.expect_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_ends_right_after(kind: str) -> None:
    driver = make_driver(kind)
    first = add(driver, PROMPT, max_tokens=20)
    for _ in range(7):
        driver.schedule()
        driver.answer()
    forget_prefixes(driver.scheduler.rows)
    driver.scheduler.finish(first, FinishReason.ABORT)
    check_scheduler(driver.scheduler)


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_a_prefix_computes_it(kind: str) -> None:
    """Requests that came before and after the reset; what the first of them computes is shared again."""
    driver = make_driver(kind, max_num_batched_tokens=512)
    scheduler = driver.scheduler
    add(driver, PROMPT)
    add(driver, [*PROMPT, 5])
    driver.schedule()
    assert scheduler.rows.prefixes.waiting
    forget_prefixes(scheduler.rows)
    assert not scheduler.rows.prefixes.waiting
    add(driver, [*PROMPT, 6])
    driver.drain()
    assert 200 < scheduler.prefix_cache_hits <= len(PROMPT)
    driver.expect_idle()


def test_a_request_that_was_preempted_meanwhile_is_right() -> None:
    driver = make_driver("full", num_blocks=90)
    first = add(driver, PROMPT[:120], max_tokens=40)
    second = add(driver, PROMPT[100:220], max_tokens=40)
    for _ in range(8):
        driver.schedule()
        driver.answer()
    forget_prefixes(driver.scheduler.rows)
    third = add(driver, PROMPT[:120], max_tokens=40)
    driver.drain()
    assert all(request.finish_reason is not None for request in (first, second, third))
    driver.expect_idle()


def test_completions_of_one_call() -> None:
    """The others of a call wait for the first one's prompt, which they compute anew after a reset."""
    driver = make_driver("full")
    driver.add(PROMPT, max_tokens=4, min_tokens=4, n=3)
    driver.schedule()
    forget_prefixes(driver.scheduler.rows)
    driver.drain()
    driver.expect_idle()
