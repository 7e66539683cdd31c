"""One engine for coroutines and for code that blocks: `engine.sync`, `llm.as_async()`, a loop that may be blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from own_thread_helpers import LOOPS, Make, run

from aengine import (
    LLM,
    AsyncLLM,
    ChatCompletion,
    ChatMessage,
    ChatStream,
    EngineClosedError,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    SyncLLM,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]


async def test_blocking_calls_on_a_running_loop(make: Make) -> None:
    """A notebook's cell: the thread's own loop runs, and stands still during each call."""
    async with make() as engine:
        sync = engine.sync
        awaited = asyncio.create_task(engine.generate([1], SHORT))
        await asyncio.sleep(0)
        completion = sync.generate([1], SHORT)
        assert completion.choices == (await awaited).choices
        assert [c.token_ids for c in sync.generate([[1], [1]], SHORT)] == [completion.token_ids] * 2
        assert [token.token_id for token in sync.stream([1], SHORT)] == list(completion.token_ids)
        assert sync.chat(HELLO, SHORT).choices == (await engine.chat(HELLO, SHORT)).choices
        with sync.stream_chat(HELLO, ENDLESS) as half_read:
            next(half_read)
        assert half_read.completion.finish_reason is FinishReason.ABORT
        assert 0 < sync.check_health() < 10 and sync.statistics().num_finished == engine.statistics().num_finished
        assert sync.describe() == engine.describe() and sync.tokenizer.has_chat_template
        assert repr(sync) == repr(engine) and sync.state == "running"


async def test_invoke_and_ainvoke(make: Make) -> None:
    """What an agent framework does with one engine: both calls, from the loop, from threads, all at once."""

    class Model:
        def __init__(self, engine: AsyncLLM) -> None:
            self.engine = engine

        def invoke(self, text: str) -> str:
            return self.engine.sync.chat([{"role": "user", "content": text}], SHORT).message.content or ""

        async def ainvoke(self, text: str) -> str:
            message = (await self.engine.chat([{"role": "user", "content": text}], SHORT)).message
            return message.content or ""

    async with make() as engine:
        model = Model(engine)
        expected = await model.ainvoke("Hi")
        threads = [asyncio.to_thread(model.invoke, "Hi") for _ in range(4)]
        assert model.invoke("Hi") == expected
        assert set(await asyncio.gather(*threads, *(model.ainvoke("Hi") for _ in range(4)))) == {expected}


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_life_without_a_loop(make: Make, new_loop: Callable[[], Any]) -> None:
    engine = make()
    sync = engine.sync
    with pytest.raises(EngineClosedError, match="not started"):
        sync.generate([1])
    with sync:
        assert len(sync.generate([1], SHORT).token_ids) == 5
        assert len(run(engine.generate([1], SHORT), new_loop).token_ids) == 5
    assert engine.state == "closed"
    assert sync.start() is sync
    assert sync.drain() and sync.state == "draining"
    sync.resume()
    assert len(run(engine.generate([1], SHORT), new_loop).token_ids) == 5
    sync.close()


def test_the_blocking_calls_hold_the_engine(make: Make) -> None:
    sync = make().sync.start()
    assert len(sync.generate([1], SHORT).token_ids) == 5
    sync.close()


async def test_an_engine_on_the_callers_loop_has_none(make_engine: Make) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="own_thread=True") as caught:
        _ = engine.sync
    assert caught.value.param == "own_thread"


async def test_in_the_engines_own_thread_it_would_wait_for_itself(make: Make) -> None:
    told: list[Any] = []

    def on_end(end: Any) -> None:
        for call in (lambda: engine.sync.generate([1]), engine.sync.close, engine.sync.check_health):
            try:
                told.append(call())
            except InvalidRequestError as error:
                told.append(str(error))

    engine = make(on_request_end=on_end)
    async with engine:
        await engine.generate([1], SHORT)
        assert len(told) == 3 and all("wait for itself" in text for text in told), told


async def test_an_llm_that_may_block_the_loop(make_engine: Make) -> None:
    class Blocking(LLM):
        def _make_engine(self, model: Any, settings: dict[str, Any]) -> AsyncLLM:
            return make_engine(**settings)

    with pytest.raises(InvalidRequestError, match="block_running_loop=True"):
        Blocking("smollm2-135m")
    with Blocking("smollm2-135m", block_running_loop=True) as llm:
        assert isinstance(llm, SyncLLM)
        completion = llm.generate([1], SHORT)
        assert completion.choices == (await llm.as_async().generate([1], SHORT)).choices
        assert [token.token_id for token in llm.stream([1], SHORT)] == list(completion.token_ids)
        thread = threading.Thread(target=llm.generate, args=([1], SHORT))
        thread.start()
        thread.join()
        assert llm.statistics().num_finished == 4


def test_a_closed_llm_says_what_helps(make_engine: Make) -> None:
    class Quick(LLM):
        def _make_engine(self, model: Any, settings: dict[str, Any]) -> AsyncLLM:
            return make_engine(**settings)

    llm = Quick("smollm2-135m")
    assert repr(llm) == "<LLM smollm2-135m running>"
    llm.close()
    with pytest.raises(EngineClosedError, match=r"^<LLM smollm2-135m closed> is closed: `llm.start\(\)` starts"):
        llm.generate([1])
    llm.start()
    assert len(llm.generate([1], SHORT).token_ids) == 5
    llm.close()
    assert "await" not in str(pytest.raises(EngineClosedError, llm.statistics).value)


def test_a_request_id_is_for_one_prompt(make: Make) -> None:
    with make().sync as sync:
        assert sync.generate([1], SHORT, request_id="mine").request_id == "mine"
        with pytest.raises(InvalidRequestError) as caught:
            sync.generate([[1], [2]], SHORT, request_id="mine")
        assert caught.value.param == "request_id"


@pytest.mark.parametrize("own_thread", [False, True])
async def test_a_chats_stream_is_there_at_once(make_engine: Make, own_thread: bool) -> None:
    """As `stream`: nothing is awaited to begin it, and it can be aborted by its id from the first moment."""
    async with make_engine(own_thread=own_thread) as engine:
        stream = engine.stream_chat(HELLO, ENDLESS, request_id="mine")
        assert isinstance(stream, ChatStream) and stream.request_id == "mine"
        assert engine.abort("mine")
        completion = await stream.wait()
        assert isinstance(completion, ChatCompletion) and completion.finish_reason is FinishReason.ABORT
        assert isinstance(completion.message, ChatMessage) and completion.message is completion.choices[0].message
        async with engine.stream_chat(HELLO, SHORT) as again:
            assert [delta async for delta in again]
        assert again.completion.usage.completion_tokens == 5
        with pytest.raises(InvalidRequestError, match="tool_choice"):
            engine.stream_chat(HELLO, tool_choises="auto")  # type: ignore[call-arg]
        refused = engine.stream_chat(HELLO, SHORT, tools=[3])  # what only planning finds
        with pytest.raises(InvalidRequestError, match="tool"):
            await anext(refused)
