"""Several ranks, each a real process with the fake runner: they start in phases, agree, and fail together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import fake_runner
import pytest
from worker_helpers import config, decode, gone, leftovers, make, start, start_until, step

from aengine.engine.executor import ProcessExecutor
from aengine.errors import EngineError, InternalError, InvalidRequestError, ModelLoadError
from aengine.ipc.messages import PLAN_LIMITS, Kind
from aengine.outputs import StartupProgress
from aengine.workers.agreement import merge
from aengine.workers.host.handshake import Handshake
from aengine.workers.rank import Rank, ranks_of

OFFERS = {"0": {"num_blocks": 900, "max_model_len": 4000}, "1": {"num_blocks": 1200, "max_model_len": 3000}}
FAKE = {"worker": "fake_runner:load_model"}


def two_ranks() -> list[Rank]:
    return [Rank(index=i, tp_rank=i, tp_size=2) for i in range(2)]


async def pids_gone(executor: ProcessExecutor) -> None:
    for worker in executor.workers:
        assert worker.pid is not None
        await gone(worker.pid)
    assert not leftovers()


# -- start


async def test_the_least_wins_and_every_rank_allocates_it() -> None:
    executor = make(tensor_parallel_size=2)
    ready = await start(executor, {"offers": OFFERS})
    plan = {"num_blocks": 900, "max_model_len": 3000, "max_num_batched_tokens": 8192}
    assert {name: ready[name] for name in PLAN_LIMITS} == plan
    assert ready["block_size"] == 16 and ready["device_memory_total_bytes"] == 2000
    ranks = ready["ranks"]
    assert [rank["rank"] for rank in ranks] == [rank["tp_rank"] for rank in ranks] == [0, 1]
    assert [rank["pid"] for rank in ranks] == [worker.pid for worker in executor.workers]
    assert all(rank["was_given"] == plan for rank in ranks)
    assert not any("num_blocks" in rank or "block_size" in rank for rank in ranks), "what is equal is told once"
    await executor.aclose(5)
    await pids_gone(executor)


@pytest.mark.parametrize("name, value", [("block_size", 32), ("dtype", "float16"), ("unheard_of", 1)])
async def test_ranks_that_differ_can_not_start(name: str, value: Any) -> None:
    executor = make(tensor_parallel_size=2)
    with pytest.raises(ModelLoadError, match=rf"rank 0 has {name}=.* and rank 1 has {name}={value!r}") as caught:
        await start(executor, {"offers": {"1": {name: value}}})
    assert "\n" not in str(caught.value)
    await pids_gone(executor)


async def test_progress_shows_all_ranks() -> None:
    seen: list[StartupProgress] = []
    executor = make(tensor_parallel_size=2)
    await start(executor, report=seen.append)
    weights = [progress for progress in seen if progress.stage == "weights"]
    assert (weights[-1].done, weights[-1].total, weights[-1].detail) == (800, 800, "2 of 2 ranks")
    await executor.aclose(5)


async def test_progress_is_the_slowest_ranks() -> None:
    seen: list[StartupProgress] = []
    handshake = Handshake(two_ranks(), seen.append)
    assert handshake.slowest() == (0, "exec")

    def report(rank: int, stage: str, done: int = 0, total: int = 0) -> StartupProgress:
        handshake.take(rank, Kind.PROGRESS, {"stage": stage, "done": done, "total": total, "unit": "bytes"})
        return seen[-1]

    assert report(0, "import") == StartupProgress("import", 0, 0, "bytes", "1 of 2 ranks")
    assert report(0, "weights", 10, 40) == StartupProgress("weights", 10, 40, "bytes", "1 of 2 ranks")
    assert handshake.slowest() == (1, "exec")
    assert report(1, "import").stage == "import"
    assert report(0, "weights", 40, 40).stage == "import"
    assert handshake.slowest() == (1, "import")
    assert report(1, "weights", 5, 60) == StartupProgress("weights", 45, 100, "bytes", "2 of 2 ranks")
    assert report(0, "profile") == StartupProgress("weights", 45, 100, "bytes", "1 of 2 ranks")
    assert report(1, "weights", 60, 60) == StartupProgress("weights", 100, 100, "bytes", "1 of 2 ranks")
    assert report(1, "profile") == StartupProgress("profile", 0, 0, "bytes", "2 of 2 ranks")


async def test_a_rank_that_fails_while_it_loads_ends_all() -> None:
    executor = make(tensor_parallel_size=2)
    with pytest.raises(ModelLoadError, match="no such weights"):
        await start(executor, {"fail": "load"})
    await pids_gone(executor)


async def test_the_rank_that_is_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(tensor_parallel_size=2)
    with pytest.raises(ModelLoadError, match=r"worker [01] was not ready after startup_timeout=600 s.*profile"):
        await start_until("profile", executor, {"fail": "hang"}, monkeypatch)
    await pids_gone(executor)


# -- steps


async def test_memory_that_runs_out_on_one_rank_is_the_end_of_all_at_once() -> None:
    """Rank 0 has computed the step and could answer: nobody goes on alone."""
    executor = make(tensor_parallel_size=2)
    failures: list[EngineError | None] = []
    await start(executor, failures=failures)
    assert (await (await executor.execute_model(step(0, [5])))).token_ids[0] == 261
    await executor.execute_model(step(1, [fake_runner.NO_MEMORY_ON_RANK_1], 1))
    late = None
    with contextlib.suppress(InternalError):  # rank 1 may have failed by now
        late = await executor.execute_model(decode(2, [0]))
    while not failures:
        await asyncio.sleep(0.01)
    assert isinstance(failures[0], InternalError) and "worker 1: the device ran out of memory" in str(failures[0])
    assert late is None or late.done()
    with pytest.raises(InternalError, match="out of memory"):
        await executor.execute_model(decode(3, [0]))
    await executor.aclose(5)
    await pids_gone(executor)


# -- values


def test_places_of_ranks() -> None:
    def devices(**settings: Any) -> list[str]:
        return [rank.device for rank in ranks_of(config(**FAKE, **settings))]

    assert devices() == ["auto"] and devices(device="cuda:3") == ["cuda:3"] and devices(device="cuda") == ["cuda"]
    assert devices(device="cuda", tensor_parallel_size=3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices(device="cpu", tensor_parallel_size=2) == ["cpu", "cpu"]
    assert devices(device="cuda:5,2", tensor_parallel_size=2) == ["cuda:5", "cuda:2"]
    assert devices(tensor_parallel_size=2) == ["auto:0", "auto:1"]
    for wrong in ("cuda:1", "cuda:1,2,3", "cuda:1,1", "cuda:1,01"):
        with pytest.raises(InvalidRequestError, match=r"1 |3 different devices, and the engine has 2 ranks") as caught:
            config(**FAKE, device=wrong, tensor_parallel_size=2)
        assert caught.value.param == "device"
    ranks = ranks_of(config(**FAKE, tensor_parallel_size=2))
    assert [(rank.index, rank.tp_rank, rank.world_size, rank.answers) for rank in ranks] == [
        (0, 0, 2, True),
        (1, 1, 2, False),
    ]
    assert Rank.from_wire(ranks[1].to_wire()) == ranks[1]
    (of_replica,) = ranks_of(config(**FAKE), 1, 2)
    assert (of_replica.index, of_replica.dp_rank, of_replica.dp_size, of_replica.world_size) == (0, 1, 2, 1)
    assert not Rank(pp_size=2).answers and Rank(index=1, pp_rank=1, pp_size=2).answers


def test_what_is_agreed_and_what_each_rank_has_of_its_own() -> None:
    readies = [{"pid": 1, "kv_cache_bytes": 30}, {"pid": 2, "kv_cache_bytes": 20}]
    assert merge(two_ranks(), {"num_blocks": 5, "block_size": 2}, readies) == {
        "num_blocks": 5,
        "block_size": 2,
        "pid": 1,
        "kv_cache_bytes": 50,
        "ranks": [{"rank": 0, **readies[0]}, {"rank": 1, **readies[1]}],
    }


def test_a_models_parameters_are_counted_once() -> None:
    """Each rank of a stage says those of the whole stage."""
    ranks = [Rank(i, tp_rank=i % 2, tp_size=2, pp_rank=i // 2, pp_size=2) for i in range(4)]
    readies = [{"num_parameters": count} for count in (70, 70, 30, 30)]
    assert merge(ranks, {}, readies)["num_parameters"] == 100
    assert merge(ranks[:2], {}, readies[:2])["num_parameters"] == 70
