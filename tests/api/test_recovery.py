"""Workers that die, hang and answer nonsense, over the fake executor: nobody who reads notices."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of, settled, until, until_running
from fakes import FakeExecutor

from aengine import AsyncLLM, Completion, InternalError, SamplingParams, StructuredOutput, WorkerDiedError
from aengine.engine import recovery
from aengine.engine.scheduler.block_pool import BlockPool
from aengine.engine.scheduler.rows import Rows
from aengine.engine.structured.llguidance.matcher import LLGuidanceMatcher
from aengine.errors import DeadlineExceededError, EngineClosedError
from aengine.ipc.messages import ModelRunnerOutput, SchedulerOutput, int32

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)


def death() -> WorkerDiedError:
    return WorkerDiedError("worker 0 died of SIGKILL", rank=0, exit_code=-9)


def work(engine: AsyncLLM, seed: int) -> list[asyncio.Task[Completion]]:
    """Requests of every kind, each of which has one right answer."""
    rng = random.Random(seed)
    plain = SamplingParams(max_tokens=40, ignore_eos=True)
    kinds = [
        plain,
        plain.replace(temperature=0.7, seed=3),
        plain.replace(n=2, seed=1),
        plain.replace(stop=["e"], max_tokens=80),
        plain.replace(structured_output=StructuredOutput(regex="[a-f]{20,30}"), ignore_eos=False),
        plain.replace(structured_output=StructuredOutput(choice=["a long answer, all of it forced"]), ignore_eos=False),
    ]
    prompts = [[rng.randrange(300, 900) for _ in range(rng.randint(1, 60))] for _ in range(24)]
    return [asyncio.create_task(engine.generate(p, kinds[i % len(kinds)])) for i, p in enumerate(prompts)]


def essence(completion: Completion) -> Any:
    return completion.text, completion.token_ids, completion.finish_reason


@pytest.mark.slow
async def test_many_deaths_change_nothing(make_engine: Make, rng: random.Random) -> None:
    async with make_engine() as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
    async with make_engine(max_restarts=1000, fake={"delay": 0.0005}) as engine:
        tasks = work(engine, 1)
        was_early = False
        while not all(task.done() for task in tasks):
            # At any moment of a step or of a restart; but whoever is suspected is given the time of a trial in between.
            was_early = not was_early and rng.random() < 0.5
            if was_early:
                for _ in range(rng.randrange(60)):
                    await asyncio.sleep(0)
            else:
                least = engine.statistics().generated_tokens + rng.randint(30, 100)
                while engine.statistics().generated_tokens < least and not all(task.done() for task in tasks):
                    await asyncio.sleep(0.001)  # a loop that spins keeps the threads that fill bitmasks waiting
            engine.executor.fail(death())
        got = [essence(task.result()) for task in tasks]
        await settled(engine)
        assert engine.statistics().num_restarts >= 3 and engine.state == "running"
    assert got == expected


async def test_streams_go_on_token_by_token(make_engine: Make) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, n=2, seed=4)
    async with make_engine() as engine:
        expected = [(t.index, t.token_id) async for t in engine.stream([5, 6], params)]
    async with make_engine(fake={"delay": 0.0005}) as engine:
        got = []
        async for token in engine.stream([5, 6], params):
            got.append((token.index, token.token_id))
            if len(got) in (1, 10, 30, 77):
                engine.executor.fail(death())
        await settled(engine)
        assert engine.statistics().num_restarts == 4
    assert sorted(got, key=lambda pair: pair[0]) == sorted(expected, key=lambda pair: pair[0])


async def test_a_death_while_idle(make_engine: Make) -> None:
    async with make_engine() as engine:
        engine.executor.fail(death())
        completion = await engine.generate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(completion.token_ids) == 5 and engine.statistics().num_restarts == 1


async def test_a_death_that_nobody_waits_for_is_noticed(make_engine: Make) -> None:
    async with make_engine() as engine:
        await asyncio.sleep(0.01)  # the loop is idle
        engine.executor.fail(death())
        while not engine.statistics().num_restarts:
            await asyncio.sleep(0.001)


async def test_a_death_before_the_first_step_is_noticed(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has been ready, and there is no step loop yet to be told."""
    start = FakeExecutor.start

    async def start_and_die(self: FakeExecutor, *args: Any) -> dict[str, Any]:
        monkeypatch.setattr(FakeExecutor, "start", start)
        ready = await start(self, *args)
        self.fail(death())
        return ready

    monkeypatch.setattr(FakeExecutor, "start", start_and_die)
    async with make_engine() as engine:
        while not engine.statistics().num_restarts:
            await asyncio.sleep(0.001)


