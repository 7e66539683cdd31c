"""`aengine.testing`: engines that say what a script says."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import pytest
from conftest_api import settled, until_running
from pydantic import BaseModel, Field, field_validator

from aengine import (
    LLM,
    AsyncLLM,
    DeadlineExceededError,
    EngineClosedError,
    EngineOverloadedError,
    FinishReason,
    GrammarError,
    InvalidRequestError,
    RequestEnd,
    SamplingParams,
    StructuredOutput,
    WorkerDiedError,
    testing,
)
from aengine.chat import TextDelta, ToolCallStart, tools_of
from aengine.testing import FakeAsyncLLM, FakeLLM, FakeRequest, Reply, ScriptError, core

pytestmark = pytest.mark.usefixtures("no_blocking")
HELLO = [{"role": "user", "content": "Hello"}]


class Report(BaseModel):
    city: str
    sizes: list[int] = Field(default=[], max_length=3)
    day: date | None = None


def get_weather(city: str, days: int = 1) -> str:
    """Weather forecast for a city."""
    return f"{days} sunny days in {city}"


# -- what a script may be


async def test_tools_are_read_in_a_thread_and_lines_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large schemas take their time. Requests that come meanwhile get the lines after it, also if it is aborted."""
    threads: list[int] = []
    may_read = threading.Event()

    def read(tools: Any) -> Any:
        threads.append(threading.get_ident())
        assert may_read.wait(60)
        return tools_of(tools)

    monkeypatch.setattr(core, "tools_of", read)
    async with FakeAsyncLLM(["one", "two", "three", "four"]) as engine:
        streams = [engine.stream_chat(HELLO, tools=[get_weather]), engine.stream_chat(HELLO)]
        streams += [engine.stream_chat(HELLO, tools=[get_weather], request_id="third"), engine.stream_chat(HELLO)]
        await asyncio.sleep(0)
        assert engine.abort("third")
        may_read.set()
        texts = ["".join([item.text async for item in stream if isinstance(item, TextDelta)]) for stream in streams]
        assert texts == ["one", "two", "", "three"]
        with pytest.raises(InvalidRequestError, match="tool"):
            await engine.chat(HELLO, tools=[{"name": "no name!"}])
        assert (await engine.generate("Hello")).text == "four"
    assert threads and threading.get_ident() not in threads


async def test_a_list_has_one_reply_for_each_completion() -> None:
    async with FakeAsyncLLM(["Paris", Reply("Rome")]) as engine:
        assert isinstance(engine, AsyncLLM)
        completion = await engine.generate("The capital of France is")
        assert (completion.text, completion.finish_reason) == ("Paris", "stop")
        assert (await engine.chat(HELLO)).message.content == "Rome"
        with pytest.raises(ScriptError, match="has 2 replies, and this is completion 3"):
            await engine.generate("more")
        await settled(engine)


async def test_a_function_answers_what_was_asked() -> None:
    def reply(request: FakeRequest) -> Any:
        if request.messages is None:
            return f"{request.index} {request.text}"
        return None if request.tools else [tool["content"] for tool in request.messages]

    async with FakeAsyncLLM(reply) as engine:
        assert (await engine.generate("a text")).text == "0 a text"
        assert (await engine.generate(list(b"ids"))).text == "1 ids"
        assert (await engine.chat(HELLO, output_type=list[str])).parsed == ["Hello"]
        assert (await engine.generate(HELLO, output_type=list[str])).parsed == ["Hello"]
        await engine.chat(HELLO, SamplingParams(seed=3), tools=[get_weather], tool_choice="required")
        first, *_, last = engine.requests
        assert (first.prompt, first.tools, first.output_type) == ("a text", (), None)
        assert [tool.name for tool in last.tools] == ["get_weather"] and last.tool_choice == "required"
        assert last.params.seed == 3 and last.text == "Hello"
        assert [request.output_type for request in engine.requests[2:4]] == [list[str]] * 2
        with pytest.raises(InvalidRequestError):
            await engine.generate("x", SamplingParams(logit_bias={999_999: 1}))
        assert len(engine.requests) == 5  # what is refused does not use up the script


async def test_one_reply_for_all() -> None:
    async with FakeAsyncLLM("Yes 🙂.") as engine:
        completions = await asyncio.gather(*(engine.generate(f"{i}") for i in range(50)))
        assert {completion.text for completion in completions} == {"Yes 🙂."}
        await settled(engine)


