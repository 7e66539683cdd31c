"""Engines of several replicas, whose workers are processes: the answers of one, whatever is asked, and whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_api import core_of, settled
from test_pipeline_engine import SETTINGS, essence, work

from aengine import LLM, AsyncLLM, SamplingParams

TinyModel = Callable[..., Path]
TWO: dict[str, Any] = SETTINGS | {"data_parallel_size": 2}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3, num_hidden_layers=5)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    async def answers() -> list[Any]:
        async with AsyncLLM(model, **SETTINGS) as engine:
            return [essence(completion) for completion in await asyncio.gather(*work(engine, 1))]

    return asyncio.run(answers())


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
async def test_any_request(model: Path, expected: list[Any], ranks: dict[str, int]) -> None:
    async with AsyncLLM(model, **TWO | ranks) as engine:
        assert [essence(completion) for completion in await asyncio.gather(*work(engine, 1))] == expected
        replicas = core_of(engine).replicas
        pids = {worker.pid for replica in replicas for worker in replica.worker.executor.workers}
        assert len(pids) == 2 * (2 if ranks else 1)
        assert all(replica.prefix_cache_queries for replica in engine.statistics().replicas)
        await settled(engine)


async def test_a_worker_dies(model: Path, expected: list[Any]) -> None:
    async with AsyncLLM(model, **TWO) as engine:
        workers = [replica.worker for replica in core_of(engine).replicas]
        tasks = work(engine, 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        survivor = workers[1].executor.workers[0].pid
        os.kill(workers[0].executor.workers[0].pid, signal.SIGKILL)
        assert [essence(await task) for task in tasks] == expected
        await settled(engine)
        assert workers[1].executor.workers[0].pid == survivor and engine.statistics().replicas[1].num_restarts == 0


def test_other_handles(model: Path, expected: list[Any]) -> None:
    """A loop of the engine's own, and calls that block."""

    async def on_thread() -> None:
        async with AsyncLLM(model, own_thread=True, **TWO) as engine:
            assert [essence(completion) for completion in await asyncio.gather(*work(engine, 1))] == expected
            assert len(engine.statistics().replicas) == 2 and await engine.check_health() > 0

    asyncio.run(on_thread())
    with LLM(model, **TWO) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        prompts = [[i, 30, 40] for i in range(20, 36)]
        together = [completion.token_ids for completion in llm.generate(prompts, greedy)]
        assert together == [llm.generate(prompt, greedy).token_ids for prompt in prompts]
        assert all(replica.prefix_cache_queries for replica in llm.statistics().replicas)


async def test_vectors(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen3", seed=4)
    texts = [[i, 25, 31, 7] for i in range(20, 40)]
    found = []
    for settings in (SETTINGS, TWO, SETTINGS | {"pipeline_parallel_size": 2}):
        async with AsyncLLM(model, pooling="last", **settings) as engine:
            found.append(await asyncio.gather(*map(engine.embed, texts)))
            await settled(engine)
    for alone, shared, of_stages in zip(*found, strict=True):
        assert shared == pytest.approx(alone, abs=1e-5)
        assert of_stages == pytest.approx(alone, abs=1e-5)
