"""Chats with tools over a fake worker, which takes any token that the bitmask allows."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest_api import expire, settled, until_scheduled, user_requests
from pydantic import BaseModel

from aengine import (
    AsyncLLM,
    DeadlineExceededError,
    EngineClosedError,
    EngineOverloadedError,
    FinishReason,
    GrammarError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
    Token,
)
from aengine.chat import TextDelta, ToolCallStart
from aengine.engine.chat import plan as chat_module

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = SamplingParams(max_tokens=300)


def shaped(**wanted: Any) -> SamplingParams:
    return SHORT.replace(structured_output=StructuredOutput(**wanted))


class Sum(BaseModel):
    total: bool


def add(a: bool, b: bool) -> int:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def any_token(engine: AsyncLLM, seed: int) -> None:
    engine.executor.choose = random.Random(seed).choice


async def test_a_required_call_and_its_result(make_engine: Make, rng: random.Random) -> None:
    async with make_engine() as engine:
        any_token(engine, rng.randrange(10**6))
        params = SHORT.replace(max_tokens=600)
        completion = await engine.chat(HELLO, params, tools=[add], tool_choice="add", output_type=Sum)
        assert completion.finish_reason is FinishReason.TOOL_CALLS and completion.parsed is None
        (call,) = completion.message.tool_calls
        assert call.name == "add" and set(call.parsed_arguments()) == {"a", "b"}
        history = [*HELLO, completion.message.to_dict(), {"role": "tool", "content": "3", "tool_call_id": call.id}]
        answer = await engine.chat(history, params, tools=[add], tool_choice="none", output_type=Sum)
        assert isinstance(answer.parsed, Sum) and answer.message.content == answer.text
        await settled(engine)


async def test_deltas_come_as_they_are_made(make_engine: Make) -> None:
    async with make_engine() as engine:
        any_token(engine, 1)
        stream = engine.stream_chat(HELLO, SHORT, tools=[add], tool_choice="required", parallel_tool_calls=False)
        with pytest.raises(InvalidRequestError, match="read to its end"):
            _ = stream.completion
        deltas = [delta async for delta in stream]
    assert [d.name for d in deltas if isinstance(d, ToolCallStart)] == ["add"]
    assert stream.completion.message == stream.message


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [add, add]}, "tools"),
        ({"tools": [3]}, "tools"),
        ({"tools": [add], "tool_choice": "sub"}, "tool_choice"),
        ({"tools": [add], "parallel_tool_calls": "x"}, "parallel_tool_calls"),
        ({"output_type": print}, "output_type"),
        ({"deadline": -1}, "deadline"),
        ({"bogus": 1}, "bogus"),
        ({"params": SamplingParams(detokenize=False)}, "detokenize"),
        ({"params": shaped(regex="a"), "output_type": Sum}, "output_type"),
        ({"params": shaped(grammar='start: "a"'), "tools": [add]}, "structured_output"),
        ({"params": shaped(json_object=True, backend="other"), "tools": [add]}, "structured_output"),
        ({"on_unsupported": "ignore"}, "on_unsupported"),
        ({"messages": []}, "messages"),
        ({"messages": [], "tools": [add]}, "messages"),
        ({"messages": [{"content": "x"}], "tools": [add]}, "messages"),
    ],
)
async def test_wrong_chats(make_engine: Make, wrong: dict[str, Any], param: str) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.chat(**({"messages": HELLO} | wrong))
        assert caught.value.param == param
        await settled(engine)


SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "boolean"}, "of": {"type": "string", "maxLength": 3}},
    "required": ["sum", "of"],
    "additionalProperties": False,
}


async def test_an_answer_of_a_json_schema_or_calls(make_engine: Make, rng: random.Random) -> None:
    """What OpenAI's clients send: tools, and a response format that is a dict."""
    async with make_engine() as engine:
        any_token(engine, rng.randrange(10**6))
        texts = calls = 0
        while not (texts and calls):
            stream = engine.stream_chat(HELLO, shaped(json_schema=SCHEMA), tools=[add])
            snapshots = [stream.partial async for _ in stream]
            completion, message = stream.completion, stream.message
            assert completion.finish_reason == ("tool_calls" if message.tool_calls else "stop")
            assert completion.parsed is None
            calls += bool(message.tool_calls)
            if message.tool_calls:
                assert message.content is None and stream.partial is None
                continue
            texts += 1
            answer = json.loads(message.content)
            assert list(answer) == ["sum", "of"] and stream.partial == answer
            assert all(set(snapshot or {}) <= set(answer) for snapshot in snapshots)
        await settled(engine)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"regex": "[ab]{2,5}"}, "[ab]{2,5}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" "b"+'}, "ab+"),
    ],
)
async def test_an_answer_of_another_shape(make_engine: Make, wanted: dict[str, Any], fits: str) -> None:
    async with make_engine() as engine:
        any_token(engine, 4)
        completion = await engine.chat(HELLO, shaped(**wanted))
        text = completion.message.content
        if completion.finish_reason == "stop":
            assert re.fullmatch(fits, text)
        if "grammar" not in wanted:
            completion = await engine.chat(HELLO, shaped(**wanted), tools=[add], tool_choice="auto")
            assert completion.message.tool_calls or re.fullmatch(fits, completion.message.content)
        await settled(engine)


