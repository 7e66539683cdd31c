"""LiteLLM's own calls over an engine of the same process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field

from aengine import (
    ContextLengthError,
    DeadlineExceededError,
    EngineOverloadedError,
    InternalError,
    InvalidRequestError,
    WorkerDiedError,
)
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply

litellm: Any
register: Any
unregister: Any
"""Imported when the tests run: it takes five seconds, which only the process that runs them need pay."""

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),  # of its logging
]

MODEL = "local/llm"
USER = [{"role": "user", "content": "?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLS = Reply("I look.", reasoning="Hm.", tool_calls=[("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})])


class Report(BaseModel):
    city: str
    degrees: int = Field(ge=-90, le=60)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    global litellm, register, unregister
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing it asks for one over the network
    import litellm

    from aengine.integrations.litellm import register, unregister


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    yield
    unregister("local")


async def ended(engine: Any) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


def test_what_is_no_engine_is_no_provider() -> None:
    with pytest.raises(InvalidRequestError, match="engine must be an AsyncLLM or an LLM, not 5"):
        register(5, "local")  # type: ignore[arg-type]
    assert "local" not in litellm.provider_list


async def test_a_completion_with_settings_usage_and_logprobs() -> None:
    async with FakeAsyncLLM(["yes", "yes", "yes"]) as engine:
        register(engine, "local")
        response = await litellm.acompletion(
            MODEL,
            messages=[{"role": "system", "content": "Be brief."}, *USER],
            temperature=0.5,
            top_k=7,
            min_p=0.1,
            max_completion_tokens=99,
            stop=["END"],
            n=2,
            logprobs=True,
            top_logprobs=1,
            user="me",
            extra_body={"repetition_penalty": 1.5},
        )
        params = engine.requests[0].params
        assert (params.temperature, params.top_k, params.min_p, params.max_tokens) == (0.5, 7, 0.1, 99)
        assert params.stop == ("END",) and params.repetition_penalty == 1.5
        assert [choice.message.content for choice in response.choices] == ["yes", "yes"]
        assert [choice.finish_reason for choice in response.choices] == ["stop", "stop"]
        assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
        assert response.usage.completion_tokens == 8
        tokens = response.choices[0].logprobs.content
        assert [token.token for token in tokens[:3]] == ["y", "e", "s"] and len(tokens[0].top_logprobs) == 1
        again = [*USER, response.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
        await litellm.acompletion(MODEL, messages=again)
        assert [message["role"] for message in engine.requests[-1].messages] == ["user", "assistant", "user"]


async def test_a_loop_of_tools_and_an_answer_of_a_schema() -> None:
    replies = [CALLS, "It is fine.", Report(city="Paris", degrees=21), {"a": 1}]
    async with FakeAsyncLLM(replies, reasoning=True) as engine:
        register(engine, "local")
        response = await litellm.acompletion(MODEL, messages=USER, tools=TOOLS, tool_choice="auto")
        message = response.choices[0].message
        assert response.choices[0].finish_reason == "tool_calls" and message.reasoning_content == "Hm."
        assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Paris"}', '{"city": "Rome"}']
        results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls]
        response = await litellm.acompletion(MODEL, messages=[*USER, message, *results], tools=TOOLS)
        assert response.choices[0].message.content == "It is fine."
        assert len(engine.requests[1].messages[1]["tool_calls"]) == 2
        response = await litellm.acompletion(MODEL, messages=USER, response_format=Report)
        assert Report.model_validate_json(response.choices[0].message.content) == Report(city="Paris", degrees=21)
        assert engine.requests[2].params.structured_output.json_schema["required"] == ["city", "degrees"]
        await litellm.acompletion(MODEL, messages=USER, response_format={"type": "json_object"})
        assert engine.requests[3].params.structured_output.json_object


async def test_a_stream_of_chunks_is_what_the_whole_answer_is() -> None:
    async with FakeAsyncLLM(CALLS, reasoning=True, token_delay=0.0005) as engine:
        register(engine, "local")
        stream = await litellm.acompletion(
            MODEL, messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert len(chunks) > 20 and len({chunk.id for chunk in chunks}) == 1
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
        assert reasons == ["tool_calls"] and chunks[-1].usage.completion_tokens > 50
        fields = [chunk.choices[0].delta.provider_specific_fields or {} for chunk in chunks]
        assert "".join(field.get("reasoning_content", "") for field in fields) == "Hm."
        whole = litellm.stream_chunk_builder(chunks).choices[0].message
        assert whole.content == "I look."
        assert [call.function.arguments for call in whole.tool_calls] == ['{"city": "Paris"}', '{"city": "Rome"}']
        assert len({call.id for call in whole.tool_calls}) == 2


ERRORS = [
    (ContextLengthError(9, 5), "ContextWindowExceededError"),
    (EngineOverloadedError("full", retry_after=2.0), "RateLimitError"),
    (DeadlineExceededError("late", deadline=1.0), "Timeout"),
    (InvalidRequestError("wrong"), "BadRequestError"),
    (WorkerDiedError("gone"), "ServiceUnavailableError"),
    (InternalError("bug"), "InternalServerError"),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=[expected for _, expected in ERRORS])
async def test_errors_are_litellms(error: Exception, expected: str) -> None:
    async with FakeAsyncLLM([error, Reply("so f", error=error)]) as engine:
        register(engine, "local")
        with pytest.raises(getattr(litellm, expected)) as caught:
            await litellm.acompletion(MODEL, messages=USER)
        assert caught.value.__cause__ is error and caught.value.llm_provider == "local"
        if isinstance(error, EngineOverloadedError):
            assert caught.value.response.headers["retry-after"] == "2.0"
        with pytest.raises((getattr(litellm, expected), litellm.exceptions.MidStreamFallbackError)):
            async for _ in await litellm.acompletion(MODEL, messages=USER, stream=True):
                pass


async def test_what_cannot_be_asked_is_a_bad_request() -> None:
    async with FakeAsyncLLM("word " * 2000, token_delay=0.001) as engine:
        register(engine, "local")
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        for wrong, said in [({"colour": "red"}, "colour"), ({"temperature": -1}, "temperature")]:
            with pytest.raises(litellm.BadRequestError, match=said):
                await litellm.acompletion(MODEL, messages=USER, **wrong)
        with pytest.raises(litellm.BadRequestError):
            await litellm.acompletion(MODEL, messages=[{"role": "user", "content": image}])
        with pytest.raises(litellm.BadRequestError, match="n can't be streamed"):
            async for _ in await litellm.acompletion(MODEL, messages=USER, n=2, stream=True):
                pass
        with pytest.raises(litellm.Timeout):
            await litellm.acompletion(MODEL, messages=USER, timeout=0.05)
        with pytest.raises(litellm.BadRequestError, match="own_thread=True"):
            litellm.completion(MODEL, messages=USER)
        task = asyncio.ensure_future(litellm.acompletion(MODEL, messages=USER))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        engine.abort_all()
        with pytest.raises(litellm.BadRequestError, match="aborted"):
            await task


async def test_a_router_tries_again_and_elsewhere() -> None:
    replies = [EngineOverloadedError("full", retry_after=0.01), "yes", WorkerDiedError("gone"), "other"]
    async with FakeAsyncLLM(replies) as engine:
        register(engine, "local")
        models = [
            {"model_name": name, "litellm_params": {"model": f"local/{name}"}} for name in ("first", "second", "third")
        ]
        router = litellm.Router(model_list=models, num_retries=1, fallbacks=[{"third": ["second"]}])
        response = await router.acompletion("first", messages=USER)
        assert response.choices[0].message.content == "yes"
        response = await router.acompletion("third", messages=USER, num_retries=0)
        assert response.choices[0].message.content == "other" and response.model == "second"


@pytest.mark.parametrize("how", ["close", "drop", "task"])
async def test_who_leaves_ends_the_request(how: str) -> None:
    async with FakeAsyncLLM("word " * 2000, token_delay=0.001) as engine:
        register(engine, "local")
        if how == "task":
            task = asyncio.ensure_future(litellm.acompletion(MODEL, messages=USER))
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
        else:
            stream = await litellm.acompletion(MODEL, messages=USER, stream=True)
            await anext(stream)
            if how == "close":
                await stream.aclose()
            del stream
        await ended(engine)
        assert engine.statistics().num_aborted == 1


def test_blocking_calls_over_a_thread_of_its_own() -> None:
    with FakeLLM("yes", token_delay=0.0005) as engine:
        register(engine, "local")
        assert litellm.completion(MODEL, messages=USER).choices[0].message.content == "yes"
        chunks = litellm.completion(MODEL, messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "yes"


async def test_names_are_registered_replaced_and_taken_back() -> None:
    providers, handlers = list(litellm.provider_list), list(litellm.custom_provider_map)
    async with FakeAsyncLLM("one") as first, FakeAsyncLLM("two") as second:
        register(first, "local")
        assert (await litellm.acompletion(MODEL, messages=USER)).choices[0].message.content == "one"
        assert register(second, "local").engine is second
        assert (await litellm.acompletion("local/other", messages=USER)).choices[0].message.content == "two"
        assert unregister("local") and not unregister("local")
        assert litellm.provider_list == providers and litellm.custom_provider_map == handlers
        for name in ("openai", "a/b", ""):
            with pytest.raises(InvalidRequestError, match="name"):
                register(first, name)
