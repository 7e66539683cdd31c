"""`rest`: waits that are not woken by each token, as servers of many streams make."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aengine import FinishReason, SamplingParams
from aengine.engine.chat.parser import ChatParser
from aengine.remote import connect, serve_engine
from aengine.testing import FakeAsyncLLM

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG = 1e6  # seconds


@pytest.fixture(params=["on the loop", "own thread", "remote"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def engine_of(kind: str, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    """The engine to ask, and the one that answers."""
    async with AsyncExitStack() as stack:
        engine = FakeAsyncLLM("abcdefgh" * 50, own_thread=kind == "own thread", **settings)
        await stack.enter_async_context(engine)
        asked: Any = engine
        if kind == "remote":
            await stack.enter_async_context(serve_engine(engine, tmp_path / "engine"))
            asked = await stack.enter_async_context(connect(tmp_path / "engine"))
        yield asked, engine


async def test_a_rest_ends_with_the_answer(kind: str, tmp_path: Path) -> None:
    async with engine_of(kind, tmp_path) as (engine, _):
        for stream in (engine.stream_chat(HELLO), engine.stream("hello", SamplingParams(max_tokens=1000))):
            first = await stream.read()
            assert first
            await stream.rest(LONG)
            await stream.rest(LONG)  # it has ended: no wait
            text = "".join(item.text for item in first)
            while items := await stream.read():
                text += "".join(item.text for item in items)
            assert text == "abcdefgh" * 50 and stream.completion.finish_reason is FinishReason.STOP


async def test_a_rest_is_as_long_as_was_asked(kind: str, tmp_path: Path) -> None:
    async with engine_of(kind, tmp_path, token_delay=0.005) as (engine, _):
        async with engine.stream("hello", SamplingParams(max_tokens=1000)) as stream:
            assert await stream.read()
            await stream.rest(0.001)
            assert stream.finish_reasons[0] is None
            assert await stream.read()


async def test_a_rest_that_is_cancelled_ends_the_request(kind: str, tmp_path: Path) -> None:
    async with engine_of(kind, tmp_path, token_delay=0.005) as (engine, answering):
        stream = engine.stream("hello", SamplingParams(max_tokens=1000, ignore_eos=True))
        assert await stream.read()
        resting = asyncio.ensure_future(stream.rest(LONG))
        await asyncio.sleep(0)
        resting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resting
        while answering.statistics().num_running:
            await asyncio.sleep(0.001)
        assert answering.statistics().num_aborted == 1


def test_a_parser_is_freed_without_the_garbage_collector() -> None:
    parser = ChatParser(None, None, (), False, lambda name: None)
    parser.feed("text")
    parser.finish()
    gone = weakref.ref(parser)
    gc.disable()
    try:
        del parser
        assert gone() is None
    finally:
        gc.enable()