async def test_a_number_is_whole_only_at_the_end(make_engine: Make) -> None:
    async with make_engine() as engine:
        any_token(engine, 5)
        stream = engine.stream_chat(HELLO, SHORT, output_type=int)
        assert [stream.partial async for _ in stream].count(None) > 0
        assert stream.completion.finish_reason == "length" or stream.partial == stream.completion.parsed


async def test_what_can_not_be_enforced_is_left_out_on_demand(make_engine: Make) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "integer", "not": {"const": 3}}}, "required": ["x"]}
    tool = {"name": "f", "parameters": odd}
    async with make_engine() as engine:
        any_token(engine, 6)
        for params, how in ((SHORT, {"tools": [tool]}), (shaped(json_schema=odd), {"tools": [add]})):
            with pytest.raises(GrammarError, match='on_unsupported="relax"') as caught:
                await engine.chat(HELLO, params, **how)
            assert (caught.value.kind, caught.value.path) == ("unsupported", "$.properties.x.not")
            assert (await engine.chat(HELLO, params, **how, on_unsupported="relax")).warnings
        counted = {"type": "object", "properties": {"a": {"type": "boolean"}}, "minProperties": 1}
        counted["additionalProperties"] = True
        tools = [{"name": "g", "parameters": counted}]
        completion = await engine.chat(HELLO, SHORT, tools=tools, tool_choice="required", on_unsupported="relax")
        assert any("the tool 'g': $.minProperties is not enforced" in warning for warning in completion.warnings)
        await settled(engine)


async def test_a_chat_that_is_closed_has_what_came(make_engine: Make) -> None:
    async with make_engine() as engine:
        any_token(engine, 7)
        async with engine.stream_chat(HELLO, SHORT, output_type=list[bool]) as stream:
            seen = await anext(stream)
        assert [delta async for delta in stream] == []
        assert isinstance(stream.partial, list)
        completion = stream.completion
        assert completion.finish_reason == "abort" and completion.message.content.startswith(seen.text)
        assert stream.completion is completion
        await settled(engine)


@pytest.mark.parametrize("params", [SHORT, shaped(choice=["yes"]), shaped(regex="[{]+")])
@pytest.mark.parametrize("own_thread", [False, True])
async def test_a_text_that_was_not_asked_to_be_json_has_no_snapshot(
    make_engine: Make, params: SamplingParams, own_thread: bool
) -> None:
    async with make_engine(own_thread=own_thread) as engine:
        stream = engine.stream_chat(HELLO, params)
        assert not any([stream.partial async for _ in stream]) and stream.completion.text
        plain = engine.stream([5], params)
        assert not any([plain.partial async for _ in plain]) and plain.completion.text


