"""The life of an engine with a thread of its own: begun, ended, dropped, failed and forked, in any order."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import handle_of, until_scheduled
from own_thread_helpers import ENDLESS, LOOPS, Make, in_threads, own_threads, run, settled

from aengine import (
    AsyncLLM,
    EngineClosedError,
    FinishReason,
    InvalidRequestError,
    ModelLoadError,
    SamplingParams,
    TokenStream,
    WorkerDiedError,
)
from aengine.engine.threads.loop_ownership import check_may_block

pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")


# -- begun and ended


def test_starts_and_closes_in_any_order(make: Make, rng: random.Random) -> None:
    """Each call ends, with a result or the error that says so; afterwards it can be started and closed."""
    engine = make()
    seeds = [rng.random() for _ in range(6)]

    async def use(i: int) -> int:
        own = random.Random(seeds[i])
        done = 0
        for _ in range(15):
            try:
                async with asyncio.timeout(own.choice([None, None, 0.002])):
                    await engine.start()
                    done += len((await engine.generate([1], SamplingParams(max_tokens=own.choice([1, 5])))).token_ids)
                    if own.random() < 0.5:
                        await engine.aclose(drain=own.choice([0, 0.01]))
                    elif own.random() < 0.3:
                        engine.terminate()
            except (EngineClosedError, TimeoutError):
                pass
        return done

    results = in_threads(6, lambda i: run(use(i), LOOPS[i % 2]))
    assert all(isinstance(result, int) for result in results), results

    async def once_more() -> None:
        async with engine:
            assert len((await engine.generate([1], SamplingParams(max_tokens=3))).token_ids) == 3
            await settled(engine)

    run(once_more())


async def test_cancel_the_start_at_every_await(make: Make) -> None:
    for turns in range(200):
        engine = make()
        starting = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0 if turns < 40 else 0.0001 * turns)
        if starting.done():
            await engine.aclose()
            break
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        async with engine:
            assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2
    else:
        pytest.fail("never started")


@pytest.mark.parametrize("others", ["nobody", "waits", "has it"])
async def test_the_starter_is_cancelled_while_it_comes_up(make: Make, others: str) -> None:
    """Before it could hear of it. Nobody would close the engine, unless there is another who waits, or has it."""
    engine = make()
    starting = asyncio.create_task(engine.start())
    second = asyncio.create_task(engine.start()) if others == "waits" else None
    while engine.state == "new":
        await asyncio.sleep(0)
    while engine.state != "running":
        time.sleep(0.001)  # this loop can't be told meanwhile
    if others == "has it":
        thread = threading.Thread(target=engine.sync.start)
        thread.start()
        thread.join()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    if second is not None:
        await second
    assert (engine.state == "running") is (others != "nobody")
    async with engine:
        assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2


async def test_cancel_the_close_at_every_await(make: Make) -> None:
    for turns in (*range(20), *range(20, 60, 4)):
        engine = await make(fake={"delay": 0.001}).start()
        stream = engine.stream([1], ENDLESS)
        closing = asyncio.create_task(engine.aclose(drain=0.01 * (turns % 2)))
        for _ in range(turns):
            await asyncio.sleep(0 if turns < 20 else 0.0005)
        closing.cancel()
        await asyncio.wait([closing])
        await engine.aclose()
        assert engine.executor.terminated
        with pytest.raises(EngineClosedError):
            await stream.wait()


# -- the end of the engine


async def test_a_failure_reaches_every_waiter_in_every_thread(make: Make) -> None:
    engine = await make(max_restarts=0, fake={"delay": 0.005}).start()
    begun = threading.Barrier(7)

    async def wait(i: int) -> None:
        streams = [engine.stream([1], ENDLESS) for _ in range(5)]
        await anext(streams[0])
        await asyncio.to_thread(begun.wait)
        for stream in streams:
            with pytest.raises(WorkerDiedError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.exit_code == -9
            assert stream.completion.finish_reason is FinishReason.ERROR
        with pytest.raises(EngineClosedError, match="killed"):
            engine.stream([1])

    waiting = asyncio.create_task(asyncio.to_thread(in_threads, 6, lambda i: run(wait(i), LOOPS[i % 2])))
    await asyncio.to_thread(begun.wait)
    handle_of(engine).thread.post(engine.executor.fail, WorkerDiedError("killed", rank=0, exit_code=-9))
    assert await waiting == [None] * 6
    assert engine.state == "failed"
    async with engine:  # and again
        assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2


async def test_a_worker_that_is_replaced(make: Make) -> None:
    async with make(fake={"delay": 0.002}) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=50, ignore_eos=True))
        await anext(stream)
        handle_of(engine).thread.post(engine.executor.fail, WorkerDiedError("killed", rank=0, exit_code=-9))
        assert len((await stream.wait()).token_ids) == 50
        assert engine.statistics().num_restarts == 1


async def test_a_model_that_is_not_there(make: Make) -> None:
    engine = AsyncLLM("smollm3-135m", own_thread=True)
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="smollm2-135m"):
            await engine.start()
        assert engine.state == "new"


async def test_close_with_open_streams(make: Make) -> None:
    engine = make(fake={"delay": 0.01})
    async with engine:
        stream = engine.stream([1], ENDLESS)
        await anext(stream)
    with pytest.raises(EngineClosedError):
        async for _ in stream:
            pass
    await stream.aclose()
    await engine.aclose()
    await engine.start()
    draining = engine.stream([1], SamplingParams(max_tokens=5, ignore_eos=True))
    await engine.aclose(drain=30)
    assert len((await draining.wait()).token_ids) == 5


@pytest.mark.parametrize("where", ["here", "another thread"])
async def test_terminate_tells_who_waits(make: Make, where: str) -> None:
    engine = await make(fake={"delay": 30.0}).start()
    tasks = [
        asyncio.create_task(engine.generate([1], ENDLESS)),
        asyncio.create_task(engine.generate("a text", ENDLESS)),
        asyncio.create_task(engine.chat([{"role": "user", "content": "x"}], ENDLESS)),
    ]
    await until_scheduled(engine, 3)
    if where == "here":
        engine.terminate()
    else:
        await asyncio.to_thread(engine.terminate)
    done, pending = await asyncio.wait(tasks, timeout=10)
    assert not pending and all(isinstance(task.exception(), EngineClosedError) for task in done)
    assert engine.executor.terminated
    engine.terminate()
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        engine.stream([1])


@pytest.mark.parametrize("how", ["aclose", "terminate"])
async def test_ending_it_while_it_starts_tells_the_starter(make: Make, how: str) -> None:
    for turns in range(12):
        engine = make()
        starting = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0.0003 * turns)
        if how == "aclose":
            await engine.aclose()
        else:
            engine.terminate()
        await asyncio.wait([starting])
        assert isinstance(starting.exception(), EngineClosedError | None)
        await engine.aclose()
        async with engine:
            assert engine.state == "running"


async def test_use_before_start(make: Make) -> None:
    engine = make()
    assert engine.state == "new" and not own_threads()
    with pytest.raises(EngineClosedError, match="not started"):
        engine.stream([1])
    with pytest.raises(EngineClosedError, match="not started"):
        engine.stream_chat([{"role": "user", "content": "x"}])
    await engine.aclose()
    engine.terminate()


def test_one_that_is_dropped_takes_its_thread_along(make: Make) -> None:
    engine = run(make().start())
    executor, gone = engine.executor, weakref.ref(engine)
    stream = engine.stream([1], SamplingParams(max_tokens=20, ignore_eos=True))
    del engine
    assert len(run(stream.wait()).token_ids) == 20  # it is not dropped while somebody reads
    with pytest.warns(ResourceWarning, match="without being closed"):
        del stream
        for thread in own_threads():
            thread.join(5)
    assert gone() is None and executor.terminated


async def test_subclasses_may_choose_it(make_engine: Make) -> None:
    class Mine(make_engine):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(own_thread=True)

        def stream(self, prompt: Any, *args: Any, **options: Any) -> TokenStream:
            return super().stream([7, *prompt], *args, **options)

    async with Mine() as engine:
        assert isinstance(engine, Mine) and type(engine).__name__ == "Mine"
        assert (await engine.stream([1], SamplingParams(max_tokens=1)).wait()).usage.prompt_tokens == 2
        assert len(own_threads()) == 1


async def test_the_thread_has_ended_when_aclose_returns(make: Make) -> None:
    for _ in range(20):
        engine = await make().start()
        (thread,) = own_threads()
        await engine.aclose()
        assert not thread.is_alive()


async def test_what_is_not_started_says_how_to(make: Make) -> None:
    engine = make()
    with pytest.raises(EngineClosedError, match=r"engine\.sync\.start\(\)"):
        engine.sync.generate([1])


async def test_without_it_there_is_nothing_of_it(make_engine: Make) -> None:
    async with make_engine() as engine:
        assert type(engine) is make_engine and not own_threads()
        assert type(engine.stream([1], SamplingParams(max_tokens=1))) is TokenStream
    with pytest.raises(InvalidRequestError, match="own_thread"):
        make_engine(own_thread="yes")


# -- forks


async def test_a_fork_is_told_so(make: Make) -> None:
    async with make(fake={"delay": 0.002}) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(stream)
        child = os.fork()
        if child == 0:
            os._exit(0 if _is_refused_here(engine, stream) else 1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0
        assert len((await stream.wait()).token_ids) == 100
        await settled(engine)


def _is_refused_here(engine: AsyncLLM, stream: TokenStream) -> bool:
    """In a fork: nothing hangs, and nothing is done to the parent's."""
    refused = []

    async def call(function: Callable[[], Any]) -> None:
        try:
            result = function()
            if result is not None and not isinstance(result, TokenStream | bool):
                await asyncio.wait_for(result, 60)
        except EngineClosedError:
            refused.append(function)

    calls: list[Callable[[], Any]] = [
        lambda: engine.stream([1]),
        lambda: engine.generate([1]),
        lambda: engine.start(),
        lambda: engine.stream_chat([{"role": "user", "content": "x"}]),
        lambda: engine.abort("own-1"),
        lambda: stream.wait(),
    ]

    def all_of_them() -> None:
        for function in calls:
            run(call(function))
        run(engine.aclose())
        run(stream.aclose())
        engine.terminate()
        handle_of(engine).thread.stop()

    thread = threading.Thread(target=all_of_them, daemon=True)  # the fork's main thread is on the parent's loop
    thread.start()
    thread.join(20)
    return not thread.is_alive() and len(refused) == len(calls)


async def test_the_reader_that_must_not_be_here(make: Make) -> None:
    with pytest.raises(InvalidRequestError, match="use AsyncLLM"):
        check_may_block(None, any_thread=False)
