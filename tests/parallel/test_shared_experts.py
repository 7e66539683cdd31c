"""Engines of replicas that share experts (`enable_expert_parallel` with `data_parallel_size`): the answers of one rank,
whatever is asked, and whoever dies."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest_api import core_of, settled, until
from test_ranked_processes import EXPERTS, GREEDY, SETTINGS, answers, essence, work

from aengine import AsyncLLM
from aengine.config import EngineConfig
from aengine.engine.replicas.joint import shares_experts
from aengine.errors import ModelLoadError
from aengine.workers.loaded import WorkerContext

TinyModel = Callable[..., Path]
SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3_moe", seed=3, **EXPERTS)


@pytest.fixture(scope="module")
def expected(model: Path) -> Sequence[Any]:
    return asyncio.run(answers(model))


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2, "max_in_flight_steps": 1}], ids=str)
async def test_any_request(model: Path, expected: Sequence[Any], settings: dict[str, Any]) -> None:
    async with AsyncLLM(model, **SETTINGS | SHARED | settings) as engine:
        assert [essence(completion) for completion in await asyncio.gather(*work(engine))] == expected
        replicas = engine.statistics().replicas
        assert len(replicas) == 2 and all(replica.prefix_cache_queries for replica in replicas)
        of_ranks = [rank["num_experts"] for replica in engine.describe()["replicas"] for rank in replica["ranks"]]
        assert of_ranks == [8 // len(of_ranks)] * len(of_ranks)
        await settled(engine)


async def test_a_rank_dies(model: Path, expected: Sequence[Any]) -> None:
    """All ranks are started again, and all streams go on."""
    async with AsyncLLM(model, **SETTINGS | SHARED) as engine:
        tasks = work(engine)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        replicas = core_of(engine).replicas
        before = {worker.pid for replica in replicas for worker in replica.worker.executor.workers}
        os.kill(replicas[1].worker.executor.workers[0].pid, signal.SIGKILL)
        assert [essence(await task) for task in tasks] == expected
        after = {worker.pid for replica in replicas for worker in replica.worker.executor.workers}
        assert len(after) == 2 and not after & before
        statistics = engine.statistics()
        assert [replica.num_restarts for replica in statistics.replicas] == [1, 1]
        assert statistics.num_restarts == len(statistics.restarts) == 1, "they are one event"
        await settled(engine)


async def test_one_replica_has_nothing_to_do(model: Path, expected: Sequence[Any]) -> None:
    """One request after the other; then another beside a long one; the end comes while one runs."""
    async with AsyncLLM(model, **SETTINGS | SHARED) as engine:
        prompts = [[i, 30, 40] for i in range(20, 23)]
        one_by_one = [(await engine.generate(prompt, GREEDY)).token_ids for prompt in prompts]
        long = asyncio.create_task(engine.generate([50, 51], GREEDY.replace(max_tokens=60)))
        for prompt, token_ids in zip(prompts, one_by_one, strict=True):
            assert (await engine.generate(prompt, GREEDY)).token_ids == token_ids
        assert len((await long).token_ids) == 60
        assert await engine.check_health() > 0
        pids = [answer["pid"] for answer in await engine.collective_rpc("ping")]
        assert len(set(pids)) == 2
        running = asyncio.create_task(engine.generate([50, 51], GREEDY))
        await asyncio.sleep(0)
        assert await engine.drain(60)
        assert len((await running).token_ids) == GREEDY.max_tokens


class Slow:
    """A worker extension whose method returns at once on the first rank."""

    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.rank.index

    def hold(self, seconds: float) -> int:
        """Runs without giving another thread a turn, as what writes a trace does."""
        if self._rank:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return self._rank


async def test_a_call_that_takes_longer_on_one_replica(model: Path) -> None:
    """The steps of the other one wait for it, and none of the two hangs."""
    settings = {"hang_timeout": 2.5, "worker_extension": "test_shared_experts:Slow"}
    async with AsyncLLM(model, **SETTINGS | SHARED | settings) as engine:
        await engine.generate([50, 51], GREEDY)
        call = asyncio.create_task(engine.collective_rpc("hold", 3.5))
        await asyncio.sleep(0.1)  # the call has begun, most likely
        assert len((await engine.generate([50, 51], GREEDY)).token_ids) == GREEDY.max_tokens
        assert await call == [0, 1]
        assert engine.statistics().num_restarts == 0


async def test_pipelines_do_not_share(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="pipeline_parallel_size=2 with data_parallel_size=2"):
        await AsyncLLM(model, pipeline_parallel_size=2, **SETTINGS | SHARED).start()


def test_models_without_experts_do_not_share() -> None:
    config = EngineConfig(model="any", **SHARED)
    assert shares_experts(config, {"num_local_experts": 8}) and shares_experts(
        config, {"text_config": {"num_experts": 4}}
    )
    assert not shares_experts(config, {"hidden_size": 64}) and not shares_experts(config, {"num_experts": 0})
    assert not shares_experts(config.replace(data_parallel_size=1), {"num_experts": 8})
    assert not shares_experts(config.replace(enable_expert_parallel=False), {"num_experts": 8})


async def test_drafts_and_swapped_requests(model: Path, expected: Sequence[Any]) -> None:
    """Steps with drafts are steps with prompts to the others of a round; so are those in which pages come back."""
    small = SETTINGS | {"kv_cache_memory_bytes": 3 << 15, "block_size": 4, "swap_space_bytes": 1 << 20}
    small["kv_tiers"] = "host:16MB"
    async with AsyncLLM(model, speculation="ngram_worker", **small | SHARED) as engine:
        for _ in range(2):
            found = [essence(completion) for completion in await asyncio.gather(*work(engine))]
            assert [choices for choices, *_ in found] == [choices for choices, *_ in expected]
        (tier,) = engine.statistics().kv_tiers
        assert tier.num_fetched > 0
        assert engine.statistics().drafted_tokens > engine.statistics().num_preemptions > 0
        await settled(engine)


async def test_fp8_keys_and_values(model: Path) -> None:
    """Of one rank, and of replicas that measure their scales together before the first round. One request may have met
    a number in the middle between two codes."""
    expected = await answers(model, kv_cache_dtype="fp8")
    small = {"kv_cache_memory_bytes": 24 << 10, "block_size": 4, "swap_space_bytes": 1 << 20}
    more = {"kv_cache_dtype": "fp8", "speculation": "ngram_worker"}
    async with AsyncLLM(model, **SETTINGS | SHARED | small | more) as engine:
        assert engine.describe()["kv_cache_scales"] == "calibrated"
        found = [essence(completion) for completion in await asyncio.gather(*work(engine))]
        pairs = zip(found, expected, strict=True)
        assert sum(ours[0] != wanted[0] for ours, wanted in pairs) <= 1
        assert engine.statistics().num_preemptions > 0
        await settled(engine)


async def test_pauses(model: Path, expected: Sequence[Any]) -> None:
    """Of replicas whose steps are computed in rounds, at any time, also where one of them has nothing to do."""
    async with AsyncLLM(model, **SETTINGS | SHARED) as engine:
        tasks = work(engine)
        while not all(task.done() for task in tasks):
            async with asyncio.timeout(60):
                assert await engine.pause("keep")
            assert not any(replica.scheduler.rows.steps for replica in core_of(engine).replicas)
            before = engine.statistics().num_steps
            await engine.resume()
            await until(lambda: engine.statistics().num_steps > before or all(task.done() for task in tasks))
        assert [essence(await task) for task in tasks] == expected
        await settled(engine)
