"""An engine with a thread of its own: the same contract, from any loop and thread, and nothing lost between them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import random
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from conftest_api import core_of, handle_of, until, until_running
from own_thread_helpers import ENDLESS, LOOPS, Make, in_threads, own_threads, run, settled
from pydantic import BaseModel

from aengine import (
    AsyncLLM,
    DeadlineExceededError,
    EngineClosedError,
    EngineConfig,
    EngineOverloadedError,
    FinishReason,
    GrammarError,
    InternalError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
    TokenStream,
)
from aengine.engine.handles.local import LocalHandle
from aengine.engine.handles.on_thread import ThreadHandle
from aengine.engine.threads.call_queue import call_queue_of
from aengine.remote.handle import RemoteHandle

pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")


# -- the same as without


async def test_the_answers_are_those_without(make: Make, make_engine: Make) -> None:
    params = SamplingParams(max_tokens=40, n=2, logprobs=None, stop="zq")
    async with make_engine() as plain, make() as engine:
        assert isinstance(engine, type(plain))
        for prompt in ([1, 2, 3], "Hello there", [{"role": "user", "content": "Hi"}]):
            stream = engine.stream(prompt, params)
            assert isinstance(stream, TokenStream)
            tokens = [token async for token in stream]
            expected = [token async for token in plain.stream(prompt, params)]
            assert sorted(tokens) == sorted(expected)
            whole, same = await engine.generate(prompt, params), await plain.generate(prompt, params)
            assert whole.choices == same.choices == stream.completion.choices
            assert whole.usage == same.usage
        assert engine.describe() == plain.describe() and engine.tokenizer.has_chat_template
        assert engine.statistics().num_finished == plain.statistics().num_finished
        await settled(engine)


async def test_a_completion_is_whole_when_it_comes(make: Make) -> None:
    """What the engine writes after the last token, as usage and counters, is there when the reader sees the end."""
    async with make(fake={"token": lambda row, position: 300}) as engine:
        for i in range(1, 60):
            salt = {"cache_salt": f"s{i}"}
            first = await engine.generate([1] * 64, SamplingParams(max_tokens=1), **salt)
            assert engine.statistics().num_finished == 2 * i - 1
            again = engine.stream([1] * 64, SamplingParams(max_tokens=2), **salt)
            async for token in again:
                if token.finish_reason is not None:
                    usage = again.completion.usage
            assert (first.usage.cached_tokens, usage.cached_tokens) == (0, 48)


async def test_an_output_type_and_what_it_says_so_far(make: Make) -> None:
    class Answer(BaseModel):
        yes: bool
        number: int

    async with make() as engine:
        engine.executor.choose = random.Random(3).choice
        for _ in range(5):
            stream = engine.stream([1], SamplingParams(max_tokens=200), output_type=Answer)
            seen = [stream.partial async for _ in stream]
            completion = stream.completion
            if completion.finish_reason == "stop":
                assert isinstance(completion.parsed, Answer)
                assert stream.partial == completion.parsed.model_dump()
            assert all(partial is None or set(partial) <= {"yes", "number"} for partial in seen)
        with pytest.raises(GrammarError):
            await engine.generate([1], SamplingParams(structured_output=StructuredOutput(regex="(")))
        await settled(engine)


async def test_chats(make: Make) -> None:
    def add(a: bool, b: bool) -> int:
        """Adds."""
        return a + b

    hello = [{"role": "user", "content": "Hello"}]
    async with make() as engine:
        engine.executor.choose = random.Random(1).choice
        params = SamplingParams(max_tokens=300)
        stream = engine.stream_chat(hello, params, tools=[add], tool_choice="required")
        async for _ in stream:
            pass
        assert stream.message.tool_calls[0].name == "add" and stream.completion.message == stream.message
        assert (await engine.chat(hello, SamplingParams(max_tokens=3))).usage.completion_tokens == 3
        with pytest.raises(InvalidRequestError, match="bogus"):
            await engine.chat(hello, bogus=1)
        engine.executor.delay = 0.001
        half_read = engine.stream_chat(hello, SamplingParams(max_tokens=900, ignore_eos=True))
        async with half_read:
            await anext(half_read)
        assert half_read._stream.completion.finish_reason is FinishReason.ABORT
        await settled(engine)


async def test_errors_keep_their_types(make: Make) -> None:
    async with make(max_num_queued_requests=4, max_num_seqs=1, fake={"delay": 0.01}) as engine:
        with pytest.raises(InvalidRequestError, match=r"prompt\[1\]"):
            engine.stream([1, -1])
        with pytest.raises(InvalidRequestError) as caught:
            engine.stream([1], deadline=-1)
        assert caught.value.param == "deadline"
        with pytest.raises(DeadlineExceededError) as late:
            await engine.generate([1], ENDLESS, deadline=0.05)
        assert late.value.deadline == 0.05
        first = engine.stream([1], ENDLESS, request_id="mine")
        with pytest.raises(InvalidRequestError, match="mine"):
            await engine.generate([1], request_id="mine")
        twice = engine.stream([1], request_id="mine")
        with pytest.raises(InvalidRequestError, match="mine"):
            await anext(twice)
        with pytest.raises(InvalidRequestError, match="mine"):
            _ = twice.completion
        await twice.aclose()
        others = []
        with pytest.raises(EngineOverloadedError):
            while True:
                others.append(engine.stream([1], SamplingParams(max_tokens=2)))
        assert len(others) < 6
        await first.aclose()
        for other in others:
            await other.wait()
        await settled(engine)


async def test_a_profile(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make() as engine:

        async def call(method: str, *args: Any, timeout: float) -> dict[str, str]:
            return {"path": method} if threading.current_thread().name == "aengine" else {"refused": "here"}

        monkeypatch.setattr(core_of(engine).replicas[0].worker, "call", call)
        assert await engine.start_profile("x") == "start_profile"
        assert await engine.stop_profile() == "stop_profile"


async def test_health(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    async with engine:
        asked_in: list[str] = []

        async def ping(method: str, *args: Any, timeout: float) -> None:
            asked_in.append(threading.current_thread().name)
            if timeout < 1:
                raise InternalError("late")

        monkeypatch.setattr(core_of(engine).replicas[0].worker, "call", ping)
        assert 0 < await engine.check_health() < 10
        with pytest.raises(InternalError, match="late"):
            await engine.check_health(timeout=0.5)
        assert asked_in == ["aengine"] * 2
    with pytest.raises(EngineClosedError):
        await engine.check_health()


def test_all_handles_have_what_an_engine_asks_of_them() -> None:
    source = "".join(map(inspect.getsource, AsyncLLM.__mro__[:-1]))
    asked = set(re.findall(r"self\._handle\.(\w+)", source))
    assert {"start", "run", "submit", "submit_chat", "statistics", "config"} < asked
    config = EngineConfig(model="smollm2-135m")
    engine = AsyncLLM(config)
    for handle in (LocalHandle(engine, config), ThreadHandle(engine, config), RemoteHandle("path", 1.0)):
        assert asked - set(dir(handle)) == set()


async def test_prompts_are_the_engines_once_given(make: Make) -> None:
    async with make() as engine:
        prompt = [1, 2, 3]
        stream = engine.stream(prompt, SamplingParams(max_tokens=2))
        prompt.clear()
        assert (await stream.wait()).usage.prompt_tokens == 3


# -- many loops, many threads


@pytest.mark.parametrize("new_loop", LOOPS)
def test_many_loops_at_once(make: Make, new_loop: Callable[[], Any]) -> None:
    engine = run(make(max_num_seqs=16).start(), new_loop)

    async def use(i: int) -> int:
        async def one(k: int) -> int:
            params = SamplingParams(max_tokens=1 + (i + k) % 37)
            if k % 2:
                return len((await engine.generate([5] * (1 + k), params)).token_ids)
            return len([token async for token in engine.stream([5] * (1 + k), params)])

        assert await engine.start() is engine
        counts = await asyncio.gather(*(one(k) for k in range(30)))
        assert counts == [1 + (i + k) % 37 for k in range(30)]
        assert engine.statistics().num_requests >= 30
        return sum(counts)

    results = in_threads(8, lambda i: run(use(i), LOOPS[i % 2]))
    assert all(isinstance(result, int) for result in results), results

    async def end() -> None:
        await settled(engine)
        assert engine.statistics().generated_tokens == sum(results)
        await engine.aclose()

    run(end())
    assert engine.state == "closed"


async def test_the_thread_has_a_loop_like_the_callers(make: Make) -> None:
    policy = asyncio.get_event_loop_policy()
    loop = asyncio.get_running_loop()
    async with make() as engine:
        assert type(core_of(engine).loop) in (type(loop), asyncio.SelectorEventLoop)
        assert isinstance(core_of(engine).loop, uvloop.Loop) == isinstance(loop, uvloop.Loop)
        assert core_of(engine).loop.get_debug() == loop.get_debug()
        (thread,) = own_threads()
        assert thread.daemon
    assert asyncio.get_event_loop_policy() is policy
    assert not thread.is_alive() or thread.join(1) is None


def test_it_outlives_the_loop_that_started_it(make: Make) -> None:
    engine = run(make().start(), uvloop.new_event_loop)
    assert len(run(engine.generate([1], SamplingParams(max_tokens=3))).token_ids) == 3
    run(engine.aclose())
    assert engine.executor.terminated
    with pytest.raises(EngineClosedError, match="closed"):
        run(engine.generate([1]))
    assert run(engine.start()).state == "running"
    run(engine.aclose())


def test_one_stream_read_on_loop_after_loop(make: Make) -> None:
    engine = run(make().start())
    stream = engine.stream([1], SamplingParams(max_tokens=5, ignore_eos=True))  # on no loop at all

    async def read() -> int:
        return (await anext(stream)).position

    assert [run(read(), LOOPS[i % 2]) for i in range(5)] == list(range(5))
    assert run(stream.wait()).finish_reason == "length"
    assert len(stream.completion.token_ids) == 5
    run(engine.aclose())


# -- ending early


@pytest.mark.parametrize("prompt", ["a text that is encoded in the thread", [1, 2, 3]])
@pytest.mark.parametrize("how", ["stream", "generate", "chat"])
async def test_cancel_at_every_await(make: Make, prompt: object, how: str) -> None:
    """Cancel the reading task after k turns of the loop, for every k until it ends by itself."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    async with make() as engine:

        async def read() -> int:
            if how == "chat":
                message = {"role": "user", "content": str(prompt)}
                return (await engine.chat([message], params)).usage.completion_tokens
            if how == "generate":
                return len((await engine.generate(prompt, params)).token_ids)
            return len([t async for t in engine.stream(prompt, params)])

        for turns in range(3000):
            task = asyncio.create_task(read())
            for _ in range(turns):
                await asyncio.sleep(0 if turns < 60 else 0.0002)
                if task.done():
                    break
            if task.done():
                assert task.result() == 12
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await settled(engine)
        else:
            pytest.fail("never ended by itself")


