"""Each rule of docs/internals/scheduling.md by itself."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import pytest
from scheduler_harness import STOP_ID, Driver, expected_output
from scheduler_invariants import check_scheduler

from aengine.engine.replicas.moving import take_out
from aengine.engine.scheduler.request import CacheKey, Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler, StepResult
from aengine.engine.speculation.drafts import Drafts
from aengine.errors import InternalError
from aengine.ipc.messages import (
    STATE_BLOCK_SIZE,
    KVCacheGroup,
    ModelRunnerOutput,
    ResultColumns,
    RowError,
    SchedulerOutput,
    int32,
)
from aengine.outputs import FinishReason
from aengine.params import SamplingParams
from aengine.telemetry.metrics import DraftStatistics

LIMITS: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}


def make_scheduler(**changes: Any) -> Scheduler:
    limits = {**LIMITS, "max_model_len": 1000} | changes
    scheduler = Scheduler(kv_groups=[KVCacheGroup("full", limits.pop("block_size"))], **limits)
    scheduler.rows.lookahead = Drafts(scheduler.rows)
    return scheduler


def blocks_of(request: Request) -> list[int]:
    (table,) = request.block_tables
    return table.block_ids


def make(prompt: int | list[int], max_tokens: int = 8, name: str = "r", n: int = 1, **more: Any) -> Request:
    ids = [zlib.crc32(name.encode()) % 1000 + 1 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(n=n, min_tokens=more.pop("min_tokens", 0))
    settings = {"seed": 0, "max_num_tokens": len(ids) + max_tokens, "stop_token_ids": frozenset({STOP_ID})} | more
    return Request(name, ids, params, **settings)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_request(request)


def step(scheduler: Scheduler) -> SchedulerOutput:
    out = scheduler.schedule()
    assert out is not None
    check_scheduler(scheduler)
    return out


def reply(scheduler: Scheduler, out: SchedulerOutput, token_ids: list[int], errors: list[RowError] | None = None):
    result = scheduler.update(ModelRunnerOutput(out.step_id, int32(token_ids), errors=errors or []))
    check_scheduler(scheduler)
    return result[:2]


def test_prompts_share_a_step_and_decode_in_the_next() -> None:
    scheduler = make_scheduler()
    a, b = make(5, name="a"), make(3, name="b")
    add(scheduler, a, b)
    first = step(scheduler)
    assert list(first.num_scheduled_tokens) == [5, 3] and list(first.req_idx) == [a.req_idx, b.req_idx]
    assert [len(new.block_ids) for new in first.new_requests] == [2, 1]
    second = step(scheduler)  # before the answer
    assert list(second.num_scheduled_tokens) == [1, 1] and not second.new_requests
    assert (list(second.block_rows), len(second.block_ids)) == ([], 0)
    assert a.num_pending == b.num_pending == 2
    assert reply(scheduler, first, [10, 20]) == ([(a, 10, 0), (b, 20, 1)], [])
    third = step(scheduler)  # b's fourth token fills its block, its fifth needs another
    assert list(third.block_rows) == [b.req_idx] and blocks_of(b)[1:] == list(third.block_ids)
    assert third.req_idx is second.req_idx and third.num_scheduled_tokens is second.num_scheduled_tokens


def test_a_long_prompt_goes_in_chunks_and_never_holds_up_a_decode() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    short, long = make(3, name="short", max_tokens=20), make(20, name="long")
    add(scheduler, short, long)
    out = step(scheduler)
    assert list(out.num_scheduled_tokens) == [3, 5]
    assert reply(scheduler, out, [10, -1])[0] == [(short, 10, 0)]
    for left in (7, 7):
        out = step(scheduler)
        assert list(out.num_scheduled_tokens) == [1, left]
        assert reply(scheduler, out, [10, -1])[0] == [(short, 10, 0)]
    out = step(scheduler)
    assert list(out.num_scheduled_tokens) == [1, 1]
    assert len(reply(scheduler, out, [10, 11])[0]) == 2 and long.output_token_ids == [11]


def test_a_step_with_decodes_has_as_many_prompt_tokens_as_it_may() -> None:
    """Prompts alone are not cut; beside a decode the limit is asked for, by what the step before had no room for: both
    that catch up and wait count, and not those that have come since."""
    asked: list[tuple[int, int]] = []

    def limit(num_decoding: int, num_left: int) -> int | None:
        asked.append((num_decoding, num_left))
        return 5

    scheduler = make_scheduler(prompt_limit=limit, max_in_flight_steps=4)
    add(scheduler, make(20, name="a"))
    first = step(scheduler)
    assert list(first.num_scheduled_tokens) == [20] and not asked
    add(scheduler, make(8, name="b"), make(3, name="c"))
    second = step(scheduler)
    assert list(second.num_scheduled_tokens) == [1, 5] and asked == [(1, 0)]
    third = step(scheduler)
    assert list(third.num_scheduled_tokens) == [1, 3, 2] and asked[1:] == [(1, 2)]
    reply(scheduler, first, [50])
    reply(scheduler, second, [51, -1])
    fourth = step(scheduler)
    assert list(fourth.num_scheduled_tokens) == [1, 1, 1] and asked[2:] == [(2, 1)]
    step(scheduler)
    assert len(asked) == 3  # only decodes are left
    reply(scheduler, third, [52, 53, -1])
    add(scheduler, make(3, name="d"))
    step(scheduler)
    assert asked[3:] == [(3, 0)]


def test_the_limit_of_prompt_tokens_holds_up_no_decode() -> None:
    """Not one that lacks a block either, which catches up with its one token."""
    scheduler = make_scheduler(prompt_limit=lambda num_decoding, num_left: 2, max_in_flight_steps=100)
    add(scheduler, *(make(4, max_tokens=20, name=name) for name in "abc"))
    assert list(step(scheduler).num_scheduled_tokens) == [4, 4, 4]
    add(scheduler, make(30, name="long"))
    for _ in range(9):
        assert sorted(step(scheduler).num_scheduled_tokens) == [1, 1, 1, 2]


def test_the_waiting_come_by_priority_then_arrival_then_order() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    late, early, tie, urgent = (
        make(2, name="late", max_tokens=1, arrival_time=2.0),
        make(2, name="early", max_tokens=1, arrival_time=1.0),
        make(2, name="tie", max_tokens=1, arrival_time=1.0),
        make(2, name="urgent", max_tokens=1, priority=-1, arrival_time=9.0),
    )
    add(scheduler, late, early, tie, urgent)
    ended = []
    while scheduler.num_waiting:
        out = step(scheduler)
        ended += [request for request, _, _ in reply(scheduler, out, [5])[0]]
    assert ended == [urgent, early, tie, late]
    assert all(request.finish_reason is FinishReason.LENGTH for request in ended)


def test_a_row_is_told_as_removed_and_given_anew_in_the_same_step() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = make(2, name="first", max_tokens=1), make(2, name="second", max_tokens=1)
    add(scheduler, first, second)
    out = step(scheduler)
    assert scheduler.schedule() is None  # its only token is in flight, and there is one row
    reply(scheduler, out, [5])
    out = step(scheduler)
    assert list(out.removed) == [0] and out.new_requests[0].req_idx == 0 == second.req_idx
    reply(scheduler, out, [5])
    assert scheduler.schedule() is None  # the second removal waits until somebody comes
    add(scheduler, third := make(2, name="third"))
    assert list(step(scheduler).removed) == [0] and third.req_idx == 0


def test_a_token_past_the_stop_is_dropped_and_blocks_outlive_the_step_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=4)
    request = make(4)
    add(scheduler, request)
    first = step(scheduler)
    second = step(scheduler)
    sampled, _ = reply(scheduler, first, [STOP_ID])
    assert sampled == [(request, STOP_ID, 0)] and request.finish_reason is FinishReason.STOP
    assert scheduler.num_running == 0 and scheduler.num_free_blocks == 2
    assert reply(scheduler, second, [7]) == ([], [])
    assert request.output_token_ids == [STOP_ID] and scheduler.num_free_blocks == 4


def test_min_tokens_keeps_a_stop_token_from_stopping() -> None:
    scheduler = make_scheduler()
    request = make(4, min_tokens=1)
    add(scheduler, request)
    reply(scheduler, step(scheduler), [STOP_ID])
    assert request.finish_reason is None
    reply(scheduler, step(scheduler), [STOP_ID])
    assert request.finish_reason is FinishReason.STOP


def test_the_last_token_is_never_computed() -> None:
    scheduler = make_scheduler(max_in_flight_steps=3)
    request = make(2, max_tokens=2)
    add(scheduler, request)
    steps = [step(scheduler), step(scheduler)]
    assert scheduler.schedule() is None
    for out in steps:
        reply(scheduler, out, [5])
    assert request.finish_reason is FinishReason.LENGTH and len(request.token_ids) == 4
    assert scheduler.num_free_blocks == 64


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_finish_from_outside_is_idempotent(answered: int) -> None:
    scheduler = make_scheduler()
    request = make(4)
    add(scheduler, request)
    steps = [step(scheduler), step(scheduler)]
    for out in steps[:answered]:
        reply(scheduler, out, [5])
    scheduler.finish(request, FinishReason.ABORT)
    scheduler.finish(request, FinishReason.ERROR)
    check_scheduler(scheduler)
    for out in steps[answered:]:
        assert reply(scheduler, out, [5]) == ([], [])
    assert request.finish_reason is FinishReason.ABORT and len(request.output_token_ids) == answered
    assert scheduler.num_free_blocks == 64 and scheduler.schedule() is None


def test_the_steps_in_flight_from_the_oldest_to_the_newest() -> None:
    scheduler = make_scheduler()
    add(scheduler, make(4, max_tokens=20))
    assert scheduler.oldest_step is scheduler.newest_step is None
    first, second = step(scheduler), step(scheduler)
    assert (scheduler.oldest_step.step_id, scheduler.newest_step.step_id) == (first.step_id, second.step_id) == (0, 1)
    reply(scheduler, first, [5])
    assert scheduler.oldest_step is scheduler.newest_step
    scheduler.drop_tables()  # the engine has closed
    assert scheduler.oldest_step is None and scheduler.num_blocks == scheduler.num_free_blocks == 0


def test_finish_while_waiting() -> None:
    scheduler = make_scheduler()
    request = make(4)
    add(scheduler, request)
    assert not request.is_preempted, "it has not had a row yet"
    scheduler.finish(request, FinishReason.ABORT)
    assert scheduler.num_waiting == 0 and scheduler.schedule() is None


def test_a_failed_row_ends_alone() -> None:
    scheduler = make_scheduler()
    good, bad = make(4, name="good"), make(4, name="bad")
    add(scheduler, good, bad)
    first, second = step(scheduler), step(scheduler)
    error = RowError(1, "InternalError", "NaN")
    assert reply(scheduler, first, [5, -1], [error]) == ([(good, 5, 0)], [(bad, error)])
    assert bad.finish_reason is FinishReason.ERROR
    assert reply(scheduler, second, [6, -1], [error]) == ([(good, 6, 0)], [])


def test_what_a_failed_row_wrote_is_not_shared() -> None:
    scheduler = make_scheduler()
    add(scheduler, bad := make(list(range(1, 10)), name="bad"))
    reply(scheduler, step(scheduler), [-1], [RowError(0, "InternalError", "NaN")])
    add(scheduler, make(list(range(1, 10)), name="next"))
    assert bad.finish_reason is FinishReason.ERROR
    assert step(scheduler).new_requests[0].num_computed_tokens == 0


@pytest.mark.parametrize(
    ("token_ids", "errors"),
    [([5], []), ([5, 6, 7], []), ([-1, -1], []), ([5, 6], []), ([5, -1], [RowError(2, "E", "")])],
)
def test_an_answer_of_another_form_is_an_error(token_ids: list[int], errors: list[RowError]) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, make(4, name="whole"), make(9, name="chunk"))
    out = step(scheduler)
    with pytest.raises(InternalError, match="step 0"):
        reply(scheduler, out, token_ids, errors)


def test_an_answer_out_of_order_is_an_error() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InternalError, match="none is due"):
        scheduler.update(ModelRunnerOutput(0, int32()))
    add(scheduler, make(4))
    step(scheduler)
    with pytest.raises(InternalError, match="step 0 is due"):
        scheduler.update(ModelRunnerOutput(1, int32([5])))


# -- sharing


def test_a_prefix_is_shared_once_its_step_is_answered() -> None:
    scheduler = make_scheduler()
    prompt = list(range(1, 11))
    add(scheduler, a := make(prompt, name="a"))
    first = step(scheduler)
    add(scheduler, b := make(prompt, name="b"))
    second = step(scheduler)
    assert second.new_requests[0].num_computed_tokens == 0  # not yet answered
    reply(scheduler, first, [50])
    add(scheduler, c := make(prompt, name="c"), d := make(prompt, name="d", cache_key=CacheKey(b"other")))
    third = step(scheduler)
    assert [new.num_computed_tokens for new in third.new_requests] == [8, 0]
    assert list(third.new_requests[0].block_ids)[:2] == blocks_of(a)[:2]
    assert (b.num_cached_tokens, c.num_cached_tokens, d.num_cached_tokens) == (0, 8, 0)
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (40, 8)
    assert list(third.num_scheduled_tokens) == [1, 1, 2, 10]
    reply(scheduler, second, [51, 50])


def test_what_was_generated_is_shared_too() -> None:
    """The next turn of a chat finds question and answer in the cache."""
    driver = Driver(**LIMITS)
    (first,) = driver.add([1, 2, 3, 4, 5], max_tokens=20, seed=4)
    driver.drain()
    turn = first.token_ids + [9, 9]
    assert len(first.output_token_ids) > 8, "choose another seed"
    (second,) = driver.add(turn, max_tokens=4)
    driver.drain()
    assert second.num_cached_tokens == (len(first.token_ids) - 1) // 4 * 4  # all full blocks that were computed


def test_a_model_with_states_goes_on_from_the_latest_of_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.scheduler.prefixes.kept_states.STATE_INTERVAL", 8)
    groups = [KVCacheGroup("state", STATE_BLOCK_SIZE), KVCacheGroup("full", 4)]
    limits = {name: value for name, value in LIMITS.items() if name != "block_size"}
    for depth in (1, 2):
        driver = Driver(kv_groups=groups, depth=depth, **limits)
        (first,) = driver.add([1, 2, 3, 4, 5], max_tokens=30, min_tokens=30)
        driver.drain()
        (second,) = driver.add([*first.token_ids, 9], max_tokens=4)
        driver.drain()
        assert second.num_cached_tokens == 32, "of 35, kept every 8 tokens"


def test_prefix_caching_can_be_off() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    add(scheduler, make(list(range(1, 11)), name="a"))
    reply(scheduler, step(scheduler), [50])
    add(scheduler, make(list(range(1, 11)), name="b"))
    assert step(scheduler).new_requests[0].num_computed_tokens == 0
    assert scheduler.prefix_cache_queries == 0


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_for_the_prompt_and_share_it(caching: bool) -> None:
    scheduler = make_scheduler(enable_prefix_caching=caching)
    prompt = list(range(1, 11))
    group = [make(prompt, n=3, index=i) for i in range(3)]
    add(scheduler, *group)
    assert scheduler.num_waiting == 3
    first = step(scheduler)
    assert len(first.new_requests) == 1 and scheduler.num_waiting == 2
    second = step(scheduler)
    assert not second.new_requests
    reply(scheduler, first, [50])
    third = step(scheduler)
    assert [new.num_computed_tokens for new in third.new_requests] == [8, 8]
    assert {tuple(blocks_of(request)[:2]) for request in group} == {tuple(blocks_of(group[0])[:2])}
    assert len({blocks_of(request)[2] for request in group}) == 3
    other = [make(prompt, n=2, index=i, name="other") for i in range(2)]
    add(scheduler, *other)
    reply(scheduler, second, [51])
    reply(scheduler, third, [52, 53, 54])
    cached = {len(new.block_ids): new.num_computed_tokens for new in step(scheduler).new_requests}
    assert cached == ({3: 8} if caching else {3: 0})  # off: siblings share with each other alone


def test_siblings_do_not_hash_the_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    group = [make(24, n=4, index=i) for i in range(4)]
    add(scheduler, *group)
    reply(scheduler, step(scheduler), [50])
    assert len(group[0].block_hashes) >= 5
    monkeypatch.setattr(
        "aengine.engine.scheduler.kv_cache_manager.blake2b", lambda *args, **options: pytest.fail("hashed")
    )
    assert [new.num_computed_tokens for new in step(scheduler).new_requests] == [20] * 3


def test_siblings_that_move_share_the_prompt_and_no_completion() -> None:
    died, other = make_scheduler(), make_scheduler()
    group = [make(6, max_tokens=20, n=2, index=i) for i in range(2)]
    add(died, *group)
    reply(died, step(died), [50])
    for place in range(8):
        out = step(died)
        reply(died, out, [10 * (1 + row) + place for row in out.req_idx])
    died.preempt_all()
    add(other, *take_out(died, group))
    assert min(len(request.token_ids) for request in group) >= 12
    reply(other, step(other), [60])
    assert [new.num_computed_tokens for new in step(other).new_requests] == [4]


def test_siblings_with_nothing_to_share_do_not_wait() -> None:
    scheduler = make_scheduler()
    add(scheduler, *(make(4, n=3, index=i) for i in range(3)))
    assert len(step(scheduler).new_requests) == 3


def test_siblings_go_on_without_their_leader() -> None:
    scheduler = make_scheduler()
    group = [make(10, n=3, index=i) for i in range(3)]
    add(scheduler, *group)
    step(scheduler)
    scheduler.finish(group[2], FinishReason.ABORT)
    scheduler.finish(group[0], FinishReason.ABORT)
    check_scheduler(scheduler)
    assert [new.req_idx for new in step(scheduler).new_requests] == [group[1].req_idx]
    assert group[1].status is RequestStatus.DECODING and group[2].status is RequestStatus.FINISHED


# -- want of blocks


@pytest.mark.parametrize("caching", [True, False])
def test_the_least_urgent_is_preempted_and_resumes_with_its_tokens(caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=5, enable_prefix_caching=caching)
    low, high = make(4, name="low", max_tokens=12, priority=1), make(7, name="high", max_tokens=9)
    add(scheduler, low)
    steps = [step(scheduler)]
    add(scheduler, high)
    while (out := scheduler.schedule()) is not None:
        steps.append(out)
        oldest = steps.pop(0)
        reply(scheduler, oldest, [7] * len(oldest.req_idx))
        row = low.req_idx
    # high must have low's blocks, but not as long as a step in flight may know them: low lacked a block already
    check_scheduler(scheduler)
    assert scheduler.rows.num_preemptions == 1 and scheduler.num_free_blocks == 0
    assert low.status is RequestStatus.HELD and high.status is RequestStatus.CATCHING_UP
    assert low.is_preempted and not high.is_preempted
    (oldest,) = steps
    reply(scheduler, oldest, [7] * len(oldest.req_idx))
    assert low.status is RequestStatus.WAITING and len(low.output_token_ids) == 5 and low.is_preempted
    out = step(scheduler)
    assert list(out.removed) == [row] and list(out.req_idx) == [high.req_idx]
    reply(scheduler, out, [7])
    while high.finish_reason is None:
        out = step(scheduler)
        assert list(out.req_idx) == [high.req_idx]
        reply(scheduler, out, [7])
    assert low.is_preempted
    (resumed,) = step(scheduler).new_requests
    assert not low.is_preempted
    assert list(resumed.token_ids) == low.token_ids and resumed.num_prompt_tokens == 4
    assert low.num_cached_tokens == 0 and scheduler.rows.num_preemptions == 1


def test_blocks_about_to_come_are_awaited_rather_than_taken() -> None:
    scheduler = make_scheduler(num_blocks=11)
    urgent, low = make(4, name="urgent", max_tokens=20, priority=-1), make(5, name="low", max_tokens=20, priority=1)
    ending = make(8, name="ending", max_tokens=9)
    add(scheduler, urgent, ending, low)
    steps = [step(scheduler) for _ in range(2)]
    for _ in range(7):
        out = steps.pop(0)
        reply(scheduler, out, [7] * 3)
        steps.append(step(scheduler))
    reply(scheduler, steps.pop(0), [7] * 3)
    assert scheduler.num_free_blocks == 0
    out = step(scheduler)  # urgent's 13th token lacks a block; ending's four are on their way
    assert ending.status is RequestStatus.DRAINING and urgent.status is RequestStatus.CATCHING_UP
    assert list(out.req_idx) == [low.req_idx] and scheduler.rows.num_preemptions == 0
    reply(scheduler, steps.pop(0), [7] * 3)
    assert ending.finish_reason is FinishReason.LENGTH
    reply(scheduler, out, [7])
    out = step(scheduler)
    assert {urgent.req_idx, low.req_idx} == set(out.req_idx) and scheduler.rows.num_preemptions == 0


def test_no_more_are_preempted_than_needed() -> None:
    scheduler = make_scheduler(num_blocks=7)
    urgent, others = make(4, name="a", max_tokens=20), [make(5, name=name, max_tokens=18) for name in "bc"]
    add(scheduler, urgent, *others)
    steps = [step(scheduler)]
    while scheduler.num_free_blocks or urgent.num_computed_tokens % 4:
        steps.append(step(scheduler))
        out = steps.pop(0)
        reply(scheduler, out, [7] * len(out.req_idx))
    step(scheduler)
    assert [request.status.name for request in others] == ["DECODING", "HELD"]


def test_a_decode_that_lacked_a_block_is_not_held_up_by_a_more_urgent_chunk() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_in_flight_steps=1)
    low, high = make(4, name="low", max_tokens=20, priority=1), make(60, name="high")
    add(scheduler, low)
    reply(scheduler, step(scheduler), [7])
    add(scheduler, high)
    for _ in range(4):
        reply(scheduler, step(scheduler), [7, -1])
    # What is left is just enough for high's next chunk.
    taken = scheduler.rows.kv.pool.allocate(scheduler.num_free_blocks - 2)
    out = scheduler.schedule()
    assert out is not None and list(out.req_idx) == [high.req_idx] and low.status is RequestStatus.CATCHING_UP
    scheduler.update(ModelRunnerOutput(out.step_id, int32([-1])))
    scheduler.rows.kv.pool.release(taken)
    out = step(scheduler)
    assert dict(zip(out.req_idx, out.num_scheduled_tokens)) == {high.req_idx: 7, low.req_idx: 1}


def test_nobody_is_preempted_for_a_less_urgent_one() -> None:
    scheduler = make_scheduler(num_blocks=6, max_in_flight_steps=1)
    high, low = make(8, name="high", max_tokens=12), make(4, name="low", max_tokens=12, priority=1)
    add(scheduler, high, low)
    waits = 0
    while high.finish_reason is None:
        out = step(scheduler)
        reply(scheduler, out, [7] * len(out.req_idx))
        assert high.status is not RequestStatus.HELD
        waits += low.status is RequestStatus.CATCHING_UP
    assert waits, "low never lacked a block: the sizes are off"


def test_the_waiting_leave_everybody_a_block_to_grow_into() -> None:
    scheduler = make_scheduler(num_blocks=5)
    a, b = make(8, name="a"), make(9, name="b")
    add(scheduler, a, b)
    assert len(step(scheduler).new_requests) == 1  # b would take the last three
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, make(8, name="a"), make(9, name="b"))
    assert len(step(scheduler).new_requests) == 2


@pytest.mark.invariant
def test_one_request_may_fill_the_whole_pool() -> None:
    driver = Driver(**{**LIMITS, "num_blocks": 4})
    assert driver.scheduler.max_tokens_capacity == 16
    driver.add([1, 2, 3], max_tokens=13, seed=3, min_tokens=13)
    driver.add([4, 5, 6], max_tokens=13, seed=4, min_tokens=13)
    driver.drain()
    with pytest.raises(AssertionError, match="does not fit"):
        driver.add([1] * 10, max_tokens=7)


def test_a_new_worker_gets_everything_again() -> None:
    driver = Driver(**LIMITS)
    driver.add([1, 2, 3, 4, 5], max_tokens=30, seed=5, n=2)
    driver.add([6], max_tokens=30, seed=6)
    for _ in range(3):
        driver.schedule()
        driver.schedule()
        driver.answer()
        driver.answer()
    before = [list(request.output_token_ids) for request, _ in driver.requests]
    assert any(before)
    driver.schedule()
    driver.restart()
    scheduler = driver.scheduler
    assert scheduler.num_running == 0 and scheduler.num_free_blocks == 64
    out = step(scheduler)
    assert not out.removed and all(new.num_computed_tokens == 0 for new in out.new_requests)
    assert [list(new.token_ids) for new in out.new_requests] == [
        request.token_ids for request, _ in driver.requests if request.finish_reason is None
    ]


def test_a_decode_batch_of_256_reuses_its_columns() -> None:
    scheduler = make_scheduler(max_num_seqs=256, max_num_batched_tokens=1024, num_blocks=1024, block_size=16)
    for i in range(256):
        add(scheduler, make(2, name=f"r{i}", max_tokens=50))
    first = step(scheduler)
    reply(scheduler, first, [5] * 256)
    second, third = step(scheduler), step(scheduler)
    assert second.req_idx is third.req_idx and second.num_scheduled_tokens == array("i", [1] * 256)


def test_the_model_of_the_worker_tells_right_from_wrong() -> None:
    """The harness itself: another seed, another token in the prompt, or a wrong block is noticed."""
    assert expected_output([1, 2], 0, 12) != expected_output([1, 2], 1, 12)
    assert expected_output([1, 2], 0, 12) != expected_output([3, 2], 0, 12)
    driver = Driver(**LIMITS)
    driver.add([1, 2, 3, 4, 5], max_tokens=5)
    driver.schedule()
    driver.answer()
    driver.schedule()
    (table,) = next(iter(driver.worker.rows.values())).tables
    table[0], table[1] = table[1], table[0]
    with pytest.raises(AssertionError, match="something else"):
        driver.answer()


def ragged(scheduler: Scheduler, out: SchedulerOutput, tokens: list[list[int]]) -> StepResult:
    column = int32(token_id for said in tokens for token_id in said)
    return scheduler.update(ModelRunnerOutput(out.step_id, column, counts=int32(map(len, tokens))))


def test_drafts_are_computed_with_the_token_before_them() -> None:
    scheduler = make_scheduler()
    a, b = make(5, max_tokens=20, name="a"), make(3, max_tokens=20, name="b")
    add(scheduler, a, b)
    first = step(scheduler)
    scheduler.rows.lookahead.propose(a, [12, 13, 14])  # step 0 samples 11, say
    second = step(scheduler)
    assert second.drafts is not None and first.drafts is None
    assert dict(zip(second.req_idx, second.num_scheduled_tokens)) == {b.req_idx: 1, a.req_idx: 4}
    assert (list(second.drafts.counts), list(second.drafts.token_ids)) == ([0, 3], [12, 13, 14])
    reply(scheduler, first, [11, 30])
    assert a.num_pending == 4
    third = step(scheduler)  # from wherever step 1 gets to
    assert set(third.num_scheduled_tokens) == {1} and not third.settled_rows and a.num_pending == 5
    result = ragged(scheduler, second, [[31], [12, 13, 99]])
    assert [(r.request_id, t, place) for r, t, place in result.sampled] == [
        ("b", 31, 0),
        ("a", 12, 1),
        ("a", 13, 2),
        ("a", 99, 3),
    ]
    assert a.output_token_ids == [11, 12, 13, 99] and a.num_pending == 1 and result.num_rows == 2
    drafts = scheduler.rows.lookahead
    assert isinstance(drafts, Drafts)
    assert drafts.statistics() == (DraftStatistics("grammar", 1, 3, 2, (1, 1)),)
    fourth = step(scheduler)
    assert (list(fourth.settled_rows), list(fourth.num_rejected)) == ([a.req_idx], [1])
    reply(scheduler, third, [32, 15])
    assert not step(scheduler).settled_rows


def test_a_chunk_of_a_prompt_beside_drafts_is_shared_as_well() -> None:
    scheduler = make_scheduler()
    a, prompt = make(5, max_tokens=20, name="a"), list(range(1, 41))
    add(scheduler, a)
    first = step(scheduler)
    scheduler.rows.lookahead.propose(a, [12, 13])
    add(scheduler, b := make(prompt, name="b"))
    second = step(scheduler)
    assert list(second.num_scheduled_tokens) == [3, 29] and second.drafts is not None
    reply(scheduler, first, [11])
    ragged(scheduler, second, [[12, 13, 99], []])
    add(scheduler, c := make([*prompt[:20], 99], name="c"))
    third = step(scheduler)
    assert [new.num_computed_tokens for new in third.new_requests] == [20]
    assert blocks_of(c)[:5] == blocks_of(b)[:5]


@pytest.mark.parametrize(
    ("proposed", "kept"),
    [
        ([], []),
        ([STOP_ID, 12], []),
        ([11, STOP_ID, 12], [11]),
        ([11, 12, 13, 14, 15], [11, 12]),  # 4 tokens: one is in flight, and the last is sampled
    ],
)
def test_drafts_end_before_a_stop_and_before_the_last_token(proposed: list[int], kept: list[int]) -> None:
    scheduler = make_scheduler()
    request = make(5, max_tokens=4)
    add(scheduler, request)
    step(scheduler)
    assert scheduler.rows.lookahead.propose(request, proposed) == len(kept)
    assert (request.status is RequestStatus.DECODING) == (not kept)
    out = step(scheduler)
    assert (list(out.drafts.token_ids) if out.drafts is not None else []) == kept


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {}])
def test_what_counts_its_tokens_has_no_certain_drafts(params: dict[str, float]) -> None:
    """Those would be tokens of the row before they are counted."""
    scheduler = make_scheduler()
    request = make(5, max_tokens=9)
    request.params = request.params.replace(**params)
    add(scheduler, request)
    step(scheduler)
    scheduler.rows.lookahead.propose(request, [11, 12], are_certain=True)
    drafts = step(scheduler).drafts
    assert drafts is not None and list(drafts.token_ids) == [11, 12]
    assert list(drafts.is_certain) == [not params]


def test_an_end_within_an_answer() -> None:
    """A stop token, or the last one, at any place: what comes after it is dropped."""
    scheduler = make_scheduler()
    a, b = make(5, max_tokens=20, name="a"), make(5, max_tokens=3, name="b")
    add(scheduler, a, b)
    first = step(scheduler)
    scheduler.rows.lookahead.propose(a, [12, 13])
    scheduler.rows.lookahead.propose(b, [22, 23])
    second = step(scheduler)
    reply(scheduler, first, [11, 21])
    ragged(scheduler, second, [[12, STOP_ID, 14], [22, 23]])
    assert a.output_token_ids == [11, 12, STOP_ID] and a.finish_reason is FinishReason.STOP
    assert b.output_token_ids == [21, 22, 23] and b.finish_reason is FinishReason.LENGTH


def test_who_seemed_to_be_at_its_end_goes_on_when_drafts_are_rejected() -> None:
    scheduler = make_scheduler(max_in_flight_steps=3)
    request = make(5, max_tokens=4)
    add(scheduler, request)
    first = step(scheduler)
    scheduler.rows.lookahead.propose(request, [12, 13])
    second = step(scheduler)
    assert scheduler.schedule() is None and request.status is RequestStatus.DRAINING
    reply(scheduler, first, [11])
    ragged(scheduler, second, [[99]])
    assert request.status is RequestStatus.DECODING
    for token_id in (98, 97):
        reply(scheduler, step(scheduler), [token_id])
    assert request.output_token_ids == [11, 99, 98, 97] and request.finish_reason is FinishReason.LENGTH
    check_scheduler(scheduler)


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": None},
        {"counts": int32([1, 4]), "token_ids": int32([1] * 5)},  # the second has two drafts
        {"counts": int32([2, 1]), "token_ids": int32([1] * 3)},  # the first none
        {"counts": int32([1, 0]), "token_ids": int32([1])},  # and both sample
        {"counts": int32([4]), "token_ids": int32([1] * 4)},
        {"counts": int32([1, 1]), "token_ids": int32([1, -1])},
    ],
)
def test_an_answer_with_counts_that_can_not_be_is_refused_whole(wrong: dict[str, array[int] | None]) -> None:
    scheduler = make_scheduler()
    a, b = make(5, max_tokens=20, name="a"), make(3, max_tokens=20, name="b")
    add(scheduler, b, a)
    first = step(scheduler)
    scheduler.rows.lookahead.propose(a, [12, 13])
    second = step(scheduler)
    reply(scheduler, first, [11, 30])
    fields = {"token_ids": int32([1, 1]), **wrong}
    with pytest.raises(InternalError):
        scheduler.update(ModelRunnerOutput(second.step_id, **fields))
    assert len(a.output_token_ids) == len(b.output_token_ids) == 1


def test_a_row_that_is_left_is_not_settled() -> None:
    scheduler = make_scheduler()
    request = make(5, max_tokens=9)
    add(scheduler, request)
    first = step(scheduler)
    scheduler.rows.lookahead.propose(request, [11, 12, 13])
    second = step(scheduler)
    scheduler.finish(request, FinishReason.ABORT)
    reply(scheduler, first, [11])
    ragged(scheduler, second, [[5]])
    other = make(5, name="other")
    add(scheduler, other)
    third = step(scheduler)
    assert not third.settled_rows and list(third.removed) == [0]


def test_a_request_without_tokens_ends_with_its_result() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make(6, max_tokens=1, samples=False)
    other = make(2, max_tokens=3, name="other")
    add(scheduler, request, other)
    first, second = step(scheduler), step(scheduler)
    assert list(second.num_scheduled_tokens) == [2, 2]
    reply(scheduler, first, [-1])
    column = ResultColumns(int32([0]), int32([2]), array("f", [1.0, 2.0]))
    result = scheduler.update(ModelRunnerOutput(second.step_id, int32([-1, 7]), results=column))
    assert result.results == [(request, array("f", [1.0, 2.0]))] and request.output_token_ids == []
    assert request.finish_reason is FinishReason.STOP and [r for r, *_ in result.sampled] == [other]
    third = step(scheduler)
    assert list(third.req_idx) == [other.req_idx] and list(third.removed) == [0]


def test_a_paused_request_keeps_its_row_and_is_in_no_step() -> None:
    scheduler = make_scheduler()
    a, b = make(3, max_tokens=4, name="a"), make(2, max_tokens=9, name="b")
    add(scheduler, a, b)
    reply(scheduler, step(scheduler), [11, 21])
    second = step(scheduler)
    row = a.req_idx
    scheduler.pause(a)
    reply(scheduler, second, [12, 22])
    assert a.output_token_ids == [11, 12] and a.num_pending == 0
    third = step(scheduler)
    assert list(third.req_idx) == [b.req_idx] and a.req_idx == row and not third.removed
    reply(scheduler, third, [23])
    scheduler.resume(a)
    fourth = step(scheduler)
    assert list(fourth.req_idx) == [b.req_idx, row] and list(fourth.num_scheduled_tokens) == [1, 1]
    reply(scheduler, fourth, [24, 13])
    fifth = step(scheduler)
    scheduler.pause(a)  # its last token is in flight: there is nothing to be left out of
    assert not a.is_paused
    reply(scheduler, fifth, [25, 14])
    assert a.output_token_ids == [11, 12, 13, 14] and a.finish_reason is FinishReason.LENGTH


def test_micro_batches_take_turns_with_equal_shares_of_a_burst() -> None:
    scheduler = make_scheduler(num_batches=2, max_in_flight_steps=3)
    requests = [make(3, name=str(i)) for i in range(5)]
    add(scheduler, *requests)
    batches = [{r.request_id for r in scheduler.newest_step.batch} for _ in range(3) if step(scheduler)]
    assert batches == [{"0", "1", "2"}, {"3", "4"}, {"0", "1", "2"}]


def test_a_micro_batch_with_nothing_to_do_is_passed_over() -> None:
    scheduler = make_scheduler(num_batches=3, max_in_flight_steps=4)
    one = make(3)
    add(scheduler, one)
    for _ in range(4):
        step(scheduler)
        assert scheduler.newest_step.batch == [one]
    another = make(3, name="another")
    add(scheduler, another)
    scheduler.finish(one, FinishReason.ABORT)
    reply(scheduler, SchedulerOutput(0), [5])
    step(scheduler)
    assert scheduler.newest_step.batch == [another]
