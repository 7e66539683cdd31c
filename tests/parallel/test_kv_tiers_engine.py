"""Prefixes whose KV comes back from the host's memory: the answers of an engine that has room for all of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_api import core_of, saved, settled, tiers_of
from test_hybrids import MODELS
from test_pipeline_engine import SETTINGS, essence, repeating, tokens, work

from aengine import AsyncLLM, HostTier, ModelLoadError, SamplingParams
from aengine.engine.tiers.kv_tiers import KVTiers, PageJob

TinyModel = Callable[..., Path]
SMALL: dict[str, Any] = SETTINGS | {"kv_cache_memory_bytes": 1 << 18, "block_size": 4}
"""A pool for one or two of the longest requests."""
HALF = {"kv_cache_memory_bytes": 1 << 17}
"""The same of each of two ranks, which have half of each page."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3, num_hidden_layers=5)


async def test_any_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all, for a part, on ranks that have a part of each page or replicas, and when workers die."""
    async with AsyncLLM(model, **SETTINGS) as engine:
        expected = [essence(completion) for completion in await asyncio.gather(*work(engine, 1))]
    dying: list[AsyncLLM] = []
    take = KVTiers.take_fetches

    def deadly(tiers: KVTiers) -> list[PageJob]:
        jobs = take(tiers)
        while jobs and dying:  # the copy is not even begun
            os.kill(core_of(dying.pop()).replicas[0].worker.executor.workers[-1].pid, signal.SIGKILL)
        return jobs

    monkeypatch.setattr(KVTiers, "take_fetches", deadly)
    for ranks, num_bytes, dies in (
        ({}, 1 << 24, True),
        ({}, 1 << 18, False),
        ({"tensor_parallel_size": 2} | HALF, 1 << 24, True),
        ({"pipeline_parallel_size": 2} | HALF, 1 << 24, True),
        ({"data_parallel_size": 2}, 1 << 24, False),
    ):
        async with AsyncLLM(model, kv_tiers=[HostTier(num_bytes)], **SMALL | ranks) as engine:
            for turn in range(2):
                assert [essence(completion) for completion in await asyncio.gather(*work(engine, 1))] == expected
                await saved(engine)
                dying += [engine] * (dies and not turn)
            assert engine.statistics().num_restarts == dies
            await settled(engine)
            num_fetched = sum(tiers_of(engine, i).num_fetched for i in range(len(core_of(engine).replicas)))
            assert num_fetched or num_bytes < 1 << 24


@pytest.mark.parametrize("name", ["gemma2", "qwen3-next", "qwen3_moe", "by transformers"])
async def test_models(name: str, tiny_model: TinyModel) -> None:
    """Windows, states, experts, and a model that transformers computes."""
    arch, fields = MODELS.get(name, (name, {"sliding_window": 9} if name == "gemma2" else {}))
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "num_threads": 1, "max_num_seqs": 2}
    if name == "by transformers":
        arch, settings["model_impl"] = "qwen3", "transformers"
    folder = tiny_model(arch, seed=7, **fields, max_position_embeddings=1024)
    prompts = [[(i * 7 + j * 3) % 200 + 20 for j in range(600)] for i in range(6)]
    async with AsyncLLM(folder, skip_tokenizer=True, kv_cache_memory_bytes=1 << 25, **settings) as engine:
        expected = [(await engine.generate(prompt, GREEDY)).token_ids for prompt in prompts]
        ready = core_of(engine).replicas[0].worker.ready
    pool = 3 * ready["kv_cache_bytes"] // ready["num_blocks"] * (600 // ready["block_size"] + 8)
    async with AsyncLLM(
        folder, skip_tokenizer=True, kv_cache_memory_bytes=pool, kv_tiers="host:64MB", **settings
    ) as engine:
        for _ in range(2):
            for prompt, wanted in zip(prompts, expected, strict=True):
                assert (await engine.generate(prompt, GREEDY)).token_ids == wanted
            await saved(engine)
        (tier,) = engine.statistics().kv_tiers
        assert tier.num_fetched and tier.num_bytes and not tier.num_lost


async def test_fp8_and_drafts(model: Path) -> None:
    """Pages as they are. One request may have met a number in the middle between two codes."""
    async with AsyncLLM(model, kv_cache_dtype="fp8", **SETTINGS) as engine:
        expected = [tokens(completion) for completion in await asyncio.gather(*repeating(engine, 1))]
    settings = {"kv_cache_dtype": "fp8", "kv_tiers": "host:16MB", "speculation": "ngram_worker"}
    async with AsyncLLM(model, **SMALL | {"kv_cache_memory_bytes": 1 << 16} | settings) as engine:
        for _ in range(2):
            found = [tokens(completion) for completion in await asyncio.gather(*repeating(engine, 1))]
            assert sum(ours != wanted for ours, wanted in zip(found, expected, strict=True)) <= 1
            await saved(engine)
        assert tiers_of(engine).num_fetched


async def test_sleep_keeps_it_and_a_reset_does_not(model: Path) -> None:
    prompt = list(range(20, 90))
    async with AsyncLLM(model, kv_tiers=[HostTier("16MB")], **SMALL) as engine:
        expected = (await engine.generate(prompt, GREEDY)).token_ids
        await saved(engine)
        tiers = tiers_of(engine)
        await engine.sleep()
        await engine.wake_up()
        completion = await engine.generate(prompt, GREEDY)
        assert completion.token_ids == expected and completion.usage.cached_tokens and tiers.num_fetched
        await engine.reset_prefix_cache()
        assert tiers.num_kept == 0
        completion = await engine.generate(prompt, GREEDY)
        assert completion.token_ids == expected and not completion.usage.cached_tokens


async def test_a_salt_is_a_tenants_own(model: Path) -> None:
    prompt = list(range(20, 90))
    async with AsyncLLM(model, kv_tiers=[HostTier("16MB")], **SMALL) as engine:
        await engine.generate(prompt, GREEDY, cache_salt="one")
        await saved(engine)
        await engine.sleep()
        await engine.wake_up()
        assert not (await engine.generate(prompt, GREEDY, cache_salt="two")).usage.cached_tokens
        assert not tiers_of(engine).num_fetched
        assert (await engine.generate(prompt, GREEDY, cache_salt="one")).usage.cached_tokens


@pytest.mark.parametrize(("size", "why"), [("100B", "no room for a page"), ("900TB", "are free")])
async def test_a_size_that_is_of_no_use_is_refused(model: Path, size: str, why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        async with AsyncLLM(model, kv_tiers=[HostTier(size)], **SMALL):
            pass
