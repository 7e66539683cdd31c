"""Drafts of a model in the worker, over tiny models: the same tokens, whatever is asked for."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_every_architecture import MIB, Model, models, one_thread, running
from test_speculation_workers import answers, any_cost
from tiny import write_tiny_model

from aengine import SamplingParams

__all__ = ["any_cost", "models", "one_thread"]  # fixtures

SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": MIB, "max_num_seqs": 6, "max_leased_steps": 0}


def drafted_by(folder: Path, tokens: int = 3) -> dict[str, Any]:
    return {"speculation": {"method": "draft_model", "model": str(folder), "tokens": tokens}}


async def test_the_same_tokens(models: Callable[[str], Model], tmp_path: Path) -> None:
    """By drafts of a model whose heads are of other sizes, and which so has a KV group of its own; two ranks divide
    both. With too few blocks for all, and a worker that is killed."""
    model, settings = models("llama"), SETTINGS | {"tensor_parallel_size": 2}
    folder = write_tiny_model(tmp_path / "other", "qwen2", seed=5, num_key_value_heads=1, num_hidden_layers=2)
    async with running(model, **SETTINGS) as engine:
        expected = await answers(engine, 3)
    async with running(model, **settings, **drafted_by(folder)) as engine:
        task = asyncio.create_task(answers(engine, 3))
        while engine.statistics().drafted_tokens < 100:
            await asyncio.sleep(0.001)
        os.kill(engine.describe()["pid"], signal.SIGKILL)
        assert await task == expected
        statistics = engine.statistics()
        drafts = {each.proposer: each for each in statistics.drafts}["draft_model"]
        assert drafts.drafted_tokens > 150 and statistics.num_restarts == 1
        assert engine.describe()["proposer"]["num_bytes"] > 0


async def test_a_model_that_drafts_for_itself_is_right(models: Callable[[str], Model]) -> None:
    """Each draft is accepted, of a greedy request: with prompts in chunks, hits in the prefix cache, tokens that were
    drafted for nobody before, other requests' drafts, too few blocks, and pages that are copied aside. So its keys and
    values are where they are to be; the same at the context's end."""
    model = models("llama")
    rng = random.Random(4)
    shared = [rng.randrange(320) for _ in range(30)]
    prompts = [
        shared[: rng.randint(0, 30)] + [rng.randrange(320) for _ in range(rng.randint(1, 30))] for _ in range(12)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    settings = SETTINGS | {"kv_cache_memory_bytes": MIB // 8, "max_num_batched_tokens": 16, "swap_space_bytes": MIB}
    async with running(model, **settings, **drafted_by(model.folder)) as engine:
        alone = [(await engine.generate(prompt, greedy)).token_ids for prompt in prompts]
        model.check_greedy(prompts[0], alone[0], 36)
        work = [engine.generate(p, greedy.replace(speculation=bool(i % 3))) for i, p in enumerate(prompts)]
        assert [c.token_ids for c in await asyncio.gather(*work)] == alone
        print(engine.statistics().drafts)
        # what one without drafts has got is drafted behind
        longer = [p + list(ids[:-5]) for p, ids in zip(prompts, alone, strict=True)]
        found = [(await engine.generate(p, greedy.replace(max_tokens=5))).token_ids for p in longer]
        assert found == [ids[-5:] for ids in alone]
        (last,) = [c.token_ids for c in await asyncio.gather(engine.generate(shared, greedy.replace(max_tokens=None)))]
        assert len(last) == 96 - len(shared)
        (drafts,) = engine.statistics().drafts
        print(engine.statistics().drafts)
        assert drafts.accepted_tokens == drafts.drafted_tokens > 100
        assert engine.statistics().num_preemptions > 0
