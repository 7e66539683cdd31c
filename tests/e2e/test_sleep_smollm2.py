"""A real worker that sleeps: memory goes back to the system, and the texts are those of an engine that never slept."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
from conftest_api import settled, until
from test_recovery_smollm2 import CONFIG, GREEDY, texts, worker_of

from aengine import AsyncLLM

LEAST_GIVEN_BACK = 16 << 20
"""Bytes of the KV of 16 prompts of 500 tokens, in float32, are 5 times as many."""


async def test_the_same_texts_after_each_sleep(smollm2: str) -> None:
    async with AsyncLLM(smollm2, **CONFIG) as engine:
        expected = await texts(engine)
        prompts = [[100 + i, *range(600, 1100)] for i in range(16)]
        await asyncio.gather(*(engine.generate(prompt, GREEDY.replace(max_tokens=1)) for prompt in prompts))
        worker = worker_of(engine)
        before = worker.memory_info().rss
        await engine.sleep()
        assert worker.is_running() and worker.memory_info().rss < before - LEAST_GIVEN_BACK
        assert await texts(engine) == expected and worker_of(engine) == worker

        running = asyncio.create_task(texts(engine))
        await until(lambda: engine.statistics().num_running)
        await engine.sleep(level=2)
        assert not psutil.pid_exists(worker.pid) and engine.statistics().sleep_level == 2
        assert await texts(engine) == expected == await running

        await engine.sleep()
        os.kill(worker_of(engine).pid, signal.SIGKILL)
        await until(lambda: engine.statistics().sleep_level == 2)
        assert await engine.check_health() == 0.0 and engine.is_sleeping
        await engine.wake_up()
        assert await texts(engine) == expected and engine.statistics().num_restarts == 0
        await settled(engine)
