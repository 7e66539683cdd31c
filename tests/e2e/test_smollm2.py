"""The whole engine: a real model in a real worker process, against transformers on the same weights in float32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from conftest_api import core_of, settled
from short_model import kv_memory

from aengine import AsyncLLM, Completion, SamplingParams

PLAIN = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Deutschland ist",
]
CHAT = [
    "What is gravity?",
    "Translate 'good morning' to French.",
    "Say hello 👋 in Japanese.",
]
GREEDY = SamplingParams(max_tokens=24, temperature=0)
EXACT: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 256 * 2**20}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exact(smollm2: str) -> AsyncIterator[AsyncLLM]:
    """One engine for the tests that need no other settings; each test's prompts may be in its prefix cache."""
    async with AsyncLLM(smollm2, **EXACT) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pressed(smollm2: str) -> AsyncIterator[AsyncLLM]:
    """Prompts in chunks, and memory for 112 tokens: requests that are admitted soon outgrow it, in blocks of four."""
    small = {
        "kv_cache_memory_bytes": kv_memory(smollm2, 5 * 2**20),
        "max_model_len": 96,
        "block_size": 4,
        "max_num_batched_tokens": 32,
    }
    async with AsyncLLM(smollm2, **(EXACT | small)) as engine:
        yield engine


def prompts_of(engine: AsyncLLM) -> list[list[int]]:
    tokenizer = core_of(engine).tokenizer
    chats = (tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in CHAT)
    return [tokenizer.encode(text) for text in PLAIN] + [tokenizer.encode(c, add_special_tokens=False) for c in chats]


async def all_at_once(engine: AsyncLLM, params: SamplingParams = GREEDY) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(ids, params) for ids in prompts_of(engine))))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_greedy_equals_transformers_alone_batched_chunked_cached_preempted(
    judge: Any, exact: AsyncLLM, pressed: AsyncLLM
) -> None:
    """Up to 24 tokens of each prompt; every way of computing them gives transformers' tokens."""
    prompts = prompts_of(exact)
    some = [0, 6]
    for i in some:
        judge.check_greedy(prompts[i], (await exact.generate(prompts[i], GREEDY)).token_ids)
    batched = await all_at_once(exact)
    assert sum(c.usage.cached_tokens for c in batched) > 0  # prefix hits, from the runs alone
    for ids, completion in zip(prompts, batched, strict=True):
        judge.check_greedy(ids, completion.token_ids)
    await settled(exact)
    completions = await all_at_once(pressed)
    assert pressed.statistics().num_preemptions > 0, pressed.statistics()
    for ids, completion in zip(prompts, completions, strict=True):
        judge.check_greedy(ids, completion.token_ids)
    await settled(pressed)


async def test_logprobs_equal_transformers(judge: Any, exact: AsyncLLM) -> None:
    prompt = prompts_of(exact)[0]
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, logprobs=5)
    completion = await exact.generate(prompt, params)
    expected = judge.logprobs(prompt, completion.token_ids)
    assert completion.logprobs is not None
    for i, (sampled, *top) in enumerate(completion.logprobs):
        assert sampled.token_id == completion.token_ids[i]
        assert abs(sampled.logprob - float(expected[i, sampled.token_id])) < 1e-3
        assert len(top) == 5
        want = expected[i].topk(5).values
        for rank, (alternative, value) in enumerate(zip(top, want.tolist(), strict=True)):
            assert abs(alternative.logprob - value) < 1e-3, (i, rank)
            assert abs(float(expected[i, alternative.token_id]) - value) < 1e-3
    await settled(exact)


async def test_a_seed_gives_the_same_tokens_in_any_company(exact: AsyncLLM, pressed: AsyncLLM) -> None:
    """Alone, in a batch, chunked and preempted: same seed, same tokens."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, top_p=0.95)
    prompts = prompts_of(exact)
    alone = [(await exact.generate(ids, params)).token_ids for ids in prompts[:3]]
    assert len(set(alone)) == 3
    together = [c.token_ids for c in await all_at_once(exact, params)]
    assert together[:3] == alone
    group = await exact.generate(prompts[0], params.replace(n=3))
    assert group.token_ids == alone[0]
    assert len({choice.token_ids for choice in group.choices}) == 3
    await settled(exact)
    assert [c.token_ids for c in await all_at_once(pressed, params)] == together
    await settled(pressed)


async def test_tokens_arrive_one_by_one(exact: AsyncLLM) -> None:
    """A stream is a stream: the first token comes long before the last is made."""
    async with exact.stream("Once upon a time", GREEDY.replace(max_tokens=400, ignore_eos=True)) as stream:
        assert (await anext(stream)).position == 0
        assert stream.finish_reasons == (None,)
    await settled(exact)
