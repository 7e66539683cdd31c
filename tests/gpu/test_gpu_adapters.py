"""LoRA adapters of requests on a GPU, under captured graphs: tokens are those of models whose weights were merged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_models import Checkpoint
from lora_files import merged, write_adapter
from test_gpu_engine import running

from aengine import AsyncLLM, SamplingParams

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1)
Answer = tuple[list[int], list[float]]


async def answer(engine: AsyncLLM, prompt: list[int], name: str | None) -> Answer:
    found = await engine.generate(prompt, PARAMS, lora=name)
    assert found.logprobs is not None
    return list(found.token_ids), [one.logprob or 0.0 for (one, *_) in found.logprobs]


class Likeness:
    """How much answers are like those that are wanted, up to each one's first token that is another."""

    def __init__(self) -> None:
        self.differences: list[float] = []  # of log-probabilities
        self.num_same, self.num_wanted = 0, 0

    def add(self, found: Answer, wanted: Answer) -> None:
        self.num_wanted += len(wanted[0])
        for own, other, value, expected in zip(found[0], wanted[0], found[1], wanted[1], strict=True):
            self.differences.append(abs(value - expected))
            if own != other:
                break
            self.num_same += 1

    def check(self, tolerance: float, least: float) -> None:
        """Nine of ten log-probabilities differ by less than ``tolerance``, and ``least`` of the tokens are the same:
        rounding may choose another expert, or the other of two tokens."""
        assert sorted(self.differences)[len(self.differences) * 9 // 10] < tolerance
        assert self.num_same >= least * self.num_wanted, (self.num_same, self.num_wanted)


@pytest.mark.parametrize(
    ("arch", "dtype", "tolerance", "least"),
    [
        ("qwen3_moe", "float32", 2e-3, 0.97),
        ("qwen3_moe", "bfloat16", 0.4, 0.3),
        ("gpt_oss", "float32", 2e-3, 0.97),
        ("llama", "float32", 2e-3, 0.97),
    ],
)
async def test_the_tokens_of_merged_models(
    arch: str,
    dtype: str,
    tolerance: float,
    least: float,
    checkpoint: Callable[..., Checkpoint],
    tmp_path: Path,
    rng: random.Random,
) -> None:
    """Of several ranks side by side, and of none, in chunks, while one adapter is loaded in place of another."""
    base = checkpoint(arch).folder
    ranks = {"a": 3, "b": 16, "c": 8}
    paths = {
        name: write_adapter(tmp_path / name, base, rng, rank, is_stacked=name == "b") for name, rank in ranks.items()
    }
    prompts = [[rng.randrange(250) for _ in range(rng.randint(3, 60))] for _ in range(6)]
    asked = [(prompt, name) for prompt in prompts for name in (None, *paths)]
    settings: dict[str, Any] = {"dtype": dtype}
    wanted: dict[str | None, list[Answer]] = {}
    for name in (None, "a", "b"):  # the third one takes their places
        model = base if name is None else merged(tmp_path / f"merged-{name}", base, paths[name])
        async with running(model, **settings, enforce_eager=True) as engine:
            wanted[name] = await asyncio.gather(*(answer(engine, prompt, None) for prompt in prompts))
    assert len({str(own) for own in wanted.values()}) == 3
    loras = {name: str(path) for name, path in paths.items()}
    own = settings | {"max_loras": 2, "max_num_batched_tokens": 64}
    async with running(base, **own, loras=loras) as engine:
        for _ in range(2):
            found = await asyncio.gather(*(answer(engine, *one) for one in asked))
            likeness = Likeness()
            for (prompt, name), ids in zip(asked, found, strict=True):
                if name in wanted:
                    likeness.add(ids, wanted[name][prompts.index(prompt)])
            likeness.check(tolerance, least)


async def test_many_tokens_have_adapters_of_experts(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path, rng: random.Random
) -> None:
    """Prompts of more pairs than are blocks by themselves."""
    base = checkpoint("qwen3_moe", size="long").folder
    paths = {name: write_adapter(tmp_path / name, base, rng, 5, is_stacked=name == "b") for name in "ab"}
    prompts = [[rng.randrange(250) for _ in range(1200)] for _ in range(4)]
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 4096}
    settings |= {"kv_cache_memory_bytes": 1 << 28}
    async with running(base, **settings, loras={name: str(path) for name, path in paths.items()}) as engine:
        found = {name: await asyncio.gather(*(answer(engine, one, name) for one in prompts)) for name in "ab"}
    for name, path in paths.items():
        async with running(merged(tmp_path / f"merged-{name}", base, path), **settings, enforce_eager=True) as engine:
            likeness = Likeness()
            for prompt, own in zip(prompts, found[name], strict=True):
                likeness.add(own, await answer(engine, prompt, None))
            likeness.check(5e-3, 0.9)