async def test_a_call_that_is_cut_off_is_no_call(make_engine: Make) -> None:
    async with make_engine() as engine:
        any_token(engine, 1)
        completion = await engine.chat(HELLO, SamplingParams(max_tokens=12), tools=[add], tool_choice="required")
        assert completion.finish_reason is FinishReason.LENGTH
        assert not any(call.is_complete for call in completion.message.tool_calls)


async def test_one_of_some_tools_must_be_called(make_engine: Make, rng: random.Random) -> None:
    tools = [add, {"name": "sub"}, {"name": "mul"}]
    listed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "mul"}}]}}
    async with make_engine() as engine:
        any_token(engine, rng.randrange(10**6))
        for choice, allowed in ((["sub", "mul"], {"sub", "mul"}), (listed, {"mul"}), ("any", {"add", "sub", "mul"})):
            answers = await asyncio.gather(*(engine.chat(HELLO, SHORT, tools=tools, tool_choice=choice) for _ in "abc"))
            called = {call.name for answer in answers for call in answer.message.tool_calls}
            assert called and called <= allowed, (choice, called)


@pytest.mark.parametrize("own_thread", [False, True])
async def test_several_answers_of_one_chat(make_engine: Make, rng: random.Random, own_thread: bool) -> None:
    """Each is parsed by itself, whatever the order of their tokens."""
    async with make_engine(own_thread=own_thread) as engine:
        any_token(engine, rng.randrange(10**6))
        kinds, differ = set[str](), False  # the four may all be the same shortest answer
        while kinds != {"stop", "tool_calls"} or not differ:
            stream = engine.stream_chat(HELLO, SHORT.replace(n=4), tools=[add], output_type=Sum)
            seen: dict[int, list[str]] = {}
            async for delta in stream:
                if isinstance(delta, TextDelta):
                    seen.setdefault(delta.choice, []).append(delta.text)
            completion = stream.completion
            assert [choice.index for choice in completion.choices] == [0, 1, 2, 3] and len(seen) <= 4
            assert tuple(choice.message for choice in completion.choices) == stream.messages
            assert completion.message is completion.choices[0].message and stream.message == completion.message
            for choice in completion.choices:
                kinds.add(str(choice.finish_reason))
                assert "".join(seen.get(choice.index, [])) == (choice.message.content or "")
                if choice.finish_reason == "stop":
                    assert isinstance(choice.parsed, Sum) and choice.message.content == choice.text
                elif choice.finish_reason == "tool_calls":
                    assert choice.message.tool_calls and choice.parsed is None
            differ |= len({choice.text for choice in completion.choices}) > 1
        whole = await engine.chat(HELLO, SHORT.replace(n=2), tools=[add], tool_choice="required")
        assert all(choice.message.tool_calls for choice in whole.choices)
        if not own_thread:
            await settled(engine)


async def test_several_answers_that_are_closed(make_engine: Make) -> None:
    async with make_engine() as engine:
        async with engine.stream_chat(HELLO, SHORT.replace(n=3)) as stream:
            await anext(stream)
        assert [choice.finish_reason for choice in stream.completion.choices] == ["abort"] * 3
        assert len(stream.messages) == 3
        await settled(engine)


