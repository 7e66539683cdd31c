"""The public contract over a fake worker: streaming, stopping, cancelling, limits, life and death."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conftest_api import core_of, settled
from fakes import FakeExecutor

from aengine import (
    AsyncLLM,
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    EngineOverloadedError,
    FinishReason,
    InternalError,
    InvalidRequestError,
    ModelLoadError,
    SamplingParams,
    StructuredOutput,
    WorkerDiedError,
)
from aengine.engine.delivery import Delivery
from aengine.engine.pacing.in_flight_limit import InFlightLimit

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")


# -- what a stream gives


async def test_stream_yields_tokens_in_order(make_engine: Make) -> None:
    async with make_engine() as engine:
        stream = engine.stream("Hello there", SamplingParams(max_tokens=20, ignore_eos=True))
        tokens = [token async for token in stream]
    assert [token.position for token in tokens] == list(range(20))
    assert [token.finish_reason for token in tokens] == [None] * 19 + [FinishReason.LENGTH]
    completion = stream.completion
    assert completion.text == "".join(token.text for token in tokens)
    assert completion.token_ids == tuple(token.token_id for token in tokens)
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == 20
    assert completion.usage.prompt_tokens > 0


async def test_generate_equals_the_joined_stream(make_engine: Make) -> None:
    async with make_engine() as engine:
        params = SamplingParams(max_tokens=33)
        streamed = "".join([token.text async for token in engine.stream([1, 2, 3], params)])
        completion = await engine.generate([1, 2, 3], params)
    assert completion.text == streamed
    assert len(completion.token_ids) == 33


async def test_many_streams_at_once(make_engine: Make) -> None:
    async with make_engine(max_num_seqs=16) as engine:

        async def one(i: int) -> int:
            return len([t async for t in engine.stream([5] * (1 + i % 90), SamplingParams(max_tokens=1 + i % 37))])

        counts = await asyncio.gather(*(one(i) for i in range(100)))
        assert counts == [1 + i % 37 for i in range(100)]
        await settled(engine)


async def test_completions_of_one_prompt(make_engine: Make) -> None:
    async with make_engine() as engine:
        stream = engine.stream([7] * 40, SamplingParams(max_tokens=5, n=3))
        seen: dict[int, int] = {}
        async for token in stream:
            seen[token.index] = seen.get(token.index, 0) + 1
        assert seen == {0: 5, 1: 5, 2: 5}
        assert [choice.index for choice in stream.completion.choices] == [0, 1, 2]
        assert stream.completion.usage.completion_tokens == 15
        await settled(engine)


async def test_stop_strings_end_the_text_and_never_leak(make_engine: Make) -> None:
    async with make_engine() as engine:
        whole = (await engine.generate([1], SamplingParams(max_tokens=30))).text
        stop = whole[10:14]
        stream = engine.stream([1], SamplingParams(max_tokens=30, stop=stop))
        text = "".join([token.text async for token in stream])
        assert text == whole[: whole.index(stop)]
        assert stream.completion.finish_reason is FinishReason.STOP
        kept = await engine.generate([1], SamplingParams(max_tokens=30, stop=stop, include_stop_str_in_output=True))
        assert kept.text == whole[: whole.index(stop) + len(stop)]
        held_off = await engine.generate([1], SamplingParams(max_tokens=30, min_tokens=30, stop=stop))
        assert held_off.text == whole
        await settled(engine)


async def test_stop_token_ends_and_its_text_is_not_shown(make_engine: Make) -> None:
    async with make_engine() as engine:
        whole = await engine.generate([1], SamplingParams(max_tokens=10))
        stop_id = whole.token_ids[4]
        got = await engine.generate([1], SamplingParams(max_tokens=10, stop_token_ids=[stop_id]))
        assert got.token_ids == whole.token_ids[:5]
        assert got.finish_reason is FinishReason.STOP
        assert whole.text.startswith(got.text) and len(got.text) < len(whole.text)


async def test_no_text_without_detokenize(make_engine: Make) -> None:
    async with make_engine() as engine:
        got = await engine.generate([1], SamplingParams(max_tokens=4, detokenize=False))
        assert got.text == "" and len(got.token_ids) == 4


async def test_chat_messages_as_prompt(make_engine: Make) -> None:
    async with make_engine() as engine:
        assert engine.tokenizer.has_chat_template
        messages = [{"role": "user", "content": "Hi"}]
        assert (await engine.chat(messages, SamplingParams(max_tokens=3))).usage.prompt_tokens > 5
        with pytest.raises(InvalidRequestError):
            await engine.chat("Hi")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError):
            await engine.generate([{"no": "role"}])
        with pytest.raises(InvalidRequestError, match=r"messages\[1\] has no 'content'"):
            await engine.generate([*messages, {"role": "user", "content": None}])


async def test_completion_only_at_the_end(make_engine: Make) -> None:
    async with make_engine() as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=3))
        with pytest.raises(InvalidRequestError, match="not ended"):
            _ = stream.completion
        await stream.wait()
        assert len(stream.completion.token_ids) == 3


async def test_a_slow_consumer_finds_everything(make_engine: Make) -> None:
    async with make_engine() as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=50))
        other = await engine.generate([2], SamplingParams(max_tokens=200))
        assert len(other.token_ids) == 200
        assert len([token async for token in stream]) == 50


# -- bad input


@pytest.mark.parametrize("prompt", ["", [], b"bytes", 7, None, {"role": "user"}, [1.5], [[1]], [1, "x"], [True]])
async def test_wrong_prompts(make_engine: Make, prompt: object) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(prompt)  # type: ignore[arg-type]
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("bad", [-1, 49152, 2**40, "a", 1.0, None])
async def test_wrong_token_ids_are_named(make_engine: Make, bad: object) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequestError, match=r"prompt\[2\]"):
            engine.stream([1, 2, bad])  # type: ignore[list-item]


async def test_over_long_prompt_says_both_numbers(make_engine: Make) -> None:
    async with make_engine() as engine:
        for prompt in ([1] * 1024, "word " * 2000):
            with pytest.raises(ContextLengthError) as caught:
                await engine.generate(prompt)
            assert caught.value.max_model_len == 1024
            assert caught.value.num_prompt_tokens >= 1024
        got = await engine.generate([1] * 1023)
        assert len(got.token_ids) == 1 and got.finish_reason is FinishReason.LENGTH
        await settled(engine)


async def test_other_wrong_arguments(make_engine: Make) -> None:
    async with make_engine() as engine:
        for wrong in (
            {"deadline": 0},
            {"deadline": "soon"},
            {"deadline": 10**400},
            {"deadline": float("inf")},
            {"cache_salt": "\ud800"},
            {"request_id": "\ud800"},
            {"priority": 1.5},
            {"request_id": ""},
            {"cache_salt": 3},
            {"tenant": ""},
            {"tenant": "x" * 1025},
            {"keep": -1.0},
            {"keep": float("nan")},
            {"keep": 86_401},
            {"keep": True},
            {"session_id": ""},
            {"session_id": "x" * 1025},
            {"params": {"max_tokens": 3}},
        ):
            with pytest.raises(InvalidRequestError) as caught:
                engine.stream([1], **wrong)  # type: ignore[arg-type]
            assert caught.value.param in wrong
        with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
            engine.stream([1], cache_salt="\ud800")
        names = {"logit_bias": {49152: 1}, "stop_token_ids": [99999], "allowed_token_ids": [5, 49152]}
        for name, value in names.items():
            with pytest.raises(InvalidRequestError, match="49152") as caught:
                engine.stream([1], SamplingParams(**{name: value}))
            assert caught.value.param == name
        with pytest.raises(InvalidRequestError, match="tokens: 1 to 32 are possible") as caught:
            await engine.generate([1], SamplingParams(bad_words=["fine", "0123456789" * 4]))
        assert caught.value.param == "bad_words"
        first = engine.stream([1], SamplingParams(max_tokens=500), request_id="mine")
        with pytest.raises(InvalidRequestError, match="mine"):
            engine.stream([1], request_id="mine")
        await first.aclose()
        assert (await engine.generate([1], SamplingParams(max_tokens=1), request_id="mine")).request_id == "mine"


async def test_without_a_tokenizer_only_ids(make_engine: Make) -> None:
    async with make_engine(skip_tokenizer=True) as engine:
        assert (await engine.generate([1], SamplingParams(max_tokens=2))).text == ""
        with pytest.raises(InvalidRequestError, match="skip_tokenizer"):
            engine.stream("text")
        with pytest.raises(InvalidRequestError, match="skip_tokenizer"):
            engine.stream([1], SamplingParams(stop="x"))
        with pytest.raises(InvalidRequestError, match="bad_words need a tokenizer") as caught:
            engine.stream([1], SamplingParams(bad_words=["x"]))
        assert caught.value.param == "bad_words"


async def test_unknown_model_says_what_exists() -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        await AsyncLLM("smollm3-135m").start()


# -- ending early


async def test_break_aborts(make_engine: Make) -> None:
    async with make_engine() as engine:
        async for token in engine.stream([1], SamplingParams(max_tokens=900)):
            if token.position == 3:
                break
        await asyncio.sleep(0.01)  # the loop's next turn: a stream may be collected anywhere, also within the scheduler
        assert engine.statistics().num_aborted == 1
        await settled(engine)


async def test_aclose_and_async_with(make_engine: Make) -> None:
    async with make_engine() as engine:
        async with engine.stream([1], SamplingParams(max_tokens=900)) as stream:
            await anext(stream)
        assert stream.completion.finish_reason is FinishReason.ABORT
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        await settled(engine)


async def test_abort_by_id_ends_the_stream(make_engine: Make) -> None:
    async with make_engine() as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=900), request_id="r")
        await anext(stream)
        assert engine.abort("r")
        assert not engine.abort("r")
        async for _ in stream:
            pass
        assert stream.completion.finish_reason is FinishReason.ABORT
        await settled(engine)


async def test_dropping_a_stream_aborts(make_engine: Make) -> None:
    async with make_engine() as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=900))
        await anext(stream)
        gone = weakref.ref(stream)
        del stream
        gc.collect()
        assert gone() is None
        await settled(engine)
        assert engine.statistics().num_aborted == 1


@pytest.mark.parametrize("prompt", ["a text that is encoded in the thread", [1, 2, 3]])
async def test_cancel_at_every_await(make_engine: Make, prompt: object) -> None:
    """Cancel the reading task after k turns of the loop, for every k until it ends by itself."""
    async with make_engine() as engine:

        async def read() -> int:
            return len([t async for t in engine.stream(prompt, SamplingParams(max_tokens=12))])  # type: ignore[arg-type]

        for turns in range(200):
            task = asyncio.create_task(read())
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                assert task.result() == 12
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await settled(engine)
        else:  # on a loaded machine the thread that encodes takes more turns
            assert await read() == 12


async def test_timeout_of_generate_aborts(make_engine: Make) -> None:
    async with make_engine(fake={"delay": 0.01}) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate([1], SamplingParams(max_tokens=900))
        await settled(engine)


async def test_deadline(make_engine: Make) -> None:
    async with make_engine(fake={"delay": 0.01}) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=900), deadline=0.1)
        with pytest.raises(DeadlineExceededError) as caught:
            async for _ in stream:
                pass
        assert caught.value.deadline == 0.1
        assert stream.completion.finish_reason is FinishReason.ERROR
        assert len((await engine.generate([1], SamplingParams(max_tokens=2), deadline=60)).token_ids) == 2
        await settled(engine)


# -- the queue


async def test_full_queue_refuses_with_retry_after(make_engine: Make) -> None:
    async with make_engine(max_num_queued_requests=4, max_num_seqs=1, fake={"delay": 0.01}) as engine:
        streams = [engine.stream([1], SamplingParams(max_tokens=20)) for _ in range(4)]
        with pytest.raises(EngineOverloadedError) as caught:
            engine.stream([1])
        assert caught.value.retry_after > 0
        await asyncio.gather(*(s.wait() for s in streams))
        await engine.generate([1], SamplingParams(max_tokens=1))


async def test_a_request_that_has_just_come_is_counted_once(make_engine: Make) -> None:
    """Other threads name those that they have sent, some of which may be in the queue already."""
    async with make_engine(max_num_queued_requests=2) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=3))
        admission = core_of(engine).admission
        admission.check_room({stream.request_id}, None)
        with pytest.raises(EngineOverloadedError):
            admission.check_room({"another"}, None)
        await stream.wait()


async def test_full_queue_waits_when_asked_to(make_engine: Make) -> None:
    async with make_engine(max_num_queued_requests=2, max_num_seqs=2, admission="wait") as engine:
        streams = [engine.stream([1], SamplingParams(max_tokens=3)) for _ in range(20)]
        held = streams.pop()
        await held.aclose()
        done = await asyncio.gather(*(s.wait() for s in streams))
        assert [len(c.token_ids) for c in done] == [3] * 19
        await settled(engine)


async def test_of_those_held_the_most_urgent_is_let_in_first(make_engine: Make) -> None:
    async with make_engine(max_num_queued_requests=1, max_num_seqs=1, admission="wait") as engine:
        ended: list[str] = []

        async def one(name: str, priority: int) -> None:
            await engine.generate([1], SamplingParams(max_tokens=3), priority=priority)
            ended.append(name)

        tasks = [asyncio.create_task(one(f"usual {i}", 0)) for i in range(12)]
        await asyncio.sleep(0)  # the first runs or is queued, the others are held
        tasks += [asyncio.create_task(one("late", 5)), asyncio.create_task(one("urgent", -1))]
        await asyncio.gather(*tasks)
        assert ended.index("urgent") <= 2 and ended.pop() == "late", ended
        ended.remove("urgent")
        assert ended == [f"usual {i}" for i in range(12)]
        await settled(engine)


@pytest.mark.parametrize("first", ["refused grammar", "refused prompt", "aborted"])
async def test_whoever_is_held_is_let_in_when_a_place_is_left_without_a_step(make_engine: Make, first: str) -> None:
    async with make_engine(max_num_queued_requests=1, admission="wait") as engine:
        regex = StructuredOutput(regex="(" if first == "refused grammar" else "a")
        prompt = "hello " * (3000 if first == "refused prompt" else 5)
        params = SamplingParams(structured_output=None if first == "refused prompt" else regex)
        gone = asyncio.create_task(engine.generate(prompt, params, request_id="first"))
        await asyncio.sleep(0)
        held = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=3)))
        await asyncio.sleep(0)
        if first == "aborted":
            engine.abort("first")
        assert len((await asyncio.wait_for(held, 30)).token_ids) == 3
        await asyncio.wait([gone])
        assert gone.exception() is not None or gone.result().finish_reason == "abort"
        await settled(engine)


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_burst_is_begun_while_it_is_submitted(make_engine: Make, is_full: bool) -> None:
    """The first steps leave as soon as they are full, before the host's loop gets a turn; or wait for room."""
    prompts = [[7, 8, i] * 8 for i in range(40)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    settings = {"fake": {"max_num_batched_tokens": 96}, "max_num_queued_requests": 30, "admission": "wait"}
    async with make_engine(**settings) as engine:
        expected = [(await engine.generate(prompt, params)).token_ids for prompt in prompts]
        executor = engine.executor
        executor.is_full = is_full
        await settled(engine)
        steps, tried = engine.statistics().num_steps, executor.num_tried
        streams = [engine.stream(prompt, params) for prompt in prompts]
        assert executor.num_tried == tried + (1 if is_full else 4)
        assert engine.statistics().num_steps == steps + (0 if is_full else 4)
        completions = await asyncio.gather(*(stream.wait() for stream in streams))
    assert [completion.token_ids for completion in completions] == expected


async def test_a_burst_waits_while_other_replicas_have_their_turn(make_engine: Make) -> None:
    async with make_engine(fake={"max_num_batched_tokens": 96}) as engine:
        await settled(engine)
        steps, tried = core_of(engine).replicas[0].steps, engine.executor.num_tried
        await engine.generate([1], SamplingParams(max_tokens=2))
        await settled(engine)
        own_peers = steps._peers
        steps._peers = SimpleNamespace(may_step=False)  # type: ignore[assignment]  # as rounds of shared experts have
        streams = [engine.stream([7, 8, i] * 8, SamplingParams(max_tokens=5)) for i in range(8)]
        assert engine.executor.num_tried == tried
        steps._peers = own_peers
        assert all([len((await stream.wait()).token_ids) == 5 for stream in streams])


async def test_priority_first(make_engine: Make) -> None:
    async with make_engine(max_num_seqs=1) as engine:
        order: list[int] = []

        async def one(priority: int) -> None:
            await engine.generate([1], SamplingParams(max_tokens=3), priority=priority)
            order.append(priority)

        await asyncio.gather(*(one(p) for p in (5, 3, 4, -1, 2)))
        assert order == sorted(order)


# -- life


async def test_use_before_start_and_after_close(make_engine: Make) -> None:
    engine = make_engine()
    with pytest.raises(EngineClosedError, match="not started"):
        engine.stream([1])
    async with engine:
        assert engine.state == "running"
        assert await engine.start() is engine
    with pytest.raises(EngineClosedError, match="closed"):
        engine.stream([1])
    await engine.aclose()
    async with engine:  # and again
        assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2


async def test_close_with_open_streams(make_engine: Make) -> None:
    engine = make_engine(fake={"delay": 0.01})
    async with engine:
        stream = engine.stream([1], SamplingParams(max_tokens=900))
        await anext(stream)
    with pytest.raises(EngineClosedError):
        async for _ in stream:
            pass


async def test_drain_lets_them_end(make_engine: Make) -> None:
    engine = make_engine(fake={"delay": 0.001})
    await engine.start()
    stream = engine.stream([1], SamplingParams(max_tokens=30))
    closing = asyncio.create_task(engine.aclose(drain=30))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosedError):
        engine.stream([1])
    await closing
    assert len((await stream.wait()).token_ids) == 30


