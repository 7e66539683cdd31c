"""Engines that sleep, of several ranks and of several kinds of models: the answers are those of one that never slept,
though it slept while they were computed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest_api import core_of, settled, until
from test_ranked_processes import EXPERTS, SETTINGS, answers, essence, work

from aengine import AsyncLLM

TinyModel = Callable[..., Path]
DIVIDED: list[Any] = [
    {"tensor_parallel_size": 2},
    pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.extended),
    pytest.param({"data_parallel_size": 2}, marks=pytest.mark.extended),
    {"data_parallel_size": 2, "enable_expert_parallel": True},
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3_moe", seed=3, **EXPERTS)


@pytest.fixture(scope="module")
def expected(model: Path) -> Sequence[Any]:
    return asyncio.run(answers(model))


async def check(model: Path, expected: Sequence[Any], **settings: Any) -> None:
    async with AsyncLLM(model, **SETTINGS | settings) as engine:
        tasks = work(engine)
        await until(lambda: engine.statistics().num_running)
        for level in (1, 2):
            await engine.sleep(level)
            assert engine.statistics().sleep_level == level
            if level == 1:
                await engine.wake_up(["kv_cache"])
            await engine.wake_up()
            before = engine.statistics().num_steps
            await until(lambda before=before: engine.statistics().num_steps > before)
        if engine.config.num_ranks > 1:
            await engine.sleep()
            os.kill(core_of(engine).replicas[0].worker.executor.workers[-1].pid, signal.SIGKILL)
            await until(lambda: engine.statistics().sleep_level == 2)
            await engine.wake_up()
        assert [essence(await task) for task in tasks] == expected
        assert engine.statistics().num_restarts == 0
        await settled(engine)


@pytest.mark.parametrize("settings", DIVIDED, ids=str)
async def test_divided(model: Path, expected: Sequence[Any], settings: dict[str, Any]) -> None:
    await check(model, expected, **settings)


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        pytest.param("gemma3", {"head_dim": 16, "vocab_size": 1100}, marks=pytest.mark.extended),
        ("qwen3_next", EXPERTS | {"head_dim": 16}),
    ],
)
async def test_families(arch: str, fields: dict[str, Any], tiny_model: TinyModel) -> None:
    """With sliding windows, and with states."""
    model = tiny_model(arch, seed=3, **fields)
    memory = {"kv_cache_memory_bytes": 24 << 20}  # states take more
    await check(model, await answers(model, **memory), **memory)
