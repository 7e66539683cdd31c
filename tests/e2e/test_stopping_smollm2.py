"""A real worker, and an engine that is to end: requests drain over its death, and a close cut short leaves none."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from aengine import AsyncLLM, EngineClosedError, SamplingParams

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def begin(engine: AsyncLLM, params: SamplingParams) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(engine.generate(f"Story {i}:", params)) for i in range(4)]


async def has_tokens(engine: AsyncLLM, number: int) -> None:
    least = engine.statistics().generated_tokens + number
    while engine.statistics().generated_tokens < least:
        await asyncio.sleep(0.005)


async def test_stopping(smollm2: str) -> None:
    settings: dict[str, Any] = {
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 128 * 2**20,
        "dtype": "float32",
        "preload_grammars": False,
        "max_leased_steps": 0,  # else a late loop may find all done when it kills the worker
    }
    engine = await AsyncLLM(smollm2, **settings).start()
    expected = [(await task).token_ids for task in begin(engine, GREEDY)]

    tasks = begin(engine, GREEDY)
    await has_tokens(engine, 16)
    draining = asyncio.create_task(engine.drain())
    while engine.state != "draining":
        await asyncio.sleep(0.001)
    os.kill(engine.describe()["pid"], signal.SIGKILL)
    assert await draining is True
    assert [(await task).token_ids for task in tasks] == expected
    assert engine.statistics().num_restarts == 1 and engine.state == "draining"

    await engine.resume()
    tasks = begin(engine, GREEDY.replace(max_tokens=900))
    await has_tokens(engine, 12)
    pid = engine.describe()["pid"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.aclose(drain=600), 0.5)
    for task in tasks:
        with pytest.raises(EngineClosedError) as caught:
            await task
        assert caught.value.completion is not None and caught.value.completion.text
    for _ in range(500):
        if is_gone(pid):
            break
        await asyncio.sleep(0.01)
    assert is_gone(pid) and engine.state == "closed"
    await engine.aclose()