async def test_a_script_that_raises() -> None:
    full = EngineOverloadedError("full", retry_after=2)
    async with FakeAsyncLLM([full, "fine", KeyError("a bug of the test's")]) as engine:
        with pytest.raises(EngineOverloadedError) as caught:
            await engine.generate("x")
        assert caught.value.retry_after == 2
        assert (await engine.generate("x")).text == "fine"
        with pytest.raises(KeyError):
            await engine.chat(HELLO)
        await settled(engine)


# -- chats and shapes


async def test_a_call_of_a_tool_is_the_requests_end_too() -> None:
    """Its hook and the statistics say of a chat's end what its completion says; deltas have every token's logprob."""
    ends: list[RequestEnd] = []
    replies = [Reply("Hm.", tool_calls=[("get_weather", {"city": "Rome"})]), "Fine.", "<tool_call>"]
    async with FakeAsyncLLM(replies, on_request_end=ends.append) as engine:
        params = SamplingParams(logprobs=0)
        stream = engine.stream_chat(HELLO, params, tools=[get_weather])
        tokens = [token.token_id async for delta in stream for token in delta.tokens]
        assert tuple(tokens) == stream.completion.token_ids
        reasons = [stream.completion.finish_reason]
        reasons += [(await engine.chat(HELLO, params, tools=[get_weather])).finish_reason]
        reasons += [(await engine.generate(HELLO)).finish_reason]
        assert [end.finish_reason for end in ends] == reasons == ["tool_calls", "stop", "stop"]
        counts = engine.statistics().finish_reasons
        assert (counts["tool_calls"], counts["stop"]) == (1, 2) and engine.statistics().num_finished == 3


async def test_tool_calls_are_python_data() -> None:
    calls = [("get_weather", {"days": 2, "city": "Köln"}), ("get_weather", {"city": 'a "b"'})]
    script = [Reply("Let me see.", tool_calls=calls), Reply(tool_calls=calls[:1]), "Sunny."]
    async with FakeAsyncLLM(script) as engine:
        stream = engine.stream_chat(HELLO, tools=[get_weather])
        deltas = [delta async for delta in stream]
        assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == "Let me see." == stream.message.content
        assert [d.name for d in deltas if isinstance(d, ToolCallStart)] == ["get_weather"] * 2
        message = stream.completion.message
        assert stream.completion.finish_reason is FinishReason.TOOL_CALLS
        assert [call.parsed_arguments() for call in message.tool_calls] == [calls[0][1], calls[1][1]]
        forced = await engine.chat(HELLO, tools=[get_weather], tool_choice="get_weather", output_type=Report)
        assert [call.name for call in forced.message.tool_calls] == ["get_weather"]
        history = [*HELLO, message.to_dict()]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        answer = await engine.chat(history, tools=[get_weather])
        assert answer.message.content == "Sunny." and engine.requests[-1].messages == history


@dataclass
class Point:
    x: int
    y: float


@pytest.mark.parametrize(
    ("reply", "output_type", "parsed"),
    [
        (Report(city="Paris", day=date(2024, 2, 1)), Report, Report(city="Paris", day=date(2024, 2, 1))),
        ({"sizes": [1], "city": "Paris"}, Report, Report(city="Paris", sizes=[1])),  # whatever the order
        (Reply(value={"x": 1, "y": 2}), Point, Point(1, 2.0)),
        (Point(3, 0.5), Point, Point(3, 0.5)),
        ('{"city":"Paris","sizes":[]}', Report, Report(city="Paris")),  # whatever the blanks
        (Reply(value=None), int | None, None),
        ("yes", Literal["yes", "no"], "yes"),
    ],
)
async def test_data_of_an_output_type(reply: Any, output_type: Any, parsed: Any) -> None:
    if reply == "yes":
        reply = Reply(value="yes")
    async with FakeAsyncLLM(reply) as engine:
        assert (await engine.generate("x", output_type=output_type)).parsed == parsed
        completion = await engine.chat(HELLO, output_type=output_type, tools=[get_weather])
        assert completion.parsed == parsed and completion.finish_reason == "stop"


