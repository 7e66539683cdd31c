"""Tenants over the real model: what each asks for, beside a flood of another, is what it would get alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from test_sessions_smollm2 import ASKED, QUESTIONS

from aengine import AsyncLLM, SamplingParams, Tenant

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    """With rows and blocks for a part of what is asked for."""
    settings: Any = {
        "max_model_len": 512,
        "max_num_seqs": 6,
        "kv_cache_memory_bytes": 40 << 20,
        "speculation": "suffix",
    }
    settings |= {"tenants": {"heavy": Tenant(weight=3), "capped": Tenant(max_running=1)}, "swap_space_bytes": 0}
    async with AsyncLLM("smollm2-135m", logits_processors=["callers_processors:Residues"], **settings) as engine:
        yield engine


async def test_what_tenants_ask_for(engine: AsyncLLM) -> None:
    names = list(ASKED)
    params = [SamplingParams(**{"max_tokens": 20, "seed": 5, "temperature": 0} | ASKED[name]) for name in names]
    prompts = [f"{QUESTIONS[number % len(QUESTIONS)]} ({name})" for number, name in enumerate(names)]
    alone = [await engine.generate(prompt, how) for prompt, how in zip(prompts, params, strict=True)]
    await engine.reset_prefix_cache()
    whose = ("heavy", "capped", "unknown", None)
    flood = [
        engine.generate(f"{number} {QUESTIONS[0]}", SamplingParams(max_tokens=30), tenant="flood")
        for number in range(20)
    ]
    asked = [
        engine.generate(prompt, how, tenant=whose[number % 4], cache_salt=whose[number % 4])
        for number, (prompt, how) in enumerate(zip(prompts, params, strict=True))
    ]
    beside = (await asyncio.gather(*flood, *asked))[len(flood) :]
    for name, one, other in zip(names, alone, beside, strict=True):
        assert [choice.token_ids for choice in other.choices] == [choice.token_ids for choice in one.choices], name
    rows = {one.name: one for one in engine.statistics().tenants}
    assert rows["flood"].num_requests == 20 and rows["heavy"].generated_tokens > 0
    assert all(not one.num_running and not one.num_open for one in rows.values())
