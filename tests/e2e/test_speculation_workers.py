"""Drafts by lookup in real worker processes, over tiny models: fewer steps, the same tokens, whatever is asked for."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from searches import every_step_has_a_search  # noqa: F401
from test_every_architecture import MIB, Model, models, one_thread, running

from aengine import AsyncLLM, Completion, SamplingParams
from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget

__all__ = ["models", "one_thread"]  # fixtures


def make_work(seed: int, count: int = 14) -> list[tuple[list[int], SamplingParams]]:
    """Requests of any kind. Half of the prompts repeat themselves; tiny models say the same over and over, too."""
    rng, work = random.Random(seed), []
    for i in range(count):
        prompt = [rng.randrange(320) for _ in range(rng.randint(1, 20))] * rng.choice([1, 2])
        max_tokens = rng.randint(10, 50)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.3]),
            seed=i,
            n=rng.choice([1, 1, 2]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            logit_bias=rng.choice([{}, {5: 3.0, 9: -3.0}, {20: 30.0, 21: 29.0}]),  # with the last they say the same
            logprobs=rng.choice([None, 2]),
            min_tokens=rng.choice([0, 0, 8]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.2]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.1]),
            stop_token_ids=rng.choice([(), (7, 8, 9)]),
            max_tokens=max_tokens,
        )
        work.append((prompt, params))
    return work


def essence(completion: Completion) -> Any:
    return [(choice.token_ids, choice.finish_reason, len(choice.logprobs or ())) for choice in completion.choices]


async def answers(engine: AsyncLLM, *seed_and_count: int) -> list[Any]:
    work = (engine.generate(*one) for one in make_work(*seed_and_count))
    return [essence(c) for c in await asyncio.gather(*work)]


@pytest.fixture(autouse=True)
def any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are granted whatever the steps of these small models take on a machine that may be busy."""
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(16))


@pytest.mark.parametrize(("arch", "speculation"), [("llama", "ngram_worker"), ("mixed", "suffix")])
async def test_the_same_tokens_of_real_workers(models: Callable[[str], Model], arch: str, speculation: str) -> None:
    """Found on the host or by the worker. With too few blocks for all, and a worker that is killed while requests have
    drafts."""
    model = models(arch)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": MIB // 4, "max_num_seqs": 6, "max_leased_steps": 0}
    async with running(model, **settings) as engine:
        expected = await answers(engine, 3)
        assert engine.statistics().drafted_tokens == 0
    async with running(model, speculation=speculation, **settings) as engine:
        assert await answers(engine, 3) == expected
        statistics = engine.statistics()
        assert 100 < statistics.accepted_tokens < statistics.drafted_tokens, "some repeat themselves"
        task = asyncio.create_task(answers(engine, 3))
        while engine.statistics().accepted_tokens < statistics.accepted_tokens + 50:
            await asyncio.sleep(0.001)
        os.kill(engine.describe()["pid"], signal.SIGKILL)
        assert await task == expected
        assert engine.statistics().num_restarts == 1
