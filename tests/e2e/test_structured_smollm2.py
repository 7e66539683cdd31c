"""Structured output of a real model in a real worker: what finishes parses, alone and beside others."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import pytest_asyncio
from conftest_api import settled
from pydantic import BaseModel, Field, TypeAdapter
from short_model import kv_memory

from aengine import AsyncLLM, SamplingParams, StructuredOutput
from aengine.engine.grammar_gate import JumpForward
from aengine.engine.replicas import replica


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: str = Field(max_length=30)
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    home: Address | None
    tags: list[Literal["a", "b", "c"]] = Field(max_length=3)


@dataclass
class Point:
    x: float
    y: float


TYPES: list[Any] = [
    Person,
    Address,
    Point,
    Colour,
    Literal["yes", "no"],
    bool,
    int,
    list[Colour],
    dict[Literal["left", "right"], bool],
    Point | Address,
]
CONFIG: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 128 * 2**20, "dtype": "float32"}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm2: str) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(smollm2, **CONFIG) as engine:
        yield engine


async def test_every_answer_that_ends_is_of_its_type(engine: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=90, temperature=0.8)
    asked = [(kind, seed) for seed, kind in enumerate(TYPES)]
    completions = await asyncio.gather(
        *(
            engine.generate(f"An example in JSON of {kind}:", params.replace(seed=s), output_type=kind)
            for kind, s in asked
        )
    )
    await settled(engine)
    ended = 0
    for (kind, _), completion in zip(asked, completions):
        if completion.finish_reason == "stop":
            ended += 1
            assert completion.parse_error is None, (kind, completion.text, completion.parse_error)
            assert TypeAdapter(kind).validate_json(completion.text) == completion.parsed
        else:
            assert completion.finish_reason == "length" and completion.parsed is None
    assert ended >= len(asked) // 2, f"{ended} of {len(asked)} ended"


async def test_the_same_alone_and_beside_others_preempted_and_chunked(engine: AsyncLLM, smollm2: str) -> None:
    schema = TypeAdapter(Person).json_schema()
    shaped = SamplingParams(max_tokens=24, temperature=0.9, structured_output=StructuredOutput(json_schema=schema))
    prompts = [f"{'word ' * (12 * i)}A person as JSON:" for i in range(4)]
    alone = [await engine.generate(p, shaped.replace(seed=i)) for i, p in enumerate(prompts)]
    tight = {
        **CONFIG,
        "kv_cache_memory_bytes": kv_memory(smollm2, 5 * 2**20),
        "max_num_batched_tokens": 32,
        "max_model_len": 96,
    }
    async with AsyncLLM(smollm2, **tight, block_size=4) as small:
        plain = SamplingParams(max_tokens=30, ignore_eos=True, seed=5)
        together = await asyncio.gather(
            *(small.generate(p, shaped.replace(seed=i)) for i, p in enumerate(prompts)),
            *(small.generate(f"Story {i}", plain) for i in range(3)),
        )
        preempted = small.statistics().num_preemptions
        await settled(small)
    assert [c.text for c in together[:4]] == [c.text for c in alone]
    assert preempted > 0, "there was memory enough"


async def test_forced_tokens_change_nothing(engine: AsyncLLM, smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same texts whether they are computed together or sampled one by one, and in fewer steps."""
    schema = TypeAdapter(Person).json_schema()
    shape = StructuredOutput(json_schema=schema)
    shaped = SamplingParams(max_tokens=30, temperature=0.7, seed=4, structured_output=shape)

    async def texts_and_steps(engine: AsyncLLM) -> tuple[list[str], int]:
        done = await asyncio.gather(*(engine.generate("As JSON:", shaped.replace(seed=i)) for i in range(4)))
        await settled(engine)
        before = engine.statistics().num_steps
        done.append(await engine.generate("As JSON:", shaped))
        await settled(engine)
        return [completion.text for completion in done], engine.statistics().num_steps - before

    texts, steps = await texts_and_steps(engine)
    monkeypatch.setattr(replica, "ALWAYS", JumpForward(-1, 0.0))
    async with AsyncLLM(smollm2, **CONFIG) as plain:
        plain_texts, plain_steps = await texts_and_steps(plain)
    assert texts == plain_texts
    assert steps < plain_steps


async def test_a_grammar_with_slow_rows_beside_others(engine: AsyncLLM) -> None:
    """Each of its masks takes 25 ms and more: they are filled ahead, and everybody gets its tokens as if alone."""
    repeats = StructuredOutput(regex="[xy](a{300}){300}")
    slow = SamplingParams(max_tokens=10, temperature=0.9, logprobs=0, structured_output=repeats)
    plain = SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True)

    def calls() -> list[Any]:
        made = [engine.generate("Letters:", slow.replace(seed=i)) for i in range(2)]
        return made + [engine.generate(f"Story {i}", plain.replace(seed=i)) for i in range(2)]

    alone = [(await call).token_ids for call in calls()]
    together = [completion.token_ids for completion in await asyncio.gather(*calls())]
    await settled(engine)
    assert together == alone


def get_weather(city: str, days: int = 1) -> str:
    """Weather forecast.

    Args:
        city: Its name.
        days: How many days.
    """
    return f"{days} days of sun in {city}"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_chats_with_tools_and_a_type(engine: AsyncLLM, choice: str) -> None:
    messages = [{"role": "user", "content": "What will the weather in Paris be?"}]
    params = SamplingParams(max_tokens=80, temperature=0.7, seed=3)
    stream = engine.stream_chat(
        messages, params, tools=[get_weather], tool_choice=choice, parallel_tool_calls=False, output_type=Address
    )
    deltas = [delta async for delta in stream]
    completion = stream.completion
    await settled(engine)
    message = completion.message
    assert message == stream.message and deltas
    if choice == "required":
        assert message.tool_calls and completion.parsed is None and not message.content
    for call in message.tool_calls:
        if call.is_complete:
            assert call.name == "get_weather" and set(json.loads(call.arguments)) <= {"city", "days"}
    if completion.finish_reason == "stop" and not message.tool_calls:
        assert isinstance(completion.parsed, Address)