@pytest.mark.parametrize("n", [1, 3])
async def test_deltas_have_the_logprobs_of_their_tokens(make_engine: Make, n: int) -> None:
    params = SHORT.replace(logprobs=2, n=n, max_tokens=40)
    async with make_engine() as engine:
        stream = engine.stream_chat(HELLO, params)
        tokens: dict[int, list[Token]] = {i: [] for i in range(n)}
        async for delta in stream:
            assert delta.tokens and all(token.index == delta.choice for token in delta.tokens)
            assert delta.text == "".join(token.text for token in delta.tokens)
            tokens[delta.choice] += delta.tokens
        for choice in stream.completion.choices:
            logprobs = [((t.token_id, t.logprob), *t.top_logprobs) for t in tokens[choice.index]]
            assert tuple(logprobs) == choice.logprobs and len(logprobs) == 40
        any_token(engine, 1)
        stream = engine.stream_chat(HELLO, SHORT.replace(logprobs=0), tools=[add], tool_choice="required")
        ids = [token.token_id async for delta in stream for token in delta.tokens]
        assert tuple(ids) == stream.completion.token_ids
        plain = engine.stream_chat(HELLO, SHORT)
        assert not any([delta.tokens async for delta in plain])


async def test_a_tool_that_can_not_be_held_is_named(make_engine: Make) -> None:
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"not": {}}}}}
    async with make_engine() as engine:
        with pytest.raises(GrammarError, match="parameters of the tool 'f'") as caught:
            await engine.chat(HELLO, tools=[add, bad])
        assert (caught.value.kind, caught.value.path) == ("unsupported", "$.properties.x.not")


async def test_deadline_and_queue_hold_while_a_chat_is_planned(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = chat_module.plan_chat
    slow_plan = lambda *args: (time.sleep(0.3), plan(*args))[1]  # noqa: E731  # six times the deadline below
    monkeypatch.setattr(chat_module, "plan_chat", slow_plan)
    async with make_engine(max_num_queued_requests=2) as engine:
        any_token(engine, 2)
        with pytest.raises(DeadlineExceededError):
            await engine.chat(HELLO, SHORT, deadline=0.05)
        tasks = [asyncio.create_task(engine.chat(HELLO, SamplingParams(max_tokens=2))) for _ in range(5)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results].count(EngineOverloadedError) == 3
        await settled(engine)


async def test_the_queue_counts_grammars_from_the_start(make_engine: Make) -> None:
    params = SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex="a*"))
    async with make_engine(max_num_queued_requests=4) as engine:
        accepted = []
        with pytest.raises(EngineOverloadedError):
            while True:
                accepted.append(engine.stream([7], params))
        assert len(accepted) == 4
        for stream in accepted:
            await stream.wait()
        await settled(engine)


async def test_terminate_tells_who_waits(make_engine: Make) -> None:
    engine = await make_engine(fake={"delay": 30.0}).start()
    tasks = [
        asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=5))),
        asyncio.create_task(engine.generate([1], output_type=Sum)),
    ]
    await until_scheduled(engine, 2)
    engine.terminate()
    done, pending = await asyncio.wait(tasks, timeout=10)
    assert not pending and all(isinstance(task.exception(), EngineClosedError) for task in done)
    await engine.aclose()


# -- a chat is a request like any other before it is planned


