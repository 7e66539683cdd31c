"""A program that is checked and never run: what type checkers know of the public interface.

``assert_type`` fails where a type is another; an ``expected error`` must be reported on its line, and nothing else.
"""

from __future__ import annotations

from typing import Any, assert_type

from aengine import (
    LLM,
    AsyncLLM,
    ChatCompletion,
    ChatMessage,
    ChatStream,
    Completion,
    EngineConfig,
    RequestOptions,
    SamplingParams,
    SyncLLM,
    Token,
    TokenStream,
)


class City:
    name: str


async def awaited(engine: AsyncLLM, anything: Any) -> None:
    assert_type(await engine.generate("x", output_type=City), Completion[City])
    assert_type((await engine.generate("x", output_type=City)).parsed, City)
    assert_type((await engine.generate([1, 2], output_type=list[int], deadline=1.0)).parsed, list[int])
    assert_type((await engine.generate("x")).parsed, None)
    assert_type((await engine.generate("x", output_type=None)).parsed, None)
    assert_type((await engine.generate("x", output_type=anything)).parsed, Any)
    assert_type((await engine.generate("x", output_type=int | str)).choices[0].parsed, Any)
    chat = await engine.chat([{"role": "user", "content": "x"}], output_type=City, tools=[awaited])
    assert_type(chat, ChatCompletion[City])
    assert_type(chat.parsed, City)
    assert_type(chat.choices[0].parsed, City)
    assert_type(chat.message, ChatMessage)
    assert_type(chat.message.content, str | None)
    whatever: list[Completion] = [chat, await engine.generate("x")]
    assert_type(whatever[0].parsed, Any)
    stream = engine.stream("x", SamplingParams(max_tokens=1), priority=1, request_id="r")
    assert_type(stream, TokenStream)
    async for token in stream:
        assert_type(token, Token)
    options: RequestOptions = {"deadline": 1.0}
    await engine.generate("x", **options)

    await engine.generate("x", deadlin=1.0)  # expected error
    await engine.generate("x", deadline="soon")  # expected error
    engine.stream("x", tools=[])  # expected error
    await engine.chat("x")  # expected error


def blocking(llm: LLM, engine: AsyncLLM) -> None:
    assert_type(llm.generate("x", output_type=City).parsed, City)
    assert_type(llm.generate(["x", "y"], output_type=City, progress=True), list[Completion[City]])
    assert_type(llm.generate("x"), Completion[None])
    assert_type(llm.chat([{"role": "user", "content": "x"}], output_type=City).parsed, City)
    assert_type(llm.chat([{"role": "user", "content": "x"}]).message, ChatMessage)
    for token in llm.stream("x"):
        assert_type(token, Token)
    assert_type(llm.as_async(), AsyncLLM)
    assert_type(engine.sync, SyncLLM)
    with engine.sync as sync:
        assert_type(sync.generate("x", output_type=City).parsed, City)

    llm.generate("x", progres=True)  # expected error
    llm.chat([], tool=[])  # expected error


def settings() -> None:
    AsyncLLM("m", max_num_seqs=64, dtype="bfloat16", own_thread=True)
    AsyncLLM(EngineConfig(model="m"), device="cpu")
    LLM("m", admission="error", block_running_loop=True)

    AsyncLLM("m", max_num_seq=64)  # expected error
    AsyncLLM("m", max_num_seqs="64")  # expected error
    AsyncLLM("m", dtype="float8")  # expected error
    LLM("m", modle="x")  # expected error


async def chat_stream(engine: AsyncLLM) -> None:
    stream = engine.stream_chat([{"role": "user", "content": "x"}], tool_choice="none")
    assert_type(stream, ChatStream)
    assert_type(stream.message, ChatMessage)
    assert_type((await stream.wait()).message, ChatMessage)