async def test_worker_death_reaches_every_waiter(make_engine: Make) -> None:
    async with make_engine(max_restarts=0, fake={"delay": 0.005}) as engine:
        streams = [engine.stream([1], SamplingParams(max_tokens=900)) for _ in range(5)]
        await anext(streams[0])
        engine.executor.fail(WorkerDiedError("killed", rank=0, exit_code=-9))  # type: ignore[attr-defined]
        for stream in streams:
            with pytest.raises(WorkerDiedError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.exit_code == -9
        assert engine.state == "failed"
        with pytest.raises(EngineClosedError, match="killed"):
            engine.stream([1])


async def test_a_bug_in_the_step_loop_is_an_internal_error(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_engine() as engine:
        steps = core_of(engine).replicas[0].steps

        def broken() -> None:
            raise ZeroDivisionError("bug")

        monkeypatch.setattr(steps.scheduler, "schedule", broken)
        with pytest.raises(InternalError, match="bug"):
            await engine.generate([1])
        assert engine.state == "failed"


async def test_reading_one_stream_from_two_tasks_is_refused(make_engine: Make) -> None:
    async with make_engine(fake={"delay": 0.02}) as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=5))
        reader = asyncio.create_task(stream.wait())
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="another task"):
            await anext(stream)
        await reader


