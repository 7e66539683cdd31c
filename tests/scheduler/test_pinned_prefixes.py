"""A prefix that is pinned is found again, whatever else runs, and the largest request still runs beside all pins."""

from __future__ import annotations

import pytest
from scheduler_harness import VOCAB, Driver

from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.rows import forget_prefixes
from aengine.ipc.messages import KVCacheGroup

LARGEST = 32
PROMPTS = [[1 + (i + 7 * k) * i % (VOCAB - 1) for i in range(LARGEST - 4)] for k in range(7)]
KINDS = {
    "full": [KVCacheGroup("full", 4)],
    "window": [KVCacheGroup("full", 4), KVCacheGroup("window", 4, 9)],
    "state": [KVCacheGroup("state", 1 << 20), KVCacheGroup("full", 4)],
}


def make_driver(kind: str, num_blocks: int) -> Driver:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": LARGEST, "max_model_len": LARGEST}
    return Driver(num_blocks=num_blocks, kv_groups=KINDS[kind], **limits)


def run(driver: Driver, prompt: list[int]) -> Request:
    (request,) = driver.add(prompt, max_tokens=4, min_tokens=4)
    while driver.unfinished:
        assert driver.schedule() or driver.in_flight, "no room beside what is pinned"
        if driver.in_flight:
            driver.answer()
    while driver.in_flight:
        driver.answer()
    return request


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_prefix_outlives_the_largest_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.scheduler.kv_cache_manager.STATE_INTERVAL", 8)
    driver = make_driver(kind, 40)
    kv = driver.scheduler.rows.kv
    first = run(driver, PROMPTS[0])
    driver.pin(0, first)
    assert driver.num_pinned and not driver.num_refused_pins
    found = kv.match(first)
    for prompt in PROMPTS[1:]:
        run(driver, prompt)
    assert kv.match(first).length == found.length >= 24
    kv.pins.unpin(0)
    for prompt in PROMPTS[1:]:
        run(driver, prompt)
    assert kv.match(first).length < found.length
    driver.expect_idle()


def test_what_may_be_pinned_leaves_room_for_the_largest_request_and_others() -> None:
    bounds = {num_blocks: make_driver("full", num_blocks).scheduler.max_pinned_blocks for num_blocks in (4, 8, 10, 40)}
    assert bounds == {4: 0, 8: 0, 10: 2, 40: 20}


def test_the_largest_request_runs_beside_as_many_pins_as_there_may_be() -> None:
    driver = make_driver("full", 10)
    first = run(driver, PROMPTS[0][:7])
    driver.pin(0, first)
    assert driver.scheduler.num_free_blocks == 8 and driver.scheduler.max_pinned_blocks == 2
    for prompt in PROMPTS:
        run(driver, prompt)
    assert driver.scheduler.rows.kv.match(first).length == 8
    driver.pin(1, run(driver, PROMPTS[1]))
    assert driver.num_refused_pins == 1 and len(driver.scheduler.rows.kv.pins) == 2
    driver.expect_idle()


@pytest.mark.parametrize("how", ["worker", "prefixes"])
def test_pins_end_with_the_worker_and_with_all_prefixes(how: str) -> None:
    driver = make_driver("full", 40)
    first = run(driver, PROMPTS[0])
    driver.pin(0, first)
    if how == "worker":
        driver.restart()
    else:
        forget_prefixes(driver.scheduler.rows)
    assert len(driver.scheduler.rows.kv.pins) == 0 and driver.scheduler.num_free_blocks == 40
    driver.scheduler.rows.kv.pins.unpin(0)  # its holder need not know
    driver.pin(0, run(driver, PROMPTS[0]))
    assert len(driver.scheduler.rows.kv.pins) == 7
    driver.expect_idle()
