"""Steps given far ahead to a real worker, and taken back when something comes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conftest_api import core_of
from paced_runner import MAX_LAUNCHED, sampled
from scheduler_invariants import check_scheduler

from aengine import (
    AsyncLLM,
    DeadlineExceededError,
    EngineClosedError,
    EngineConfig,
    EngineError,
    SamplingParams,
    WorkerDiedError,
)
from aengine.engine.executor import ProcessExecutor
from aengine.engine.step_loop import StepLoop
from aengine.ipc.messages import Kind, ModelRunnerOutput
from aengine.workers.host.answers import PendingAnswers

NUM_LEASED = 40


class PacedLLM(AsyncLLM):
    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="paced_runner:load_model"))


class LockstepLLM(AsyncLLM):
    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="lockstep_runner:load_model"))


@asynccontextmanager
async def paced(monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> AsyncIterator[AsyncLLM]:
    """An engine that gives its worker as many steps as if the loop were often late."""
    llm: type[AsyncLLM] = PacedLLM if ranks == 1 else LockstepLLM
    settings: dict[str, Any] = {"skip_tokenizer": True, "preload_grammars": False, "device": "cpu", "num_threads": 1}
    async with llm("smollm2-135m", tensor_parallel_size=ranks, **settings) as engine:
        lease = steps_of(engine).in_flight.limit
        monkeypatch.setattr(lease, "num_steps", lambda scheduler: NUM_LEASED if scheduler.is_steady else lease.base)
        yield engine


def steps_of(engine: AsyncLLM) -> StepLoop:
    return core_of(engine).replicas[0].steps


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def expected(prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(sampled(prompt[0], len(prompt) + i) for i in range(num_tokens))


async def leased(engine: AsyncLLM) -> None:
    """Wait until many steps are under way."""
    while len(steps_of(engine).in_flight.answers) < NUM_LEASED - 5:
        await asyncio.sleep(0.001)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The answers to steps and calls, in the order in which the worker sent them."""
    frames: list[Any] = []
    take = PendingAnswers.take

    def noted(self: PendingAnswers, rank: int, kind: Kind, step_id: int, message: Any) -> None:
        frames.append(message)
        take(self, rank, kind, step_id, message)

    monkeypatch.setattr(PendingAnswers, "take", noted)
    return frames


def since_revoked(frames: list[Any]) -> tuple[int, list[Any]]:
    """How many steps the worker has dropped when it was first asked to, and what it has sent since then. (On a busy
    machine it is asked late, and may have begun many steps by then.)"""
    place = next(i for i, frame in enumerate(frames) if isinstance(frame, int))
    return frames[place], frames[place + 1 :]


def steps_in(frames: list[Any]) -> list[ModelRunnerOutput]:
    return [frame for frame in frames if isinstance(frame, ModelRunnerOutput)]


async def test_a_new_request_waits_for_the_steps_on_the_device_only(
    monkeypatch: pytest.MonkeyPatch, frames: list[Any]
) -> None:
    async with paced(monkeypatch) as engine:
        old = [engine.stream([i, 2, 3], params(300)) for i in range(1, 4)]
        for stream in old:
            await anext(stream)
        most_dropped = 0
        for i in range(4, 9):
            await leased(engine)
            frames.clear()
            young = engine.stream([i, 2, 3], params(20))
            await anext(young)
            num_dropped, later = since_revoked(frames)
            most_dropped = max(most_dropped, num_dropped)
            num_rows = [len(step.token_ids) for step in steps_in(later)]
            assert num_rows.index(4) <= MAX_LAUNCHED, num_rows  # its own step is the first with a fourth row
            await young.wait()
            assert young.completion.choices[0].token_ids == expected([i, 2, 3], 20)
        assert most_dropped > NUM_LEASED // 2, "it is asked at once"
        for i, stream in enumerate(old, 1):
            await stream.wait()
            assert stream.completion.choices[0].token_ids == expected([i, 2, 3], 300)
        while steps_of(engine).in_flight.answers:
            await asyncio.sleep(0.001)
        assert not steps_of(engine).watchdog._steps, "what was revoked is not watched"


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_whatever_comes_in_whatever_order(
    monkeypatch: pytest.MonkeyPatch, rng: random.Random, ranks: int
) -> None:
    """Arrivals, ends, aborts and deadlines while up to 40 steps are under way: everybody gets the tokens it would get
    alone; and of several ranks all compute the same steps."""
    async with paced(monkeypatch, ranks) as engine:

        async def one(i: int) -> None:
            await asyncio.sleep(rng.random())
            prompt, num_tokens = [i, *[5] * rng.randrange(1, 30)], rng.randrange(1, 120)
            fate = rng.choice(["end", "end", "abort", "deadline", "close"])
            deadline = rng.random() * 0.5 if fate == "deadline" else None
            stream = engine.stream(prompt, params(num_tokens), deadline=deadline, request_id=f"r{i}")
            got = []
            try:
                async for token in stream:
                    got.append(token.token_id)
                    if fate == "abort" and len(got) == num_tokens // 2:
                        engine.abort(f"r{i}")
                    if fate == "close" and len(got) == num_tokens // 2:
                        await stream.aclose()
            except DeadlineExceededError:
                assert fate == "deadline"
            if fate == "end":
                assert len(got) == num_tokens
            assert tuple(got) == expected(prompt, len(got))

        await asyncio.gather(*(one(i) for i in range(60)))
        statistics = engine.statistics()
        while statistics.num_free_blocks < statistics.num_blocks:  # a step in flight may still write them
            await asyncio.sleep(0.01)
            statistics = engine.statistics()
        check_scheduler(steps_of(engine).scheduler)
        assert statistics.num_restarts == 0