async def test_statistics_and_description(make_engine: Make) -> None:
    async with make_engine() as engine:
        await engine.generate([1] * 40, SamplingParams(max_tokens=4))
        await engine.generate([1] * 40, SamplingParams(max_tokens=4))
        statistics = engine.statistics()
        assert statistics.num_requests == statistics.num_finished == 2
        assert statistics.prompt_tokens == 80 and statistics.generated_tokens == 8
        assert statistics.prefix_cache_hits >= 16
        with pytest.raises(AttributeError):
            statistics.num_steps = 1  # type: ignore[misc]
        assert engine.describe()["max_model_len"] == 1024


async def test_cache_salt_separates_tenants(make_engine: Make) -> None:
    async with make_engine() as engine:
        params = SamplingParams(max_tokens=1)
        await engine.generate([1] * 64, params, cache_salt="a")
        other = await engine.generate([1] * 64, params, cache_salt="b")
        same = await engine.generate([1] * 64, params, cache_salt="a")
        assert other.usage.cached_tokens == 0
        assert same.usage.cached_tokens >= 32


# -- several loops


def test_one_engine_on_two_loops_in_turn(make_engine: Make) -> None:
    engine = make_engine()

    async def use() -> int:
        async with engine:
            return len((await engine.generate([1], SamplingParams(max_tokens=3))).token_ids)

    assert asyncio.run(use()) == asyncio.run(use()) == 3


