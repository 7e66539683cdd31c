"""An engine that is to end: what still runs, what is refused, and what whoever is cut short gets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of, expire, settled, until, user_requests
from fakes import FakeExecutor

from aengine import (
    AsyncLLM,
    Completion,
    DeadlineExceededError,
    EngineClosedError,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    WorkerDiedError,
)
from aengine.engine import recovery
from aengine.engine.chat import plan as chat_module

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)
SLOW = {"delay": 0.02}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(params=["on this loop", "own thread"])
def make(make_engine: Make, request: pytest.FixtureRequest) -> Make:
    own_thread = request.param == "own thread"
    return lambda **config: make_engine(**{"own_thread": own_thread, "max_leased_steps": 0, **config})


def tokens(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=number, ignore_eos=True)


def begin(engine: AsyncLLM, params: SamplingParams, number: int = 1) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate([i + 1], params)) for i in range(number)]


async def running(engine: AsyncLLM, number: int = 1) -> None:
    await until(lambda: engine.statistics().num_running >= number)


async def fails_with(kind: type[Exception], awaitable: Any, match: str | None = None) -> Any:
    async with asyncio.timeout(20):
        with pytest.raises(kind, match=match) as caught:
            await awaitable
    return caught.value


def gone(engine: AsyncLLM) -> bool:
    return bool(engine.executor.terminated)  # type: ignore[attr-defined]


# -- draining


async def test_while_it_drains(make: Make) -> None:
    """New requests are refused and say why; everything else works."""
    async with make(fake=SLOW) as engine:
        four = begin(engine, tokens(20), 4)
        stream = engine.stream([9], ENDLESS, request_id="endless")
        await running(engine, 5)
        draining = asyncio.create_task(engine.drain())
        await until(lambda: engine.state == "draining")
        assert "draining" in repr(engine)
        for refused in (
            lambda: engine.generate([1]),
            lambda: engine.chat(MESSAGES),
            engine.start,
        ):
            await fails_with(EngineClosedError, refused(), match="is draining.*resume")
        with pytest.raises(EngineClosedError, match="is draining"):
            engine.stream([1])
        with pytest.raises(EngineClosedError, match="is draining"):
            engine.stream_chat(MESSAGES)
        assert engine.statistics().num_running >= 1
        assert engine.describe()["num_blocks"] and engine.tokenizer.has_chat_template
        assert await engine.check_health() > 0
        assert [len((await task).token_ids) for task in four] == [20] * 4
        assert not draining.done()
        assert engine.abort("endless")
        assert (await stream.wait()).finish_reason is FinishReason.ABORT
        assert await draining is True
        assert engine.state == "draining"
        assert await engine.drain(0) is True
        await engine.resume()
        assert engine.state == "running"
        assert len((await engine.generate([1], tokens(3))).token_ids) == 3
        await engine.resume()  # of an engine that runs: nothing
    assert engine.state == "closed"


async def test_a_drain_that_runs_out_leaves_the_rest_running(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        task = begin(engine, tokens(40))[0]
        await running(engine)
        assert await engine.drain(0.05) is False
        assert engine.state == "draining"
        assert len((await task).token_ids) == 40
        assert await engine.drain(5) is True


async def test_several_drain_at_once(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        task = begin(engine, tokens(20))[0]
        await running(engine)
        outcomes = await asyncio.gather(engine.drain(20), engine.drain(), engine.drain(0.01), engine.drain(20))
        assert outcomes == [True, True, False, True] and task.done()


async def test_resuming_ends_the_wait(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        stream = engine.stream([1], ENDLESS)
        draining = asyncio.create_task(engine.drain())
        await until(lambda: engine.state == "draining")
        await engine.resume()
        assert await draining is False
        await stream.aclose()


async def test_abort_all(make: Make) -> None:
    async with make(fake=SLOW, max_num_seqs=2, max_num_queued_requests=3, admission="wait") as engine:
        streams = [engine.stream([i + 1], ENDLESS) for i in range(8)]  # running, queued, and held
        await running(engine, 2)
        assert engine.abort_all() == 8
        for stream in streams:
            assert (await stream.wait()).finish_reason is FinishReason.ABORT
        assert await engine.drain(5) is True
        assert engine.abort_all() == 0
        if not engine.config.own_thread:
            await settled(engine)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Chats are prepared once it is set."""
    gate, plan_chat = threading.Event(), chat_module.plan_chat

    def slowly(*args: Any) -> Any:
        gate.wait(20)
        return plan_chat(*args)

    monkeypatch.setattr(chat_module, "plan_chat", slowly)
    return gate


