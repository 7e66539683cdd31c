"""An engine that is paused: nothing is computed, what runs keeps its place, and what comes waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of, settled, until, until_running
from fakes import FakeExecutor
from test_recovery import death

from aengine import AsyncLLM, Completion, EngineClosedError, FinishReason, InvalidRequestError, SamplingParams
from aengine.engine import recovery
from aengine.engine.pacing.holds import Hold

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")
SLOW = {"delay": 0.002}


@pytest.fixture(params=["on this loop", "own thread"])
def make(make_engine: Make, request: pytest.FixtureRequest) -> Make:
    return lambda **config: make_engine(**{"own_thread": request.param == "own thread", **config})


def tokens(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=number, ignore_eos=True)


def begin(engine: AsyncLLM, number: int, params: SamplingParams) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate([i + 1] * 20, params)) for i in range(number)]


def num_steps(engine: AsyncLLM) -> int:
    return engine.statistics().num_steps


async def stands_still(engine: AsyncLLM) -> None:
    """No step is in flight, and none comes, though there is work."""
    assert not any(replica.scheduler.rows.steps for replica in core_of(engine).replicas)
    before = num_steps(engine)
    await engine.check_health()
    for _ in range(50):
        await asyncio.sleep(0)
    assert num_steps(engine) == before and engine.state == "paused"


def position_tokens(number: int) -> list[int]:
    return [260 + position for position in range(20, 20 + number)]


async def test_what_runs_is_kept_and_what_comes_waits(make: Make) -> None:
    """Also while the steps are leased, and over a second pause."""
    async with make(fake=SLOW) as engine:
        tasks = begin(engine, 4, tokens(300))
        await until_running(engine, 4)
        assert await engine.pause("keep") is True
        tasks += begin(engine, 2, tokens(5))
        await until(lambda: engine.statistics().num_waiting == 2)
        await stands_still(engine)
        assert await engine.pause("keep") is True
        assert engine.statistics().num_running == 4
        await engine.resume()
        assert engine.state == "running"
        for count, task in zip([300] * 4 + [5] * 2, tasks, strict=True):
            assert list((await task).token_ids) == position_tokens(count)
        await settled(engine)


async def test_what_runs_ends_by_itself_or_is_ended(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        early = begin(engine, 3, tokens(60))
        await until_running(engine, 3)
        pausing = asyncio.create_task(engine.pause("wait"))
        await until(lambda: engine.state == "paused")
        late = begin(engine, 2, tokens(100))
        assert await pausing is True
        assert [len((await task).token_ids) for task in early] == [60] * 3
        await stands_still(engine)
        assert engine.statistics().num_waiting == 2
        await engine.resume()
        await until_running(engine, 2)
        assert await engine.pause() is True
        assert [(await task).finish_reason for task in late] == [FinishReason.ABORT] * 2
        await engine.resume()
        await settled(engine)


async def test_bad_calls_and_ends(make: Make) -> None:
    """A pause whose caller gives up was none; a drain ends one, and so does the end of the engine."""
    async with make(fake=SLOW) as engine:
        wrong: Any = "stop"
        with pytest.raises(InvalidRequestError, match='one of "abort"'):
            await engine.pause(wrong)
        with pytest.raises(InvalidRequestError, match="takes no new weights"):
            await engine.start_weight_update()
        (task,) = begin(engine, 1, tokens(100))
        await until_running(engine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.pause("wait")
        await until(lambda: engine.state == "running")
        pausing = asyncio.create_task(engine.pause("wait"))
        await until(lambda: engine.state == "paused")
        await engine.resume()
        assert await pausing is False
        assert await engine.pause("keep") and await engine.drain(0) is False and engine.state == "draining"
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.pause("keep")
        assert len((await task).token_ids) == 100
        await engine.resume()
        (task,) = begin(engine, 1, tokens(100))
        await until_running(engine)
        assert await engine.pause("keep")
        pausing = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
    for waiting in (task, pausing):
        with pytest.raises(EngineClosedError):
            await waiting


async def test_a_worker_dies_meanwhile(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause lasts; then all requests go on, with another worker."""
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)
    async with make_engine(fake=SLOW) as engine:
        tasks = begin(engine, 3, tokens(60))
        await until_running(engine, 3)
        assert await engine.pause("keep")
        core_of(engine).replicas[0].worker.executor.fail(death())
        await until(lambda: engine.statistics().num_restarts and engine.statistics().replicas[0].state == "running")
        await stands_still(engine)
        await engine.resume()
        for task in tasks:
            assert list((await task).token_ids) == position_tokens(60)


async def test_replicas_are_paused_together(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_engine, "_make_executor", lambda self, config: FakeExecutor(**self.fake))
    async with make_engine(fake=SLOW, data_parallel_size=2, num_threads=1) as engine:
        tasks = begin(engine, 6, tokens(100))
        await until_running(engine, 6)
        assert await engine.pause("keep")
        await stands_still(engine)
        await engine.resume()
        assert [len((await task).token_ids) for task in tasks] == [100] * 6


async def test_holds_of_several(make_engine: Make) -> None:
    """Steps go on when the last one that holds them up has released them."""
    async with make_engine(fake=SLOW) as engine:
        (task,) = begin(engine, 1, tokens(50))
        holds, one = core_of(engine).holds, Hold("one", "paused")
        holds.stop(one)
        await engine.pause("keep")
        await engine.resume()
        await holds.at_rest()
        before = num_steps(engine)
        for _ in range(50):
            await asyncio.sleep(0)
        assert num_steps(engine) == before and not task.done()
        holds.obstacle = "the test says so"
        with pytest.raises(InvalidRequestError, match="can't be resumed now: the test says so"):
            await engine.resume()
        holds.obstacle = ""
        assert engine.state == "paused"
        holds.release(one)
        assert engine.state == "running"
        assert len((await task).token_ids) == 50
