"""Two replicas of a model, a GPU each: the tokens of one, requests on both, and streams that outlive a worker.

With one GPU alone, both share it. On a CPU (to try the tests themselves) replicas exchange by gloo.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest_api import core_of, settled
from gpu_models import DEVICE, SHARED_GPU, Checkpoint
from test_gpu_engine import GREEDY, LENGTH, all_at_once, running, some_prompts

from aengine import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("shared_gpu")]

MakeCheckpoint = Callable[..., Checkpoint]
TWO: dict[str, Any] = {"data_parallel_size": 2, **SHARED_GPU}
HAS_TWO = torch.cuda.device_count() > 1
DEVICES = "cuda:1,0" if HAS_TWO else DEVICE


async def test_greedy_tokens_of_transformers(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    model, prompts = checkpoint("llama"), some_prompts(rng)
    async with running(model.folder, **TWO | {"device": DEVICES}) as engine:
        for _ in range(3):
            model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
        statistics = engine.statistics()
        assert statistics.num_restarts == 0
        assert all(replica.prefix_cache_queries for replica in statistics.replicas)
        if HAS_TWO:
            assert [one["device"] for one in engine.describe()["replicas"]] == ["cuda:1", "cuda:0"]


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 4}], ids=str)
async def test_replicas_that_share_experts(
    checkpoint: MakeCheckpoint, settings: dict[str, Any], rng: random.Random
) -> None:
    """Rounds of decodes and with prompts, a replica alone in some; op by op at first, then as graphs."""
    model, prompts = checkpoint("qwen3_moe"), some_prompts(rng)
    shared = {"enable_expert_parallel": True, "device": DEVICES}
    async with running(model.folder, **TWO | shared | settings) as engine:
        for _ in range(3):
            model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
            model.check_all(prompts[:1], [await engine.generate(prompts[0], GREEDY)], LENGTH)
        os.kill(core_of(engine).replicas[0].worker.executor.workers[0].pid, signal.SIGKILL)
        model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
        await settled(engine)


async def test_a_worker_dies(checkpoint: MakeCheckpoint) -> None:
    """Its streams go on with the other one, at once, and both compute again when it is back."""
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3, ignore_eos=True)
    prompts = [[i, 7, 9] for i in range(20, 44)]
    async with running(checkpoint("qwen3").folder, **TWO) as engine:
        expected = [completion.token_ids for completion in await all_at_once(engine, prompts, params)]
        tasks = [asyncio.create_task(engine.generate(prompt, params)) for prompt in prompts]
        while not all(replica.num_running for replica in engine.statistics().replicas):
            await asyncio.sleep(0)
        os.kill(core_of(engine).replicas[0].worker.executor.workers[0].pid, signal.SIGKILL)
        begun = time.monotonic()
        assert [(await task).token_ids for task in tasks] == expected
        print(f"all streams ended {time.monotonic() - begun:.2f} s after the death of a worker")
        assert engine.statistics().replicas[0].state == "restarting"
        while engine.statistics().replicas[0].state != "running":
            await asyncio.sleep(0.05)
        print(f"the worker was back after {time.monotonic() - begun:.1f} s")
        assert [completion.token_ids for completion in await all_at_once(engine, prompts, params)] == expected
        assert engine.statistics().num_restarts == 1
        await settled(engine)
