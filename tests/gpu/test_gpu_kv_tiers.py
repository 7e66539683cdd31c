"""Prefixes that come back from pinned memory of the host's process: no page is lost, late or early."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_api import saved, tiers_of
from gpu_models import DEVICE
from test_hybrids import MODELS
from tiny import write_tiny_model

from aengine import AsyncLLM, SamplingParams
from aengine.ipc.messages import KVCacheGroup
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.attention.kv_pages import KVPages
from aengine.runner.kv_spec import KVLayout
from aengine.runner.platforms.choice import choose_platform
from aengine.runner.tiers.tier_pages import Copied, TierPages

pytestmark = pytest.mark.gpu
NUM_ROWS = 1500
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def columns(*numbers: list[int]) -> list[bytes]:
    return [torch.tensor(own, dtype=torch.int32).numpy().tobytes() for own in numbers]


def wait(copied: Copied) -> None:
    while not copied.ready():
        time.sleep(0.0005)
    assert copied.get() == []


def test_pages_go_and_come() -> None:
    """While the memory is being pinned, and after that; each page is overwritten in between."""
    platform = choose_platform(DEVICE)
    platform.open()
    layout = KVLayout((KVCacheGroup("full", 16),), (), 5, 3 << 14)
    pages = KVPages(layout, NUM_ROWS, KVFormat(torch.bfloat16), platform.device)
    tier = TierPages(pages, platform, 0)
    fd = os.memfd_create("test-pages", os.MFD_CLOEXEC)
    os.truncate(fd, NUM_ROWS * layout.page_bytes)
    tier.map(os.getpid(), [fd], NUM_ROWS)
    order = torch.randperm(NUM_ROWS).tolist()
    runs = [*range(700, NUM_ROWS), *range(700)]
    for turn, places in enumerate((order, runs, order)):
        before = [slab.copy_(torch.randn_like(slab)).clone() for slab in pages.slabs]
        wait(tier.copy(False, *columns(list(range(NUM_ROWS)), places)))
        for slab in pages.slabs:
            slab.fill_(turn)
        platform.synchronize()
        wait(tier.copy(True, *columns(list(range(NUM_ROWS)), places)))
        assert all(torch.equal(*pair) for pair in zip(before, pages.slabs, strict=True))
    os.close(fd)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-next"])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
async def test_engines(name: str, dtype: Any, tmp_path: Path) -> None:
    """Keys and values of all tokens, of windows, and states; as they are and in eight bits."""
    arch, fields = MODELS.get(name, (name, {"sliding_window": 9} if name == "gemma2" else {}))
    folder = write_tiny_model(tmp_path, arch, seed=7, **fields, max_position_embeddings=1024)
    settings: dict[str, Any] = {"device": DEVICE, "max_model_len": 1024, "max_num_seqs": 4, "skip_tokenizer": True}
    settings |= {"dtype": "float32", "kv_cache_dtype": dtype, "max_num_batched_tokens": 1024}
    prompts = [[(i * 7 + j * 3) % 200 + 20 for j in range(600)] for i in range(6)]
    async with AsyncLLM(folder, kv_cache_memory_bytes=1 << 25, **settings) as engine:
        page = engine.describe()["kv_cache_bytes"] // engine.describe()["num_blocks"]
        block_size = engine.describe()["block_size"]
        expected = [(await engine.generate(prompt, GREEDY)).token_ids for prompt in prompts]
    pool = 3 * page * (1024 // block_size + 8)
    async with AsyncLLM(folder, kv_cache_memory_bytes=pool, kv_tiers="host:64MB", **settings) as engine:
        for _ in range(3):
            found = [(await engine.generate(prompt, GREEDY)).token_ids for prompt in prompts]
            differing = sum(ours != wanted for ours, wanted in zip(found, expected, strict=True))
            assert differing <= (dtype == "fp8")  # a number in the middle between two codes may be kept as either
            await saved(engine)
        assert tiers_of(engine).num_fetched and not tiers_of(engine).num_lost