def test_a_loop_that_closes_with_streams_open(make_engine: Make) -> None:
    engine = make_engine(fake={"delay": 0.01})

    async def leave() -> object:
        await engine.start()
        stream = engine.stream([1], SamplingParams(max_tokens=900))
        await anext(stream)
        return stream

    stream = asyncio.run(leave())
    assert engine.state == "closed"
    assert engine.executor.terminated  # type: ignore[attr-defined]
    del stream

    async def again() -> int:
        async with engine:
            return len((await engine.generate([1], SamplingParams(max_tokens=3))).token_ids)

    assert asyncio.run(again()) == 3


def test_the_wrong_loop_is_told_so(make_engine: Make) -> None:
    engine = make_engine()
    here = asyncio.new_event_loop()
    try:
        here.run_until_complete(engine.start())

        async def elsewhere() -> None:
            with pytest.raises(EngineClosedError, match="another event loop"):
                engine.stream([1])
            with pytest.raises(EngineClosedError, match="another event loop"):
                await engine.start()

        asyncio.run(elsewhere())
        here.run_until_complete(engine.aclose())
    finally:
        here.close()


async def test_two_engines_side_by_side(make_engine: Make) -> None:
    async with make_engine() as one, make_engine() as two:
        a, b = await asyncio.gather(
            one.generate([1], SamplingParams(max_tokens=9)), two.generate([1], SamplingParams(max_tokens=9))
        )
        assert a.token_ids == b.token_ids