async def test_too_many_deaths_end_the_engine_with_the_cause(make_engine: Make) -> None:
    async with make_engine(max_restarts=2, fake={"delay": 0.001}) as engine:
        tasks = [asyncio.create_task(engine.generate([i], SamplingParams(max_tokens=500))) for i in range(1, 4)]
        while engine.state == "running":
            engine.executor.fail(death())
            await asyncio.sleep(0.002)
        for task in tasks:
            with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
                await task
            assert "max_restarts" in str(caught.value)
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            await engine.generate([1])


async def test_no_restarts_at_all(make_engine: Make) -> None:
    async with make_engine(max_restarts=0, fake={"delay": 0.001}) as engine:
        task = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=500)))
        await until_running(engine)
        engine.executor.fail(death())
        with pytest.raises(WorkerDiedError):
            await task


async def test_a_start_that_fails_is_tried_again(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_engine(fake={"delay": 0.001}) as engine:
        task = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=30, ignore_eos=True)))
        await until_running(engine)
        start, starts = FakeExecutor.start, []

        async def fails_twice(self: FakeExecutor, *args: Any) -> dict[str, Any]:
            starts.append(self)
            if len(starts) < 3:
                raise death()
            ready = await start(self, *args)
            return {**ready, "num_blocks": 5} if len(starts) == 3 else ready  # its memory is taken, by whom ever

        monkeypatch.setattr(FakeExecutor, "start", fails_twice)
        engine.executor.fail(death())
        assert len((await task).token_ids) == 30
        assert len(starts) == 4 == engine.statistics().num_restarts


class Nonsense(FakeExecutor):
    """Answers one step as no worker does."""

    spoil: Callable[[ModelRunnerOutput], None] | None = None

    def say(self, out: SchedulerOutput, *args: Any) -> ModelRunnerOutput:
        answer = super().say(out, *args)
        if Nonsense.spoil is not None and len(out.req_idx) == 3 and not out.new_requests:
            spoil, Nonsense.spoil = Nonsense.spoil, None
            spoil(answer)
        return answer


