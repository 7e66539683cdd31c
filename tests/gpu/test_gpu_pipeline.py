"""Layers divided among stages, a process each: the tokens of one GPU, whatever is asked, and whoever dies.

With one GPU alone, stages share it. On a CPU (to try the tests themselves) they exchange by gloo.
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
from gpu_models import DEVICE, MIB, Checkpoint
from test_gpu_engine import GREEDY, LENGTH, all_at_once, running, some_prompts
from test_gpu_tensor_parallel import answers, essence, first_logprobs, work

pytestmark = pytest.mark.gpu

MakeCheckpoint = Callable[..., Checkpoint]
NUM_GPUS = torch.cuda.device_count()
TWO: dict[str, Any] = {"pipeline_parallel_size": 2, "kv_cache_memory_bytes": 16 * MIB}
if DEVICE == "cuda" and NUM_GPUS < 2:
    TWO["worker"] = "one_gpu:load_model"
FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe")


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the workers, which inherit it."""
    if "worker" in TWO:
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


@pytest.mark.parametrize("arch", FAMILIES)
async def test_greedy_tokens_of_transformers(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    """Three times: steps with prompts run op by op first, then as graphs, and prefixes are found."""
    model, prompts = checkpoint(arch), some_prompts(rng)
    async with running(model.folder, **TWO) as engine:
        model.check_all(prompts[:1], [await engine.generate(prompts[0], GREEDY)], LENGTH)
        for _ in range(3):
            model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
        assert engine.statistics().num_restarts == 0


async def test_any_request(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("qwen3").folder
    assert await answers(folder, **TWO) == await answers(folder)


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"max_num_batched_tokens": 16}], ids=str)
async def test_without_graphs_and_in_chunks(
    checkpoint: MakeCheckpoint, settings: dict[str, Any], rng: random.Random
) -> None:
    model, prompts = checkpoint("qwen3"), some_prompts(rng)
    async with running(model.folder, **TWO, **settings) as engine:
        for _ in range(2):
            model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)


async def test_prompts_beside_decodes(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    model, prompts = checkpoint("llama"), some_prompts(rng)
    async with running(model.folder, max_num_batched_tokens=32, **TWO) as engine:
        tasks = []
        for prompt in prompts * 2:
            tasks.append(asyncio.create_task(engine.generate(prompt, GREEDY)))
            await asyncio.sleep(rng.random() / 100)
        model.check_all(prompts * 2, await asyncio.gather(*tasks), LENGTH)


async def test_one_token_each(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """No step needs the tokens that come back to the first stage."""
    model, prompts = checkpoint("llama"), some_prompts(rng) * 5
    async with running(model.folder, max_num_seqs=4, **TWO) as engine:
        model.check_all(prompts, await all_at_once(engine, prompts, GREEDY.replace(max_tokens=1)), 1)


async def test_log_probabilities_in_bfloat16(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """By the kernels that overlap each other; stages round as one GPU does."""
    model = checkpoint("llama", "bfloat16", "medium")
    prompts = [[rng.randrange(model.vocab_size) for _ in range(n)] for n in (1, 5, 130, 700, 1500)]
    memory = {"kv_cache_memory_bytes": 256 * MIB, "dtype": "bfloat16"}
    one = await first_logprobs(model.folder, prompts, **memory)
    two = await first_logprobs(model.folder, prompts, **TWO | memory)
    differences = [abs(a[token] - b[token]) for a, b in zip(one, two, strict=True) for token in a.keys() & b.keys()]
    print(f"{len(differences)} differences, at most {max(differences):.3f}")
    assert len(differences) > 15 * len(prompts) and max(differences) < 0.15


@pytest.mark.skipif(DEVICE == "cuda" and NUM_GPUS < 4, reason="needs four GPUs")
async def test_stages_of_two_ranks(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("qwen3").folder
    assert await answers(folder, tensor_parallel_size=2, **TWO) == await answers(folder)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_dies(checkpoint: MakeCheckpoint, stage: int) -> None:
    folder = checkpoint("qwen3").folder
    async with running(folder, **TWO) as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
        tasks = work(engine, 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(core_of(engine).replicas[0].worker.executor.workers[stage].pid, signal.SIGKILL)
        begun = time.monotonic()
        rest = [task for task in tasks if not task.done()]
        await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
        print(f"the first stream ended {time.monotonic() - begun:.1f} s after the death of stage {stage}")
        assert [essence(await task) for task in tasks] == expected
        assert engine.statistics().num_restarts == 1
        await settled(engine)


@pytest.mark.skipif(DEVICE == "cpu" or "worker" in TWO, reason="needs two GPUs")
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_kernel_is_stuck(checkpoint: MakeCheckpoint, stage: int) -> None:
    """The other stage waits for it on its GPU; both beat, and neither gets on."""
    folder = checkpoint("qwen3").folder
    async with running(folder, worker_extension="busy_gpu:BusyGpu", **TWO) as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
        tasks = work(engine, 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await engine.collective_rpc("spin", stage, 90)
        begun = time.monotonic()
        assert [essence(await task) for task in tasks] == expected
        print(f"all streams had ended {time.monotonic() - begun:.1f} s after the kernel began")
        assert engine.statistics().num_restarts == 1


async def test_cancelled_requests_do_not_disturb_others(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    async with running(checkpoint("qwen3").folder, **TWO) as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
        for _ in range(3):
            others, tasks = work(engine, rng.randrange(1000)), work(engine, 1)
            for task in rng.sample(others, len(others)):
                await asyncio.sleep(rng.random() / 100)
                task.cancel()
            assert [essence(await task) for task in tasks] == expected
            await asyncio.gather(*others, return_exceptions=True)
            await settled(engine)