async def test_leaving_while_an_answer_is_being_delivered(make_engine: Make) -> None:
    """Tokens of a wide batch are delivered in turns; who leaves between two of them gets none, and loses nothing."""
    async with make_engine(max_num_seqs=256) as engine:
        streams = [engine.stream([1, i], SamplingParams(max_tokens=50), request_id=f"r{i}") for i in range(220)]
        async for token in streams[0]:
            if token.position == 3:
                for i in range(100, 220):
                    engine.abort(f"r{i}")
        assert len(streams[0].completion.token_ids) == 50
        for stream in streams[1:100]:
            assert len((await stream.wait()).token_ids) == 50
        for stream in streams[100:]:
            completion = await stream.wait()
            assert completion.finish_reason is FinishReason.ABORT
            assert len(completion.token_ids) < 50
        await settled(engine)


async def test_cancelling_one_starter_leaves_the_other(make_engine: Make) -> None:
    engine = make_engine()
    impatient, patient = asyncio.create_task(engine.start()), asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    assert await patient is engine
    assert engine.state == "running"
    await engine.aclose()


async def test_cancelling_the_only_starter_undoes_the_start(make_engine: Make) -> None:
    for turns in range(12):
        engine = make_engine()
        starting = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not starting.cancel():  # its threads were done sooner
            await starting
            await engine.aclose()
            continue
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert engine.state == "new"
        async with engine:
            assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2


