"""An engine belongs to one process and one event loop: whoever asks elsewhere is told so, and what to do."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import settled, until, until_running
from fakes import FakeExecutor

from aengine import AsyncLLM, EngineClosedError, InvalidRequestError, SamplingParams, TokenStream

Make = Callable[..., AsyncLLM]


def in_a_fork(check: Callable[[], bool]) -> bool:
    """What ``check`` says in a fork. It runs in a thread: the fork's main thread is on a copy of the parent's loop."""
    child = os.fork()
    if child == 0:
        said: list[bool] = []
        thread = threading.Thread(target=lambda: said.append(check()), daemon=True)
        thread.start()
        thread.join(20)
        os._exit(0 if said == [True] else 1)
    _, status = os.waitpid(child, 0)
    return status == 0


def is_refused(engine: AsyncLLM, stream: TokenStream | None) -> bool:
    """In a fork: nothing hangs, nothing is done to the parent's, and each call is told why."""
    told: list[str] = []

    async def call(function: Callable[[], Any]) -> None:
        try:
            result = function()
            if hasattr(result, "__await__"):
                await asyncio.wait_for(result, 60)
        except EngineClosedError as error:
            told.append(str(error))

    calls: list[Callable[[], Any]] = [
        lambda: engine.start(),
        lambda: engine.stream([1]),
        lambda: engine.generate([1]),
        lambda: engine.stream_chat([{"role": "user", "content": "x"}]),
        lambda: engine.check_health(),
        lambda: engine.abort("1"),
        lambda: engine.statistics(),
        lambda: engine.describe(),
    ]
    for function in calls:
        asyncio.run(call(function))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(engine.aclose())
        engine.terminate()
        engine.__del__()  # type: ignore[attr-defined]
    texts = [text for text in told if f"process {os.getppid()}" in text and "after the fork" in text]
    return len(texts) == len(calls) and engine.state == "closed"


async def test_a_fork_is_told_so_and_leaves_the_engine_alone(make_engine: Make) -> None:
    async with make_engine(fake={"delay": 0.002}) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=50, ignore_eos=True))
        await anext(stream)
        assert in_a_fork(lambda: is_refused(engine, stream))
        assert len((await stream.wait()).token_ids) == 50
        await settled(engine)


async def test_a_fork_in_the_midst_of_the_start(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    start = FakeExecutor.start
    go_on = asyncio.Event()

    async def slow_start(executor: FakeExecutor, *args: Any) -> dict[str, Any]:
        await go_on.wait()
        return await start(executor, *args)

    monkeypatch.setattr(FakeExecutor, "start", slow_start)
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.state == "starting")
    assert in_a_fork(lambda: is_refused(engine, None))
    go_on.set()
    await starting
    await engine.aclose()


async def test_an_engine_that_is_closed_or_new_starts_in_a_fork(make_engine: Make) -> None:
    closed, new = make_engine(), make_engine()
    async with closed:
        pass

    async def use(engine: AsyncLLM) -> int:
        async with engine:
            return len((await engine.generate([1], SamplingParams(max_tokens=3))).token_ids)

    assert in_a_fork(lambda: [asyncio.run(use(engine)) for engine in (closed, new)] == [3, 3])


def run_without_asyncio(coroutine: Any) -> None:
    """As the loop of another library does, which drives coroutines by itself."""
    try:
        coroutine.send(None)
    finally:
        coroutine.close()


@pytest.mark.parametrize("own_thread", [False, True])
def test_another_librarys_loop(make_engine: Make, own_thread: bool, no_thread_left: None) -> None:
    engine = make_engine(own_thread=own_thread)
    with pytest.raises(InvalidRequestError, match=r"needs one \(asyncio's.*trio.*aengine.LLM in a thread"):
        run_without_asyncio(engine.start())
    assert engine.state == "new"


async def test_a_stream_of_an_own_thread_on_another_librarys_loop(make: Make, no_thread_left: None) -> None:
    async with make(fake={"delay": 0.002}) as engine:
        told: list[str] = []

        def read() -> None:
            try:
                run_without_asyncio(engine.generate([1], SamplingParams(max_tokens=900, ignore_eos=True)))
            except InvalidRequestError as error:
                told.append(str(error))

        await asyncio.to_thread(read)
        assert "trio" in told[0]
        await settled(engine)


async def test_another_loop_is_told_what_helps(make_engine: Make) -> None:
    async with make_engine() as engine:

        async def ask() -> None:
            for call in (lambda: engine.abort("a"), engine.start, engine.aclose):
                with pytest.raises(EngineClosedError, match=r"own_thread=True.*loop_scope=\"session\""):
                    result = call()
                    await result

        await asyncio.to_thread(asyncio.run, ask())


async def test_who_closes_on_another_loop_ends_nobodys_request(make_engine: Make) -> None:
    async with make_engine(fake={"delay": 0.002}, max_leased_steps=0) as engine:
        running = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=300, ignore_eos=True)))
        await until_running(engine)
        with pytest.raises(EngineClosedError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, engine.aclose())
        assert engine.state == "running"
        assert len((await running).token_ids) == 300


def test_closing_on_another_loop_when_its_own_is_gone(make_engine: Make) -> None:
    engine = make_engine()
    asyncio.run(engine.start())
    asyncio.run(engine.aclose())
    assert engine.state == "closed"
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in a thread"])
async def test_terminated_while_it_starts(make_engine: Make, monkeypatch: pytest.MonkeyPatch, elsewhere: bool) -> None:
    engine = make_engine()
    reached = asyncio.Event()

    async def start_slowly(*args: Any) -> dict[str, Any]:
        reached.set()
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(FakeExecutor, "start", start_slowly)
    starting = asyncio.create_task(engine.start())
    await reached.wait()
    with pytest.raises(EngineClosedError, match="has not started yet"):
        await engine.drain(1)
    if elsewhere:
        await asyncio.to_thread(engine.terminate)
    else:
        engine.terminate()
    with pytest.raises(EngineClosedError, match="was closed while it started"):
        await starting
    assert engine.state == "new"
