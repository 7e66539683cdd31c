"""first_token_deadline: it ends a request in whatever phase, and has no say once a token has come.

Where it must pass, what the request waits for is held until it has. Where it must not matter, the test says when it
passes. So no outcome depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import own_thread_helpers
import pytest
from conftest_api import core_of, handle_of, settled, until, user_requests
from fakes import FakeExecutor

from aengine import (
    LLM,
    AsyncLLM,
    DeadlineExceededError,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
    WorkerDiedError,
)
from aengine.engine.chat import plan as chat_module
from aengine.engine.tokenizer.prompt import TextPart

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")
SOON = 0.02
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]


class Held:
    """The worker's answers, but for the first few, until they are let go."""

    def __init__(self, engine: AsyncLLM, *, num_passed: int = 0) -> None:
        self._executor, self._num_passed = engine.executor, num_passed
        self._later: list[tuple[Any, Any]] = []
        self._executor.answer_later = self._hold

    def _hold(self, future: Any, answer: Any) -> None:
        if self._num_passed:
            self._num_passed -= 1
            FakeExecutor.answer_later(self._executor, future, answer)
        else:
            self._later.append((future, answer))

    def let_go(self) -> None:
        del self._executor.answer_later
        for future, answer in self._later:
            self._executor.answer_later(future, answer)


