"""What a stream says of its request before the end: usage, which of n have ended, and by what."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aengine import DeadlineExceededError, FinishReason, SamplingParams, Tool, ToolCallEnd
from aengine.engine.streams.token_stream import ChoiceOutput
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply

pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = Tool("get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
STOP, LENGTH, TOOL_CALLS, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS, FinishReason.ABORT


@pytest.fixture(params=[False, True], ids=["local", "own_thread"])
def own_thread(request: pytest.FixtureRequest) -> bool:
    return request.param


def of_choice(*replies: Any) -> Any:
    """A script: reply i to a request's i-th completion."""
    return lambda request: replies[request.choice]


# -- usage


async def test_the_prompt_is_counted_before_the_end(own_thread: bool) -> None:
    prompt = "The capital of France is, as everybody knows who has been there: "
    async with FakeAsyncLLM("Paris" * 20, token_delay=0.001, own_thread=own_thread) as engine:
        first = await engine.generate(prompt)
        stream = engine.stream(prompt)
        await anext(stream)
        usage = stream.usage
        assert usage.prompt_tokens == first.usage.prompt_tokens == len(prompt)
        assert 0 < usage.cached_tokens < len(prompt), "the prompt that was computed before is in the cache"
        assert 0 < usage.completion_tokens < 100
        completion = await stream.wait()
        assert stream.usage == completion.usage and completion.usage.cached_tokens == usage.cached_tokens
        chat = engine.stream_chat(HELLO)
        await anext(chat)
        assert 0 < chat.usage.prompt_tokens == (await chat.wait()).usage.prompt_tokens


# -- one of n ends


async def test_the_end_of_one_choice_is_seen_when_its_last_delta_has_been_read(own_thread: bool) -> None:
    async with FakeAsyncLLM(of_choice("ab", "a" * 40, "abcd"), token_delay=0.001, own_thread=own_thread) as engine:
        stream = engine.stream_chat(HELLO, SamplingParams(n=3, max_tokens=20))
        assert stream.finish_reasons == stream.stop_reasons == (None, None, None)
        texts, orders = ["", "", ""], []
        async for delta in stream:
            texts[delta.choice] += delta.text
            ended = [i for i, reason in enumerate(stream.finish_reasons) if reason is not None]
            for i in ended:
                assert texts[i] == ["ab", "a" * 20, "abcd"][i], "whole when it has ended"
            if ended not in orders:
                orders.append(ended)
        assert orders[0] == [] and orders[-1] in ([0, 2], [0, 1, 2]) and [0] in orders
        assert stream.finish_reasons == (STOP, LENGTH, STOP)
        assert stream.finish_reasons == tuple(choice.finish_reason for choice in stream.completion.choices)


async def test_a_last_token_of_several_deltas_ends_its_choice_with_the_last_of_them() -> None:
    call = Reply(tool_calls=[("get_weather", {"city": "Rome"})])
    async with FakeAsyncLLM(call) as engine:
        stream = engine.stream_chat(HELLO, tools=[WEATHER])
        async for delta in stream:
            if not isinstance(delta, ToolCallEnd):
                assert stream.finish_reasons == (None,)
        assert stream.finish_reasons == (TOOL_CALLS,) and stream.stop_reasons == (None,)


async def test_read_sees_the_ends_of_all_that_it_returns(own_thread: bool) -> None:
    async with FakeAsyncLLM(of_choice("ab", "abcdef"), own_thread=own_thread) as engine:
        stream = engine.stream_chat(HELLO, SamplingParams(n=2))
        while await stream.read():
            pass
        assert stream.finish_reasons == (STOP, STOP)


async def test_ends_that_no_token_tells(own_thread: bool) -> None:
    async with FakeAsyncLLM("a" * 500, token_delay=0.001, own_thread=own_thread) as engine:
        for end in ("close", "abort"):
            stream = engine.stream_chat(HELLO, SamplingParams(n=2))
            await anext(stream)
            if end == "close":
                await stream.aclose()
            else:
                engine.abort(stream.request_id)
                await stream.wait()
            assert stream.finish_reasons == (ABORT, ABORT)
        stream = engine.stream_chat(HELLO, deadline=0.02)
        with pytest.raises(DeadlineExceededError):
            await stream.wait()
        assert stream.finish_reasons == (FinishReason.ERROR,)


