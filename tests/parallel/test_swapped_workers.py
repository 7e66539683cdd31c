"""Preempted requests whose KV is in the host's memory: the answers of an engine that computes them again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_api import core_of, settled
from test_pipeline_engine import SETTINGS, essence, repeating, tokens, work

from aengine import AsyncLLM
from aengine.engine.scheduler.swapped_requests import SwappedRequests

TinyModel = Callable[..., Path]
SMALL: dict[str, Any] = SETTINGS | {"kv_cache_memory_bytes": 1 << 18, "block_size": 4}
"""A pool for one or two of the longest requests, in blocks so small that all outgrow what they were admitted with."""
HALF = {"kv_cache_memory_bytes": 1 << 17}
"""The same of each of two ranks, which have half of each page."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


def kept_by(engine: AsyncLLM) -> SwappedRequests:
    kept = core_of(engine).replicas[0].scheduler.rows.preempted
    assert isinstance(kept, SwappedRequests)
    return kept


async def test_any_request(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all places that can be used, with few, on ranks that have a part of each page, and when workers die."""
    model = tiny_model("qwen3", seed=3, num_hidden_layers=5)
    async with AsyncLLM(model, **SETTINGS) as engine:
        expected = [essence(completion) for completion in await asyncio.gather(*work(engine, 1))]
    num_restored: list[int] = []
    dying: list[AsyncLLM] = []
    running: list[AsyncLLM] = []
    restore = SwappedRequests.restore

    def counted(kept: SwappedRequests, request: Any, prefix: Any) -> None:
        if prefix is kept._found:
            num_restored[-1] += 1
            now = running[-1].statistics()
            assert now.swapped_bytes > now.num_swapped_blocks > 0
            for engine in dying:  # the step that brings the pages back is not even sent
                os.kill(core_of(engine).replicas[0].worker.executor.workers[1].pid, signal.SIGKILL)
            dying.clear()
        restore(kept, request, prefix)

    monkeypatch.setattr(SwappedRequests, "restore", counted)
    for ranks, num_bytes, dies in (
        ({}, 1 << 20, False),
        ({}, 1 << 16, False),
        ({"tensor_parallel_size": 2} | HALF, 1 << 20, True),
        ({"pipeline_parallel_size": 2} | HALF, 1 << 20, True),
        ({"data_parallel_size": 2}, 1 << 20, False),
    ):
        num_restored.append(0)
        async with AsyncLLM(model, swap_space_bytes=num_bytes, **SMALL | ranks) as engine:
            running.append(engine)
            dying += [engine] * dies
            assert [essence(completion) for completion in await asyncio.gather(*work(engine, 1))] == expected
            assert engine.statistics().num_restarts == dies
            await settled(engine)
            assert kept_by(engine).num_kept == 0
        assert num_restored[-1] > 0 or num_bytes < 1 << 20


@pytest.mark.parametrize(
    "ranks",
    [
        {"pipeline_parallel_size": 2, "kv_cache_memory_bytes": 1 << 15},
        {"data_parallel_size": 2, "kv_cache_memory_bytes": 5 << 13},
    ],
    ids=str,
)
async def test_fp8_keys_and_values(tiny_model: TinyModel, ranks: dict[str, int]) -> None:
    """Swapped, drafted for and on processes of their own: the tokens of one that has room for all, by the same scales,
    which a worker that takes the place of another measures again. One request may have met a number in the middle
    between two codes."""
    model = tiny_model("qwen3", seed=3, num_hidden_layers=5)
    async with AsyncLLM(model, kv_cache_dtype="fp8", **SETTINGS) as engine:
        assert engine.describe()["kv_cache_scales"] == "calibrated"
        expected = [tokens(completion) for completion in await asyncio.gather(*repeating(engine, 1))]
    settings = {"kv_cache_dtype": "fp8", "swap_space_bytes": 1 << 20, "speculation": "ngram_worker"}
    async with AsyncLLM(model, **SMALL | ranks | settings) as engine:
        tasks = repeating(engine, 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(core_of(engine).replicas[0].worker.executor.workers[-1].pid, signal.SIGKILL)
        found = [tokens(await task) for task in tasks]
        assert sum(ours != wanted for ours, wanted in zip(found, expected, strict=True)) <= 1
        statistics = engine.statistics()
        assert statistics.num_preemptions and statistics.accepted_tokens and statistics.num_restarts == 1
        await settled(engine)