class Timer:
    def __init__(self, when: float, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.when, self._callback, self._args = when, callback, args
        self.is_over = False

    def fire(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._callback(*self._args)

    def cancel(self) -> None:
        self.is_over = True


class Clock:
    """The loop, as admission sees it: its timers fire when the test says so."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._loop = core_of(engine).loop
        self.timers: list[Timer] = []
        core_of(engine).admission._loop = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> Timer:
        self.timers.append(Timer(when, callback, args))
        return self.timers[-1]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """For what runs in a thread; opened at the end, whatever has happened."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def slow_encoding(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    encode = TextPart.encode
    monkeypatch.setattr(TextPart, "encode", lambda *args: (gate.wait(60), encode(*args))[1])
    return gate


@pytest.fixture
def slow_planning(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    plan = chat_module.plan_chat
    monkeypatch.setattr(chat_module, "plan_chat", lambda *args: (gate.wait(60), plan(*args))[1])
    return gate


async def check_late(engine: AsyncLLM, phase: str, prompt: Any = (1, 2), params: SamplingParams = PARAMS) -> None:
    """Both ways to ask get the error, which says where the request was; no timer of theirs is left."""
    failed = engine.statistics().num_failed
    streams = [engine.stream(prompt, params, first_token_deadline=SOON, deadline=1000)]
    calls = list(user_requests(engine).values())
    assert len(calls[-1].timers) == 2
    with pytest.raises(DeadlineExceededError, match=rf"first_token_deadline=0\.02 s \(.*{phase}") as caught:
        await anext(streams[0])
    assert caught.value.deadline == SOON
    assert streams[0].completion.finish_reason is FinishReason.ERROR
    with pytest.raises(DeadlineExceededError, match=phase):
        await engine.generate(prompt, params, first_token_deadline=SOON)
    assert engine.statistics().num_failed == failed + 2
    assert not calls[-1].timers


# -- it passes


async def test_while_the_prompt_is_encoded(make_engine: Make, slow_encoding: threading.Event) -> None:
    async with make_engine() as engine:
        await check_late(engine, "its prompt was being encoded", "Hello there")
        slow_encoding.set()
        completion = await engine.generate("Hello there", PARAMS, first_token_deadline=1000)
        assert len(completion.token_ids) == 20
        await settled(engine)


async def test_its_id_is_free_while_it_is_still_encoded(make_engine: Make, slow_encoding: threading.Event) -> None:
    async with make_engine() as engine:
        with pytest.raises(DeadlineExceededError):
            await engine.generate("Hello there", PARAMS, first_token_deadline=SOON, request_id="mine")
        again = engine.stream("Hello again", PARAMS, request_id="mine")
        slow_encoding.set()
        assert len((await again.wait()).token_ids) == 20
        await settled(engine)
        assert engine.statistics().generated_tokens == 20  # the first one did not come after all


async def test_while_the_grammar_is_prepared(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_engine() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(core_of(engine).grammars, "prepare", lambda wanted: asyncio.Event().wait())
            params = PARAMS.replace(structured_output=StructuredOutput(regex="a+"), ignore_eos=False)
            await check_late(engine, "its grammar was being prepared", params=params)
        await settled(engine)
        assert set((await engine.generate([1], params, first_token_deadline=1000)).text) == {"a"}


async def test_in_the_queue(make_engine: Make) -> None:
    async with make_engine(max_num_seqs=1) as engine:
        held = Held(engine)
        runs = engine.stream([1], PARAMS)
        await until(lambda: engine.statistics().num_running == 1)
        await check_late(engine, "the request was still queued")
        held.let_go()
        assert len((await runs.wait()).token_ids) == 20
        await settled(engine)


async def test_ahead_of_the_queue(make_engine: Make) -> None:
    async with make_engine(max_num_seqs=1, max_num_queued_requests=1, admission="wait") as engine:
        held = Held(engine)
        runs = engine.stream([1], PARAMS)
        await until(lambda: engine.statistics().num_running == 1)
        queued = engine.stream([1], PARAMS)
        await check_late(engine, "the request waited for a place in the queue")
        held.let_go()
        assert len((await runs.wait()).token_ids) == len((await queued.wait()).token_ids) == 20
        await settled(engine)


@pytest.mark.parametrize("n", [1, 2])
async def test_in_the_midst_of_the_prompt(make_engine: Make, n: int) -> None:
    async with make_engine() as engine:
        clock, held = Clock(engine), Held(engine)
        stream = engine.stream([7] * 700, PARAMS.replace(n=n), first_token_deadline=30)
        await until(lambda: engine.statistics().num_running == 1)
        clock.timers[0].fire()
        with pytest.raises(DeadlineExceededError, match=r"=30 s \([1-9]\d+ of 700 prompt tokens were"):
            await stream.wait()
        assert engine.statistics().num_running == 0
        held.let_go()
        await settled(engine)
        assert len((await engine.generate([1], PARAMS, first_token_deadline=1000)).token_ids) == 20


async def test_while_the_worker_is_started_again(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a request without a token, and is of no concern to one that has some."""
    start, may_start = FakeExecutor.start, asyncio.Event()

    async def slowly(self: FakeExecutor, *args: Any) -> dict[str, Any]:
        await may_start.wait()
        return await start(self, *args)

    async with make_engine(max_num_seqs=1) as engine:
        clock = Clock(engine)
        Held(engine, num_passed=1)
        first = engine.stream([1, 2], PARAMS, first_token_deadline=30)
        tokens = [await anext(first)]
        second = engine.stream([3], PARAMS, first_token_deadline=30)
        monkeypatch.setattr(FakeExecutor, "start", slowly)
        engine.executor.fail(WorkerDiedError("worker 0 died of SIGKILL", rank=0, exit_code=-9))
        await until(lambda: core_of(engine).replicas[0].worker.recovering is not None)
        for timer in clock.timers:
            timer.fire()
        with pytest.raises(DeadlineExceededError, match="still queued"):
            await second.wait()
        may_start.set()
        tokens += [token async for token in first]
        assert [token.position for token in tokens] == list(range(20))
        await settled(engine)


# -- it has no say any more


@pytest.mark.parametrize(
    "changes",
    [{}, {"detokenize": False}, {"logprobs": 0}, {"n": 2, "seed": 1}, {"stop": "held back"}, {"max_tokens": None}],
    ids=str,
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_once_a_token_has_come(make_engine: Make, changes: dict[str, Any], streamed: bool) -> None:
    async with make_engine(max_in_flight_steps=1) as engine:
        params = PARAMS.replace(**{name: value for name, value in changes.items() if name != "stop"})
        if "stop" in changes:  # the first token may be the beginning of it: its text is not delivered yet
            params = params.replace(stop=(await engine.generate([1], PARAMS.replace(max_tokens=1))).text + "\0")
        expected = await engine.generate([1], params)
        clock, held = Clock(engine), Held(engine, num_passed=1)
        generated = engine.statistics().generated_tokens
        if streamed:
            stream = engine.stream([1], params, first_token_deadline=30)
        else:
            task = asyncio.create_task(engine.generate([1], params, first_token_deadline=30))
        await until(lambda: engine.statistics().generated_tokens > generated)
        (request,) = user_requests(engine).values()
        await until(lambda: bool(request.mailbox.choices[0].token_ids))
        assert not streamed or request.mailbox.pending
        assert "stop" not in changes or not any(request.mailbox.choices[0].texts)
        (timer,) = clock.timers
        timer.fire()
        held.let_go()
        completion = await (stream.wait() if streamed else task)
        assert completion.choices == expected.choices
        assert engine.statistics().num_failed == 0
        await settled(engine)


async def test_once_a_token_of_one_completion_has_come(make_engine: Make) -> None:
    async with make_engine(max_in_flight_steps=1) as engine:
        clock, held = Clock(engine), Held(engine, num_passed=1)
        stream = engine.stream([7] * 40, PARAMS.replace(n=2), first_token_deadline=30)
        await anext(stream)
        (request,) = user_requests(engine).values()
        assert [len(choice.token_ids) for choice in request.mailbox.choices] == [1, 0]
        clock.timers[0].fire()
        held.let_go()
        assert [len(choice.token_ids) for choice in (await stream.wait()).choices] == [20, 20]
        await settled(engine)


async def test_a_request_of_one_token(make_engine: Make) -> None:
    async with make_engine() as engine:
        clock = Clock(engine)
        completion = await engine.generate([1], PARAMS.replace(max_tokens=1), first_token_deadline=30, deadline=60)
        assert len(completion.token_ids) == 1
        assert len(clock.timers) == 2 and all(timer.is_over for timer in clock.timers)
        await settled(engine)


async def test_the_deadline_of_the_whole_still_holds(make_engine: Make) -> None:
    async with make_engine(max_in_flight_steps=1) as engine:
        clock, held = Clock(engine), Held(engine, num_passed=1)
        stream = engine.stream([1], PARAMS, deadline=60, first_token_deadline=30)
        await anext(stream)
        for timer in sorted(clock.timers, key=lambda timer: timer.when):
            timer.fire()
        with pytest.raises(DeadlineExceededError, match=r"did not end within its deadline of 60 s \(1 tokens"):
            await stream.wait()
        held.let_go()
        await settled(engine)


@pytest.mark.parametrize("way", ["abort", "close", "engine"])
async def test_no_timer_outlives_its_request(make_engine: Make, way: str) -> None:
    async with make_engine() as engine:
        clock, held = Clock(engine), Held(engine)
        stream = engine.stream([1], PARAMS, first_token_deadline=30, request_id="mine")
        if way == "engine":
            await engine.aclose()
        elif way == "abort":
            engine.abort("mine")
        else:
            await stream.aclose()
        assert [timer.is_over for timer in clock.timers] == [True]
        held.let_go()
        if way != "engine":
            await settled(engine)


# -- chats


async def test_while_a_chat_is_planned(make_engine: Make, slow_planning: threading.Event) -> None:
    async with make_engine() as engine:
        for limits in ({"first_token_deadline": SOON}, {"first_token_deadline": SOON, "deadline": 1000}):
            with pytest.raises(DeadlineExceededError, match=r"first_token_deadline=0\.02 s \(the chat") as caught:
                await engine.chat(HELLO, PARAMS, **limits)
            assert caught.value.deadline == SOON
        with pytest.raises(DeadlineExceededError, match=r"within its deadline of 0\.02 s"):
            await anext(engine.stream_chat(HELLO, PARAMS, first_token_deadline=1000, deadline=SOON))
        slow_planning.set()
        assert (await engine.chat(HELLO, PARAMS, first_token_deadline=1000)).usage.completion_tokens == 20
        await settled(engine)


async def test_a_chat_counts_from_the_call(make_engine: Make, slow_planning: threading.Event) -> None:
    """What the planning takes is part of both; the errors tell what was given."""
    async with make_engine() as engine:
        clock, held = Clock(engine), Held(engine)
        for place, limit in ((0, 60), (1, 30)):
            stream = engine.stream_chat(HELLO, PARAMS, deadline=60, first_token_deadline=30)
            timers = clock.timers[-2:]
            assert timers[0].when - 60 == timers[1].when - 30
            timers[place].fire()
            with pytest.raises(DeadlineExceededError) as caught:
                await anext(stream)
            assert caught.value.deadline == limit
        held.let_go()
        await settled(engine)


# -- other ways to call


@pytest.mark.usefixtures("no_thread_left")
async def test_own_thread(make: Make, slow_planning: threading.Event) -> None:
    async with make() as engine:
        held = Held(engine)
        with pytest.raises(DeadlineExceededError, match="first_token_deadline"):
            await anext(engine.stream([1], PARAMS, first_token_deadline=SOON))
        with pytest.raises(DeadlineExceededError, match="first_token_deadline"):
            await engine.generate([1], PARAMS, first_token_deadline=SOON)
        with pytest.raises(DeadlineExceededError, match="first_token_deadline"):
            await engine.chat(HELLO, PARAMS, first_token_deadline=SOON)
        with pytest.raises(InvalidRequestError, match="first_token_deadline"):
            engine.stream([1], first_token_deadline=0)
        handle_of(engine).thread.post(held.let_go)
        slow_planning.set()
        assert len((await engine.generate([1], PARAMS, first_token_deadline=1000)).token_ids) == 20
        await own_thread_helpers.settled(engine)


@pytest.mark.usefixtures("no_thread_left")
def test_llm(make_engine: Make, slow_planning: threading.Event) -> None:
    class FakeSyncLLM(LLM):
        def _make_engine(self, model: str, settings: dict[str, Any]) -> Any:
            return make_engine(**settings)

    with FakeSyncLLM("smollm2-135m") as llm:
        engine = llm.as_async()
        held = Held(engine)
        late = pytest.raises(DeadlineExceededError, match="first_token_deadline")
        with late:
            llm.generate([1], PARAMS, first_token_deadline=SOON)
        with late:
            next(llm.stream([1], PARAMS, first_token_deadline=SOON))
        with late:
            llm.chat(HELLO, PARAMS, first_token_deadline=SOON)
        with late:
            next(llm.stream_chat(HELLO, PARAMS, first_token_deadline=SOON))
        results = llm.generate([[1], [2]], PARAMS, first_token_deadline=SOON, return_exceptions=True)
        assert [type(result) for result in results] == [DeadlineExceededError] * 2
        handle_of(engine).thread.post(held.let_go)
        slow_planning.set()
        assert len(llm.generate([1], PARAMS, first_token_deadline=1000).token_ids) == 20
        handle_of(llm.as_async()).wait(lambda core: settled(engine))


@pytest.mark.parametrize("value", [True, 0, -1, float("nan"), float("inf"), 1e9, 10**400, "soon", [1]], ids=repr)
async def test_values_that_are_refused(make_engine: Make, value: Any) -> None:
    async with make_engine() as engine:
        for name in ("first_token_deadline", "deadline"):
            with pytest.raises(InvalidRequestError, match=f"^{name} must be") as caught:
                engine.stream([1], **{name: value})
            assert caught.value.param == name
            with pytest.raises(InvalidRequestError) as caught:
                await engine.chat(HELLO, **{name: value})
            assert caught.value.param == name
        await settled(engine)
