"""Steps that do not end though the worker's heart beats: which are taken for hangs, and that streams go on after it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import pytest
from conftest_api import core_of

from aengine import AsyncLLM, SamplingParams
from aengine.workers.device_watch import IDLE, DeviceWatch, overdue_seconds

LONG = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False)
EXPECTED = tuple(range(261, 311))
SETTINGS: dict[str, Any] = {"worker_extension": "stuck_runner:Extension", "skip_tokenizer": True, "hang_timeout": 2.0}
FOREVER = 3600.0


def make(platform: str, num_ranks: int) -> AsyncLLM:
    worker = f"stuck_runner:load_{'cpu_' * (platform == 'cpu')}model"
    return AsyncLLM("smollm2-135m", worker=worker, tensor_parallel_size=num_ranks, **SETTINGS)


async def tokens(engine: AsyncLLM) -> tuple[int, ...]:
    return (await engine.generate([1], LONG)).token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "host", "device", "reason"),
    [
        ("gpu", [0.0], [FOREVER], "has a device that is stuck in a step"),
        ("gpu", [0.0, 0.0], [FOREVER, 0.0], "has a device that is stuck in a step"),  # the other one waits for nothing
        ("cpu", [FOREVER, 0.0], [0.0, 0.0], "has worked on a step of"),
    ],
)
async def test_a_step_that_never_ends(platform: str, host: list[float], device: list[float], reason: str) -> None:
    """A GPU's is seen long before the 30 s that the host's part of a step may take there."""
    async with make(platform, len(host)) as engine:
        assert await tokens(engine) == EXPECTED
        async with engine.stream([1], LONG) as stream:
            await engine.collective_rpc("delay", host, device)
            got = tuple([token.token_id async for token in stream])
        assert got == EXPECTED
        (restart,) = engine.statistics().restarts
        assert reason in restart.reason
        assert restart.reason.startswith("the worker" if len(host) == 1 else "one of 2 workers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "device"),
    [
        ([2.7], [0.0]),  # compiles
        ([0.0, 2.7], [2.7, 0.0]),  # a rank compiles, and the other's device waits for it
    ],
)
async def test_a_compiler_is_waited_for(host: list[float], device: list[float]) -> None:
    async with make("gpu", len(host)) as engine:
        assert await tokens(engine) == EXPECTED
        await engine.collective_rpc("delay", host, device)
        assert await tokens(engine) == EXPECTED
        assert engine.statistics().num_restarts == 0


@pytest.mark.slow
async def test_a_rank_that_is_stopped_ends_all() -> None:
    async with make("gpu", 2) as engine:
        assert await tokens(engine) == EXPECTED
        await engine.collective_rpc("delay", [0.0, 0.0], [FOREVER, FOREVER])
        os.kill(engine.describe()["ranks"][1]["pid"], signal.SIGSTOP)
        assert await tokens(engine) == EXPECTED
        assert re.match(r"worker 1 \(pid \d+\) has shown no sign of life", engine.statistics().restarts[0].reason)
        assert core_of(engine).is_alive


@pytest.mark.slow
async def test_a_rank_that_samples_other_tokens_ends_all() -> None:
    async with make("gpu", 3) as engine:
        assert await tokens(engine) == EXPECTED
        await engine.collective_rpc("lie", 2)
        assert await tokens(engine) == EXPECTED
        while not engine.statistics().restarts:
            await asyncio.sleep(0.01)
        assert await tokens(engine) == EXPECTED
        (restart,) = engine.statistics().restarts
        assert "rank 2 and the rank that answers have sampled different tokens in step" in restart.reason


# -- values


class Clock:
    def __init__(self, watch: DeviceWatch) -> None:
        self.watch, self.now = watch, 100.0

    def looks(self, seconds: float, num_tokens: int = 1, period: float = 0.01) -> None:
        end = self.now + seconds
        while self.now < end:
            self.watch.note_not_done(num_tokens, self.now)
            self.now += period


def overdue(watch: DeviceWatch) -> float:
    return overdue_seconds([watch.word])


def test_what_is_overdue() -> None:
    watch = DeviceWatch()
    clock = Clock(watch)
    clock.looks(25.0)
    assert watch.word == 1 and overdue(watch) == 0, "nothing is known yet"
    watch.note_done(1, 0.05)
    clock.looks(4.0)
    assert overdue(watch) == pytest.approx(3.9, abs=0.1)
    clock.looks(0.1, 2048)
    assert overdue(watch) == 0, "so many tokens may take 128 times as long as 16"
    watch.note_done(1, 0.0)  # not known
    assert overdue(watch) == 0
    clock.looks(0.5)
    clock.now += 3600  # the process was stopped, or compiled the next step's kernels
    clock.looks(0.5)
    assert overdue(watch) < 2
    watch.note_done(1, 30.0)
    clock.looks(50.0)
    assert overdue(watch) == 0, "one step took as long"
    for _ in range(64):
        watch.note_done(1, 0.05)
    clock.looks(4.0)
    assert overdue(watch) == pytest.approx(3.9, abs=0.1), "which is long ago"
    watch.note_busy()
    assert watch.word == 0
    watch.note_idle()
    assert watch.word == IDLE


def test_a_group_is_overdue_when_nobody_is_busy() -> None:
    assert overdue_seconds([IDLE, IDLE]) == 0
    assert overdue_seconds([5001, 7001]) == 5
    assert overdue_seconds([5001, IDLE]) == 5
    assert overdue_seconds([5001, 0]) == overdue_seconds([5001, 1]) == 0
