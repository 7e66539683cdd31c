"""An engine that sleeps: its memory goes and comes, requests wait, wake it or are refused, and whatever fails, it can
be woken later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of, settled, until, until_running
from fakes import FakeExecutor
from test_pausing import SLOW, begin, num_steps, position_tokens, tokens
from test_recovery import death

from aengine import (
    AsyncLLM,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    NotEnoughMemoryError,
    WorkerDiedError,
)
from aengine.engine.sleeping import replica_sleep

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")


class Sleeper(FakeExecutor):
    """A worker that gives memory back, unless ``problem`` is why it can't."""

    made: list[Sleeper] = []  # noqa: RUF012
    problem: dict[str, str] = {}  # noqa: RUF012
    no_start: EngineError | None = None
    lives = True

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.ready["can_sleep"] = self.lives
        self.asleep: set[str] = set()
        self.made.append(self)

    async def start(self, *args: Any) -> dict[str, Any]:
        if self.no_start is not None:
            self.terminate()
            raise self.no_start
        return await super().start(*args)

    def execute(self, out: Any) -> Any:
        assert not self.asleep, "a step came while it slept"
        return super().execute(out)

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        if method in ("sleep", "wake_up"):
            if method in self.problem:
                return [self.problem[method]]
            self.asleep = self.asleep | set(args[0]) if method == "sleep" else self.asleep - set(args[0])
            return [""]
        return await super().call(method, *args, timeout=timeout)


