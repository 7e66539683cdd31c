"""When a worker looks for the answer to a step: shortly before it can be there, and not all the time."""

from __future__ import annotations

import pytest

from aengine.workers.answer_times import AnswerTimes

STEP = 0.001


class Device:
    """Runs steps one after the other, two at a time, and the worker that looks for their ends."""

    LOOK = 1e-6  # seconds that it takes to look

    def __init__(self) -> None:
        self.times = AnswerTimes()
        self.now = 100.0
        self.ends: list[float] = []
        self.num_looks = 0
        self.slept = 0.0
        self.late = 0.0
        self.known = 0.0

    def launch(self, seconds: float = STEP, *, only_decodes: bool = True, launching: float = 0.0) -> None:
        self.ends.append(max(self.now, self.ends[-1] if self.ends else 0.0) + seconds)
        begun, self.now = self.now, self.now + launching
        self.times.note_launched(self.now, only_decodes=only_decodes, begun=begun)

    def take(self, wakes_late: float = 0.0, *, may_nap: bool = False) -> None:
        """Wait for the oldest step as a worker does."""
        self.num_looks = 0
        self.slept = 0.0
        while self.now < self.ends[0]:
            seconds = self.times.seconds_to_sleep(self.now, may_nap=may_nap)
            self.slept += seconds
            self.num_looks += not seconds
            self.now += seconds + wakes_late if seconds else self.LOOK
        self.late = self.now - self.ends.pop(0)
        self.known = self.times.note_taken(self.now)

    def run(self, num_steps: int, seconds: float = STEP) -> None:
        self.launch(seconds)
        for _ in range(num_steps):
            self.launch(seconds)
            self.take()
        self.take()


def test_it_sleeps_for_most_of_a_step_and_finds_its_end_at_once() -> None:
    device = Device()
    device.launch()
    device.take()
    assert device.num_looks == pytest.approx(STEP / Device.LOOK, abs=2)  # nothing is known yet
    device.run(10)
    assert device.num_looks == pytest.approx(100, abs=5) and device.slept == pytest.approx(STEP - 100e-6, rel=0.01)
    assert device.late < 2 * Device.LOOK


def test_a_step_with_a_prompt_is_looked_for_from_when_decodes_would_be_done() -> None:
    device = Device()
    device.run(10)
    device.launch(5 * STEP, only_decodes=False)
    device.take()
    assert device.slept == pytest.approx(STEP - 100e-6, rel=0.01) and device.late < 2 * Device.LOOK
    device.run(1)
    assert device.slept == pytest.approx(STEP - 100e-6, rel=0.01)  # it is not one of those that are learned from


def test_steps_that_become_shorter_are_found_out() -> None:
    """As when most requests have ended. A step that is done when the worker wakes says only that it was shorter."""
    device = Device()
    device.run(10, 4 * STEP)
    device.launch()
    lateness = []
    for _ in range(12):
        device.launch()
        device.take()
        lateness.append(device.late)
    assert lateness[0] > STEP and lateness[-1] < 2 * Device.LOOK and sum(late > STEP / 2 for late in lateness) < 6


def test_steps_that_become_longer_are_found_out() -> None:
    device = Device()
    device.run(10)
    device.run(10, 4 * STEP)
    assert device.slept == pytest.approx(4 * STEP - 100e-6, rel=0.01)


def test_a_thread_that_wakes_late_sleeps_for_less() -> None:
    device = Device()
    device.run(10)
    device.launch()
    device.launch()
    device.take(wakes_late=300e-6)
    assert device.late > 0
    device.take(wakes_late=300e-6)
    assert device.late < 2 * Device.LOOK and device.num_looks


def test_steps_that_are_too_short_for_a_sleep() -> None:
    device = Device()
    device.run(10, 120e-6)
    assert device.slept == 0


def test_nothing_is_slept_for_without_a_step() -> None:
    assert AnswerTimes().seconds_to_sleep(1.0) == 0


def test_it_naps_where_an_answer_is_not_urgent() -> None:
    device = Device()
    device.run(10)
    for _ in range(2):
        device.launch()
    device.take(may_nap=True)
    assert not device.num_looks and device.late <= 50e-6 and device.slept == pytest.approx(STEP, abs=51e-6)
    device.take()
    device.launch(3 * STEP, only_decodes=False)
    device.take(may_nap=True)  # first tokens
    assert device.num_looks and device.late < 2 * Device.LOOK


def test_the_time_of_a_step_is_known_if_its_begin_and_end_were_seen() -> None:
    device = Device()
    device.launch(5 * STEP, only_decodes=False, launching=STEP)
    device.launch()
    device.take()
    assert device.known == pytest.approx(5 * STEP, rel=0.01)
    device.take()
    assert device.known == pytest.approx(STEP, rel=0.01)


def test_the_time_of_a_step_is_not_known_that_ended_while_another_was_launched() -> None:
    device = Device()
    device.launch()
    device.launch(STEP, launching=10 * STEP)
    device.take()
    assert device.known == 0
    device.take()
    assert device.known == 0
    device.launch()
    device.take()
    assert device.known == pytest.approx(STEP, rel=0.01)


def test_the_time_of_a_step_on_a_processor_is_that_of_its_launch() -> None:
    device = Device()
    for _ in range(2):
        device.launch(STEP, launching=STEP)
        device.take()
        assert device.known == pytest.approx(STEP, rel=0.01)