async def test_leaving_a_stream_aborts(make: Make) -> None:
    async with make(fake={"delay": 0.001}) as engine:
        async for token in engine.stream([1], ENDLESS):
            if token.position == 3:
                break
        await until(lambda: engine.statistics().num_aborted == 1)
        async with engine.stream([1], ENDLESS) as stream:
            await anext(stream)
        assert stream.completion.finish_reason is FinishReason.ABORT
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert engine.statistics().num_aborted == 2
        unread = engine.stream([1], ENDLESS, request_id="unread")
        await unread.aclose()
        assert unread.completion.finish_reason is FinishReason.ABORT
        named = engine.stream([1], ENDLESS, request_id="named")
        assert engine.abort("named") and not engine.abort("named") and not engine.abort("nobody")
        assert (await named.wait()).finish_reason is FinishReason.ABORT
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await engine.generate([1], ENDLESS)
        await settled(engine)


async def test_closing_an_ended_stream_leaves_the_next_of_its_name(make: Make) -> None:
    async with make() as engine:
        first = engine.stream([1], SamplingParams(max_tokens=1), request_id="r")
        await first.wait()
        second = engine.stream([1], SamplingParams(max_tokens=60, ignore_eos=True), request_id="r")
        await first.aclose()
        del first
        assert len((await second.wait()).token_ids) == 60