@pytest.mark.parametrize("others", ["nobody", "waits", "has it", "cancelled"])
async def test_the_starter_is_cancelled_in_the_turn_in_which_it_is_up(make_engine: Make, others: str) -> None:
    """Nobody would close it, unless there is another who waits for it, or has been told."""
    engine = make_engine()
    starting = asyncio.create_task(engine.start())
    while engine._handle._starting is None:
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    second = asyncio.create_task(engine.start()) if others in ("waits", "cancelled") else None
    seen: list[Any] = []

    def interfere(_: Any) -> None:
        """After the start has ended, before those who wait for it know."""
        seen.append(engine.state)
        if others == "has it":
            seen.append(loop.create_task(engine.start()))
        starting.cancel()
        if others == "cancelled":
            second.cancel()  # type: ignore[union-attr]

    await asyncio.sleep(0)
    engine._handle._starting.add_done_callback(interfere)
    with pytest.raises(asyncio.CancelledError):
        await starting
    if others == "has it":
        await seen[1]
    assert seen[0] == "running"
    if others == "waits":
        await second  # type: ignore[misc]
    if others == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            await second  # type: ignore[misc]
    is_up = others in ("waits", "has it")
    assert engine.state == ("running" if is_up else "new")
    async with engine:
        assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2
    assert engine.state == "closed"


