"""What is learned of the time of steps, and how many prompt tokens they get by it."""

from __future__ import annotations

import math
import random
from bisect import bisect_left

import pytest

from aengine.engine.pacing.step_time import StepTime

FIXED, PER_TOKEN = 0.0016, 1.75e-6  # of Qwen3-0.6B on an H200: 2,048 tokens 5.2 ms, 8,192 tokens 16 ms
LARGE = 0.001, 21.5e-6  # of Llama-3.1-8B: 45 ms; 177 ms
SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2304)


class Worker:
    """Runs steps, padded to ``sizes``, and tells how long they took."""

    def __init__(self, goal: float, sizes: tuple[int, ...] = (), fixed: float = FIXED, per_token: float = PER_TOKEN):
        self.step_time = StepTime(goal, sizes)
        self.sizes, self.fixed, self.per_token = sizes, fixed, per_token

    def seconds(self, num_tokens: int) -> float:
        place = bisect_left(self.sizes, num_tokens)
        return self.fixed + self.per_token * (self.sizes[place] if place < len(self.sizes) else num_tokens)

    def run(self, num_tokens: int, more: float = 0.0) -> float:
        seconds = self.seconds(num_tokens) + more
        self.step_time.learn(num_tokens, seconds)
        return seconds

    def prompt_beside_decodes(self, num_tokens: int, num_decoding: int = 64) -> list[int]:
        """The tokens of the steps that a prompt takes."""
        steps = []
        while num_tokens:
            limit = self.step_time.prompt_limit(num_decoding, min(1, len(steps)))
            count = num_tokens if limit is None else min(limit, num_tokens)
            self.run(num_decoding + count)
            steps.append(num_decoding + count)
            num_tokens -= count
        return steps


def test_a_prompt_beside_decodes_takes_steps_that_are_not_padded_and_run_as_one_launch() -> None:
    worker = Worker(0.01, SIZES)
    for size in (8192, 4096, 1000, 100):
        worker.run(size)
    assert worker.prompt_beside_decodes(4096) == [2304, 1920]
    assert worker.prompt_beside_decodes(1000) == [1064]  # nothing is cut off that fits


def test_its_steps_keep_to_the_time_of_a_large_model() -> None:
    worker = Worker(0.01, SIZES, *LARGE)
    for size in (8192, 4096, 1000, 100):
        worker.run(size)
    sizes = worker.prompt_beside_decodes(4096)
    assert set(sizes[:-1]) == {512}  # six times the 2.4 ms of 64 decodes are 14 ms


def test_without_sizes_the_time_alone_counts() -> None:
    worker = Worker(0.01)
    for size in (8192, 4096, 1000, 100):
        worker.run(size)
    sizes = worker.prompt_beside_decodes(8192)
    assert all(worker.seconds(size) == pytest.approx(0.01, rel=0.01) for size in sizes[:-1])


@pytest.mark.parametrize("size", [1, 37, 300, 8192])
def test_steps_of_one_size_tell_the_time_of_that_size(size: int) -> None:
    worker = Worker(0.01)
    for _ in range(30):
        worker.run(size)
    assert worker.step_time.expected(size) == pytest.approx(worker.seconds(size))


def test_the_time_grows_with_the_tokens_whatever_was_measured(rng: random.Random) -> None:
    for _ in range(200):
        worker = Worker(0.01, rng.choice([(), SIZES]), 0, 0)
        for _ in range(rng.randint(1, 30)):
            worker.run(rng.choice([1, 2, 100, 8192]), rng.choice([1e-6, 1e-3, 1.0]) * rng.uniform(0.5, 1.5))
        times = [worker.step_time.expected(tokens) for tokens in (0, 1, 10, 1000, 100_000)]
        assert all(0 <= a < b < math.inf for a, b in zip(times, times[1:]))
        limits = [worker.step_time.prompt_limit(64, left) for left in (0, 1, 4, 6, 16)]
        found = [math.inf if limit is None else limit for limit in limits]
        assert min(found) >= 32 and found == sorted(found)


def test_a_disturbed_step_hardly_counts() -> None:
    worker = Worker(0.01)
    for i in range(20):
        worker.run(500 + 100 * i)
    worker.run(1000, 1.5)  # a kernel was compiled
    assert worker.step_time.expected(2000) == pytest.approx(worker.seconds(2000), rel=0.25)


def test_a_first_step_that_was_disturbed_is_forgotten() -> None:
    worker = Worker(0.01)
    worker.run(164, 5.0)
    worker.run(96)
    worker.run(2000)
    assert worker.step_time.expected(2000) == pytest.approx(worker.seconds(2000), rel=0.2)


def test_a_device_that_becomes_slower_is_followed() -> None:
    worker = Worker(0.01)
    for i in range(20):
        worker.run(1000 + 200 * i)
    worker.per_token *= 4
    for i in range(20):
        worker.run(1000 + 200 * i)
    assert worker.step_time.expected(3000) == pytest.approx(worker.seconds(3000), rel=0.1)


def test_in_a_burst_a_step_takes_longer() -> None:
    """256 prompts of 128 tokens: when 64 decode, 192 wait; when 192 decode, 64 wait."""
    worker = Worker(0.01, SIZES, *LARGE)
    for size in (8192, 4096, 1000, 100):
        worker.run(size)
    limits = [worker.step_time.prompt_limit(64, left) for left in (1, 4, 8, 14)]
    assert limits == [512 - 64, 512 - 64, 1024 - 64, 2304 - 64]
    for num_decoding, num_left in ((64, 192), (192, 64)):  # a launch is short beside such a step
        limit = worker.step_time.prompt_limit(num_decoding, num_left)
        assert limit is not None and limit > 8192


def test_where_small_steps_cost_much_a_crowd_is_not_cut() -> None:
    """A third of a small model's step is its fixed part."""
    worker = Worker(0.01, SIZES)
    for size in (8192, 4096, 1000, 100):
        worker.run(size)
    found = [worker.step_time.prompt_limit(*numbers) for numbers in ((64, 192), (127, 129), (190, 66))]
    assert found == [None, None, 2304 - 190]


def test_on_a_slow_device_prompts_get_most_of_the_time() -> None:
    worker = Worker(0.01, fixed=0.03, per_token=0.001)
    for _ in range(10):
        worker.run(100)
        worker.run(300)
    assert worker.step_time.prompt_limit(4, 1) == pytest.approx(5 * 0.034 / 0.001, rel=0.2)


def test_nothing_is_cut_without_a_goal_and_before_a_step_was_measured_only_to_one_launch() -> None:
    assert StepTime(0.01).prompt_limit(64, 1) is None
    assert StepTime(0.01, SIZES).prompt_limit(64, 1) == 2304 - 64
    worker = Worker(math.inf, SIZES)
    worker.run(100)
    assert worker.step_time.prompt_limit(64, 1) is None


@pytest.mark.parametrize("sizes", [(), SIZES])
def test_times_that_no_step_takes(sizes: tuple[int, ...], rng: random.Random) -> None:
    """Damaged answers have any number: from the least that a float can be to the largest."""
    for _ in range(50):
        step_time = StepTime(0.01, sizes)
        for _ in range(rng.randint(1, 12)):
            step_time.learn(rng.randint(1, 9000), rng.choice([5e-324, 1e-300, 1e-9, 0.01, 1e9, 1e308]))
            limit = step_time.prompt_limit(rng.randint(1, 300), rng.randint(0, 300))
            assert limit is None or limit > 0