@pytest.mark.parametrize("where", ["here", "another thread"])
async def test_dropping_a_stream_aborts(make: Make, where: str) -> None:
    async with make(fake={"delay": 0.001}) as engine:
        streams = [engine.stream([1], ENDLESS) for _ in range(5)]
        await anext(streams[0])
        gone = [weakref.ref(stream) for stream in streams]
        if where == "here":
            streams.clear()
        else:
            await asyncio.to_thread(streams.clear)
        await until(lambda: engine.statistics().num_aborted == 5)
        assert [ref() for ref in gone] == [None] * 5  # by counting references, without the collector
        await settled(engine)


async def test_a_stream_in_a_cycle_is_collected_in_the_engines_thread(make: Make) -> None:
    async with make(fake={"delay": 0.001}) as engine:
        stream = engine.stream([1], ENDLESS)
        await anext(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        handle_of(engine).thread.post(gc.collect)
        await until(lambda: engine.statistics().num_aborted == 1)
        await settled(engine)


async def test_reading_one_stream_from_two_tasks_is_refused(make: Make) -> None:
    async with make(fake={"delay": 0.02}) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=5))
        reader = asyncio.create_task(stream.wait())
        await asyncio.sleep(0)  # the reader's turn
        with pytest.raises(InvalidRequestError, match="another task"):
            await anext(stream)
        await reader


