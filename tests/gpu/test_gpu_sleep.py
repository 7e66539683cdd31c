"""A GPU's memory that goes and comes: as the driver sees it, with graphs that stay right."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_api import core_of, until
from gpu_models import MEDIUM
from tiny import write_tiny_model

from aengine import AsyncLLM, NotEnoughMemoryError, SamplingParams
from aengine.runner.platforms.choice import choose_platform
from aengine.runner.sleeping.arena import Arena
from aengine.runner.sleeping.moving import made_in

pytestmark = pytest.mark.gpu

KV_BYTES = 2 << 30
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cuda:0", "kv_cache_memory_bytes": KV_BYTES, "skip_tokenizer": True}
ARENAS: list[Arena] = []  # what was pinned stays so to the end of the process, as a worker's does
PROMPTS = [[7 + i, *range(10, 40 + 20 * i)] for i in range(6)]


def free() -> int:
    return int(torch.cuda.mem_get_info(0)[0])


async def texts(engine: AsyncLLM) -> list[Any]:
    return [(await engine.generate(prompt, GREEDY)).token_ids for prompt in PROMPTS]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "llama", **MEDIUM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_memory_of_the_driver(dtype: torch.dtype) -> None:
    platform = choose_platform("cuda:0")
    platform.open()
    platform.virtual_memory.open()
    arena = Arena(platform.virtual_memory, platform, keeps=True)
    ARENAS.append(arena)
    before = torch.ones(9, device="cuda:0")
    with made_in(arena, platform):
        values = torch.randn(64 << 20, device="cuda:0").to(dtype)
        part = values[1000:]
    expected, place = values.clone().cpu(), values.data_ptr()
    graph = torch.cuda.CUDAGraph()
    result = torch.zeros(1, device="cuda:0")
    with torch.cuda.graph(graph):
        result.copy_(part.view(torch.uint8)[:4096].float().sum().view(1))
    graph.replay()
    total = result.item()
    for _ in range(3):
        awake = free()
        arena.give_back()
        platform.release_cached()
        assert free() >= awake + values.nbytes
        arena.take_back()
        assert values.data_ptr() == place and torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))
        result.zero_()
        graph.replay()
        assert result.item() == total
    assert bool((before == 1).all())


@pytest.mark.parametrize(
    "how", [{}, {"enforce_eager": True}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str
)
async def test_the_same_tokens_and_flat_memory(model: Path, how: dict[str, Any]) -> None:
    async with AsyncLLM(model, **SETTINGS, enable_sleep_mode=True, **how) as engine:
        assert engine.describe()["can_sleep"]
        expected = await texts(engine)
        left: list[int] = []
        for _ in range(20):
            awake = free()
            await engine.sleep()
            assert engine.statistics().sleep_level == 1
            assert free() - awake >= KV_BYTES * 0.95
            left.append(free())
            await engine.wake_up()
            assert await texts(engine) == expected
        assert min(left[1:]) >= left[1] * 0.99
        await engine.sleep()
        await engine.sleep(level=2)
        assert await texts(engine) == expected  # the request wakes it
        await engine.sleep()
        os.kill(engine.describe()["pid"], signal.SIGKILL)
        await until(lambda: engine.statistics().sleep_level == 2)
        await engine.wake_up()
        assert await texts(engine) == expected


async def test_waking_without_memory(model: Path) -> None:
    """Something else has it: a typed error, nothing is left taken, and later it wakes."""
    async with AsyncLLM(model, **SETTINGS, enable_sleep_mode=True) as engine:
        expected = await texts(engine)
        await engine.sleep()
        asleep = free()
        taken = torch.empty(asleep - (KV_BYTES >> 1), dtype=torch.uint8, device="cuda:0")
        beside = free()
        with pytest.raises(NotEnoughMemoryError, match="bytes are needed"):
            await engine.wake_up()
        assert engine.is_sleeping and abs(free() - beside) < 64 << 20
        del taken
        torch.cuda.empty_cache()
        await engine.wake_up()
        assert await texts(engine) == expected


async def test_without_the_setting_the_worker_ends(model: Path) -> None:
    async with AsyncLLM(model, **SETTINGS) as engine:
        expected, pid = await texts(engine), engine.describe()["pid"]
        await engine.sleep()
        assert core_of(engine).sleeping.level == 2
        assert await texts(engine) == expected and engine.describe()["pid"] != pid