@pytest.fixture
def slow_planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Chats are planned once it is set."""
    gate, plan = threading.Event(), chat_module.plan_chat
    monkeypatch.setattr(chat_module, "plan_chat", lambda *args: (gate.wait(60), plan(*args))[1])
    yield gate
    gate.set()


@pytest.mark.parametrize("how", ["abort", "abort_all", "close", "drop", "deadline"])
async def test_a_chat_ends_while_it_is_planned(make_engine: Make, slow_planning: threading.Event, how: str) -> None:
    async with make_engine() as engine:
        deadline = 0.02 if how == "deadline" else None
        stream = engine.stream_chat(HELLO, SHORT, tools=[add], request_id="chat", deadline=deadline)
        assert engine.statistics().num_waiting == 1
        if how == "abort":
            assert engine.abort("chat") and not engine.abort("chat")
        elif how == "abort_all":
            assert engine.abort_all() == 1
        elif how == "close":
            await stream.aclose()
        elif how == "drop":
            del stream
            gc.collect()
            await settled(engine)
        if how == "deadline":
            with pytest.raises(DeadlineExceededError):
                await stream.wait()
        elif how != "drop":
            assert [delta async for delta in stream] == []
            assert stream.completion.finish_reason == "abort" and stream.message.content is None
        await settled(engine)
        assert not slow_planning.is_set()
        again = engine.stream_chat(HELLO, SHORT.replace(max_tokens=3), request_id="chat")
        slow_planning.set()
        assert len((await again.wait()).token_ids) == 3
        await settled(engine)
        assert engine.statistics().generated_tokens == 3  # the first one did not come after all


async def test_a_chat_waits_for_its_place_in_the_queue(make_engine: Make, slow_planning: threading.Event) -> None:
    async with make_engine(max_num_queued_requests=1, admission="wait") as engine:
        params = SHORT.replace(max_tokens=3)
        first = engine.stream_chat(HELLO, params)
        held = engine.stream_chat(HELLO, params, first_token_deadline=0.02)
        late = engine.stream_chat(HELLO, params, request_id="late")
        urgent = engine.stream_chat(HELLO, params, priority=-1)
        assert engine.statistics().num_waiting == 4
        with pytest.raises(DeadlineExceededError, match="waited for a place in the queue"):
            await held.wait()
        assert engine.abort("late") and engine.statistics().num_waiting == 2
        assert (await late.wait()).finish_reason == "abort"
        slow_planning.set()
        for stream in (first, urgent):
            assert len((await stream.wait()).token_ids) == 3
        await settled(engine)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
async def test_end_a_chat_at_every_await(make_engine: Make, how: str) -> None:
    """After k turns of the loop, until it ends by itself: while it is planned, compiled, decoded. Larger k are further
    apart: on a busy machine the loop turns often while a thread plans."""
    async with make_engine() as engine:
        any_token(engine, 3)
        params = SHORT.replace(max_tokens=12)
        await engine.chat(HELLO, params, tools=[add], output_type=Sum)  # the grammar is compiled
        turns, is_over = 0, False
        while not is_over:
            chat = engine.chat(HELLO, params, tools=[add], output_type=Sum, request_id="chat", deadline=1000)
            task = asyncio.create_task(chat)
            for _ in range(turns):
                await asyncio.sleep(0)
            if is_over := task.done():
                assert task.result().usage.completion_tokens > 0
            elif how == "abort" and engine.abort("chat"):
                assert (await task).finish_reason == "abort"
            elif how == "deadline" and turns and (request := user_requests(engine).get("chat")):
                expire(engine, request)
                with pytest.raises(DeadlineExceededError):
                    await task
            else:
                task.cancel()
                await asyncio.wait([task])
            await settled(engine)
            turns += 1 + turns // 20


async def test_messages_are_the_callers_own_again_at_once(make_engine: Make, slow_planning: threading.Event) -> None:
    messages = [dict(HELLO[0])]
    async with make_engine() as engine:
        count = engine.tokenizer.count(messages)
        stream = engine.stream_chat(messages, SHORT.replace(max_tokens=1))
        plain = engine.stream(messages, SHORT.replace(max_tokens=1))
        messages[0]["content"] = "x" * 100
        messages.append({"role": "user", "content": "y"})
        slow_planning.set()
        for asked in (stream, plain):
            assert (await asked.wait()).usage.prompt_tokens == count


async def test_tools_are_the_callers_own_again_at_once(make_engine: Make, slow_planning: threading.Event) -> None:
    tools: list[Any] = [{"name": "first", "parameters": {"type": "object", "properties": {}}}]
    async with make_engine() as engine:
        stream = engine.stream_chat(HELLO, SHORT, tools=tools, tool_choice="required")
        tools[:] = [add]
        slow_planning.set()
        assert [call.name for call in (await stream.wait()).message.tool_calls][:1] == ["first"]
