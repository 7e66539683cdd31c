"""Adapters through whole engines with real workers: tokens are those of models whose weights were merged with them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import ALL, merged, write_adapter
from safetensors.torch import load_file
from tiny import write_tiny_model

from aengine import AsyncLLM, InvalidRequestError, ModelLoadError, SamplingParams
from aengine.engine.pooling.requests import ScoredCompletion

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer": True,
    "dtype": "float32",
    "max_model_len": 128,
    "kv_cache_memory_bytes": 1 << 24,
}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
SEEDED = GREEDY.replace(temperature=0.8, seed=5)


TENSOR: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
]
SCORED = [1, 2, 3, 4, 5], [[5, 6], [7]]
ENGINES: list[dict[str, Any]] = [
    {"speculation": "suffix"},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2},
]


async def tokens(engine: AsyncLLM, prompt: list[int], params: SamplingParams, name: str | None = None) -> list[int]:
    return list((await engine.generate(prompt, params, lora=name)).token_ids)


async def test_each_request_is_as_by_a_merged_model(tmp_path: Path, rng: random.Random) -> None:
    """Side by side, with more adapters than places; while one is added; and when a worker is killed in the middle."""
    base = write_tiny_model(tmp_path / "base", "llama", **SIZES)
    paths = {name: write_adapter(tmp_path / name, base, rng, rank) for name, rank in (("a", 4), ("b", 8), ("c", 2))}
    prompts = [[rng.randrange(250) for _ in range(20)] for _ in range(4)]
    asked = [(prompt, params, name) for name in (None, *"abc") for prompt in prompts for params in (GREEDY, SEEDED)]
    rng.shuffle(asked)
    models = {None: base} | {name: merged(tmp_path / f"merged_{name}", base, path) for name, path in paths.items()}
    wanted: dict[Any, list[int]] = {}
    scores: dict[str | None, list[ScoredCompletion]] = {}
    for name, model in models.items():
        async with AsyncLLM(str(model), **SETTINGS) as engine:
            own = [one for one in asked if one[2] == name]
            found = await asyncio.gather(*(tokens(engine, prompt, params) for prompt, params, _ in own))
            scores[name] = await engine.score_completions(*SCORED)
            wanted |= {(*prompt, params.seed, name): ids for (prompt, params, _), ids in zip(own, found, strict=True)}
    assert len({tuple(ids) for ids in wanted.values()}) > len(wanted) // 2

    loras = {name: str(paths[name]) for name in "ab"}
    for settings in ENGINES:
        # With leased steps a loop that is late may find all done when it kills a worker.
        own = SETTINGS | {"max_leased_steps": 0, "max_loras": 2, "max_lora_rank": 8} | settings
        async with AsyncLLM(str(base), **own, loras=loras) as engine:
            config = json.loads((paths["c"] / "adapter_config.json").read_text())
            await engine.add_lora("c", load_file(paths["c"] / "adapter_model.safetensors"), config=config)
            for name, expected in scores.items():
                for one, wish in zip(await engine.score_completions(*SCORED, lora=name), expected, strict=True):
                    assert one.logprobs == pytest.approx(wish.logprobs, abs=1e-3), (name, settings)
            for is_killed in (False, True):
                running = [asyncio.create_task(tokens(engine, *one)) for one in asked]
                if is_killed:
                    while not any(one["num_running"] for one in (await engine.list_loras()).values()):
                        await asyncio.sleep(0.001)
                    os.kill(engine.describe()["pid"], signal.SIGKILL)
                for (prompt, params, name), ids in zip(asked, await asyncio.gather(*running), strict=True):
                    assert ids == wanted[(*prompt, params.seed, name)], (name, is_killed, settings)
            assert engine.statistics().num_restarts == 1


async def test_shared_experts(tmp_path: Path, rng: random.Random) -> None:
    """Requests of two replicas that share experts, with adapters of what is no expert. Those of experts are refused."""
    base = write_tiny_model(tmp_path / "base", "qwen3_moe")
    paths = {name: write_adapter(tmp_path / name, base, rng, 4, ALL[:4]) for name in "ab"}
    prompts = [[rng.randrange(200) for _ in range(9)] for _ in range(4)]
    division = {"data_parallel_size": 2, "enable_expert_parallel": True}
    loras = {name: str(path) for name, path in paths.items()}
    whole = write_adapter(tmp_path / "whole", base, rng, 4)
    with pytest.raises(ModelLoadError, match="max_lora_expert_rank=4: replicas that share experts"):
        await AsyncLLM(str(base), **SETTINGS, **division, loras={"whole": str(whole)}).start()
    async with AsyncLLM(str(base), **SETTINGS, **division, loras=loras) as engine:
        with pytest.raises(InvalidRequestError, match="max_lora_expert_rank=0"):
            await engine.add_lora("whole", str(whole))
        asked = [(prompt, name) for prompt in prompts for name in (None, *"ab")]
        found = await asyncio.gather(*(tokens(engine, prompt, GREEDY, name) for prompt, name in asked))
    for name, path in paths.items():
        async with AsyncLLM(str(merged(tmp_path / f"merged_{name}", base, path)), **SETTINGS) as engine:
            for (prompt, own), ids in zip(asked, found, strict=True):
                if own == name:
                    assert ids == await tokens(engine, prompt, GREEDY)


@pytest.mark.parametrize(
    ("arch", "divisions"), [("mixtral", [{}, {"pipeline_parallel_size": 2}]), ("qwen3_moe", TENSOR)]
)
async def test_adapters_of_experts(
    arch: str, divisions: list[dict[str, Any]], tmp_path: Path, rng: random.Random
) -> None:
    """In both of PEFT's forms, with other ranks than the rest has, alone and divided, in parts and side by side."""
    base = write_tiny_model(tmp_path / "base", arch, **SIZES)
    stacked = write_adapter(tmp_path / "stacked", base, rng, 4, is_stacked=True)
    paths = {"stacked": stacked, "each": write_adapter(tmp_path / "each", base, rng, 7)}
    prompts = [[rng.randrange(250) for _ in range(rng.randint(5, 40))] for _ in range(4)]
    asked = [(prompt, name) for prompt in prompts for name in (None, *paths)]
    wanted: dict[str | None, list[list[int]]] = {}
    models = {None: base} | {name: merged(tmp_path / f"merged_{name}", base, path) for name, path in paths.items()}
    for name, model in models.items():
        async with AsyncLLM(str(model), **SETTINGS) as engine:
            wanted[name] = await asyncio.gather(*(tokens(engine, prompt, GREEDY) for prompt in prompts))
    assert len({str(own) for own in wanted.values()}) == 3
    loras = {name: str(path) for name, path in paths.items()}
    for division in divisions:
        settings = SETTINGS | {"max_num_batched_tokens": 16} | division
        async with AsyncLLM(str(base), **settings, loras=loras) as engine:
            found = await asyncio.gather(*(tokens(engine, prompt, GREEDY, name) for prompt, name in asked))
        for (prompt, name), ids in zip(asked, found, strict=True):
            assert ids == wanted[name][prompts.index(prompt)], (name, division)


