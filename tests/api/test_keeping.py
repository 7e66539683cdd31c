"""KV that is kept for a session's next turn, as requests ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of

from aengine import SamplingParams
from aengine.testing import FakeLLM

Make = Callable[..., FakeLLM]
TEN = SamplingParams(max_tokens=10)


def blocks_of(engine: Any) -> int:
    return int(engine.statistics().num_kept_blocks)


async def settled(engine: Any, number: int) -> None:
    async with asyncio.timeout(10):
        while blocks_of(engine) != number:
            await asyncio.sleep(0.01)


async def test_a_turn_is_kept_and_replaced(make_engine: Make) -> None:
    async with make_engine() as engine:
        first = await engine.generate([1] * 100, TEN, session_id="a", keep=60)
        kept = blocks_of(engine)
        assert kept >= 100 // engine.statistics().block_size
        again = await engine.generate([1] * 100 + list(first.token_ids) + [2] * 100, TEN, session_id="a", keep=60)
        assert again.usage.cached_tokens > 90 and engine.statistics().kept_block_hits == kept
        assert blocks_of(engine) > kept
        await engine.generate([3] * 100, TEN, session_id="a", keep=60)
        assert blocks_of(engine) <= kept + 1
        await engine.generate([3] * 100, TEN, session_id="a")
        assert blocks_of(engine) == 0


async def test_sessions_of_other_salts_and_without_a_name_are_others(make_engine: Make) -> None:
    async with make_engine() as engine:
        await engine.generate([1] * 64, TEN, session_id="a", keep=60)
        one = blocks_of(engine)
        await engine.generate([1] * 64, TEN, session_id="a", keep=60, cache_salt="x")
        assert blocks_of(engine) == 2 * one
        await engine.generate([2] * 64, TEN, request_id="a", keep=60)
        assert blocks_of(engine) == 3 * one
        keeping = core_of(engine).admission.keeping
        assert keeping.keep("a", 0) and blocks_of(engine) == 2 * one
        assert not keeping.keep("a", 5) and keeping.keep("a", 5, cache_salt="x")


async def test_it_ends_by_itself_and_may_be_made_longer(make_engine: Make) -> None:
    async with make_engine() as engine:
        keeping = core_of(engine).admission.keeping
        await engine.generate([1] * 64, TEN, session_id="a", keep=0.01)
        await engine.generate([2] * 64, TEN, session_id="b", keep=0.01)
        assert keeping.keep("b", 60)
        await settled(engine, blocks_of(engine) // 2)
        assert not keeping.keep("a", 60) and keeping.keep("b", 0.01)
        await settled(engine, 0)


@pytest.mark.parametrize("fraction", [0.0, 0.01])
async def test_no_more_is_kept_than_the_share(make_engine: Make, fraction: float) -> None:
    async with make_engine(kept_kv_fraction=fraction) as engine:
        for number in range(8):
            await engine.generate([number + 1] * 500, TEN, session_id=str(number), keep=60)
        statistics = engine.statistics()
        assert statistics.num_kept_blocks <= fraction * statistics.num_blocks
        assert statistics.num_free_blocks == statistics.num_blocks


async def test_a_failed_turn_keeps_what_the_one_before_kept(make_engine: Make) -> None:
    async with make_engine() as engine:
        await engine.generate([1] * 64, TEN, session_id="a", keep=60)
        kept = blocks_of(engine)
        waiting = asyncio.create_task(engine.generate("text " * 10, TEN, session_id="a", keep=60, request_id="b"))
        await asyncio.sleep(0)  # the text is being encoded
        assert engine.abort("b")
        await waiting
        assert blocks_of(engine) == kept
        assert core_of(engine).admission.keeping.keep("a", 0)


async def test_a_next_turn_goes_to_the_replica_that_keeps_its_kv(make_engine: Make) -> None:
    async with make_engine(data_parallel_size=2) as engine:
        prompts = {str(number): [number + 1] * 300 for number in range(6)}
        for _ in range(3):
            answers = [engine.generate(prompt, TEN, session_id=name, keep=60) for name, prompt in prompts.items()]
            for prompt, answer in zip(prompts.values(), await asyncio.gather(*answers), strict=True):
                prompt += [*answer.token_ids, 9]
        statistics = engine.statistics()
        assert statistics.prefix_cache_hits > 12 * 250
        assert all(replica.num_kept_blocks > 0 for replica in statistics.replicas)
        size = statistics.block_size
        assert statistics.num_kept_blocks <= sum(len(prompt) // size for prompt in prompts.values())