async def test_closing_while_starting_tells_the_starter(make_engine: Make) -> None:
    engine = make_engine()
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engine.aclose()
    with pytest.raises(EngineClosedError, match="while it started"):
        await starting
    async with engine:
        assert engine.state == "running"


async def test_a_late_loop_is_given_more_steps_ahead(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are the same, and nobody gets more than asked for, however many steps were under way."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    stopping = params.replace(stop=["e"], max_tokens=200)
    async with make_engine() as engine:
        expected = [await engine.generate([i, 2, 3], params) for i in range(1, 5)]
        stopped = await engine.generate([7], stopping)
    async with make_engine(fake={"delay": 0.002}) as engine:
        monkeypatch.setattr(InFlightLimit, "num_steps", lambda limit, scheduler: 30)
        tasks = [asyncio.create_task(engine.generate([i, 2, 3], params)) for i in range(1, 5)]
        tasks.append(asyncio.create_task(engine.generate([7], stopping)))
        deepest = 0
        while not all(task.done() for task in tasks):
            deepest = max(deepest, len(core_of(engine).replicas[0].steps.scheduler.rows.steps))
            await asyncio.sleep(0)
        got = [task.result() for task in tasks]
        await settled(engine)
    assert deepest > 20
    assert [c.token_ids for c in got] == [c.token_ids for c in (*expected, stopped)]


@pytest.mark.parametrize("timeout", [0, -1, True, "1", None, float("nan"), float("inf")])
async def test_a_timeout_of_a_health_check_that_is_none(make_engine: Make, timeout: object) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.check_health(timeout)  # type: ignore[arg-type]
        assert caught.value.param == "timeout"


async def test_a_worker_without_steps_gets_one_before_tokens_are_delivered(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    deliver, execute = Delivery.deliver_all, FakeExecutor.execute_model

    async def note_tokens(self: Delivery, *args: Any) -> None:
        order.append("tokens")
        await deliver(self, *args)

    async def note_step(self: FakeExecutor, *args: Any) -> Any:
        order.append("step")
        return await execute(self, *args)

    monkeypatch.setattr(Delivery, "deliver_all", note_tokens)
    monkeypatch.setattr(FakeExecutor, "execute_model", note_step)
    async with make_engine(max_in_flight_steps=1) as engine:
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4
    assert order == ["step", *["step", "tokens"] * 3, "tokens"]