async def test_without_a_script_the_shape_is_followed() -> None:
    schema = {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "age": {"type": "integer", "minimum": 18},
            "kind": {"enum": ["x", "y"]},
            "two": {"type": "array", "items": {"type": "number"}, "minItems": 2},
            "name": {"type": "string", "minLength": 3},
        },
        "required": ["day", "age", "kind", "two", "name"],
        "additionalProperties": False,
    }

    def shape(**wanted: Any) -> SamplingParams:
        return SamplingParams(max_tokens=400, structured_output=StructuredOutput(**wanted))

    async with FakeAsyncLLM() as engine:
        assert (await engine.generate("x")).text == "ok" == (await engine.chat(HELLO)).message.content
        assert isinstance((await engine.generate("x", output_type=Report)).parsed, Report)
        completion = await engine.chat(HELLO, tools=[get_weather], tool_choice="required")
        assert [call.name for call in completion.message.tool_calls if call.is_complete] == ["get_weather"]
        value = json.loads((await engine.generate("x", shape(json_schema=schema))).text)
        assert value["age"] >= 18 and len(value["two"]) == 2 and len(value["name"]) == 3, value
        assert re.fullmatch(r"\d{4}-[ab]+", (await engine.generate("x", shape(regex=r"\d{4}-[ab]+"))).text)
        assert (await engine.chat(HELLO, shape(choice=["yes", "no"]))).text in ("yes", "no")


async def test_a_reply_that_the_grammar_forbids_is_the_tests_fault() -> None:
    script = [{"town": "Paris"}, "maybe", Reply(tool_calls=[("get_wether", {})]), "after"]
    async with FakeAsyncLLM(script) as engine:
        with pytest.raises(ScriptError, match="town.*it stops after"):
            await engine.generate("x", output_type=Report)
        with pytest.raises(ScriptError, match="'maybe'"):
            await engine.generate("x", SamplingParams(structured_output=StructuredOutput(choice=["yes", "no"])))
        with pytest.raises(ScriptError, match="get_wether"):
            await engine.chat(HELLO, tools=[get_weather])
        assert (await engine.generate("x")).text == "after"
        await settled(engine)


class Even(BaseModel):
    value: int

    @field_validator("value")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value


async def test_what_a_validator_refuses_and_what_no_grammar_can_hold() -> None:
    async with FakeAsyncLLM({"value": 3}) as engine:
        completion = await engine.generate("x", output_type=Even)
        assert completion.parsed is None and "odd" in str(completion.parse_error)
        with pytest.raises(GrammarError):
            await engine.generate("x", SamplingParams(structured_output=StructuredOutput(regex="(")))


async def test_reasoning() -> None:
    reply = Reply("Paris.", reasoning="It is in France.")
    async with FakeAsyncLLM(reply, reasoning=True) as engine:
        message = (await engine.chat(HELLO, tools=[get_weather])).message
        assert (message.reasoning, message.content) == ("It is in France.", "Paris.")


async def test_several_choices_take_several_replies() -> None:
    async with FakeAsyncLLM(["a", "b", Reply(tool_calls=[("get_weather", {"city": "x"})]), "d"]) as engine:
        completion = await engine.chat(HELLO, SamplingParams(n=3, logprobs=2), tools=[get_weather])
        assert [choice.message.content for choice in completion.choices] == ["a", "b", None]
        assert [str(choice.finish_reason) for choice in completion.choices] == ["stop", "stop", "tool_calls"]
        assert [request.choice for request in engine.requests] == [0, 1, 2]
        (first, likeliest, other), _ = completion.choices[0].logprobs
        assert first == likeliest == (ord("a"), 0.0) and other.logprob < -10
        assert (await engine.generate("x")).text == "d"


async def test_what_the_engine_does_is_real() -> None:
    async with FakeAsyncLLM("one two three") as engine:
        completion = await engine.generate("x", SamplingParams(max_tokens=5))
        assert (completion.text, completion.finish_reason) == ("one t", "length")
        completion = await engine.generate("12345", SamplingParams(stop=" th"))
        assert (completion.text, completion.finish_reason) == ("one two", "stop")
        assert completion.usage.prompt_tokens == 5
        with pytest.raises(InvalidRequestError, match="nothing to profile|no worker to profile"):
            await engine.start_profile()
        assert await engine.check_health() >= 0
        assert engine.statistics().num_finished == 2


# -- time, failure, death


