"""Models with windows through the whole engine: bounded KV, a death, several completions; and the dtype of KV."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable

import pytest
from test_every_architecture import Model, models, one_thread, running

from aengine import SamplingParams

__all__ = ["models", "one_thread"]  # fixtures

PAGE_BYTES = 3 * 2 * 2 * 8 * 4 * 4
WINDOW, BLOCK = 7, 4  # of tiny.py's Mistral


@pytest.fixture
def mistral(models: Callable[[str], Model]) -> Model:
    return models("mistral")


async def test_kv_of_a_window_stays_bounded_and_the_context_passes_the_pool(mistral: Model, rng: random.Random) -> None:
    """A pool of 40 tokens, and two contexts of 180, while each holds little more than its window."""
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    prompts = [[rng.randrange(320) for _ in range(30)] for _ in range(2)]
    sizes = {"kv_cache_memory_bytes": 10 * PAGE_BYTES, "max_model_len": 200, "max_num_batched_tokens": 16}
    async with running(mistral, **sizes) as engine:
        assert engine.describe()["kv_groups"] == [["window", BLOCK, WINDOW, 0]]
        assert engine.describe()["num_blocks"] == 10 and engine.describe()["max_model_len"] == 200
        used: list[int] = []

        async def generate(prompt: list[int]) -> list[int]:
            ids = []
            async for token in engine.stream(prompt, params):
                ids.append(token.token_id)
                if len(ids) > 4:  # the prompts are through
                    statistics = engine.statistics()
                    used.append(statistics.num_blocks - statistics.num_free_blocks)
            return ids

        for prompt, output in zip(prompts, await asyncio.gather(*map(generate, prompts)), strict=True):
            mistral.check_greedy(prompt, output, len(output))
        assert 0 < max(used) <= 10
        alone = await generate(prompts[0])
        mistral.check_greedy(prompts[0], alone, 150)
        assert max(used[-100:]) <= -(-(WINDOW + 2) // BLOCK) + 2


@pytest.mark.parametrize("name", ["mistral", "mixed"])
async def test_a_death_costs_no_token(models: Callable[[str], Model], rng: random.Random, name: str) -> None:
    model = models(name)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (3, 25, 50)]
    async with running(model, max_leased_steps=0) as engine:  # else a late loop may find all done by then
        streams = [engine.stream(prompt, params) for prompt in prompts]
        outputs: list[list[int]] = [[] for _ in prompts]

        async def read(i: int) -> None:
            async for token in streams[i]:
                outputs[i].append(token.token_id)
                if i == 0 and len(outputs[0]) == 15:
                    os.kill(engine.describe()["pid"], signal.SIGKILL)

        await asyncio.gather(*map(read, range(len(prompts))))
        assert engine.statistics().num_restarts == 1
        for prompt, output in zip(prompts, outputs, strict=True):
            model.check_greedy(prompt, output, 40)


@pytest.mark.parametrize("name", ["mistral", "mixed"])
async def test_several_completions_share_a_prompt(
    models: Callable[[str], Model], rng: random.Random, name: str
) -> None:
    model = models(name)
    prompt = [rng.randrange(320) for _ in range(50)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, n=3)
    async with running(model) as engine:
        completion = await engine.generate(prompt, params)
        assert len(completion.choices) == 3
        for choice in completion.choices:
            model.check_greedy(prompt, choice.token_ids, 20)
        assert engine.statistics().prefix_cache_hits == 2 * 48


@pytest.mark.parametrize("name", ["mistral", "mixed"])
async def test_a_burst_with_a_common_beginning_computes_it_once(
    models: Callable[[str], Model], rng: random.Random, name: str
) -> None:
    """The first is cancelled while the others wait for it: one of them computes it then."""
    model = models(name)
    common = [rng.randrange(320) for _ in range(140)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    async with running(model, max_model_len=200) as engine:
        prompts = [[*common, rng.randrange(320), i] for i in range(6)]
        first = engine.stream([*common, 319], params)
        others = [asyncio.create_task(engine.generate(prompt, params)) for prompt in prompts]
        while not engine.statistics().num_running:
            await asyncio.sleep(0)
        await first.aclose()
        for prompt, completion in zip(prompts, await asyncio.gather(*others), strict=True):
            model.check_greedy(prompt, completion.token_ids, 12)
        assert engine.statistics().prefix_cache_hits in (5 * 140, 6 * 140)  # its answer may have come before its end


async def test_kv_in_a_dtype_of_its_own(mistral: Model, rng: random.Random) -> None:
    """Half the bytes; the tokens are those of rounded keys and values, whatever the step that computed them."""
    prompt = [rng.randrange(320) for _ in range(40)]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    async with running(mistral) as engine:
        whole = engine.describe()
        assert whole["kv_cache_dtype"] == "float32"
    for tokens in (512, 16):
        async with running(mistral, kv_cache_dtype="bfloat16", max_num_batched_tokens=tokens) as engine:
            half = engine.describe()
            assert half["kv_cache_dtype"] == "bfloat16" and half["dtype"] == "float32"
            assert half["kv_cache_bytes"] / half["num_blocks"] * 2 == whole["kv_cache_bytes"] / whole["num_blocks"]
            completion = await engine.generate(prompt, params)
            mistral.check_greedy(prompt, completion.token_ids, 30, most=0.5)


async def test_kv_in_eight_bits(mistral: Model, rng: random.Random) -> None:
    """A quarter of the bytes of 32 bits; the same tokens alone and together, in chunks, and from another worker."""
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (40, 7, 25)]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    async with running(mistral) as engine:
        whole = engine.describe()
        assert whole["kv_cache_scales"] == ""
    outputs = []
    for tokens in (512, 16):
        async with running(mistral, kv_cache_dtype="fp8", max_num_batched_tokens=tokens) as engine:
            eighth = engine.describe()
            assert (eighth["kv_cache_dtype"], eighth["kv_cache_scales"]) == ("fp8", "calibrated")
            assert eighth["kv_cache_bytes"] / eighth["num_blocks"] * 4 == whole["kv_cache_bytes"] / whole["num_blocks"]
            together = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            outputs.append([completion.token_ids for completion in together])
            os.kill(engine.describe()["pid"], signal.SIGKILL)
            outputs.append([(await engine.generate(prompt, params)).token_ids for prompt in prompts])
    for i, prompt in enumerate(prompts):
        mistral.check_greedy(prompt, outputs[0][i], 30, most=2.0)
    for other in outputs[1:]:  # A number in the middle between two codes becomes either, by the shape of its batch.
        assert sum(one != first for one, first in zip(other, outputs[0], strict=True)) <= 1
