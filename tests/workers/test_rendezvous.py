"""Ranks that meet: real processes, each of which opens its group in the file that the host has made for them."""

from __future__ import annotations

import pytest
from worker_helpers import descriptors, gone, leftovers, make, start, start_until

from aengine.engine.executor import ProcessExecutor
from aengine.errors import ModelLoadError, WorkerDiedError

pytestmark = pytest.mark.slow
MEET = "meeting_runner:load_model"


async def pids_gone(executor: ProcessExecutor) -> None:
    for worker in executor.workers:
        assert worker.pid is not None
        await gone(worker.pid)
    assert not leftovers()


@pytest.mark.parametrize("ranks", [2, 4])
async def test_ranks_meet_in_a_file_without_a_name(ranks: int) -> None:
    before = descriptors()
    executor = make(worker=MEET, tensor_parallel_size=ranks, num_threads=1)
    ready = await start(executor)
    others = [[rank["rank"], rank["pid"]] for rank in ready["ranks"]]
    assert all(rank["seen"] == others for rank in ready["ranks"])
    assert not any(rank["is_global"] for rank in ready["ranks"]), "torch's global group is nobody's"
    shared = [[name for name in rank["files"] if "rendezvous" in name] for rank in ready["ranks"]]
    assert shared == [["/memfd:aengine-rendezvous (deleted)"]] * ranks
    await executor.aclose(5)
    await pids_gone(executor)
    assert descriptors() <= before


async def test_two_groups_of_one_host_do_not_meet() -> None:
    first, second = (make(worker=MEET, tensor_parallel_size=2, num_threads=1) for _ in range(2))
    for executor in (first, second):
        ready = await start(executor)
        assert ready["seen"] == [[rank["rank"], rank["pid"]] for rank in ready["ranks"]]
    for executor in (first, second):
        await executor.aclose(5)


@pytest.mark.parametrize("when", ["die", "die after"])
async def test_a_rank_that_dies_while_they_meet_ends_the_start_at_once(when: str) -> None:
    executor = make(worker=MEET, tensor_parallel_size=2, num_threads=1)
    with pytest.raises(WorkerDiedError, match="worker 1 .*SIGKILL") as caught:
        await start(executor, {"fail": when})
    assert caught.value.rank == 1
    await pids_gone(executor)


async def test_a_rank_that_does_not_come_is_what_the_start_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(worker=MEET, tensor_parallel_size=2, num_threads=1)
    with pytest.raises(ModelLoadError, match=r"not ready after startup_timeout=600 s.* meet"):
        await start_until("meet", executor, {"fail": "hang"}, monkeypatch)
    await pids_gone(executor)
