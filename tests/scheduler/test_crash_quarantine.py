"""Who is held to have killed a worker."""

from __future__ import annotations

import random

from scheduler_harness import Driver

from aengine.engine.scheduler.crash_quarantine import CrashQuarantine
from aengine.engine.scheduler.request import Request
from aengine.outputs import FinishReason
from aengine.params import SamplingParams


def make(name: str) -> Request:
    return Request(name, [1, 2], SamplingParams(), seed=0, max_num_tokens=10_000, stop_token_ids=frozenset())


def gain(request: Request, count: int) -> None:
    request.token_ids += [7] * count


def test_who_kills_by_a_prefill_or_by_a_decode_is_at_fault() -> None:
    for tokens_a_life in (0, 1):
        quarantine, poison, other = CrashQuarantine(), make("poison"), make("other")
        at_fault: list[Request] = []
        deaths = 0
        while not at_fault:
            deaths += 1
            assert deaths <= 6
            alone = quarantine and quarantine.first is poison
            gain(poison, tokens_a_life)
            at_fault = quarantine.note_death([poison] if alone else [poison, other])
            if quarantine and quarantine.first is other:  # its trial, which it passes
                gain(other, 4)
                assert not quarantine.holds(other)
        assert at_fault == [poison] and deaths == 6


def test_a_death_without_the_one_on_trial_speaks_for_it() -> None:
    quarantine, request = CrashQuarantine(), make("r")
    for _ in range(5):
        assert not quarantine.note_death([request])
    for _ in range(5):
        assert not quarantine.note_death([])  # as of a worker that is killed while it starts
        for _ in range(3):
            assert not quarantine.note_death([request])
    assert quarantine.note_death([request]) == [request]


def test_the_same_exception_twice_while_it_runs_alone() -> None:
    quarantine, request, other = CrashQuarantine(), make("r"), make("other")
    assert not quarantine.note_death([request, other], "ValueError")  # either may have raised it
    assert not quarantine.note_death([request], "ValueError")
    assert not quarantine.note_death([request], "another")
    assert not quarantine.note_death([], "another")
    assert quarantine.note_death([request], "another") == [request]


def test_the_same_exception_after_progress_or_unsaid_is_no_proof() -> None:
    quarantine, request = CrashQuarantine(), make("r")
    for _ in range(10):
        gain(request, 2)
        assert not quarantine.note_death([request], "CUDA error")
    silent = make("silent")
    for _ in range(5):
        assert not CrashQuarantine().note_death([silent], "")


def test_some_progress_is_no_proof() -> None:
    quarantine, request = CrashQuarantine(), make("r")
    for _ in range(50):
        gain(request, 2)
        assert not quarantine.note_death([request])
    gain(request, 4)
    assert not quarantine.holds(request) and not quarantine


def test_kills_at_random_condemn_hardly_anybody(rng: random.Random) -> None:
    """A worker lives for 3 to 60 tokens, in one life of five for 0 to 3; one life of four ends before any request."""
    at_fault = 0
    for _ in range(1500):
        quarantine, request = CrashQuarantine(), make("r")
        for _ in range(30):
            gained = rng.randint(0, 3) if rng.random() < 0.2 else rng.randint(3, 60)
            for _ in range(gained):
                gain(request, 1)
                if quarantine:
                    quarantine.holds(request)
            at_fault += bool(quarantine.note_death([] if rng.random() < 0.25 else [request]))
    assert at_fault <= 9, "of 45,000 deaths; with three deaths alone, and four tokens to pass it, 17 to 27"


def test_it_is_left_after_a_few_tokens_wherever_they_are_in_a_block() -> None:
    driver = Driver(depth=1, block_size=64, num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)
    first, second = (driver.add([i] * 5, max_tokens=50, min_tokens=50)[0] for i in (1, 2))
    for _ in range(2):  # deaths, with both in the step
        assert driver.schedule()
        driver.restart()
    assert first in driver.scheduler.quarantine and second in driver.scheduler.quarantine
    while not second.num_output_tokens:
        assert driver.schedule()
        driver.answer()
    assert first.num_output_tokens < 10
    driver.drain()


def test_one_that_ends_in_quarantine_holds_up_nobody() -> None:
    driver = Driver(depth=1, block_size=4, num_blocks=80, max_num_seqs=4, max_num_batched_tokens=64)
    first, second = (driver.add([i] * 5, max_tokens=9, min_tokens=9)[0] for i in (1, 2))
    for _ in range(2):
        assert driver.schedule()
        driver.restart()
    (third,) = driver.add([3] * 5, max_tokens=9, priority=-1)
    assert driver.schedule()
    assert (first.num_computed_tokens, second.num_computed_tokens, third.num_computed_tokens) == (5, 0, 0)
    driver.answer()
    driver.scheduler.finish(first, FinishReason.ABORT)
    assert driver.schedule() and second.num_computed_tokens == 5
    driver.drain()
    assert not driver.scheduler.quarantine


def test_it_is_left_with_the_fourth_token_since_the_death() -> None:
    quarantine, request, other = CrashQuarantine(), make("r"), make("other")
    for _ in range(2):
        quarantine.note_death([request])
    assert quarantine.holds(request) and request in quarantine and not quarantine.holds(other)
    gain(request, 3)
    assert quarantine.holds(request)
    gain(request, 1)
    assert not quarantine.holds(request) and request not in quarantine
