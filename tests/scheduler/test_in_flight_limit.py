"""How far ahead steps are given, by how late the loop was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from scheduler_harness import Driver

from aengine.engine.pacing import in_flight_limit as lease
from aengine.engine.pacing.in_flight_limit import InFlightLimit
from aengine.engine.pacing.multi_step import MultiStep
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import ModelRunnerOutput, SchedulerOutput, int32

LIMITS = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


class Clock:
    """Answers to steps of ``step`` seconds, which the loop takes ``late`` seconds after they were sent."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent = 100.0

    def answer(self, given: InFlightLimit, step: float = 0.002, late: float = 0.0) -> None:
        self.sent += step
        self.now = max(self.now, self.sent + late)
        given.note_answer(self.sent)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease.time, "monotonic", lambda: clock.now)
    return clock


def decoding() -> Scheduler:
    driver = Driver(**LIMITS)
    driver.add([1] * 4, max_tokens=60)
    driver.schedule()
    assert driver.scheduler.is_steady
    return driver.scheduler


def used(clock: Clock, most: int = 64) -> InFlightLimit:
    given = InFlightLimit(2, most)
    for _ in range(200):
        clock.answer(given)
    return given


def test_as_many_steps_as_the_loop_is_late(clock: Clock) -> None:
    scheduler = decoding()
    assert InFlightLimit(2, 64).num_steps(scheduler) == 2
    given = used(clock)
    assert given.num_steps(scheduler) == 2
    clock.answer(given, late=0.05)
    assert given.num_steps(scheduler) == 2 + 38
    clock.answer(given)  # sent in time, and taken late as well
    assert given.num_steps(scheduler) == 2 + 38
    clock.sent = clock.now
    for _ in range(1000):
        clock.answer(given, step=0.01)
    assert given.num_steps(scheduler) == 2, "it is on time again"
    clock.answer(given, late=5)
    assert given.num_steps(scheduler) == 64
    none = used(clock, most=0)
    clock.answer(none, late=5)
    assert none.num_steps(scheduler) == 2


def test_a_long_step_is_no_late_loop(clock: Clock) -> None:
    given = used(clock)
    for seconds in (3, 0.08, 0.08, 0.0001):
        clock.answer(given, step=seconds)
    assert given.num_steps(decoding()) == 2


def test_answers_that_a_fast_worker_heaps_up_are_no_late_loop(clock: Clock) -> None:
    """The loop takes one of them after the other; more steps ahead would only be more answers that lie there."""
    given = used(clock)
    for _ in range(100):
        clock.now += 0.002
        clock.answer(given, step=0.001)
    assert clock.now > clock.sent + 0.05
    assert given.num_steps(decoding()) == 2


def test_a_starved_worker_does_not_seem_slow(clock: Clock) -> None:
    """Two steps of 2 ms, then nothing for 50 ms since the loop is blocked: the lease is reckoned by the 2 ms."""
    given = used(clock)
    for _ in range(10):
        clock.answer(given, step=0.05, late=0.048)
        clock.answer(given, step=0.002)
    assert given.num_steps(decoding()) >= 2 + 36


def test_only_where_nothing_but_decodes_is_to_be_done(clock: Clock) -> None:
    given = used(clock)
    clock.answer(given, late=0.05)
    driver = Driver(**LIMITS)
    driver.add([1] * 100, max_tokens=10)
    assert given.num_steps(driver.scheduler) == 2, "one waits"
    driver.schedule()
    assert given.num_steps(driver.scheduler) == 2, "its prompt is not through"
    driver.schedule()
    assert given.num_steps(driver.scheduler) > 2
    driver.scheduler.num_constrained = 1
    assert given.num_steps(driver.scheduler) == 2, "a grammar needs the host between two steps"
    driver.scheduler.num_constrained = 0
    driver.scheduler.rows.kv.pool.allocate(driver.scheduler.num_free_blocks - 3)
    assert given.num_steps(driver.scheduler) == 2, "it would take the last blocks early"


class Workers:
    """An executor whose worker begins only the steps that are answered here, and drops all others on demand."""

    def __init__(self) -> None:
        self.given: list[tuple[SchedulerOutput, asyncio.Future[ModelRunnerOutput]]] = []
        self.on_revoked: Callable[[int], None] | None = None

    async def execute_model(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        self.given.append((output, asyncio.get_running_loop().create_future()))
        return self.given[-1][1]

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        self.on_revoked = on_revoked
        return True

    def drop(self) -> None:
        if self.on_revoked is not None:
            kept = [pair for pair in self.given if not pair[0].is_leased]
            count, self.given, on_revoked, self.on_revoked = len(self.given) - len(kept), kept, self.on_revoked, None
            on_revoked(count)

    def answer(self, sent: float) -> None:
        output, future = self.given.pop(0)
        future.set_result(ModelRunnerOutput(output.step_id, int32([1] * len(output.req_idx)), answered_at=sent))


async def test_of_requests_that_come_one_by_one_no_more_steps_are_taken_back_than_answered(clock: Clock) -> None:
    """The loop is late, so steps are given far ahead, and each request takes these back."""
    driver = Driver(depth=64, num_blocks=4000, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    steps, workers, most = MultiStep(2, 64), Workers(), 0
    steps.attach(driver.scheduler, workers, Mock(), asyncio.Event())
    steps.is_running = True
    clock.answer(steps.limit, late=0.1)
    for num_answers in (3, 1, 5, 1, 4, 100):
        driver.add([2] * 5, max_tokens=200)
        steps.cancel_queued()
        workers.drop()
        for _ in range(num_answers):
            steps.begin_turn()
            while steps.has_room and (output := steps.schedule()) is not None:
                await steps.give(output)
            most = max(most, len(steps.answers))
            assert len(steps.answers) <= 2 + num_answers
            clock.sent += 0.001
            clock.now = clock.sent + 0.1
            workers.answer(clock.sent)
            answer = await steps.next_answer()
            assert answer is not None
            driver.scheduler.update(answer)
    assert most == 64
