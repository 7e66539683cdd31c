"""`engine.add_listener`: what is told of requests to those who listen."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest
from conftest_api import settled

from aengine import (
    AsyncLLM,
    DeadlineExceededError,
    FinishReason,
    InvalidRequestError,
    RequestEnd,
    RequestListener,
    RequestStart,
    SamplingParams,
    Timings,
)
from aengine.testing import FakeAsyncLLM, FakeLLM

pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")
HELLO = [{"role": "user", "content": "Hello"}]
caller: ContextVar[str] = ContextVar("caller", default="nobody")


class Heard(RequestListener):
    """Notes all that it hears."""

    def __init__(self) -> None:
        self.starts: dict[str, RequestStart] = {}
        self.first: dict[str, Timings] = {}
        self.ends: dict[str, RequestEnd] = {}
        self.threads: set[str] = set()

    def on_accepted(self, request: RequestStart) -> None:
        assert request.request_id not in self.starts
        self.starts[request.request_id] = request
        self.threads.add(threading.current_thread().name)

    def on_first_token(self, request: RequestStart, timings: Timings) -> None:
        assert self.starts[request.request_id] is request and request.request_id not in self.first
        self.first[request.request_id] = timings
        self.threads.add(threading.current_thread().name)

    def on_end(self, request: RequestStart, end: RequestEnd) -> None:
        assert self.starts[request.request_id] is request and request.request_id not in self.ends
        self.ends[request.request_id] = end
        self.threads.add(threading.current_thread().name)

    def callers(self) -> list[str]:
        return [start.context.run(caller.get) for start in self.starts.values()]


@pytest.fixture(params=[False, True], ids=["local", "own_thread"])
def own_thread(request: pytest.FixtureRequest) -> bool:
    return request.param


async def test_each_request_is_heard_of_from_its_call_to_its_end(own_thread: bool) -> None:
    heard = Heard()
    begun = time.time()
    async with FakeAsyncLLM("Paris", own_thread=own_thread) as engine:
        engine.add_listener(heard)
        await engine.generate("x", SamplingParams(max_tokens=3, temperature=0.5), request_id="a", priority=4)
        await engine.chat(HELLO, SamplingParams(n=2), request_id="b")
        await engine.generate(HELLO, request_id="c")  # type: ignore[arg-type]
    assert [(s.request_id, s.kind) for s in heard.starts.values()] == [
        ("a", "completion"),
        ("b", "chat"),
        ("c", "chat"),
    ]
    start, first, end = heard.starts["a"], heard.first["a"], heard.ends["a"]
    assert (start.params.max_tokens, start.params.temperature, start.priority) == (3, 0.5, 4)
    assert begun - 1 < start.arrived_at < time.time() + 1
    assert first.first_token == end.timings.first_token and first.queued == end.timings.queued
    assert first.total is None and end.timings.total is not None
    assert end.finish_reasons == (FinishReason.LENGTH,) and end.usage.completion_tokens == 3
    assert heard.ends["b"].finish_reasons == (FinishReason.STOP,) * 2
    assert set(heard.first) == set(heard.ends) == {"a", "b", "c"}
    assert heard.threads == {"aengine" if own_thread else "MainThread"}


async def test_the_callers_context_variables(own_thread: bool) -> None:
    heard = Heard()

    async def call(name: str, engine: AsyncLLM) -> None:
        caller.set(name)
        stream = engine.stream_chat(HELLO)
        caller.set("changed since")
        await stream.wait()

    async with FakeAsyncLLM("Paris", own_thread=own_thread) as engine:
        engine.add_listener(heard)
        async with asyncio.TaskGroup() as tasks:
            for name in ("Ada", "Bob", "Eve"):
                tasks.create_task(call(name, engine))
        await engine.generate("x")
    assert heard.callers() == ["Ada", "Bob", "Eve", "nobody"]


def test_blocking_calls_have_it_too() -> None:
    heard = Heard()
    with FakeLLM("Paris") as llm:
        remove = llm.add_listener(heard)
        caller.set("Ada")
        llm.generate(["x", "y"])
        remove()
        llm.generate("z")
    assert heard.callers() == ["Ada", "Ada"] and len(heard.ends) == 2


async def test_ends_of_all_kinds(own_thread: bool) -> None:
    heard = Heard()
    engine = FakeAsyncLLM("a" * 900, token_delay=0.001, own_thread=own_thread)
    engine.add_listener(heard)  # before the start
    async with engine:
        with pytest.raises(DeadlineExceededError):
            await engine.generate("x", request_id="late", deadline=0.01)
        stream = engine.stream("x", request_id="left")
        await anext(stream)
        await stream.aclose()
        with pytest.raises(InvalidRequestError):
            await engine.generate("x", SamplingParams(stop_token_ids=[10**9]), request_id="refused")
        left_open = engine.stream("x", request_id="open")
        await anext(left_open)
    reasons = {name: end.finish_reason for name, end in heard.ends.items()}
    assert reasons == {"late": FinishReason.ERROR, "left": FinishReason.ABORT, "open": FinishReason.ERROR}
    assert set(heard.starts) == set(reasons) and isinstance(heard.ends["late"].error, DeadlineExceededError)
    async with engine:  # its next life
        await engine.generate("x", SamplingParams(max_tokens=1), request_id="again")
    assert "again" in heard.ends


async def test_one_that_comes_and_goes_hears_whole_requests(own_thread: bool) -> None:
    early, late = Heard(), Heard()
    async with FakeAsyncLLM("a" * 50, token_delay=0.001, own_thread=own_thread) as engine:
        remove = engine.add_listener(early)
        stream = engine.stream("x", request_id="a")
        await anext(stream)
        engine.add_listener(late)
        remove()
        remove()
        await engine.generate("x", SamplingParams(max_tokens=1), request_id="b")
        await stream.wait()
    assert (list(early.ends), list(late.ends)) == (["a"], ["b"])
    assert (list(early.first), list(late.first)) == (["a"], ["b"])


async def test_what_it_raises_is_logged_and_harms_nobody(own_thread: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RequestListener):
        def on_accepted(self, request: RequestStart) -> None:
            raise ValueError("accepted")

        def on_first_token(self, request: RequestStart, timings: Timings) -> None:
            raise ValueError("first")

        def on_end(self, request: RequestStart, end: RequestEnd) -> None:
            raise ValueError("end")

    heard = Heard()
    async with FakeAsyncLLM("Paris", own_thread=own_thread) as engine:
        engine.add_listener(Broken())
        engine.add_listener(heard)
        assert (await engine.generate("x", request_id="a")).text == "Paris"
    assert list(heard.ends) == ["a"]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert {record.name for record in errors} == {"aengine.requests"}
    assert [str(record.exc_info[1]) for record in errors if record.exc_info] == ["accepted", "first", "end"]
    assert "Broken.on_accepted failed for request a" in errors[0].getMessage()


async def test_it_may_abort_and_begin_requests(own_thread: bool) -> None:
    class Meddler(RequestListener):
        def on_accepted(self, request: RequestStart) -> None:
            if request.request_id == "a":
                engine.abort("a")

    heard = Heard()
    engine = FakeAsyncLLM("Paris", own_thread=own_thread)
    async with engine:
        engine.add_listener(Meddler())
        engine.add_listener(heard)
        completion = await engine.generate("x", request_id="a")
        assert completion.finish_reason == "abort"
        assert (await engine.generate("x", request_id="b")).text == "Paris"
        if not own_thread:
            await settled(engine)


async def test_whoever_is_no_listener_is_refused() -> None:
    wrong: Any = print
    with pytest.raises(InvalidRequestError, match="RequestListener") as raised:
        FakeAsyncLLM().add_listener(wrong)
    assert raised.value.param == "listener"