async def test_a_chat_that_is_being_prepared_belongs_to_what_runs(make: Make, gate: threading.Event) -> None:
    async with make() as engine:
        chat = asyncio.create_task(engine.chat(MESSAGES, tokens(5)))
        await until(lambda: engine.statistics().num_waiting == 1)
        assert await engine.drain(0.01) is False
        gate.set()
        assert await engine.drain(20) is True
        assert len((await chat).token_ids) == 5


@pytest.mark.parametrize("how", ["abort", "abort_all"])
async def test_a_chat_that_is_being_prepared_can_be_aborted(make: Make, gate: threading.Event, how: str) -> None:
    async with make(fake=SLOW) as engine:
        chat = asyncio.create_task(engine.chat(MESSAGES, ENDLESS, request_id="chat"))
        await until(lambda: engine.statistics().num_waiting == 1)
        assert not engine.abort("another")
        assert engine.abort("chat") if how == "abort" else engine.abort_all() == 1
        gate.set()
        assert (await chat).finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("seconds", [-1, "5", float("nan"), float("inf"), True, 1e9])
async def test_seconds_that_are_none(make: Make, seconds: Any) -> None:
    async with make() as engine:
        error = await fails_with(InvalidRequestError, engine.drain(seconds))
        assert error.param == "timeout"
        error = await fails_with(InvalidRequestError, engine.aclose(drain=seconds))
        assert error.param == "drain"
        assert engine.state == "running"


async def test_drain_and_resume_of_an_engine_that_does_not_run(make: Make) -> None:
    engine = make()
    for call in (engine.drain, engine.resume):
        await fails_with(EngineClosedError, call(), match="not started")
    with pytest.raises(EngineClosedError, match="not started"):
        engine.abort_all()


# -- closing


async def test_a_late_caller_neither_kills_what_drains_nor_starts_what_nobody_closes(make: Make) -> None:
    engine = await make(fake=SLOW).start()
    four = begin(engine, tokens(30), 4)
    await running(engine, 4)
    closing = asyncio.create_task(engine.aclose(drain=30))
    await until(lambda: engine.state == "draining")
    await fails_with(EngineClosedError, engine.start(), match="being closed.*once aclose")
    await fails_with(EngineClosedError, engine.generate([1]), match="draining.*will be closed")
    await fails_with(EngineClosedError, engine.resume(), match="being closed")
    assert engine.statistics().num_running == 4
    assert [len((await task).token_ids) for task in four] == [30] * 4
    await closing
    assert engine.state == "closed" and gone(engine)
    async with engine:  # whoever wants it now has to close it
        assert len((await engine.generate([1], tokens(2))).token_ids) == 2


async def test_of_several_closers_the_first_to_run_out_closes(make: Make) -> None:
    engine = await make(fake=SLOW).start()
    stream = engine.stream([1], ENDLESS)
    patient = asyncio.create_task(engine.aclose(drain=1000))
    await until(lambda: engine.state == "draining")
    await engine.aclose(drain=0.05)
    await fails_with(EngineClosedError, stream.wait())
    async with asyncio.timeout(20):
        await patient
    assert engine.state == "closed" and gone(engine)


@pytest.mark.parametrize("then", ["nothing", "terminate", "start", "death", "aclose"])
async def test_a_close_that_is_cut_short_ends_everything(make: Make, then: str) -> None:
    engine = await make(fake=SLOW).start()
    streams = [engine.stream([i + 1], ENDLESS) for i in range(3)]
    await running(engine, 3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.aclose(drain=1000), 0.05)
    assert engine.state == "closed" and gone(engine)
    if then == "terminate":
        engine.terminate()
    elif then == "death":
        engine.executor.fail(WorkerDiedError("killed"))  # type: ignore[attr-defined]
    elif then == "start":
        await engine.start()
    elif then == "aclose":
        await engine.aclose()
    for stream in streams:
        await fails_with(EngineClosedError, stream.wait())
    await engine.aclose()