# -- the host's loop


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_blocked_loop_does_not_hold_up_the_engine(make: Make, new_loop: Callable[[], Any]) -> None:
    engine = run(make(fake={"delay": 0.001}).start())

    async def block() -> None:
        stream = engine.stream([1], SamplingParams(max_tokens=300, ignore_eos=True))
        first = await anext(stream)
        before = engine.statistics().generated_tokens
        time.sleep(0.1)  # the blocked loop, which is what is tested here
        assert engine.statistics().generated_tokens > before + 15
        rest = [token async for token in stream]
        assert [first.position, *(token.position for token in rest)] == list(range(300))

    run(block(), new_loop)
    run(engine.aclose())


async def test_a_slow_reader_costs_little(make: Make) -> None:
    """A hundred readers on a loop that is blocked: the engine leaves a wake-up for each of them, not one a token."""
    loop = asyncio.get_running_loop()
    async with make() as engine:
        streams = [engine.stream([i], SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(100)]
        turns: list[int] = []

        async def read(stream: TokenStream) -> int:
            return len([token async for token in stream])

        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.sleep(0)
        queue = call_queue_of(loop)
        deliver = queue.deliver

        def counted() -> None:
            turns.append(len(queue._calls))
            deliver()

        queue.deliver = counted  # type: ignore[method-assign]
        while engine.statistics().num_finished < 100:
            time.sleep(0.01)
        assert len(queue._calls) <= 100
        assert all(len(stream._buffer.ready) <= 400 for stream in streams)
        assert await asyncio.gather(*readers) == [400] * 100
        assert len(turns) <= 20, turns  # for 40,000 tokens
        await settled(engine)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("ending", ["runner", "close"])
def test_a_loop_that_closes_with_streams_open(make: Make, new_loop: Callable[[], Any], ending: str) -> None:
    """The runner cancels what reads; a bare close() does not, and the engine finds out when it has a token."""
    engine = run(make(fake={"delay": 0.001}).start())
    loop = new_loop()

    async def read() -> None:
        async for _ in engine.stream([1], ENDLESS):
            pass

    async def begin() -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(read()) for _ in range(3)]
        await until_running(engine, 3)
        return tasks

    if ending == "runner":
        run(begin(), new_loop)
    else:
        tasks = loop.run_until_complete(begin())
        for task in tasks:
            task._log_destroy_pending = False  # that is this test's fault
        loop.close()

    async def look() -> None:
        await until(lambda: engine.statistics().num_aborted == 3)
        await settled(engine)
        assert len((await engine.generate([1], SamplingParams(max_tokens=3))).token_ids) == 3
        await engine.aclose()

    run(look())
    loop.close()


async def test_context_variables_stay_where_they_are(make: Make) -> None:
    class Request:
        pass

    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("request", default=None)
    seen: set[Any] = set()

    def token(row: int, position: int) -> int:
        seen.add(variable.get())
        return 300

    request = Request()
    variable.set(request)
    async with make(fake={"token": token}) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=5))
        await engine.generate("a text", SamplingParams(max_tokens=5))
        await engine.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=5))
        assert len([t async for t in stream]) == 5
        assert variable.get() is request
        assert seen == {None}