@pytest.mark.parametrize("fault", ["id", "count", "negative", "huge"])
async def test_nonsense_is_a_death(make_engine: Make, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def spoil(answer: ModelRunnerOutput) -> None:
        if fault == "id":
            answer.step_id += 1
        elif fault == "count":
            answer.token_ids = int32([7])
        else:
            answer.token_ids[1] = -1 if fault == "negative" else 10**9

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    async with make_engine() as engine:
        expected = await asyncio.gather(*(engine.generate([i, 2], params) for i in range(1, 4)))
    monkeypatch.setattr(type(engine), "_make_executor", lambda self, config: _keep(self, Nonsense(**self.fake)))
    Nonsense.spoil = spoil
    async with make_engine() as engine:
        got = await asyncio.gather(*(engine.generate([i, 2], params) for i in range(1, 4)))
        assert engine.statistics().num_restarts == 1 and Nonsense.spoil is None
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def _keep(engine: Any, executor: FakeExecutor) -> FakeExecutor:
    engine.executor = executor
    return executor


class Poisoned(FakeExecutor):
    """Dies of a certain prompt, at its prefill (666) or at its first decode (667)."""

    poisoned = -1

    def execute(self, out: SchedulerOutput) -> Any:
        dies = any(new.token_ids[0] == 666 for new in out.new_requests) or self.poisoned in out.req_idx
        for new in out.new_requests:
            if new.token_ids[0] == 667:
                self.poisoned = new.req_idx
        self.is_hung = self.is_hung or dies  # nothing from this step on is answered; what came before it is
        future = super().execute(out)
        if dies:
            asyncio.get_running_loop().call_later(self.delay, self.fail, death())
        return future


@pytest.mark.parametrize("poison", [666, 667])
async def test_a_poison_request_takes_nobody_with_it(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, poison: int
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = make_engine(fake={"delay": 0.0005})
    monkeypatch.setattr(type(engine), "_make_executor", lambda self, config: _keep(self, Poisoned(**self.fake)))
    async with engine:
        others = [asyncio.create_task(engine.generate([i, 2], params)) for i in range(1, 9)]
        await until_running(engine, 8)
        with pytest.raises(WorkerDiedError, match="again and again"):
            await engine.generate([poison, 1], params, request_id="the-poison")
        done = await asyncio.gather(*others)
        assert all(len(c.token_ids) == 60 for c in done)
        assert engine.statistics().num_restarts <= 8
        await settled(engine)


class Raising(FakeExecutor):
    """Its worker raises in every step with a certain prompt."""

    def execute(self, out: SchedulerOutput) -> Any:
        raises = any(new.token_ids[0] == 666 for new in out.new_requests)
        self.is_hung = self.is_hung or raises
        future = super().execute(out)
        if raises:
            error = InternalError("worker 0: ValueError: no such thing", worker_traceback="Traceback ...")
            asyncio.get_running_loop().call_later(self.delay, self.fail, error)
        return future


async def test_a_request_of_which_every_step_raises_ends_at_the_second(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(fake={"delay": 0.0005})
    monkeypatch.setattr(type(engine), "_make_executor", lambda self, config: _keep(self, Raising(**self.fake)))
    async with engine:
        with pytest.raises(WorkerDiedError, match="again and again.*ValueError: no such thing"):
            await engine.generate([666, 1], SamplingParams(max_tokens=5))
        assert len((await engine.generate([2, 1], SamplingParams(max_tokens=5, ignore_eos=True))).token_ids) == 5
        assert engine.statistics().num_restarts == 2
        await settled(engine)


async def test_a_worker_that_hangs_is_replaced(make_engine: Make) -> None:
    async with make_engine(hang_timeout=0.3, fake={"delay": 0.001}) as engine:
        stream = engine.stream([1, 2], SamplingParams(max_tokens=900, ignore_eos=True))
        await anext(stream)
        engine.executor.is_hung = True
        assert len((await stream.wait()).token_ids) == 900
        assert engine.statistics().num_restarts == 1


async def test_a_worker_that_waits_for_a_grammar_does_not_hang(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, slow = LLGuidanceMatcher.fill, [0.5, 0.5]

    def slowly(self: LLGuidanceMatcher, bitmask: Any, row: int) -> None:
        if slow and self._token_ids:
            time.sleep(slow.pop())
        fill(self, bitmask, row)

    async with make_engine(hang_timeout=0.2, fake={"delay": 0.001}) as engine:
        await engine.generate([1], SamplingParams(max_tokens=2))  # what comes first may take longer
        monkeypatch.setattr(LLGuidanceMatcher, "fill", slowly)
        params = SamplingParams(max_tokens=40, structured_output=StructuredOutput(regex="[a-f]{20,30}"))
        assert len((await engine.generate([1, 2], params)).text) >= 20
        assert not slow and engine.statistics().num_restarts == 0


async def test_leaving_while_there_is_no_worker(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abort, deadline, a closed stream, a new request: all of it works meanwhile."""
    async with make_engine(fake={"delay": 0.001}) as engine:
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        stream = engine.stream([1, 2], params)
        await anext(stream)
        aborted = asyncio.create_task(engine.generate([3], params, request_id="one"))
        expired = asyncio.create_task(engine.generate([4], params, deadline=0.1))
        await until_running(engine, 3)
        start, gate = FakeExecutor.start, asyncio.Event()

        async def slowly(self: FakeExecutor, *args: Any) -> dict[str, Any]:
            await gate.wait()
            return await start(self, *args)

        monkeypatch.setattr(FakeExecutor, "start", slowly)
        assert await engine.check_health() > 0
        engine.executor.fail(death())
        await until(lambda: engine.statistics().num_running == 0)
        with pytest.raises(WorkerDiedError, match="being started again"):
            await engine.check_health()
        await stream.aclose()
        engine.abort("one")
        assert (await aborted).finish_reason == "abort"
        with pytest.raises(DeadlineExceededError):
            await expired
        late = asyncio.create_task(engine.generate([5], params.replace(max_tokens=7)))
        await until(lambda: engine.statistics().num_waiting == 1)
        assert engine.statistics().num_running == 0 and not late.done()
        gate.set()
        assert len((await late).token_ids) == 7
        assert await engine.check_health() > 0
        await settled(engine)


@pytest.mark.parametrize("how", ["aclose", "terminate"])
async def test_closing_while_there_is_no_worker(make_engine: Make, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    engine = make_engine(fake={"delay": 0.001})
    await engine.start()
    task = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=300, ignore_eos=True)))
    await until_running(engine)

    async def never(self: FakeExecutor, *args: Any) -> dict[str, Any]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    monkeypatch.setattr(FakeExecutor, "start", never)
    engine.executor.fail(death())
    await until(lambda: engine.statistics().num_running == 0)
    if how == "aclose":
        await engine.aclose()
    else:
        engine.terminate()
    with pytest.raises(EngineClosedError):
        await task
    assert engine.executor.terminated
    if how == "terminate":
        await engine.aclose()


async def test_a_bug_of_ours_is_no_death(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_engine() as engine:
        monkeypatch.setattr(type(core_of(engine).replicas[0].steps.scheduler), "schedule", lambda self: 1 / 0)
        with pytest.raises(InternalError, match="step loop failed"):
            await engine.generate([1, 2])


async def test_the_collector_may_run_within_the_scheduler(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams dropped in cycles, whose finalisers then run in the middle of a step's making."""
    async with make_engine(fake={"delay": 0.0005, "num_blocks": 120}) as engine:

        def collecting(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: (gc.collect(0), function(*args))[1]

        monkeypatch.setattr(BlockPool, "count_idle", collecting(BlockPool.count_idle))
        monkeypatch.setattr(Rows, "set_limit", collecting(Rows.set_limit))
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        steady = asyncio.create_task(engine.generate([1, 2], params))
        for i in range(150):
            stream = engine.stream([i % 7 + 1] * 20, params)
            cycle = [stream]
            cycle.append(cycle)
            if i % 3:
                await anext(stream)
            del stream, cycle
            await asyncio.sleep(0.0005)
        assert len((await steady).token_ids) == 200
        gc.collect()
        await settled(engine)
        assert engine.statistics().num_restarts == 0


async def test_a_worker_that_is_started_again_takes_the_kv_memory_of_the_one_before(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free may be less by now: the engine's blocks are as many as they were."""
    loads: list[dict[str, Any]] = []

    start = FakeExecutor.start

    async def noted_start(self: FakeExecutor, load: dict[str, Any], *args: Any) -> dict[str, Any]:
        loads.append(load)
        return {**await start(self, load, *args), "ranks": [{"rank": 0, "kv_cache_bytes": 7 << 20}]}

    monkeypatch.setattr(FakeExecutor, "start", noted_start)
    async with make_engine() as engine:
        core_of(engine).replicas[0].worker.executor.fail(death())
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(completion.token_ids) == 4
    assert [load["config"]["kv_cache_memory_bytes"] for load in loads] == [None, 7 << 20]