def test_iterators_that_block_say_it_too() -> None:
    with FakeLLM("one, two") as llm:
        chat = llm.stream_chat(HELLO, SamplingParams(stop=","))
        assert [delta.text for delta in chat] == ["o", "n", "e"] and chat.finish_reasons == (STOP,)
        assert chat.stop_reasons == (",",) and chat.completion.choices[0].stop_reason == ","
        tokens = llm.stream("x", SamplingParams(n=2, max_tokens=3))
        tokens.wait()
        assert tokens.finish_reasons == (LENGTH, LENGTH) and tokens.stop_reasons == (None, None)


# -- what ended it


@pytest.mark.parametrize("include", [False, True])
async def test_the_stop_string_that_ended_it(own_thread: bool, include: bool) -> None:
    params = SamplingParams(stop=["END", "."], include_stop_str_in_output=include)
    async with FakeAsyncLLM(["one. two", "one END", "one", "one" * 9], own_thread=own_thread) as engine:
        reasons = []
        for limits in (params, params, params, params.replace(max_tokens=4)):
            choice = (await engine.generate("x", limits)).choices[0]
            reasons.append((choice.finish_reason, choice.stop_reason))
        assert reasons == [(STOP, "."), (STOP, "END"), (STOP, None), (LENGTH, None)]


async def test_a_stop_string_of_what_was_held_back_to_the_end() -> None:
    async with FakeAsyncLLM("é") as engine:  # of whose two bytes the limit leaves one
        choice = (await engine.generate("x", SamplingParams(stop="\ufffd", max_tokens=1))).choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", STOP, "\ufffd")


async def test_the_stop_token_that_ended_it(own_thread: bool) -> None:
    async with FakeAsyncLLM("one. two", own_thread=own_thread) as engine:
        async with engine.stream("x", SamplingParams(stop_token_ids=[ord("."), ord("t")])) as stream:
            async for _ in stream:
                pass
        assert stream.finish_reasons == (STOP,) and stream.stop_reasons == (ord("."),)
        chat = await engine.chat(HELLO, SamplingParams(stop_token_ids=[ord(".")]))
        assert chat.choices[0].stop_reason == ord(".")
        both = await engine.generate("x", SamplingParams(stop=["e"], stop_token_ids=[ord("e")]))
        assert both.finish_reason is STOP and both.choices[0].stop_reason == ord("e"), "its text is not searched"


async def test_the_end_of_sequence_is_no_stop_reason() -> None:
    async with FakeAsyncLLM("one") as engine:
        stream = engine.stream("x")
        last = [token async for token in stream][-1]
        assert stream.completion.choices[0].stop_reason is None
        for own in ([last.token_id], [last.token_id, ord("!")]):
            also_asked = await engine.generate("x", SamplingParams(stop_token_ids=own))
            assert also_asked.choices[0].stop_reason is None
        before = await engine.generate("x", SamplingParams(stop_token_ids=[last.token_id, ord("e")]))
        assert before.choices[0].stop_reason == ord("e")
        alone = await engine.generate("x", SamplingParams(stop_token_ids=[last.token_id], ignore_eos=True))
        assert alone.choices[0].stop_reason == last.token_id


# -- memory


def outputs() -> set[int]:
    """Ids of what holds the tokens of a completion."""
    return {id(one) for one in gc.get_objects() if type(one) is ChoiceOutput}


async def test_a_request_is_freed_with_its_last_reference(own_thread: bool) -> None:
    """Not by a later run of the garbage collector, which would find the tokens of many."""
    params = SamplingParams(max_tokens=5, n=2)
    async with FakeAsyncLLM("abc " * 20, own_thread=own_thread) as engine:
        gc.collect()
        gc.disable()
        try:
            before = outputs()
            await engine.chat(HELLO, params)
            await engine.generate("x", params)
            async for _ in engine.stream_chat(HELLO, params):
                pass
            async with engine.stream("x", SamplingParams(max_tokens=50)) as stream:
                await anext(stream)
            del stream
            while outputs() - before:  # the engine's loop may not be done with it
                await asyncio.sleep(0.01)
        finally:
            gc.enable()