async def test_a_health_check_is_not_behind_all_of_them(monkeypatch: pytest.MonkeyPatch, frames: list[Any]) -> None:
    async with paced(monkeypatch) as engine:
        stream = engine.stream([1, 2], params(200))
        await leased(engine)
        frames.clear()
        await engine.check_health()
        later = since_revoked(frames)[1]
        reply = next(i for i, frame in enumerate(later) if isinstance(frame, dict))
        assert len(steps_in(later[:reply])) <= MAX_LAUNCHED
        assert (await stream.wait()).choices[0].token_ids == expected([1, 2], 200)


async def test_closing_is_not_behind_all_of_them(monkeypatch: pytest.MonkeyPatch, frames: list[Any]) -> None:
    async with paced(monkeypatch) as engine:
        stream = engine.stream([1, 2], params(200))
        await leased(engine)
        frames.clear()
        await stream.aclose()
        while steps_of(engine).in_flight.answers:
            await asyncio.sleep(0.001)
        assert len(steps_in(since_revoked(frames)[1])) <= MAX_LAUNCHED


async def test_closing_with_leased_steps_asks_the_worker_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of steps that it has dropped meanwhile is no nonsense, for which it would be killed."""
    async with paced(monkeypatch) as engine:
        streams = [engine.stream([i, 2, 3], params(300)) for i in range(1, 5)]
        await leased(engine)
        steps = steps_of(engine)
        executor = steps._executor
        sent: list[Kind] = []
        for worker in executor.workers:  # type: ignore[attr-defined]
            publish = worker.channel.publish

            async def noted(kind: Kind, *rest: Any, publish: Any = publish) -> None:
                sent.append(kind)
                await publish(kind, *rest)

            monkeypatch.setattr(worker.channel, "publish", noted)
        faults: list[EngineError] = []
        fail = executor.fail
        monkeypatch.setattr(executor, "fail", lambda error: (faults.append(error), fail(error)))
        await engine.aclose()
        for stream in streams:
            with pytest.raises(EngineClosedError):
                await stream.wait()
        assert sent == [Kind.SHUTDOWN]
        steps.in_flight._on_revoked(2)  # comes when its step loop has ended
        assert not [fault for fault in faults if not isinstance(fault, WorkerDiedError)], (
            "it has ended, and that is all"
        )


@pytest.mark.slow
async def test_several_ranks_go_on_while_the_loop_is_blocked(
    monkeypatch: pytest.MonkeyPatch, frames: list[Any]
) -> None:
    async with paced(monkeypatch, ranks=2) as engine:
        stream = engine.stream([1, 2], params(300))
        await leased(engine)
        begun = time.monotonic()
        time.sleep(1.0)  # the blocked loop, which is what is tested here
        ended = time.monotonic()
        assert (await stream.wait()).choices[0].token_ids == expected([1, 2], 300)
        assert sum(begun < step.answered_at < ended for step in steps_in(frames)) > 2 * MAX_LAUNCHED


@pytest.mark.slow
async def test_ranks_end_with_leased_steps_that_are_never_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async with paced(monkeypatch, ranks=2) as engine:
        stream = engine.stream([1, 2], params(2000))
        await leased(engine)
        begun = time.monotonic()
        await engine.aclose()
        assert time.monotonic() - begun < engine.config.shutdown_timeout, "the second rank was killed"
        with pytest.raises(EngineClosedError):
            await stream.wait()


async def test_a_step_that_is_on_its_way_into_full_rings_is_not_revoked(
    monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """What revokes leased steps comes in the very turn in which one of them was published, which the step loop does not
    know yet; and the answer comes before it does. Else another step would be taken for revoked, and the loop would
    await its answer for ever, without giving anybody else a turn."""
    async with paced(monkeypatch, 2) as engine:
        steps = steps_of(engine)
        workers, loop = steps._executor.workers, asyncio.get_running_loop()  # type: ignore[attr-defined]
        try_broadcast, publish_in_turn = workers.try_broadcast, workers._publish_in_turn
        num_waited = 0

        def disturbed(broadcast: Any) -> None:
            nonlocal num_waited
            publish_in_turn(broadcast)
            if broadcast.kind is Kind.STEP and steps.in_flight._leased:
                num_waited += 1
                loop.call_soon(steps.in_flight.cancel_queued)
                loop.call_soon(time.sleep, 0.003)

        monkeypatch.setattr(
            workers,
            "try_broadcast",
            lambda kind, *args: not (kind is Kind.STEP and rng.random() < 0.3) and try_broadcast(kind, *args),
        )
        monkeypatch.setattr(workers, "_publish_in_turn", disturbed)
        streams = [engine.stream([i, 2, 3], params(400)) for i in range(1, 5)]
        for i, stream in enumerate(streams, 1):
            await stream.wait()
            assert stream.completion.choices[0].token_ids == expected([i, 2, 3], 400)
        assert num_waited > 20