async def test_tokens_take_their_time() -> None:
    async with FakeAsyncLLM("x" * 100_000, token_delay=0.001) as engine:
        async with engine.stream("x") as stream:
            for _ in range(3):
                await anext(stream)
        with pytest.raises(DeadlineExceededError) as caught:
            await engine.generate("x", deadline=0.1)
        assert 0 < len(caught.value.completion.text) < 100_000
        task = asyncio.create_task(engine.generate("x"))
        await until_running(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(engine)


async def test_a_reply_that_begins_late() -> None:
    script = [Reply("late", delay=1000), Reply("late", delay=0.01), Reply("never", delay=1000)]
    async with FakeAsyncLLM(script) as engine:
        with pytest.raises(DeadlineExceededError, match="no token within"):
            await engine.generate("x", first_token_deadline=0.05)
        assert (await engine.generate("x", first_token_deadline=100)).text == "late"
        stream = engine.stream("x", request_id="mine")
        assert engine.abort("mine") and (await stream.wait()).finish_reason == "abort"


async def test_an_error_in_mid_stream() -> None:
    async with FakeAsyncLLM([Reply("so far", error=WorkerDiedError("gone")), "after"]) as engine:
        seen = []
        with pytest.raises(WorkerDiedError, match="gone") as caught:
            async for token in engine.stream("x"):
                seen += [token.text]
        assert "".join(seen) == "so far" == caught.value.completion.text
        assert (await engine.generate("x")).text == "after"
        await settled(engine)


async def test_a_workers_death_loses_nothing() -> None:
    async with FakeAsyncLLM(["other " * 20, Reply("whole", num_deaths=1)], token_delay=0.001) as engine:
        other = asyncio.create_task(engine.generate("x"))
        await asyncio.sleep(0)
        assert (await engine.generate("x")).text == "whole"
        assert (await other).text == "other " * 20
        assert engine.statistics().num_restarts == 1


async def test_a_worker_that_may_not_be_started_again() -> None:
    async with FakeAsyncLLM(Reply("whole", num_deaths=1), max_restarts=0) as engine:
        with pytest.raises(WorkerDiedError, match="as the script says"):
            await engine.generate("x")
        assert engine.state == "failed"
        with pytest.raises(EngineClosedError):
            engine.stream("x")


async def test_a_full_queue() -> None:
    async with FakeAsyncLLM("x" * 50, token_delay=0.001, max_num_queued_requests=2, max_num_seqs=1) as engine:
        streams = [engine.stream("x") for _ in range(2)]
        with pytest.raises(EngineOverloadedError):
            engine.stream("x")
        assert len(engine.requests) == 2
        await asyncio.gather(*(stream.wait() for stream in streams))
    async with FakeAsyncLLM(
        [str(i) for i in range(9)], max_num_queued_requests=1, max_num_seqs=1, admission="wait"
    ) as engine:
        answers = await asyncio.gather(*(engine.chat(HELLO) for _ in range(9)))
        assert sorted(answer.text for answer in answers) == [str(i) for i in range(9)]
        assert all(request.messages == HELLO for request in engine.requests)


async def test_closing_while_it_answers() -> None:
    engine = await FakeAsyncLLM("x" * 10_000, token_delay=0.001).start()
    stream = engine.stream("x")
    await anext(stream)
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await stream.wait()
    async with engine:  # it can be started again
        assert engine.state == "running"


# -- other ways to hold it


async def test_with_a_thread_of_its_own(no_thread_left: None) -> None:
    script = ["Paris", Reply(tool_calls=[("get_weather", {"city": "x"})]), KeyError("bug")]
    async with FakeAsyncLLM(script, own_thread=True) as engine:
        assert "".join([token.text async for token in engine.stream("x")]) == "Paris"
        completion = await engine.chat(HELLO, tools=[get_weather])
        assert completion.message.tool_calls and engine.requests[1].messages == HELLO
        with pytest.raises(KeyError):
            await engine.generate("x")


def test_blocking(no_thread_left: None) -> None:
    def reply(request: FakeRequest) -> Any:
        return Reply(value={"city": "Paris"}) if request.output_type else request.text.upper()

    with FakeLLM(reply) as llm:
        assert isinstance(llm, LLM)
        assert [completion.text for completion in llm.generate(["a", "b"])] == ["A", "B"]
        assert "".join(token.text for token in llm.stream("abc")) == "ABC"
        assert llm.chat(HELLO, output_type=Report).parsed == Report(city="Paris")
        assert len(llm.requests) == 4


def test_the_names_are_those_that_are_public() -> None:
    assert testing.__all__ == ["FakeAsyncLLM", "FakeLLM", "FakeRequest", "Reply", "ScriptError"]


def test_wrong_settings() -> None:
    for wrong in ({"token_delay": -1}, {"token_delay": "x"}, {"max_num_sequences": 3}):
        with pytest.raises(InvalidRequestError) as caught:
            FakeAsyncLLM("x", **wrong)
        assert caught.value.param == next(iter(wrong))


def test_it_is_light() -> None:
    code = """
import asyncio, sys
from aengine.testing import FakeAsyncLLM

async def main():
    async with FakeAsyncLLM("ok") as engine:
        assert (await engine.generate("x")).text == "ok"

asyncio.run(main())
heavy = {"torch", "numpy", "llguidance", "pydantic", "jinja2", "transformers", "huggingface_hub", "gguf"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
