"""A real worker that is killed or stopped in mid-stream: the same texts as without."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
from conftest_api import core_of, settled

from aengine import AsyncLLM, SamplingParams, StructuredOutput

CONFIG: dict[str, Any] = {
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 128 * 2**20,
    "dtype": "float32",
    "hang_timeout": 3.0,
    "preload_grammars": False,
}
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
KINDS = [
    GREEDY,
    GREEDY.replace(temperature=0.8, seed=11),
    GREEDY.replace(temperature=0.8, seed=12, n=2),
    GREEDY.replace(logprobs=2, max_tokens=10),
    GREEDY.replace(temperature=0.9, seed=5, structured_output=StructuredOutput(regex=r"[a-z]{2,9}( [a-z]{2,9}){20}")),
]


def worker_of(engine: AsyncLLM) -> psutil.Process:
    return psutil.Process(core_of(engine).replicas[0].worker.executor.workers[0].pid)


async def texts(engine: AsyncLLM) -> list[Any]:
    completions = await asyncio.gather(*(engine.generate(f"Story {i}:", params) for i, params in enumerate(KINDS)))
    return [(c.text, c.token_ids, [other.token_ids for other in c.choices]) for c in completions]


async def test_the_same_texts_after_each_way_of_dying(smollm2: str) -> None:
    async with AsyncLLM(smollm2, **CONFIG) as engine:
        expected = await texts(engine)
        for num_restarts, how in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            worker, before = worker_of(engine), engine.statistics().generated_tokens
            task = asyncio.create_task(texts(engine))
            while engine.statistics().generated_tokens < before + 30:
                await asyncio.sleep(0.005)
            os.kill(worker.pid, how)
            assert await task == expected
            assert engine.statistics().num_restarts == num_restarts
            assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
            await settled(engine)