@pytest.mark.slow
async def test_a_cancelled_close_is_a_termination_at_every_await(make: Make, rng: Any) -> None:
    for turns in range(30):
        engine = await make(fake={"delay": 0.001}).start()
        stream = engine.stream([1], ENDLESS)
        closing = asyncio.create_task(engine.aclose(drain=[0, 0.01, 1000][turns % 3]))
        for _ in range(turns):
            await asyncio.sleep(0 if turns < 15 else 0.001)
        begun = turns > 0
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        if begun and not engine.config.own_thread:
            assert engine.state == "closed" and gone(engine)
        await engine.aclose()
        await fails_with(EngineClosedError, stream.wait())


@pytest.mark.parametrize("drains", [False, True])
async def test_terminate_reaches_those_who_drain(make: Make, drains: bool) -> None:
    engine = await make(fake=SLOW).start()
    stream = engine.stream([1], ENDLESS)
    await running(engine)
    waiting = asyncio.create_task(engine.drain() if drains else engine.aclose(drain=1000))
    await until(lambda: engine.state == "draining")
    engine.terminate()
    await fails_with(EngineClosedError, stream.wait())
    async with asyncio.timeout(20):
        with contextlib.suppress(EngineClosedError):  # its thread has ended
            await waiting
    assert engine.state == "closed"
    await engine.aclose()


async def test_terminate_leaves_no_task(make_engine: Make) -> None:
    engine = await make_engine().start()
    await engine.generate([1], tokens(2))
    await asyncio.sleep(0.01)  # idle, so that nothing but the termination wakes it
    engine.terminate()
    await until(lambda: "aengine-step-loop" not in {task.get_name() for task in asyncio.all_tasks()})


# -- a worker's death meanwhile


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)


@pytest.mark.usefixtures("no_delay")
async def test_a_death_in_a_drain_is_recovered(make: Make) -> None:
    async with make() as engine:
        expected = (await engine.generate([1], tokens(60))).token_ids
    engine = await make(fake=SLOW).start()
    task = begin(engine, tokens(60))[0]
    await running(engine)
    closing = asyncio.create_task(engine.aclose(drain=1000))
    await until(lambda: engine.state == "draining")
    first = engine.executor  # type: ignore[attr-defined]
    core = core_of(engine)
    assert core is not None
    core.loop.call_soon_threadsafe(first.fail, WorkerDiedError("worker 0 died of SIGKILL"))
    async with asyncio.timeout(60):
        assert (await task).token_ids == expected
        await closing
    assert engine.executor is not first and gone(engine) and engine.state == "closed"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_delay")