@pytest.mark.parametrize("level", [1, 2])
async def test_adapters_outlast_a_sleep(tmp_path: Path, rng: random.Random, level: int) -> None:
    """Of requests in the middle, of those that wake the engine, and one that could not be loaded meanwhile."""
    base = write_tiny_model(tmp_path / "base", "llama", **SIZES)
    loras = {name: str(write_adapter(tmp_path / name, base, rng, 4)) for name in "abc"}
    prompt = [rng.randrange(250) for _ in range(20)]
    async with AsyncLLM(str(base), **SETTINGS, loras=loras, max_loras=3) as engine:
        wanted = [await tokens(engine, prompt, GREEDY, name) for name in (None, *"abc")]
    assert len({tuple(ids) for ids in wanted}) == 4
    async with AsyncLLM(str(base), **SETTINGS, loras=loras, max_loras=3) as engine:
        running = [asyncio.create_task(tokens(engine, prompt, GREEDY, name)) for name in (None, *"ab")]
        while not engine.statistics().generated_tokens:
            await asyncio.sleep(0.001)
        await engine.sleep(level)
        await engine.pin_lora("c")
        assert await tokens(engine, prompt, GREEDY, "c") == wanted[3]
        assert [await one for one in running] == wanted[:3]


async def test_what_only_a_worker_sees_fails_its_requests_alone(tmp_path: Path, rng: random.Random) -> None:
    base = write_tiny_model(tmp_path / "base", "llama", **SIZES)
    good = write_adapter(tmp_path / "good", base, rng, 4)
    nan = write_adapter(tmp_path / "nan", base, rng, 4, change=lambda own: next(iter(own.values())).fill_(torch.nan))
    loras = {"good": str(good), "nan": str(nan)}
    async with AsyncLLM(str(base), **SETTINGS, loras=loras) as engine:
        before = await tokens(engine, [1, 2, 3], GREEDY)
        results = await asyncio.gather(
            *(tokens(engine, [1, 2, 3], GREEDY, name) for name in ("good", "nan", None, "nan")), return_exceptions=True
        )
        assert isinstance(results[1], InvalidRequestError) and "nan" in str(results[1])
        assert isinstance(results[3], InvalidRequestError) and results[2] == before and isinstance(results[0], list)
