"""How far ahead steps are given, by how late the loop was."""

from __future__ import annotations

import pytest
from scheduler_harness import Driver

from aengine.engine import lease
from aengine.engine.lease import Lease

LIMITS = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    return now


def used(clock: list[float], most: int = 64) -> Lease:
    """Steps of 2 ms."""
    given = Lease(2, most)
    for _ in range(200):
        clock[0] += 0.002
        given.note_turn(2, 1)
        given.note_answer()
    return given


def test_as_many_steps_as_the_loop_is_late(clock: list[float]) -> None:
    scheduler = Driver(**LIMITS).scheduler
    assert Lease(2, 64).num_steps(scheduler) == 2
    given = used(clock)
    assert given.num_steps(scheduler) == 2
    clock[0] += 0.05
    given.note_turn(2, 2)  # the worker had nothing to do
    assert given.num_steps(scheduler) == 2 + 38
    clock[0] += 0.05
    given.note_turn(40, 25)  # it has, now, and the loop is still as late
    assert given.num_steps(scheduler) == 2 + 38
    for _ in range(1000):
        clock[0] += 0.01
        given.note_turn(40, 1)
    assert given.num_steps(scheduler) == 2, "it is on time again"
    clock[0] += 5
    given.note_turn(2, 2)
    assert given.num_steps(scheduler) == 64
    none = used(clock, most=0)
    clock[0] += 5
    none.note_turn(2, 2)
    assert none.num_steps(scheduler) == 2


def test_a_long_step_is_no_late_loop(clock: list[float]) -> None:
    given = used(clock)
    clock[0] += 3
    given.note_turn(2, 1)
    assert given.num_steps(Driver(**LIMITS).scheduler) == 2


def test_none_with_grammars_or_without_memory(clock: list[float]) -> None:
    driver = Driver(**LIMITS)
    given = used(clock)
    clock[0] += 0.05
    given.note_turn(2, 2)
    assert given.num_steps(driver.scheduler) > 2
    driver.scheduler.num_constrained = 1
    assert given.num_steps(driver.scheduler) == 2
    driver.scheduler.num_constrained = 0
    for _ in range(6):
        driver.add([1] * 100, max_tokens=60)
    driver.schedule()
    assert driver.scheduler.num_running
    driver.scheduler._pool.allocate(driver.scheduler.num_free_blocks - 3)
    assert given.num_steps(driver.scheduler) == 2
