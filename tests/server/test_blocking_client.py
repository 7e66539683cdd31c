"""OpenAI's blocking client over an engine on a thread of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from aengine import EngineOverloadedError, InvalidRequestError
from aengine.server.in_process import ERRORS
from aengine.testing import FakeAsyncLLM, FakeLLM

HELLO: Any = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


def test_a_chat_is_answered_whole_and_as_it_comes() -> None:
    with FakeLLM("Hello there", token_delay=0.01) as llm:
        client = llm.openai_client()
        assert client.chat.completions.create(**HELLO).choices[0].message.content == "Hello there"
        pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**HELLO, stream=True)]
        assert len(pieces) > 2 and "".join(filter(None, pieces)) == "Hello there"


@pytest.mark.parametrize("how", ["close", "timeout"])
def test_who_leaves_ends_the_request(how: str) -> None:
    with FakeLLM("a" * 5000, token_delay=0.001) as llm:
        client = llm.openai_client(max_retries=0)
        if how == "close":
            with client.chat.completions.create(**HELLO, stream=True) as stream:
                next(stream)
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.05).chat.completions.create(**HELLO)
        while llm.statistics().num_running:
            pass
        assert llm.statistics().num_aborted == 1


def test_threads_share_a_client() -> None:
    with FakeLLM(lambda request: request.text, token_delay=0.0005) as llm:
        client, together = llm.openai_client(), threading.Barrier(4)

        def ask(text: str) -> Any:
            together.wait()
            messages: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="fake", messages=messages).choices[0].message.content

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, "abcd")) == list("abcd")


def test_errors_have_the_engines_beside_them() -> None:
    full = EngineOverloadedError("full", retry_after=1.0)
    with FakeLLM(full) as llm:
        client = llm.openai_client(max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**HELLO)
        assert caught.value.request.extensions[ERRORS] == [full]
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(**HELLO)


async def test_an_engine_on_the_loop_has_none() -> None:
    async with FakeAsyncLLM("yes", own_thread=True) as engine:
        assert isinstance(engine.sync.openai_client(), openai.OpenAI)
    async with FakeAsyncLLM("yes") as engine:
        with pytest.raises(InvalidRequestError, match="own_thread=True"):
            _ = engine.sync
