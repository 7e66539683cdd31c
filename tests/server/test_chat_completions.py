"""Chat completions, by OpenAI's own client over an engine of the same process."""

from __future__ import annotations

from typing import Any

import pytest
from conftest_api import leaves

from aengine.server.in_process import openai_client
from aengine.testing import FakeAsyncLLM, Reply

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_a_chat_is_answered_whole() -> None:
    async with FakeAsyncLLM("Hello there") as engine, openai_client(engine) as client:
        answer = await client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=1)
        choice = answer.choices[0]
        assert choice.message.content == "Hello there"
        assert choice.finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens == len("Hello there") + 1
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content).startswith("Hello there")


async def test_a_chat_streams() -> None:
    async with FakeAsyncLLM("Hello there", token_delay=0.001) as engine, openai_client(engine) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert len(chunks) > 4, "it comes in pieces"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len("Hello there") + 1


async def test_tool_calls_come_whole_and_in_pieces() -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
    reply = Reply(tool_calls=[("add", {"a": 1})])
    async with FakeAsyncLLM([reply, reply]) as engine, openai_client(engine) as client:
        answer = await client.chat.completions.create(model="fake", messages=HELLO, tools=[tool])
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.arguments == '{"a": 1}'
        assert answer.choices[0].finish_reason == "tool_calls"
        async with client.chat.completions.stream(model="fake", messages=HELLO, tools=[tool]) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        (same,) = streamed.message.tool_calls or ()
        assert same.function.arguments == '{"a": 1}' and streamed.finish_reason == "tool_calls"


async def test_a_call_that_is_cut_off_is_a_call() -> None:
    """Behind its name, and within its arguments: the same whole and in pieces."""
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}
    reply = Reply("Adding. ", tool_calls=[("add", {"a": "bcd"})])
    async with FakeAsyncLLM(lambda _: reply) as engine, openai_client(engine) as client:
        for max_tokens, arguments in ((40, ""), (60, '{"a": "bcd"')):
            ask: dict[str, Any] = {"model": "fake", "messages": HELLO, "tools": [tool], "max_tokens": max_tokens}
            choice = (await client.chat.completions.create(**ask)).choices[0]
            (call,) = choice.message.tool_calls or ()
            assert (call.function.name, call.function.arguments) == ("add", arguments)
            assert (choice.finish_reason, choice.message.content) == ("length", "Adding. ")
            chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
            pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
            assert [piece.function.name for piece in pieces if piece.function][0] == "add"
            assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == arguments
            assert chunks[-1].choices[0].finish_reason == "length"
            texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
            assert "".join(texts) == "Adding. "


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_ends_the_request(stream: bool) -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=0.01) as engine, openai_client(engine) as client:
        call = client.chat.completions.create(model="fake", messages=HELLO, stream=stream)  # type: ignore[call-overload]
        await leaves(engine, call, stream)