@pytest.fixture(params=["workers live", "workers end"])
def make(make_engine: Make, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Make:
    monkeypatch.setattr(Sleeper, "made", [])
    monkeypatch.setattr(Sleeper, "problem", {})
    monkeypatch.setattr(Sleeper, "lives", request.param == "workers live")
    monkeypatch.setattr(make_engine, "_make_executor", lambda self, config: Sleeper(**self.fake))
    return make_engine


async def stands_still(engine: AsyncLLM) -> None:
    assert not any(replica.scheduler.rows.steps for replica in core_of(engine).replicas)
    before = num_steps(engine)
    for _ in range(50):
        await asyncio.sleep(0)
    assert num_steps(engine) == before and engine.is_sleeping and engine.state == "asleep"
    statistics = engine.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks and statistics.sleep_level in (1, 2)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_what_runs_goes_on_when_it_is_woken(make: Make, level: int, replicas: int) -> None:
    how = {"data_parallel_size": replicas, "num_threads": 1} if replicas > 1 else {}
    async with make(fake=SLOW, **how) as engine:
        tasks = begin(engine, 4, tokens(60))
        await until_running(engine, 4)
        for _ in range(3):
            await engine.sleep(level)
            await engine.sleep(level)
            await stands_still(engine)
            assert await engine.check_health() >= 0 and engine.is_sleeping
            await engine.wake_up()
            await engine.wake_up()
            assert engine.state == "running" and engine.statistics().sleep_level == 0
        for task in tasks:
            assert list((await task).token_ids) == position_tokens(60)
        ends = level == 2 or not Sleeper.lives
        assert len(Sleeper.made) == replicas * (4 if ends else 1)
        assert engine.statistics().num_restarts == 0
        await settled(engine)


async def test_a_request_wakes_it_waits_or_is_refused(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        await engine.sleep()
        tasks = begin(engine, 3, tokens(20))
        assert [len((await task).token_ids) for task in tasks] == [20] * 3 and engine.state == "running"
    async with make(fake=SLOW, when_asleep="wait") as engine:
        await engine.sleep()
        tasks = begin(engine, 3, tokens(20))
        await until(lambda: engine.statistics().num_waiting == 3)
        await stands_still(engine)
        await engine.wake_up()
        assert [len((await task).token_ids) for task in tasks] == [20] * 3
    async with make(fake=SLOW, when_asleep="error") as engine:
        await engine.sleep()
        with pytest.raises(EngineClosedError, match="asleep: wake_up"):
            await engine.generate([1], tokens(1))
        await stands_still(engine)
        await engine.wake_up()
        assert len((await engine.generate([1], tokens(1))).token_ids) == 1


async def test_idle_engines_sleep_by_themselves(make: Make) -> None:
    async with make(fake=SLOW, sleep_after=0.01) as engine:
        for _ in range(2):
            await until(lambda: engine.is_sleeping)
            assert len((await engine.generate([1], tokens(20))).token_ids) == 20
        await engine.pause()
        await engine.resume()
        await until(lambda: engine.is_sleeping)
        async with engine.stays_awake(), engine.stays_awake():
            assert engine.is_sleeping, "nothing wakes it for that"
            assert len((await engine.generate([1], tokens(5))).token_ids) == 5
            await asyncio.sleep(0.03)  # it would have fallen asleep by now
            assert engine.state == "running"
        await until(lambda: engine.is_sleeping)
        async with engine.stays_awake():
            await engine.aclose()


async def test_by_tags(make: Make) -> None:
    """Weights can be sent anew while there is no KV yet."""
    async with make(fake=SLOW, when_asleep="wait") as engine:
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        await engine.sleep()
        wrong: Any
        for wrong in ("weights", ["kv"], [1]):
            with pytest.raises(InvalidRequestError, match="tags"):
                await engine.wake_up(wrong)
        for wrong in (0, 3, True, "1", None):
            with pytest.raises(InvalidRequestError, match="level"):
                await engine.sleep(wrong)
        with pytest.raises(EngineClosedError, match="asleep"):
            await engine.collective_rpc("method")
        await engine.wake_up(["weights"])
        assert await engine.collective_rpc("method") == [["method"]]
        await stands_still(engine)
        await engine.sleep()
        await engine.wake_up(["kv_cache"])
        await stands_still(engine)
        await engine.wake_up(["weights"])
        assert len((await task).token_ids) == 60


async def test_without_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the weights on the host: it goes on. At waking: a typed error, also of the requests that were to wake it; and
    it can be woken later."""
    async with make(fake=SLOW) as engine:
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        if Sleeper.lives:
            Sleeper.problem["sleep"] = "no room"
            with pytest.raises(NotEnoughMemoryError, match="no room"):
                await engine.sleep()
            assert engine.state == "running"
            Sleeper.problem.clear()
        await engine.sleep()
        Sleeper.problem["wake_up"] = "7 bytes are needed"
        monkeypatch.setattr(Sleeper, "no_start", NotEnoughMemoryError("7 bytes are needed"))
        for _ in range(2):
            with pytest.raises(NotEnoughMemoryError, match="7 bytes"):
                await engine.wake_up()
            await stands_still(engine)
            with pytest.raises(ModelLoadError, match="7 bytes"):
                await engine.generate([1], tokens(1))
            await stands_still(engine)
        assert await engine.drain(0.01) is False and engine.state == "draining"
        await engine.resume()
        await until(lambda: engine.is_sleeping)
        Sleeper.problem.clear()
        monkeypatch.setattr(Sleeper, "no_start", None)
        await engine.wake_up()
        assert len((await task).token_ids) == 60
        await settled(engine)


async def test_a_worker_dies_asleep(make: Make) -> None:
    """Another is started when the engine is woken, and not before."""
    async with make(fake=SLOW) as engine:
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        await engine.sleep()
        Sleeper.made[-1].fail(death())
        for _ in range(20):
            await asyncio.sleep(0)
        await stands_still(engine)
        assert len(Sleeper.made) == 1 and await engine.check_health() >= 0
        assert engine.statistics().sleep_level == 2 and engine.statistics().num_restarts == 0
        await engine.wake_up()
        assert len(Sleeper.made) == 2 and len((await task).token_ids) == 60
        await settled(engine)


async def test_workers_that_fail_as_they_are_woken_are_ended(make: Make) -> None:
    async def fails(workers: Any) -> None:
        raise EngineError("it has no weights")

    async with make(fake=SLOW) as engine:
        worker = core_of(engine).replicas[0].worker
        await engine.sleep(level=2)
        before, worker.on_restarted = worker.on_restarted, fails
        for _ in range(3):
            with pytest.raises(EngineError, match="no weights"):
                await engine.wake_up()
        assert len(Sleeper.made) == 4 and all(one.failure is not None for one in Sleeper.made)
        worker.on_restarted = before
        assert len((await engine.generate([1], tokens(2))).token_ids) == 2


async def test_a_worker_dies_between_tags(make: Make) -> None:
    """Its weights sleep again, as those of a worker that dies asleep."""
    async with make(fake=SLOW) as engine:
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        await engine.sleep()
        await engine.wake_up(["weights"])
        Sleeper.made[-1].fail(death())
        await until(lambda: engine.statistics().sleep_level == 2)
        await engine.wake_up(["kv_cache"])
        await stands_still(engine)
        await engine.wake_up()
        assert engine.state == "running" and len((await task).token_ids) == 60


async def test_a_worker_dies_as_the_others_wake(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make(fake=SLOW, data_parallel_size=2, num_threads=1) as engine:
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        await engine.sleep()
        wake = replica_sleep.ReplicaSleep.wake

        async def dies(self: Any, *args: Any) -> None:
            await wake(self, *args)
            if self.replica is core_of(engine).replicas[0]:
                self.replica.worker.executor.fail(death())
                await until(lambda: self.has_ended)

        with monkeypatch.context() as patch:
            patch.setattr(replica_sleep.ReplicaSleep, "wake", dies)
            with pytest.raises(WorkerDiedError, match="can be woken again"):
                await engine.wake_up()
        await stands_still(engine)
        await engine.wake_up()
        assert engine.state == "running" and len((await task).token_ids) == 60


async def test_while_a_worker_is_started_again(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        Sleeper.made[-1].fail(death())
        await engine.sleep()
        await stands_still(engine)
        await engine.wake_up()
        assert len((await task).token_ids) == 60
        Sleeper.made[-1].fail(death())
        await until(lambda: engine.statistics().num_restarts >= 1 or engine.statistics().replicas[0].state == "running")
        await engine.sleep(2)
        await stands_still(engine)


async def test_drains_pauses_and_ends(make: Make) -> None:
    """A drain computes what stands still; a pause outlasts a sleep, and the other way round."""
    async with make(fake=SLOW, when_asleep="wait") as engine:
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        await engine.sleep()
        assert await engine.drain() is True and len((await task).token_ids) == 60
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.sleep()
        await engine.resume()
        assert engine.state == "running"
        await engine.sleep()
        assert await engine.drain() is True  # nothing is to be computed
        await engine.resume()
        await stands_still(engine)
        await engine.wake_up()
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        await engine.pause("keep")
        await engine.sleep()
        await stands_still(engine)
        await engine.wake_up()
        assert engine.state == "paused" and not task.done()
        await engine.sleep()
        await engine.resume()
        await stands_still(engine)
        await engine.wake_up()
        assert len((await task).token_ids) == 60
        (task,) = begin(engine, 1, tokens(60))
        await until_running(engine)
        await engine.sleep()
    with pytest.raises(EngineClosedError):
        await task
    with pytest.raises(EngineClosedError):
        await engine.wake_up()


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
async def test_callers_who_give_up_and_engines_that_end(make: Make, method: str) -> None:
    """At every turn of the loop: who gives up changes nothing, and the end of an engine ends all that is under way."""
    for turns in range(30):
        async with make(fake=SLOW, when_asleep="wait") as engine:
            (task,) = begin(engine, 1, tokens(30))
            await until_running(engine)
            if method == "wake_up":
                await engine.sleep()
            call = asyncio.create_task(getattr(engine, method)())
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns % 2:
                call.cancel()
                await asyncio.wait([call])
                await engine.wake_up()
                assert len((await task).token_ids) == 30
                await settled(engine)
        if not turns % 2:
            for one in (call, task):
                if (error := (await asyncio.gather(one, return_exceptions=True))[0]) is not None:
                    assert isinstance(error, EngineClosedError) or one is task, error


async def test_from_other_threads(make: Make) -> None:
    async with make(fake=SLOW, own_thread=True) as engine:
        await engine.sleep()
        await until(lambda: engine.is_sleeping)
        assert len((await engine.generate([1], tokens(5))).token_ids) == 5
        await engine.sleep(level=2)
        await engine.wake_up()
        assert not engine.is_sleeping
