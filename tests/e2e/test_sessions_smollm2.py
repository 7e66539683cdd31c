"""Sessions over the real model: what a turn finds of those before it, and that its tokens are what they would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from conftest_api import user_requests

from aengine import AsyncLLM, SamplingParams, StructuredOutput

QUESTIONS = (
    "What is the capital of France?",
    "List three fruits with prices in €.",
    "What is 17*23? Show your work.",
    "Translate 'good morning' to German, French and Japanese.",
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    settings: Any = {"max_model_len": 2048, "kv_cache_memory_bytes": 128 << 20, "speculation": "suffix"}
    async with AsyncLLM("smollm2-135m", logits_processors=["callers_processors:Residues"], **settings) as engine:
        yield engine


def computed(engine: AsyncLLM, stream: Any) -> list[int]:
    """The tokens of a request that runs, its prompt's and those that have come."""
    return list(user_requests(engine)[stream.request_id].requests[0].token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_turn_finds_all_of_those_before_it(engine: AsyncLLM, temperature: float) -> None:
    """But for the block that was not full, whatever tokens the model has chosen for its words. And with the prompt's
    tokens alone the answer is the same."""
    block = engine.describe()["block_size"]
    for seed in range(2):
        async with engine.session("You are terse.") as session:
            num_known = 0
            for question in QUESTIONS:
                params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed)
                stream = session.stream(question, params)
                await anext(stream)
                known = computed(engine, stream)
                usage = (await stream.wait()).usage
                assert usage.cached_tokens >= num_known // block * block
                num_known = usage.prompt_tokens + usage.completion_tokens - 1  # the last token is computed by no step
            await engine.reset_prefix_cache()
            alone = await engine.generate(known[: usage.prompt_tokens], params)
            assert alone.token_ids == stream.completion.token_ids and alone.usage.cached_tokens == 0


ASKED: dict[str, Any] = {
    "seeds and cutoffs": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.001},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "min_tokens": {"min_tokens": 15},
    "logit_bias": {"logit_bias": {260: 3.0, 338: -5.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(300, 8000))},
    "bad_words": {"bad_words": [" the", " is"]},
    "extra_args": {"extra_args": {"residues": {"modulus": 7}}},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "n": {"n": 2, "temperature": 0.8},
    "grammars": {"structured_output": StructuredOutput(regex="[a-z ]{10,20}")},
    "without drafts": {"speculation": False},
}


async def test_what_a_turn_asks_for(engine: AsyncLLM) -> None:
    """Turns of one session, each of which asks for something else: the answer is that to the prompt's tokens alone.
    Beside them runs a fork of each."""
    async with engine.session("You are terse.") as session:
        for name, asked in ASKED.items():
            params = SamplingParams(max_tokens=20, seed=5, **{"temperature": 0, **asked})
            stream, fork = session.stream(f"Tell me about {name}.", params), session.fork()
            await anext(stream)
            known = computed(engine, stream)
            whole, other = await asyncio.gather(stream.wait(), fork.chat("Hello", params))
            await engine.reset_prefix_cache()
            alone = await engine.generate(known[: whole.usage.prompt_tokens], params)
            assert alone.usage.cached_tokens == 0 and other.usage.completion_tokens
            for ours, theirs in zip(whole.choices, alone.choices, strict=True):
                assert ours.token_ids == theirs.token_ids, name
            assert session.messages[-1]["content"] == whole.message.content


async def test_a_fork_computes_the_last_block(engine: AsyncLLM) -> None:
    """Of a conversation, and of an answer under way, which both go on as if there were no fork."""
    block = engine.describe()["block_size"]
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    async with engine.session("You are terse.", params=params) as session:
        turn = (await session.chat(QUESTIONS[1])).usage
        stream = session.stream("Count to one hundred.")
        async for _ in stream:
            if session.usage.turns[1].completion_tokens >= 3 * block:
                break
        fork = session.fork()
        rest = await fork.chat(continue_final_message=True)
        assert (
            rest.usage.cached_tokens >= (rest.usage.prompt_tokens - 1) // block * block - block
        )  # a step is under way
        assert rest.usage.cached_tokens > turn.prompt_tokens + turn.completion_tokens
        whole = await stream.wait()
        texts = [one.messages[-1]["content"] for one in (session, fork)]
        assert texts[1].startswith(texts[0]) and whole.message.content == texts[0]

        side = session.fork()
        found = (await side.chat("And now?")).usage
        last = session.usage.turns[-1]
        assert found.cached_tokens >= (last.prompt_tokens + last.completion_tokens - 1) // block * block
