"""Requests whose prefix another one computes wait for it, and nobody else does."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_harness import VOCAB, Driver
from scheduler_invariants import check_scheduler

from aengine.engine.scheduler.prefixes import kept_states
from aengine.engine.scheduler.request import CacheKey, Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, SchedulerOutput, int32
from aengine.outputs import FinishReason
from aengine.params import SamplingParams

SHARED = [1 + i * i % (VOCAB - 1) for i in range(40)]
LIMITS: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def make_driver(**changes: Any) -> Driver:
    return Driver(least_awaited_prefix=8, **LIMITS | changes)


def add(driver: Driver, prompt: list[int], **more: Any) -> Request:
    (request,) = driver.add(prompt, max_tokens=4, min_tokens=4, **more)
    return request


def followers(driver: Driver) -> list[Request]:
    return list(driver.scheduler.rows.prefixes.waiting)


def test_only_who_computes_enough_leads() -> None:
    """Eight tokens are awaited at least; a leader is kept in a table, and looked for by each that comes."""
    driver = make_driver()
    short, long = add(driver, SHARED[:7]), add(driver, SHARED[7:15])
    assert driver.schedule()
    assert not short.is_leading and long.is_leading


@pytest.mark.parametrize("kinds", [["full"], ["state", "full"]], ids=["full", "hybrid"])
def test_a_burst_with_a_long_prefix_computes_it_once(kinds: list[str]) -> None:
    """64 requests at once with 2,500 tokens in common and 64 of their own."""
    scheduler = Scheduler(
        num_blocks=10_000,
        kv_groups=[KVCacheGroup(kind, 1 << 20 if kind == "state" else 16) for kind in kinds],
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=4096,
    )
    shared = [1 + i * i % 997 for i in range(2500)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for i in range(64):
        prompt = shared + [1000 + i] * 64
        limits: dict[str, Any] = {"seed": 0, "max_num_tokens": len(prompt) + 4, "stop_token_ids": frozenset()}
        scheduler.add_request(Request(str(i), prompt, params, arrival_time=float(i), **limits))
    steps: list[SchedulerOutput] = []
    to_go: dict[int, int] = {}
    num_computed = 0
    while scheduler.num_running or scheduler.num_waiting:
        while len(steps) < 2 and (out := scheduler.schedule()) is not None:
            steps.append(out)
        out = steps.pop(0)
        num_computed += sum(out.num_scheduled_tokens)
        to_go |= {new.req_idx: len(new.token_ids) - new.num_computed_tokens for new in out.new_requests}
        answer = ModelRunnerOutput(out.step_id, int32())
        for row, count in zip(out.req_idx, out.num_scheduled_tokens, strict=True):
            to_go[row] -= count
            answer.token_ids.append(7 if to_go[row] <= 0 else -1)
        scheduler.update(answer)
        check_scheduler(scheduler)
    assert scheduler.prefix_cache_hits == 63 * 2496  # 156 blocks: 0.958 of all tokens, the most that there can be
    assert num_computed == 64 * 2564 - 63 * 2496 + 64 * 3


def test_others_are_not_held_up_behind_those_that_wait() -> None:
    driver = make_driver()
    first = add(driver, [*SHARED, 1])
    later = [add(driver, [*SHARED, 2 + i]) for i in range(3)]
    other = add(driver, [5, 6, 7])
    assert driver.schedule()
    assert driver.scheduler.newest_step.batch == [first, other]
    assert followers(driver) == later and driver.scheduler.num_waiting == 3
    assert driver.schedule() and driver.scheduler.newest_step.batch == [first, other]  # they are not in the queue
    driver.answer()
    assert not followers(driver) and list(driver.scheduler.waiting) == later
    driver.drain()
    assert [request.num_cached_tokens for request in (first, *later)] == [0, 40, 40, 40]


def test_a_prefix_is_there_with_the_chunk_that_completes_it() -> None:
    driver = make_driver()
    other = add(driver, [9] * 48)
    first = add(driver, SHARED)
    second, third = add(driver, [*SHARED[:18], 1, 2, 3]), add(driver, [*SHARED[:22], 1, 2, 3])
    driver.schedule()
    assert driver.scheduler.newest_step.batch == [other, first] and first.num_computed_tokens == 16
    driver.schedule()
    assert followers(driver) == [second, third]
    driver.answer()
    assert followers(driver) == [third] and first.num_output_tokens == 0
    driver.answer()
    assert not followers(driver)
    driver.drain()
    assert (second.num_cached_tokens, third.num_cached_tokens) == (16, 20)


def test_who_comes_while_a_long_prompt_is_halfway_waits_for_the_rest() -> None:
    driver = make_driver(max_num_batched_tokens=24)
    add(driver, [*SHARED, 1])
    driver.schedule()
    driver.answer()
    second = add(driver, [*SHARED, 2])
    driver.schedule()
    assert followers(driver) == [second]
    driver.drain()
    assert second.num_cached_tokens == 40


@pytest.mark.parametrize("prompt", [[*SHARED[:7], 49, 49, 49], SHARED[:8]])
def test_a_few_tokens_are_not_worth_waiting_for(prompt: list[int]) -> None:
    driver = make_driver()
    add(driver, SHARED)
    add(driver, prompt)
    driver.schedule()
    assert not followers(driver) and len(driver.scheduler.newest_step.batch) == 2
    driver.drain()


def test_nobody_waits_for_another_tenant() -> None:
    driver = make_driver(num_blocks=128, max_num_batched_tokens=128)
    first = add(driver, [*SHARED, 1], cache_key=CacheKey(b"a"))
    second = add(driver, [*SHARED, 2], cache_key=CacheKey(b"b"))
    third = add(driver, [*SHARED, 3], cache_key=CacheKey(b"b"))
    driver.schedule()
    assert driver.scheduler.newest_step.batch == [first, second] and followers(driver) == [third]
    driver.drain()


def test_who_has_another_image_waits_for_the_tokens_before_it_alone() -> None:
    driver = make_driver(num_blocks=128, max_num_batched_tokens=128)
    for place, image in ((5, 1), (21, 1), (5, 2), (21, 2)):
        add(driver, [*SHARED, 1], media={place: image})
    driver.schedule()
    assert [r.request_id for r in driver.scheduler.newest_step.batch] == ["req-0", "req-1", "req-2"]
    assert [awaited for _, awaited in driver.scheduler.rows.prefixes.waiting.values()] == [20]
    driver.drain()
    assert driver.scheduler.prefix_cache_hits == 20


def test_without_a_prefix_cache_nobody_waits() -> None:
    driver = make_driver(enable_prefix_caching=False, max_num_batched_tokens=128)
    for i in range(3):
        add(driver, [*SHARED, i + 1])
    driver.schedule()
    assert len(driver.scheduler.newest_step.batch) == 3
    driver.drain()


@pytest.mark.parametrize("event", ["cancelled", "failed", "restarted"])
def test_one_of_those_that_wait_takes_over(event: str) -> None:
    driver = make_driver()
    first = add(driver, [*SHARED, 1])
    later = [add(driver, [*SHARED, 2 + i]) for i in range(3)]
    driver.schedule()
    if event == "cancelled":
        driver.scheduler.finish(first, FinishReason.ABORT)
    elif event == "failed":
        driver.worker.fail_next = True
        driver.answer()
    else:
        driver.restart()
        later = [first, *later]
    assert not followers(driver) and set(later) <= set(driver.scheduler.waiting)
    driver.schedule()
    assert driver.scheduler.newest_step.batch == later[:1] and followers(driver) == later[1:]
    driver.drain()
    assert all(request.finish_reason is FinishReason.LENGTH for request in later)
    assert [request.num_cached_tokens for request in later] == [0, *[40] * (len(later) - 1)]


def test_who_is_preempted_keeps_nobody_waiting() -> None:
    driver = make_driver()
    first = add(driver, [*SHARED, 1])
    second = add(driver, [*SHARED, 2])
    driver.schedule()
    assert followers(driver) == [second]
    driver.scheduler.rows.restart(first)
    assert not followers(driver) and second.status is RequestStatus.WAITING
    driver.drain()
    assert first.finish_reason is second.finish_reason is FinishReason.LENGTH


def test_a_request_can_end_while_it_waits() -> None:
    driver = make_driver()
    add(driver, [*SHARED, 1])
    second, third = (add(driver, [*SHARED, i]) for i in (2, 3))
    driver.schedule()
    driver.scheduler.finish(second, FinishReason.ABORT)
    check_scheduler(driver.scheduler)
    assert followers(driver) == [third]
    driver.scheduler.finish(third, FinishReason.ABORT)
    driver.drain()


def test_quarantined_requests_wait_for_nobody() -> None:
    driver = make_driver()
    requests = [add(driver, [*SHARED, 1 + i]) for i in range(3)]
    for _ in range(2):  # two workers die with the first in a step
        driver.schedule()
        assert len(followers(driver)) == 2
        driver.restart()
    driver.schedule()
    assert driver.scheduler.newest_step.batch == requests[:1] and not followers(driver)
    driver.drain()
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


HYBRID = [KVCacheGroup("state", 1 << 20), KVCacheGroup("full", 4)]


@pytest.fixture
def states_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "STATE_INTERVAL", 4)


def hybrid(**changes: Any) -> Driver:
    limits = {name: value for name, value in LIMITS.items() if name != "block_size"}
    return Driver(least_awaited_prefix=8, kv_groups=HYBRID, **limits | changes)


@pytest.mark.usefixtures("states_are_cheap")
def test_a_state_is_kept_where_those_who_wait_begin_to_differ() -> None:
    driver = hybrid(max_num_batched_tokens=20, depth=3)
    first = add(driver, [*SHARED, 1])
    driver.schedule()
    assert first.num_computed_tokens == 20
    late = [add(driver, [*SHARED[:n], 45, 46]) for n in (26, 27, 15, 33)]  # too late for the third's border
    driver.schedule()
    assert first.num_computed_tokens == 40 and {24, 32} <= {copy.border for copy in first.states.copies}
    driver.schedule()
    waiting = driver.scheduler.rows.prefixes.waiting
    assert {request: awaited for request, (_, awaited) in waiting.items()} == {late[0]: 24, late[1]: 24, late[3]: 32}
    driver.drain()
    assert [request.num_cached_tokens for request in late] == [24, 24, 0, 32]


@pytest.mark.usefixtures("states_are_cheap")
def test_a_state_that_found_no_room_keeps_nobody_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where all places for states are taken at that moment, and free again at the next.
    monkeypatch.setattr(kept_states.KeptStates, "keep", lambda *_: [])
    monkeypatch.setattr(kept_states.KeptStates, "keep_within", lambda *_: [])
    driver = hybrid()
    first, second = (add(driver, [*SHARED, i]) for i in (1, 2))
    driver.schedule()
    assert followers(driver) == [second] and first.num_computed_tokens == 41
    driver.drain()
    assert first.finish_reason is second.finish_reason is FinishReason.LENGTH and second.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("groups", "num_cached"),
    [
        ([KVCacheGroup("full", 4), KVCacheGroup("window", 8, 11)], 40),
        ([KVCacheGroup("window", 4, 7)], 40),
        (HYBRID, 0),  # a state is not kept for as few tokens
    ],
    ids=["mixed", "window", "hybrid"],
)
def test_every_kind_of_kv(groups: list[KVCacheGroup], num_cached: int) -> None:
    limits = {name: value for name, value in LIMITS.items() if name != "block_size"}
    driver = Driver(least_awaited_prefix=8, kv_groups=groups, **limits | {"num_blocks": 128})
    requests = [add(driver, [*SHARED, 1 + i]) for i in range(4)]
    driver.schedule()
    assert len(followers(driver)) == (3 if num_cached else 0)
    driver.drain()
    assert [request.num_cached_tokens for request in requests] == [0, *[num_cached] * 3]