async def test_a_death_in_a_drain_that_is_not_recovered_says_its_cause(make: Make) -> None:
    engine = await make(fake=SLOW, max_restarts=0).start()
    stream = engine.stream([1], ENDLESS)
    await running(engine)
    closing = asyncio.create_task(engine.aclose(drain=1000))
    await until(lambda: engine.state == "draining")
    core = core_of(engine)
    assert core is not None
    core.loop.call_soon_threadsafe(engine.executor.fail, WorkerDiedError("worker 0 died of SIGKILL"))  # type: ignore[attr-defined]
    await fails_with(WorkerDiedError, stream.wait(), match="SIGKILL")
    async with asyncio.timeout(20):
        await closing
    assert engine.state == "failed"


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
async def test_a_restart_for_want_of_descriptors_or_threads_is_tried_again(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with make_engine(fake=SLOW) as engine:
        task = begin(engine, tokens(10))[0]
        await running(engine)
        start, starts = FakeExecutor.start, []

        async def fails_once(self: FakeExecutor, *args: Any) -> dict[str, Any]:
            starts.append(self)
            if len(starts) == 1:
                raise error
            return await start(self, *args)

        monkeypatch.setattr(FakeExecutor, "start", fails_once)
        engine.executor.fail(WorkerDiedError("killed"))  # type: ignore[attr-defined]
        assert len((await task).token_ids) == 10
        assert len(starts) == 2 == engine.statistics().num_restarts


@pytest.mark.parametrize("method", ["start_profile", "stop_profile"])
async def test_a_worker_that_writes_a_profile_is_not_hung(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with make_engine(hang_timeout=0.3, fake=SLOW) as engine:
        await engine.generate([1], tokens(2))
        task = begin(engine, tokens(20))[0]
        await running(engine)
        executor: Any = engine.executor  # type: ignore[attr-defined]
        held: list[Any] = []
        answer_later = executor.answer_later

        async def call(name: str, *args: Any, timeout: float) -> Any:
            """As the worker does it: neither steps nor heartbeats meanwhile, and then what was asked before."""
            monkeypatch.setattr(executor, "answer_later", lambda *answer: held.append(answer))
            executor.is_hung = True
            await asyncio.sleep(0.6)  # as long as the call takes: twice as long as the watchdog waits
            executor.is_hung = False
            monkeypatch.setattr(executor, "answer_later", answer_later)
            for answer in held:
                answer_later(*answer)
            return [{"path": "/trace"}]

        monkeypatch.setattr(executor, "call", call)
        assert await getattr(engine, method)() == "/trace"
        assert len((await task).token_ids) == 20
        assert held and engine.statistics().num_restarts == 0
        executor.is_hung = True  # from now on it is
        assert len((await begin(engine, tokens(5))[0]).token_ids) == 5
        assert engine.statistics().num_restarts == 1


# -- what those who are cut short get


def expire_soon(engine: AsyncLLM, request_id: str) -> None:
    """Its deadline has passed."""
    core, request = core_of(engine), user_requests(engine)[request_id]
    (timer,) = request.timers
    core.loop.call_soon_threadsafe(expire, engine, request)
    assert timer.when() > core.loop.time()


async def test_what_had_come_is_in_the_error(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        stream = engine.stream([1], ENDLESS, deadline=1000, request_id="stream")
        text = ""
        with pytest.raises(DeadlineExceededError) as caught:
            async for token in stream:
                text += token.text
                if token.position == 5:
                    expire_soon(engine, "stream")
        completion = caught.value.completion
        assert completion is not None and completion.text == text != ""
        assert completion.finish_reason is FinishReason.ERROR
        assert completion.usage.completion_tokens == len(completion.token_ids) > 0
        two = asyncio.create_task(engine.generate([1], ENDLESS.replace(n=2), deadline=1000, request_id="two"))
        chat = asyncio.create_task(engine.chat(MESSAGES, ENDLESS, deadline=1000, request_id="chat"))
        await running(engine, 3)
        least = engine.statistics().generated_tokens + 20
        await until(lambda: engine.statistics().generated_tokens >= least)
        expire_soon(engine, "two")
        error = await fails_with(DeadlineExceededError, two)
        assert [len(choice.token_ids) > 0 for choice in error.completion.choices] == [True, True]
        expire_soon(engine, "chat")
        error = await fails_with(DeadlineExceededError, chat)
        assert error.completion.message.content == error.completion.text != ""
        error = await fails_with(InvalidRequestError, engine.generate([-1]))
        assert error.completion is None


async def test_each_who_is_cut_by_the_close_gets_its_own(make: Make) -> None:
    engine = await make(fake=SLOW).start()
    tasks = [*begin(engine, ENDLESS, 2), asyncio.create_task(engine.chat(MESSAGES, ENDLESS))]
    await until(lambda: engine.statistics().generated_tokens > 30)
    await running(engine, 3)
    await engine.aclose(drain=0.2)
    completions = [(await fails_with(EngineClosedError, task)).completion for task in tasks]
    assert all(completion.text for completion in completions)
    assert len({completion.request_id for completion in completions}) == 3
    assert completions[2].message.content == completions[2].text


async def test_an_ended_stream_leaves_the_next_of_its_id_alone(make: Make) -> None:
    async with make(fake=SLOW) as engine:
        async with engine.stream([1], tokens(2), request_id="x") as first:
            async for _ in first:
                pass
            second = asyncio.create_task(engine.generate([1], tokens(30), request_id="x"))
            await running(engine)
        await first.aclose()
        del first
        assert (await second).finish_reason is FinishReason.LENGTH


async def test_a_dropped_stream_that_ended_meanwhile_leaves_the_next_of_its_id_alone(make_engine: Make) -> None:
    async with make_engine(fake=SLOW) as engine:
        first = engine.stream([1], ENDLESS, request_id="x")
        await running(engine)
        del first  # aborts it at the loop's next turn, before which
        assert engine.abort("x")
        second = engine.stream([1], tokens(5), request_id="x")
        assert (await second.wait()).finish_reason is FinishReason.LENGTH
