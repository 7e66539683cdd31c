"""Tenants of an engine: quotas that hold or refuse, from any thread, and what comes of them when engines end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aengine import AsyncLLM, EngineClosedError, EngineOverloadedError, QuotaExceededError, SamplingParams, Tenant
from aengine.testing import FakeAsyncLLM

PARAMS = SamplingParams(max_tokens=5)


def make(**settings: Any) -> FakeAsyncLLM:
    return FakeAsyncLLM("abcdefgh" * 20, token_delay=0.001, **settings)


def row(engine: AsyncLLM, name: str) -> Any:
    return next(one for one in engine.statistics().tenants if one.name == name)


async def test_without_tenants_there_is_nothing_to_see() -> None:
    async with make() as engine:
        await engine.generate("x", PARAMS)
        assert engine.statistics().tenants == ()
        await engine.generate("x", PARAMS, tenant="a")
        assert {one.name: one.num_requests for one in engine.statistics().tenants} == {"": 1, "a": 1}


@pytest.mark.parametrize("replicas", [1, 2])
async def test_so_many_run_at_once_and_the_others_wait(replicas: int) -> None:
    async with make(tenants={"capped": {"max_running": 3}}, data_parallel_size=replicas) as engine:
        capped = [asyncio.create_task(engine.generate(f"{n}", PARAMS, tenant="capped")) for n in range(30)]
        others = [asyncio.create_task(engine.generate(f"o{n}", PARAMS, tenant="other")) for n in range(6)]
        most = 0
        while not all(task.done() for task in capped):
            most = max(most, row(engine, "capped").num_running)
            await asyncio.sleep(0)
        assert most == 3 and all(task.done() for task in others)
        assert row(engine, "capped").num_open == 0 and row(engine, "capped").generated_tokens == 150


async def test_over_a_quota_it_is_refused_with_the_time_to_wait() -> None:
    async with make(tenants={"small": Tenant(tokens_per_minute=10, max_waiting=50)}) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=40), tenant="small")
        with pytest.raises(QuotaExceededError) as caught:
            await engine.generate([1, 2, 3], PARAMS, tenant="small")
        assert isinstance(caught.value, EngineOverloadedError) and 60 < caught.value.retry_after < 600
        assert (await engine.generate([1, 2, 3], PARAMS, tenant="other")).text
        assert row(engine, "small").num_rejected == 1
        assert engine.statistics().num_requests == 2


async def test_what_is_held_by_a_quota_can_be_ended() -> None:
    settings: Any = {"tenants": {"small": Tenant(tokens_per_minute=10)}, "admission": "wait"}
    async with make(**settings) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=40), tenant="small")
        held = [engine.stream([1, 2, 3], PARAMS, tenant="small", request_id=f"h{n}") for n in range(3)]
        waiting = [asyncio.create_task(stream.wait()) for stream in held]
        assert (await engine.generate([1, 2, 3], PARAMS)).text, "others go past"
        assert engine.statistics().num_waiting == 3
        engine.abort("h0")
        assert (await waiting[0]).finish_reason == "abort"
        late = asyncio.create_task(engine.generate([1], PARAMS, tenant="small", deadline=0.01))
        with pytest.raises(Exception, match="deadline"):
            await late
    for task in waiting[1:]:
        with pytest.raises(EngineClosedError):
            await task


async def test_a_full_queue_has_a_place_for_who_has_none() -> None:
    async with make(max_num_seqs=1, max_num_queued_requests=4) as engine:
        flood = [engine.stream([n], SamplingParams(max_tokens=50), tenant="flood") for n in range(4)]
        with pytest.raises(EngineOverloadedError):
            engine.stream([9], PARAMS, tenant="flood")
        assert (await engine.generate([9], PARAMS, tenant="other")).text
        for stream in flood:
            await stream.aclose()


async def test_from_other_threads_it_is_the_same() -> None:
    async with make(own_thread=True, tenants={"small": Tenant(tokens_per_minute=10)}) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=40), tenant="small")
        with pytest.raises(QuotaExceededError):
            await engine.generate([1, 2, 3], PARAMS, tenant="small")
        assert (await engine.generate([1, 2, 3], PARAMS, tenant="other")).text


async def test_many_names_are_no_way_to_more_memory() -> None:
    async with make() as engine:
        for n in range(1500):
            await engine.generate([1], SamplingParams(max_tokens=1), tenant=f"t{n}")
        assert len(engine.statistics().tenants) == 33
        assert sum(one.num_requests for one in engine.statistics().tenants) == 1500
