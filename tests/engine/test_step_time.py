"""What is learned of the time of steps, and how many prompt tokens they get by it."""

from __future__ import annotations

import math
import random

import pytest

from aengine.engine.pacing.step_time import StepTime

FIXED, PER_TOKEN = 0.0004, 3.25e-6  # of Qwen3-0.6B on an H200: 2,048 tokens 7 ms, 8,192 tokens 27 ms
DECODES = 0.0015  # 64 streams


class Worker:
    """Runs steps one after the other, each published while the one before is under way."""

    def __init__(self, step_time: StepTime, fixed: float = FIXED, per_token: float = PER_TOKEN) -> None:
        self.step_time, self.fixed, self.per_token = step_time, fixed, per_token
        self.now = 100.0

    def seconds(self, num_prompt_tokens: int) -> float:
        return self.fixed + self.per_token * num_prompt_tokens

    def run(self, num_prompt_tokens: int, more: float = 0.0) -> float:
        self.step_time.begin(num_prompt_tokens, self.now)
        seconds = (self.seconds(num_prompt_tokens) if num_prompt_tokens else 0.0) + more
        self.now += seconds
        self.step_time.end(self.now)
        return seconds

    def prompt_beside_decodes(self, num_tokens: int) -> list[float]:
        """The seconds of the steps that a prompt takes."""
        steps = []
        while num_tokens:
            limit = self.step_time.prompt_limit(64, 1)
            count = num_tokens if limit is None else min(limit, num_tokens)
            steps.append(self.run(count, DECODES))
            num_tokens -= count
        return steps


def test_a_prompt_of_4096_tokens_takes_two_steps_of_the_goal(rng: random.Random) -> None:
    worker = Worker(StepTime(0.01))
    for _ in range(8):
        worker.run(8192)
    for _ in range(100):
        worker.run(0, DECODES)
    later = [worker.prompt_beside_decodes(4096) for _ in range(20)][5:]
    assert all(len(steps) == 2 for steps in later)
    assert max(max(steps) for steps in later) < 0.0105
    assert min(steps[0] for steps in later) > 0.0095


@pytest.mark.parametrize("size", [1, 37, 300, 8192])
def test_steps_of_one_size_tell_the_time_of_that_size(size: int) -> None:
    worker = Worker(StepTime(0.01))
    for _ in range(30):
        worker.run(size)
    assert worker.step_time.expected(size) == pytest.approx(worker.seconds(size))


def test_the_time_grows_with_the_tokens_whatever_was_measured(rng: random.Random) -> None:
    for _ in range(200):
        step_time = StepTime(0.01)
        worker = Worker(step_time, 0, 0)
        for _ in range(rng.randint(1, 30)):
            worker.run(rng.choice([1, 2, 100, 8192]), rng.choice([1e-6, 1e-3, 1.0]) * rng.uniform(0.5, 1.5))
        times = [step_time.expected(tokens) for tokens in (0, 1, 10, 1000, 100_000)]
        assert all(0 <= a < b < math.inf for a, b in zip(times, times[1:]))
        limits = [step_time.prompt_limit(64, waiting) for waiting in (1, 16, 17, 64, 1000)]
        assert all(limit is not None and limit >= 32 for limit in limits) and limits == sorted(limits)


def test_a_disturbed_step_hardly_counts() -> None:
    worker = Worker(StepTime(0.01))
    for i in range(20):
        worker.run(500 + 100 * i)
    before = worker.step_time.prompt_limit(64, 1)
    worker.run(1000, 1.5)  # a kernel was compiled
    after = worker.step_time.prompt_limit(64, 1)
    assert after == pytest.approx(before, rel=0.25)


def test_a_first_step_that_was_disturbed_is_forgotten() -> None:
    worker = Worker(StepTime(0.01))
    worker.run(100, 5.0)
    assert worker.step_time.prompt_limit(64, 1) == 32
    worker.run(32)
    worker.run(2000)
    assert worker.step_time.expected(2000) == pytest.approx(worker.seconds(2000), rel=0.2)


def test_a_device_that_becomes_slower_is_followed() -> None:
    worker = Worker(StepTime(0.01))
    for i in range(20):
        worker.run(1000 + 200 * i)
    worker.per_token *= 4
    for i in range(20):
        worker.run(1000 + 200 * i)
    assert worker.step_time.expected(3000) == pytest.approx(worker.seconds(3000), rel=0.1)


def test_in_a_burst_a_step_takes_longer() -> None:
    """256 prompts of 128 tokens: the first 64 decode, and 192 wait."""
    worker = Worker(StepTime(0.01))
    worker.run(8192)
    limits = [worker.step_time.prompt_limit(64, waiting) for waiting in (1, 16, 32, 192)]
    assert limits[0] == limits[1] and limits[3] is not None and limits[3] > 8192
    assert limits[2] == pytest.approx(2 * limits[0], abs=1)


def test_on_a_slow_device_prompts_get_twice_the_time_of_decodes() -> None:
    worker = Worker(StepTime(0.01), fixed=0.03, per_token=0.001)
    for _ in range(10):
        worker.run(0, 0.03)
        worker.run(100)
        worker.run(300)
    assert worker.step_time.prompt_limit(4, 1) == pytest.approx(2 * 0.03 / 0.001, rel=0.2)


def test_nothing_is_cut_before_something_was_measured_nor_without_a_goal() -> None:
    assert StepTime(0.01).prompt_limit(64, 1) is None
    worker = Worker(StepTime(math.inf))
    worker.run(100)
    assert worker.step_time.prompt_limit(64, 1) is None


def test_what_is_no_time_of_the_worker_is_not_learned() -> None:
    step_time = StepTime(0.01)
    step_time.begin(100, 1.0, waits_for_host=True)
    step_time.begin(0, 1.0)
    step_time.begin(0, 1.0)
    step_time.drop(1)
    step_time.end(5.0)
    assert step_time.prompt_limit(64, 1) is None
    step_time.begin_worker()
    step_time.begin(100, 10.0)
    step_time.end(10.5)
    assert step_time.expected(100) == pytest.approx(0.5)
