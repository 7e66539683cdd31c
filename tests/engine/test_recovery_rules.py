"""When workers are started again, and when they count as hanging; a clock of our own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aengine.engine.recovery import RestartBudget, Watchdog
from aengine.ipc.liveness import Liveness


def test_restarts_back_off_and_end() -> None:
    budget = RestartBudget(5, 100.0)
    delays = [budget.next_delay(1.0 + i) for i in range(6)]
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, None]
    assert budget.next_delay(101.5) == 0.0, "the first has left the window, and the others are no series any more"
    budget.forgive()
    assert [budget.next_delay(102.0 + i) for i in range(2)] == [0.0, 0.25], "the cause of those before is gone"
    assert RestartBudget(0, 100.0).next_delay(0.0) is None


class FakeLoop:
    """The part of a loop that the watchdog uses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Any, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any) -> Any:
        handle = asyncio.TimerHandle(self.now + delay, callback, (), self)  # type: ignore[arg-type]
        self.timers.append((self.now + delay, callback, handle))
        return handle

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: Any) -> None:
        pass

    def run(self, seconds: float, jump: float = 0.0) -> None:
        """Let time pass; ``jump``: all at once, as when something else holds the loop."""
        end = self.now + seconds
        self.now += jump
        while self.timers and self.timers[0][0] <= end:
            when, callback, handle = self.timers.pop(0)
            self.now = max(self.now, when)
            if not handle.cancelled():
                callback()
        self.now = max(self.now, end)


class Scene:
    def __init__(self, **options: Any) -> None:
        self.loop, self.beats, self.faults = FakeLoop(), 0, []
        self.dog = Watchdog(self.loop, 4.0, self.liveness, self.faults.append, **options)  # type: ignore[arg-type]
        self.lives = True
        self.overdue = 0.0

    def liveness(self) -> Liveness:
        self.beats += self.lives
        return Liveness(self.beats, self.overdue)

    def steps(self, count: int, num_tokens: int, seconds: float) -> None:
        for _ in range(count):
            self.dog.begin(num_tokens)
            self.loop.run(seconds)
            self.dog.end()


def test_a_heart_that_stands_still() -> None:
    scene = Scene()
    scene.steps(5, 16, 0.05)
    scene.dog.begin(16)
    scene.lives = False
    scene.loop.run(3.9)
    assert scene.faults == []
    scene.loop.run(0.5)
    assert len(scene.faults) == 1 and "no sign of life" in scene.faults[0]
    scene.loop.run(100)
    assert len(scene.faults) == 1


def test_a_step_that_does_not_end() -> None:
    scene = Scene()
    scene.steps(5, 64, 0.1)
    scene.dog.begin(64)
    scene.loop.run(4.0)
    assert scene.faults == []
    scene.loop.run(1.0)
    assert "a step of 64 tokens" in scene.faults[0]


def test_an_answer_that_comes_beside_the_verdict() -> None:
    """The step loop takes it a turn later, as any answer; then it meets the failure."""
    scene = Scene()
    scene.steps(5, 16, 0.05)
    scene.dog.begin(16)
    scene.dog.begin(16)
    scene.lives = False
    scene.loop.run(5.0)
    assert len(scene.faults) == 1
    scene.dog.end()
    scene.dog.end()
    scene.loop.run(100)
    assert len(scene.faults) == 1


def test_an_answer_that_comes_after_the_end() -> None:
    """Of replicas that share experts one step loop has ended, and another one's step is answered."""
    scene = Scene()
    scene.steps(3, 16, 0.05)
    scene.dog.begin(16)
    scene.dog.stop()
    scene.dog.end()
    scene.loop.run(100)
    assert scene.faults == []


def test_devices_that_were_overdue_for_a_moment() -> None:
    """One rank has said since that it is done, and the other has not said anything newer."""
    scene = Scene(patience=30.0)
    scene.steps(5, 16, 0.05)
    for _ in range(3):
        scene.dog.begin(16)
        scene.overdue = 5.0
        scene.loop.run(0.11)
        scene.overdue = 0.0
        scene.loop.run(0.11)
        scene.dog.end()
    assert scene.faults == []
    scene.dog.begin(16)
    scene.overdue = 5.0
    scene.loop.run(0.5)
    assert "stuck in a step" in scene.faults[0]


@pytest.mark.parametrize(("num_tokens", "seconds"), [(640, 4.5), (64, 4.2)])
def test_larger_steps_may_take_longer(num_tokens: int, seconds: float) -> None:
    scene = Scene()
    scene.steps(5, 64, 0.1)
    scene.steps(1, num_tokens, seconds)
    assert scene.faults == []


def test_the_first_step_may_compile() -> None:
    scene = Scene()
    scene.steps(1, 16, 60.0)
    assert scene.faults == []
    patient = Scene(patience=30.0)
    patient.steps(3, 16, 0.001)
    patient.steps(1, 16, 29.0)
    assert patient.faults == []


def test_a_loop_that_was_held_blames_nobody() -> None:
    scene = Scene()
    scene.steps(5, 16, 0.05)
    scene.dog.begin(16)
    scene.loop.run(0.2)
    scene.loop.run(60.0, jump=60.0)
    scene.dog.end()
    assert scene.faults == []


def test_a_wait_for_the_host_is_not_the_workers() -> None:
    scene = Scene()
    scene.steps(5, 64, 0.1)
    scene.dog.begin(64)
    paused = scene.dog.pause()
    scene.loop.run(60.0)
    scene.dog.resume(paused)
    scene.loop.run(4.0)
    assert scene.faults == []
    scene.loop.run(1.0)
    assert "a step of 64 tokens" in scene.faults[0]
    scene.dog.begin(64)
    paused = scene.dog.pause()
    scene.lives = False
    scene.loop.run(5.0)
    assert "no sign of life" in scene.faults[1]
    scene.dog.resume(paused)


def test_steps_beside_a_call_say_nothing_of_others() -> None:
    """Their time is not measured, so that they must not take the place of those whose time is known."""
    scene = Scene()
    scene.steps(2, 64, 20.0)
    with scene.dog.suspended():
        scene.steps(64, 64, 0.05)
    scene.dog.begin(64)
    scene.loop.run(20.0)
    assert not scene.faults


def test_a_resume_of_what_is_watched_no_more() -> None:
    """The workers have died meanwhile, and a step of others waits for the host now."""
    scene = Scene()
    scene.steps(5, 64, 0.1)
    scene.dog.begin(64)
    paused = scene.dog.pause()
    scene.dog.stop()
    scene.dog.begin(64)
    again = scene.dog.pause()
    scene.dog.resume(paused)
    scene.loop.run(60.0)
    assert scene.faults == []
    scene.dog.resume(again)
    scene.dog.drop(3)


def test_nothing_is_watched_when_nothing_runs() -> None:
    scene = Scene()
    scene.steps(5, 16, 0.05)
    scene.lives = False
    scene.loop.run(100)
    assert scene.faults == [] and not [t for t in scene.loop.timers if not t[2].cancelled()]
