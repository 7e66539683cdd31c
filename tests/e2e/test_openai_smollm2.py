"""OpenAI's client over the real model, without a port: shapes, tools, token ids; streams say what whole answers do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from aengine import AsyncLLM, SamplingParams

MODEL = "smollm2-135m"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


class Weather(BaseModel):
    sky: Literal["sunny", "cloudy", "rainy"]
    degrees: int


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(MODEL, max_model_len=1024, kv_cache_memory_bytes=128 << 20) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(engine: AsyncLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    async with engine.openai_client(max_retries=0) as client:
        yield client


async def test_answers_have_their_shape(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather, temperature=0)
    assert isinstance(chat.choices[0].message.parsed, Weather)
    response = await client.responses.parse(model=MODEL, input=ASK, text_format=Weather, temperature=0)
    assert response.output_parsed == chat.choices[0].message.parsed
    async with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Weather, temperature=0
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == chat.choices[0].message.parsed


async def test_tools_are_called(client: openai.AsyncOpenAI) -> None:
    function: Any = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS, "strict": True}
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    tool: Any = {"type": "function", "function": function}
    chat = await client.chat.completions.create(messages=ASK, tools=[tool], **ask)
    (call,) = chat.choices[0].message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments).keys() == {"city", "unit"}
    tool = {"type": "function", **function}
    stream: Any = await client.responses.create(input=ASK, tools=[tool], stream=True, **ask)
    done = [event.item async for event in stream if event.type == "response.output_item.done"]
    assert done[-1].type == "function_call" and json.loads(done[-1].arguments) == json.loads(call.function.arguments)


async def test_texts_and_token_ids_are_completed_alike(client: openai.AsyncOpenAI) -> None:
    text = "The capital of France is"
    ids: Any = await client.with_options(base_url="http://aengine").post(
        "/tokenize", body={"prompt": text}, cast_to=dict
    )
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    both = await client.completions.create(prompt=[ids["tokens"]] * 2, **ask)
    whole = (await client.completions.create(prompt=text, **ask)).choices[0]
    assert [choice.text for choice in both.choices] == [whole.text] * 2 and "Paris" in whole.text
    logprobs = whole.logprobs
    assert logprobs is not None and logprobs.text_offset and logprobs.tokens
    for offset, token in zip(logprobs.text_offset, logprobs.tokens):
        assert whole.text[offset:].startswith(token)


async def test_words_and_tokens_that_are_not_wanted(engine: AsyncLLM, client: openai.AsyncOpenAI) -> None:
    """By the engine's own call and by OpenAI's client; the log-probabilities are the model's all the same."""
    prompt = "The capital of France is"
    greedy = SamplingParams(max_tokens=24, temperature=0)
    plain = await engine.generate(prompt, greedy.replace(logprobs=1))
    assert " Paris" in plain.text
    without = await engine.generate(prompt, greedy.replace(bad_words=["Paris", "the largest"], logprobs=1))
    assert "Paris" not in without.text and "the largest" not in without.text
    likeliest = [max(one.logprobs[0], key=lambda entry: entry.logprob) for one in (plain, without) if one.logprobs]
    assert likeliest[0].token_id == likeliest[1].token_id
    yes_no = [engine.tokenizer.encode(word)[0] for word in (" yes", " no")]
    chosen = await engine.generate(prompt, greedy.replace(allowed_token_ids=yes_no, max_tokens=5))
    assert set(chosen.token_ids) <= set(yes_no) and chosen.finish_reason == "length"
    body = {"allowed_token_ids": yes_no, "bad_words": [" yes"]}
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0, extra_body=body)
    assert answer.choices[0].text == " no no no"
