"""What several workers show of themselves: whether all live, and which one does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aengine.workers.device_watch import IDLE
from aengine.workers.host.group import WorkerGroup


def group_of(*beats: int) -> tuple[WorkerGroup, list[Any]]:
    group, channels = WorkerGroup(), [SimpleNamespace(num_heartbeats=n, device_word=IDLE) for n in beats]
    group._workers = [
        SimpleNamespace(rank=i, pid=100 + i, channel=channel)  # type: ignore[misc]
        for i, channel in enumerate(channels)
    ]
    return group, channels


def beat(channels: list[Any], *, but: int = -1) -> None:
    for rank, channel in enumerate(channels):
        channel.num_heartbeats += rank != but


def test_a_rank_that_began_later_counts_like_the_others() -> None:
    group, channels = group_of(120, 0)
    last = group.liveness().num_heartbeats
    for _ in range(3):
        beat(channels)
        liveness = group.liveness()
        assert liveness.num_heartbeats == last + 1
        last = liveness.num_heartbeats
    assert liveness.slowest == "one of 2 workers"
    for _ in range(5):
        beat(channels, but=0)
        liveness = group.liveness()
    assert liveness.num_heartbeats == last, "the one with the most beats has stopped"
    assert liveness.slowest == "worker 0 (pid 100)"
    beat(channels)
    assert group.liveness() == (last + 1, 0.0, "one of 2 workers")


def test_workers_that_start() -> None:
    group, _ = group_of()
    assert group.liveness().num_heartbeats == 0
    assert group_of(7)[0].liveness().slowest == "the worker"
