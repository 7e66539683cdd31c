"""What is told of a request: timings on its completion, `on_request_end`, log records, histograms."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of, settled, until_running

from aengine import (
    AEngineError,
    AsyncLLM,
    Completion,
    DeadlineExceededError,
    EngineClosedError,
    EngineOverloadedError,
    FinishReason,
    GrammarError,
    InvalidRequestError,
    RequestEnd,
    SamplingParams,
    StructuredOutput,
    Timings,
    WorkerDiedError,
)
from aengine.engine.scheduler.request import Request
from aengine.telemetry import observer

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)
SLOW: dict[str, Any] = {"fake": {"delay": 0.002}, "max_leased_steps": 0}


class Ends(list[RequestEnd]):
    """What `on_request_end` was given."""

    def __call__(self, end: RequestEnd) -> None:
        self.append(end)

    @property
    def reasons(self) -> dict[str, FinishReason]:
        assert len({end.request_id for end in self}) == len(self), "once a request"
        return {end.request_id: end.finish_reason for end in self}


def check(timings: Timings, num_tokens: int) -> None:
    assert timings.queued is not None and timings.prefill is not None and timings.first_token is not None
    assert timings.total is not None
    assert timings.queued >= 0 and timings.prefill > 0
    assert timings.first_token == pytest.approx(timings.queued + timings.prefill)
    if num_tokens < 2:
        assert timings.per_token is None
    else:
        assert timings.per_token is not None
        assert timings.total == pytest.approx(timings.first_token + (num_tokens - 1) * timings.per_token)


# -- timings


async def test_every_completion_has_its_timings(make_engine: Make) -> None:
    async with make_engine() as engine:
        stream = engine.stream("Hello", FIVE)
        async for token in stream:
            if token.finish_reason is not None:
                check(stream.completion.timings, 5)
        check((await engine.generate([1, 2, 3], FIVE)).timings, 5)
        check((await engine.generate([1, 2, 3], FIVE.replace(max_tokens=1))).timings, 1)
        check((await engine.generate([1, 2, 3], FIVE.replace(n=3))).timings, 5)
        chat = await engine.chat([{"role": "user", "content": "Hi"}], FIVE)
        check(chat.timings, chat.usage.completion_tokens)


async def test_a_chat_is_timed_from_its_call(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_engine() as engine:
        loop, begun = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        stream = engine.stream_chat([{"role": "user", "content": "Hi"}], FIVE)
        prepared = loop.time() - begun
        completion = await stream.wait()
        assert completion.timings.queued is not None
        assert completion.timings.queued >= prepared - 0.002  # uvloop counts whole milliseconds


async def test_timings_are_no_part_of_what_completions_are_compared_by(make_engine: Make) -> None:
    async with make_engine() as engine:
        first = await engine.generate([1, 2], FIVE, request_id="a")
        assert first == await engine.generate([1, 2], FIVE, request_id="a")


async def test_what_never_ran_was_queued_until_its_end(make_engine: Make) -> None:
    ends = Ends()
    async with make_engine(max_num_seqs=1, on_request_end=ends, **SLOW) as engine:
        running = engine.stream([1], ENDLESS)
        await anext(running)
        with pytest.raises(DeadlineExceededError):
            await engine.generate([2], FIVE, deadline=0.03)
        await running.aclose()
    waited = ends[0].timings
    assert waited.queued == waited.total and waited.total is not None and waited.total >= 0.02
    assert waited.prefill is waited.first_token is waited.per_token is None


async def test_partial_completions_have_what_there_is(make_engine: Make) -> None:
    async with make_engine(**SLOW) as engine:
        stream = engine.stream([1], ENDLESS, request_id="a")
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        check(stream.completion.timings, len(stream.completion.token_ids))


async def test_an_idle_engine_holds_no_request(make_engine: Make) -> None:
    async with make_engine() as engine:
        await engine.generate([1, 2], FIVE.replace(max_tokens=1), request_id="held by nobody")
        await settled(engine)
        gc.collect()
        # By type: isinstance reads __class__, and some objects of torch then warn that they are deprecated.
        requests = [found for found in gc.get_objects() if type(found) is Request]
        assert not [request for request in requests if request.request_id == "held by nobody"]


# -- on_request_end


async def test_it_is_called_once_in_every_way_that_a_request_can_end(make_engine: Make) -> None:
    ends = Ends()
    async with make_engine(on_request_end=ends, **SLOW) as engine:

        async def generate(
            request_id: str, prompt: Any = (1, 2), params: SamplingParams = ENDLESS, **options: Any
        ) -> Any:
            try:
                return await engine.generate(list(prompt), params, request_id=request_id, **options)
            except (AEngineError, asyncio.CancelledError) as error:
                return error

        tasks = {
            name: asyncio.create_task(generate(name, **options))
            for name, options in {
                "length": {"params": FIVE},
                "several": {"params": FIVE.replace(n=3)},
                "stop": {"params": ENDLESS.replace(stop_token_ids=[270])},
                "stop string": {"params": ENDLESS.replace(stop="e")},
                "deadline": {"deadline": 0.02},
                "first token": {"first_token_deadline": 1e-6},
                "grammar": {"params": FIVE.replace(structured_output=StructuredOutput(regex="("))},
                "aborted": {},
                "cancelled": {},
                "at the close": {},
            }.items()
        }
        broken = engine.stream([1, 2], ENDLESS, request_id="broken")
        async for _ in broken:
            break
        del broken, _
        engine.abort("aborted")
        tasks["cancelled"].cancel()
        closing = tasks.pop("at the close")
        await asyncio.wait(tasks.values())
        for call, error in (
            (lambda: engine.stream([], FIVE), InvalidRequestError),
            (lambda: engine.stream([1], FIVE, request_id="at the close"), InvalidRequestError),
        ):
            with pytest.raises(error):
                call()
        while "broken" not in ends.reasons:
            await asyncio.sleep(0)
    assert isinstance(await closing, EngineClosedError)
    stop, length, abort, error = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR
    assert ends.reasons == {
        "length": length,
        "several": length,
        "stop": stop,
        "stop string": stop,
        "deadline": error,
        "first token": error,
        "grammar": error,
        "at the close": error,
        "aborted": abort,
        "cancelled": abort,
        "broken": abort,
    }
    by_id = {end.request_id: end for end in ends}
    completion: Completion = tasks["several"].result()
    assert by_id["several"].usage == completion.usage and completion.usage.completion_tokens == 15
    assert by_id["several"].timings == completion.timings
    assert isinstance(by_id["deadline"].error, DeadlineExceededError)
    assert isinstance(by_id["grammar"].error, GrammarError)
    assert isinstance(by_id["at the close"].error, EngineClosedError)
    assert by_id["length"].error is by_id["aborted"].error is None


async def test_an_engine_that_fails_tells_of_everybody(make_engine: Make) -> None:
    ends = Ends()
    async with make_engine(on_request_end=ends, max_restarts=0, **SLOW) as engine:
        tasks = [asyncio.create_task(engine.generate([i], ENDLESS)) for i in range(1, 6)]
        await until_running(engine, 5)
        engine.executor.fail(WorkerDiedError("worker 0 died of SIGKILL", rank=0, exit_code=-9))
        await asyncio.wait(tasks)
        for task in tasks:
            task.exception()
    assert list(ends.reasons.values()) == [FinishReason.ERROR] * 5
    assert all(isinstance(end.error, WorkerDiedError) for end in ends)


async def test_a_restart_is_no_end(make_engine: Make) -> None:
    ends = Ends()
    async with make_engine(on_request_end=ends, **SLOW) as engine:
        task = asyncio.create_task(engine.generate([1], ENDLESS.replace(max_tokens=30)))
        await until_running(engine)
        engine.executor.fail(WorkerDiedError("worker 0 died of SIGKILL", rank=0, exit_code=-9))
        await task
        (restart,) = engine.statistics().restarts
        assert "SIGKILL" in restart.reason and restart.time > 1.7e9
    assert list(ends.reasons.values()) == [FinishReason.LENGTH]


async def test_refused_calls_are_no_requests(make_engine: Make) -> None:
    ends = Ends()
    async with make_engine(on_request_end=ends, max_num_seqs=1, max_num_queued_requests=1, **SLOW) as engine:
        first = engine.stream([1], ENDLESS)
        await anext(first)
        second = engine.stream([1], ENDLESS)
        with pytest.raises(EngineOverloadedError):
            engine.stream([1], ENDLESS)
        assert engine.statistics().num_rejected == 1
        await first.aclose()
        await second.aclose()
    assert len(ends) == 2


async def test_what_it_raises_is_logged_and_harms_nobody(make_engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fails(end: RequestEnd) -> None:
        raise ZeroDivisionError("a bug of the application's")

    async with make_engine(on_request_end=fails) as engine:
        completions = await asyncio.gather(*(engine.generate([i], FIVE, request_id=f"r{i}") for i in range(1, 5)))
        assert all(len(completion.token_ids) == 5 for completion in completions)
        await settled(engine)
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in records] == [
        f"on_request_end failed for request r{i}" for i in range(1, 5)
    ]
    assert all(record.exc_info[0] is ZeroDivisionError for record in records)  # type: ignore[index]


async def test_it_may_begin_and_end_others(make_engine: Make) -> None:
    ends = Ends()
    streams = []

    def begin_or_end(end: RequestEnd) -> None:
        ends(end)
        if end.request_id.startswith("first"):
            streams.append(engine.stream([1, 2], FIVE, request_id=end.request_id.replace("first", "then")))
            engine.abort(end.request_id.replace("first", "victim"))

    async with make_engine(on_request_end=begin_or_end) as engine:
        victims = [engine.stream([1], ENDLESS, request_id=f"victim {i}") for i in range(20)]
        await asyncio.gather(*(engine.generate([3], FIVE, request_id=f"first {i}") for i in range(20)))
        for stream in streams:
            assert len([token async for token in stream]) == 5
        await settled(engine)
        del victims
    assert len(ends.reasons) == 60
    assert all(ends.reasons[f"victim {i}"] is FinishReason.ABORT for i in range(20))


async def test_it_may_end_others_while_all_end(make_engine: Make) -> None:
    ends = Ends()

    def end_all(end: RequestEnd) -> None:
        ends(end)
        for i in range(5):
            core_of(engine).admission.abort(f"r{i}")

    async with make_engine(on_request_end=end_all, **SLOW) as engine:
        tasks = [asyncio.create_task(engine.generate([i + 1], ENDLESS, request_id=f"r{i}")) for i in range(5)]
        await until_running(engine, 5)
    await asyncio.wait(tasks)
    for task in tasks:
        task.exception()
    assert len(ends.reasons) == 5


async def test_with_a_thread_of_its_own_it_is_called_there(make: Make, no_thread_left: None) -> None:
    threads: set[str] = set()
    ends = Ends()

    def note(end: RequestEnd) -> None:
        threads.add(threading.current_thread().name)
        ends(end)

    async with make(on_request_end=note, **SLOW) as engine:
        completion = await engine.generate([1, 2], FIVE)
        check(completion.timings, 5)
        assert len(ends) == 1
        stream = engine.stream([1, 2], ENDLESS)
        await anext(stream)
    assert threads == {"aengine"}
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH, FinishReason.ERROR]


@pytest.mark.parametrize("wrong", [5, "print", {}])
def test_it_must_be_callable(make_engine: Make, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="on_request_end"):
        make_engine(on_request_end=wrong)


# -- log records


async def test_records_for_debugging_name_their_request(make_engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    async with make_engine(**SLOW) as engine:
        await engine.generate([7], FIVE, request_id="unseen")
        with caplog.at_level(logging.DEBUG, "aengine.requests"):
            await engine.generate([1, 2], FIVE, request_id="a")
            with pytest.raises(DeadlineExceededError):
                await engine.generate([1, 2], ENDLESS, request_id="b", deadline=0.02)
    of = {name: [r for r in caplog.records if getattr(r, "request_id", "") == name] for name in ("a", "b", "unseen")}
    assert [record.name for record in caplog.records] == ["aengine.requests"] * 6
    queued, first, end = [record.getMessage() for record in of["a"]]
    assert queued == "request a: queued, max_tokens=5, n=1, priority=0"
    assert first.startswith("request a: first token after ")
    assert end.startswith("request a: length after 2 prompt tokens (0 cached) and 5 generated; queued ")
    assert "per_token" in end and "total" in end
    assert "; DeadlineExceededError: " in of["b"][-1].getMessage() and of["b"][-1].getMessage().startswith(
        "request b: error"
    )
    assert of["unseen"] == []


async def test_the_level_is_asked_once_a_request(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(logging.Logger):
        num = 0

        def isEnabledFor(self, level: int) -> bool:
            self.num += 1
            return False

    asked = Asked("aengine.requests")
    monkeypatch.setattr(observer, "logger", asked)
    async with make_engine() as engine:
        await asyncio.gather(*(engine.generate([i], ENDLESS.replace(max_tokens=100)) for i in range(1, 8)))
    assert asked.num == 7


# -- statistics


async def test_histograms_count_what_happened(make_engine: Make) -> None:
    async with make_engine(**SLOW) as engine:
        await asyncio.gather(*(engine.generate([1] * 30, FIVE) for _ in range(4)))
        await engine.generate([1] * 300, FIVE.replace(max_tokens=1))
        with pytest.raises(DeadlineExceededError):
            await engine.generate([1], FIVE, first_token_deadline=1e-6)
        statistics = engine.statistics()
        told = statistics.histograms
    assert statistics.finish_reasons == {"stop": 0, "tool_calls": 0, "length": 5, "abort": 0, "error": 1}
    assert told.request_latency.count == 6 and told.time_to_first_token.count == 5
    assert told.queue_time.count == told.prefill_time.count == told.decode_time.count == 5
    assert told.time_per_output_token.count == 4
    assert told.inter_token_latency.count == 16 and told.inter_token_latency.sum > 0
    assert (told.prompt_tokens.sum, told.generation_tokens.sum) == (421, 21)
    lengths = told.prompt_tokens
    assert (
        dict(zip(lengths.bounds, lengths.counts))[50.0] == 4 and dict(zip(lengths.bounds, lengths.counts))[500.0] == 1
    )
    assert len(lengths.counts) == len(lengths.bounds) + 1
    assert lengths.cumulative[-1] == lengths.count == 6 and list(lengths.cumulative) == sorted(lengths.cumulative)


async def test_tokens_that_a_grammar_forces_are_one_gap(make_engine: Make) -> None:
    params = ENDLESS.replace(
        ignore_eos=False, structured_output=StructuredOutput(choice=["a long answer, all of it forced"])
    )
    async with make_engine() as engine:
        completion = await engine.generate([1], params)
        told = engine.statistics().histograms
        assert told.inter_token_latency.count < completion.usage.completion_tokens - 1
        assert told.inter_token_latency.sum <= told.request_latency.sum


async def test_gaps_do_not_span_idle_times(make_engine: Make) -> None:
    async with make_engine() as engine:
        await engine.generate([1], FIVE)
        await asyncio.sleep(0.3)  # the idle time that no gap may span
        await engine.generate([1], FIVE)
        told = engine.statistics().histograms
        assert told.inter_token_latency.count == 8
        assert told.inter_token_latency.sum <= told.decode_time.sum * 1.01 + 1e-3
