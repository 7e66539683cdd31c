"""A text of megabytes holds up nobody, and one that can't fit is refused without being encoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import settled, until

from aengine import (
    AsyncLLM,
    ContextLengthError,
    EngineClosedError,
    InternalError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
)
from aengine.engine.chat.plan import ChatRequest
from aengine.engine.tokenizer.messages import checked_messages
from aengine.engine.tokenizer.prompt import part_of
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.limits.bounds import LONG_TEXT

Make = Callable[..., AsyncLLM]
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize("own_thread", [False, True])
async def test_a_text_that_can_not_fit_is_not_encoded(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, own_thread: bool, no_thread_left: None
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    text = "The quick brown fox. " * 200_000
    async with make_engine(own_thread=own_thread) as engine:
        for prompt in (text, [{"role": "user", "content": text}]):
            with pytest.raises(ContextLengthError, match=r"at least \d+ tokens.*1024 \(max_model_len\)") as caught:
                await engine.generate(prompt, ONE)
            assert 1024 <= caught.value.num_prompt_tokens <= len(text)
        with pytest.raises(ContextLengthError, match="has 100"):  # counted, where that is a matter of milliseconds
            await engine.generate("The quick brown fox. " * 2000, ONE)
        assert max(encoded) < LONG_TEXT


async def test_a_long_text_holds_up_nobody(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, gate = Tokenizer.encode, threading.Event()

    def slow(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        if len(text) > LONG_TEXT:
            assert gate.wait(60)
            text = text[:100]
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    text = "word " * (LONG_TEXT // 4)
    async with make_engine() as engine:
        prompts = [text, [{"role": "user", "content": text}]]
        long = [asyncio.create_task(engine.generate(prompt, ONE)) for prompt in prompts]
        for _ in range(3):
            await engine.generate("short", ONE)
            await engine.generate([{"role": "user", "content": "short"}], ONE)
        assert not any(task.done() for task in long)
        gate.set()
        for task in long:
            await task
        await settled(engine)


def test_what_is_long() -> None:
    text = "x" * (LONG_TEXT + 1)
    assert part_of(text).is_long and not part_of(text[1:]).is_long
    for content, expected in (
        (text, True),
        (text[1000:], False),
        ([{"type": "text", "text": text}], True),
    ):
        assert part_of([{"role": "user", "content": content}]).is_long is expected
        assert ChatRequest(messages=[{"role": "user", "content": content}]).is_long is expected
    hello = {"role": "user", "content": "hello"}
    assert part_of([{"role": "user", "content": text[:30_000]}] * 2).is_long
    for given, expected in (
        ({"messages": [hello] * 300}, True),  # a template goes through them one by one
        ({"messages": [hello] * 20}, False),
        ({"tools": [{"name": "f", "parameters": {"enum": ["x"] * 3000}}]}, True),
        ({"chat_template_kwargs": {"documents": [text]}}, True),
        ({"params": SamplingParams(structured_output=StructuredOutput(json_schema={"enum": [text]}))}, True),
    ):
        assert ChatRequest(**{"messages": [hello], **given}).is_long is expected


async def test_long_chats_hold_up_no_other(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and whoever waits for them no more."""
    render, gate, rendered = Tokenizer.apply_chat_template, threading.Event(), []

    def slow(self: Tokenizer, messages: Any, **options: Any) -> Any:
        rendered.append(len(messages))
        assert len(messages) == 1 or gate.wait(60)
        return render(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", slow)
    hello = {"role": "user", "content": "hi"}
    async with make_engine() as engine:
        begin = [engine.chat, engine.generate] * 3
        long = [asyncio.create_task(call([hello] * 300, ONE)) for call in begin]  # type: ignore[operator]
        for _ in range(3):
            await engine.chat([hello], ONE)
            await engine.generate([hello], ONE)
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.wait(long)
        gate.set()
        await settled(engine)
        with pytest.raises(ContextLengthError, match="has 1"):
            await engine.chat([hello] * 301, ONE)
    assert rendered.count(300) == 1  # what no thread had begun was taken back


@pytest.mark.parametrize("own_thread", [False, True])
async def test_more_messages_than_tokens_are_not_rendered(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, own_thread: bool
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(Tokenizer, "apply_chat_template", fail)
    hello: dict[str, Any] = {"role": "user", "content": "hi"}
    tool = {"name": "f", "parameters": {}}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}] * 1024}
    async with make_engine(own_thread=own_thread) as engine:
        for messages, tools in (([hello] * 100_000, []), ([hello], [tool] * 1023), ([parts], []), ([{}] * 1024, [])):
            with pytest.raises(ContextLengthError, match="at least 1"):
                await engine.chat(messages, ONE, tools=tools)
            if not tools:
                with pytest.raises(ContextLengthError):
                    await engine.generate(messages, ONE)
        with pytest.raises(ContextLengthError):  # whatever the template shows of it
            await engine.chat([hello | {"extra": {"deep": ["x" * 110_000]}}], ONE)
        with pytest.raises(ContextLengthError):
            await engine.generate([hello | {"extra": {"deep": ["x" * 110_000]}}], ONE)


def test_messages_have_a_bound_in_the_largest_context_too() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}] * 1024}
    for messages in (
        [None] * 20_000,
        [parts] * 20,
        [{"role": "assistant", "tool_calls": [{}] * 20_000}],
        [{"role": "user", "content": [None] * 20_000}],
    ):
        with pytest.raises(InvalidRequestError, match="there may be 16384") as caught:
            checked_messages(messages)
        assert caught.value.param == "messages"


class Panic(BaseException):
    """As of a library in Rust, which is no `Exception`."""


@pytest.mark.parametrize("place", ["Tokenizer.encode", "Tokenizer.apply_chat_template", "spec_of"])
async def test_a_panic_of_a_library_is_an_error_of_the_request(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise Panic("index out of bounds")

    constrained = ONE.replace(structured_output=StructuredOutput(regex="a"))  # read on the loop, if it is short
    if place == "spec_of":
        monkeypatch.setattr("aengine.engine.structured.spec.spec_of", fail)
    else:
        monkeypatch.setattr(Tokenizer, place.partition(".")[2], fail)
    async with make_engine() as engine, asyncio.timeout(30):
        for call in (engine.generate,) if place == "spec_of" else (engine.generate, engine.chat):
            with pytest.raises(InternalError, match="index out of bounds"):
                await call([{"role": "user", "content": "hi"}], constrained)  # type: ignore[operator]
        assert await engine.generate([5], ONE)
        await settled(engine)


async def test_closing_does_not_wait_for_a_template(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def endless(*args: Any, **options: Any) -> Any:
        begun.set()
        gate.wait(60)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", endless)
    engine = await make_engine().start()
    chat = asyncio.create_task(engine.chat([{"role": "user", "content": "hi"}], ONE))
    await until(begun.is_set)
    async with asyncio.timeout(20):
        assert await engine.generate([5], ONE)
        await engine.aclose()
    with pytest.raises(EngineClosedError):
        await chat
    gate.set()


async def test_a_preparation_that_is_cancelled_ends_in_an_error(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the engine is terminated from another thread, or its loop is shut down: no abort of the caller's."""
    begun, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda *args, **options: (begun.set(), gate.wait(60)))
    async with make_engine() as engine:
        chat = asyncio.create_task(engine.chat([{"role": "user", "content": "hi"}], ONE))
        await until(begun.is_set)
        (preparing,) = [task for task in asyncio.all_tasks() if task.get_name() == "aengine-prepare"]
        preparing.cancel()
        with pytest.raises(EngineClosedError):
            await chat
        gate.set()
