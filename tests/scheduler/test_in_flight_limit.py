"""How far ahead steps are given, by how late the loop was."""

from __future__ import annotations

import pytest
from scheduler_harness import Driver

from aengine.engine.pacing import in_flight_limit as lease
from aengine.engine.pacing.in_flight_limit import InFlightLimit
from aengine.engine.scheduler.scheduler import Scheduler

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
