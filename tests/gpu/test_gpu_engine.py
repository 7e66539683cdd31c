"""The whole engine with a real worker on a GPU, in float32, against transformers: no token may differ."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_api import settled
from gpu_models import DEVICE, SETTINGS, Checkpoint
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE

from aengine import AsyncLLM, Completion, InternalError, SamplingParams

pytestmark = pytest.mark.gpu

LENGTH = 24
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
MakeCheckpoint = Callable[..., Checkpoint]


@asynccontextmanager
async def running(folder: Path, **config: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(folder), **(SETTINGS | config)) as engine:
        assert engine.describe()["device"].startswith(DEVICE)
        yield engine
        await settled(engine)


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def some_prompts(rng: random.Random) -> list[list[int]]:
    """Lengths of 1 to 60; a third begin like one another, some of them for whole blocks and some within one."""
    prompts = [random_ids(rng, n) for n in (1, 2, 4, 59, 60, *(rng.randint(1, 60) for _ in range(8)))]
    shared = random_ids(rng, 40)
    prompts += [shared[:length] + random_ids(rng, rng.randint(1, 20)) for length in (8, 17, 23, 32, 39, 40)]
    rng.shuffle(prompts)
    return prompts


async def all_at_once(
    engine: AsyncLLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY
) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(ids, params) for ids in prompts)))


async def test_alone_at_once_and_cached(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    model, prompts = checkpoint(arch), some_prompts(rng)
    async with running(model.folder) as engine:
        for prompt in prompts[:3]:
            model.check_all([prompt], [await engine.generate(prompt, GREEDY)], LENGTH)
        model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
        again = await all_at_once(engine, prompts)
        model.check_all(prompts, again, LENGTH)
        for prompt, completion in zip(prompts, again, strict=True):
            assert completion.usage.cached_tokens == (len(prompt) - 1) // 4 * 4
        longer = [[*p, *c.token_ids[:10], 5] for p, c in zip(prompts, again, strict=True) if len(p) < 50]
        model.check_all(longer, await all_at_once(engine, longer), LENGTH)
        assert engine.statistics().num_preemptions == 0


async def test_a_kernel_is_stuck(checkpoint: MakeCheckpoint) -> None:
    """The worker's heart beats, and its GPU gets no further."""
    prompt = [5, 6, 7]
    async with running(checkpoint("qwen3").folder, worker_extension="busy_gpu:BusyGpu") as engine:
        expected = (await engine.generate(prompt, GREEDY)).token_ids
        async with engine.stream(prompt, GREEDY) as stream:
            got = [(await anext(stream)).token_id]
            begun = time.monotonic()
            await engine.collective_rpc("spin", 0, 90)
            got += [token.token_id async for token in stream]
        print(f"the stream had ended {time.monotonic() - begun:.1f} s after the kernel began")
        assert tuple(got) == expected
        (restart,) = engine.statistics().restarts
        assert "has a device that is stuck in a step" in restart.reason


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
async def test_chunked_and_preempted(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    """16 tokens a step, and a pool for little more than one request of the greatest length, or one window."""
    model, prompts = checkpoint(arch), some_prompts(rng)
    bytes_per_block = 3 * 2 * 2 * (16 if arch == "qwen3" else 8) * 4 * 4
    num_blocks = 9 if arch == "mistral" else 30
    small: dict[str, Any] = {"max_num_batched_tokens": 16, "kv_cache_memory_bytes": num_blocks * bytes_per_block}
    async with running(model.folder, **small) as engine:
        assert engine.describe()["num_blocks"] == num_blocks
        model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
        if arch != "mistral":  # whose windows give back enough for some draws of lengths
            assert engine.statistics().num_preemptions > 0, engine.statistics()


async def test_more_requests_than_rows(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    model = checkpoint("qwen3")
    prompts = [random_ids(rng, rng.randint(1, 12)) for _ in range(100)]
    async with running(model.folder, max_num_seqs=70, kv_cache_memory_bytes=32 * 2**20) as engine:
        model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)


async def test_the_same_seed_alone_and_among_64(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """Few draws: one in some 10^5 may lie so close to another token that the order of summation decides."""
    prompts = [random_ids(rng, rng.randint(1, 20)) for _ in range(64)]
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}, {"frequency_penalty": 0.5}]
    params = [
        SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True, seed=rng.getrandbits(60), **kinds[i % 4])
        for i in range(64)
    ]
    async with running(checkpoint("qwen3").folder, kv_cache_memory_bytes=32 * 2**20) as engine:
        together = await asyncio.gather(*(engine.generate(p, how) for p, how in zip(prompts, params, strict=True)))
        for i in rng.sample(range(64), 8):
            alone = await engine.generate(prompts[i], params[i])
            assert alone.token_ids == together[i].token_ids, f"request {i}, {params[i]}"
        assert len({c.token_ids for c in together}) == 64


async def test_a_nan_fails_its_request_only(checkpoint: MakeCheckpoint, tmp_path: Path, rng: random.Random) -> None:
    """The embedding of one token is NaN: whoever has it fails, beside others and before them in the same blocks."""
    model, poison = checkpoint("llama"), 66
    folder = Path(shutil.copytree(model.folder, tmp_path / "poisoned"))
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = [[t for t in random_ids(rng, rng.randint(2, 40)) if t != poison] + [3] for _ in range(12)]
    poisoned = [[*random_ids(rng, 20), poison, 5, 6], [poison], [*random_ids(rng, 30), poison]]
    # Of the good ones none may come upon the token by itself.
    how = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logit_bias={poison: -100.0})
    async with running(model.folder) as engine:
        wanted = await all_at_once(engine, prompts, how)
    async with running(folder, kv_cache_memory_bytes=2 * 2**20) as engine:
        for _ in range(3):
            tasks = [engine.generate(p, how, cache_salt=str(rng.random())) for p in [*prompts, *poisoned]]
            *good, a, b, c = await asyncio.gather(*tasks, return_exceptions=True)
            for bad in (a, b, c):
                assert isinstance(bad, InternalError) and "NaN" in str(bad), bad
            assert [getattr(g, "token_ids", g) for g in good] == [w.token_ids for w in wanted]


async def test_a_trace_shows_the_gpus_kernels(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    async with running(checkpoint("qwen3").folder) as engine:
        await engine.start_profile(tmp_path)
        await engine.generate([1, 2, 3], GREEDY)
        path = await engine.stop_profile()
        await engine.generate([1, 2, 3], GREEDY)
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > LENGTH or DEVICE == "cpu"


async def test_the_gpus_memory_is_told(checkpoint: MakeCheckpoint) -> None:
    async with running(checkpoint("qwen3").folder) as engine:
        while (told := engine.statistics().device_memory_bytes) is None:
            await asyncio.sleep(0.01)
        total = engine.statistics().device_memory_total_bytes
        assert total == torch.cuda.get_device_properties(DEVICE).total_memory
        assert engine.describe()["kv_cache_bytes"] < told < total
