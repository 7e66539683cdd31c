"""Starts the workers of all replicas, side by side; a failure of one ends the start of all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...checkpoint.source import ModelSource
from ...config import EngineConfig, num_worker_threads
from ...errors import ModelLoadError
from ...outputs import StartupProgress
from ..executor import Executor, ProcessExecutor
from ..pacing.peers import NoPeers, Peers
from ..threads.pools import run_in_thread
from ..tiers.host_memory import HostMemory
from ..tiers.start import TiersStart
from .joint import Joint, shares_experts

if TYPE_CHECKING:
    from ..worker_control import Restart

logger = logging.getLogger("aengine")

ProgressCallback = Callable[[StartupProgress], None]
ExecutorFactory = Callable[[EngineConfig], Executor]


class Started(NamedTuple):
    """An executor that is ready, and what goes with it."""

    executor: Executor
    work: asyncio.Event  # event that is set when the executor, or one started in its place, fails
    ready: dict[str, Any]  # the READY message that its workers have agreed on
    restart: Restart
    peers: Peers
    memory: HostMemory | None  # memory in which its workers keep pages of KV


class ReplicasStart:
    """A start of all replicas under way: `begin`, then `ready` or `undo`."""

    def __init__(self, make_executor: ExecutorFactory, report: ProgressCallback) -> None:
        self._make_executor = make_executor
        self._report = report
        self._executors: list[Executor] = []
        self._starting: list[asyncio.Task[Started]] = []
        self._drop_tiers: Callable[[], None] = lambda: None

    async def begin(self, config: EngineConfig, source: ModelSource) -> None:
        """Begin to start the workers of each replica."""
        tiers = await run_in_thread("tiers", TiersStart, config, source)
        self._new_memory, self._drop_tiers = tiers.new_memory, tiers.undo
        configs = (
            await run_in_thread("replicas", replica_configs, config) if config.data_parallel_size > 1 else [config]
        )
        loop = asyncio.get_running_loop()
        if shares_experts(config, source.hf_config) and self._makes_processes(config):
            self._begin_joint(Joint(config), config, source)
            return
        self._executors = [self._make_executor(own) for own in configs]
        for index, (own, executor) in enumerate(zip(configs, self._executors, strict=True)):
            load = {"config": own.to_wire(), "source": source.to_wire(), "replica": [index, len(configs)]}
            report = self._report if len(configs) == 1 else partial(_report_of, self._report, index)
            name = f"replica {index} (data_parallel_size={len(configs)}, device={own.device!r}): "
            another = partial(self._make_executor, own)
            peers: Peers = NoPeers(f"the worker of replica {index}") if len(configs) > 1 else NoPeers()
            starting = self._start(executor, another, load, report, name if len(configs) > 1 else "", peers)
            self._starting.append(loop.create_task(starting, name="aengine-worker-start"))

    def _makes_processes(self, config: EngineConfig) -> bool:
        """Return whether the executors start worker processes, unlike a fake or a caller's own executor."""
        executor = self._make_executor(config)
        executor.terminate()
        return type(executor) is ProcessExecutor

    def _begin_joint(self, joint: Joint, config: EngineConfig, source: ModelSource) -> None:
        """Begin to start the ranks of replicas that share experts. All of them report as those of one."""
        loop = asyncio.get_running_loop()
        load = {"config": config.to_wire(), "source": source.to_wire()}
        for index in range(config.data_parallel_size):
            executor = joint.executor(index)
            self._executors.append(executor)
            starting = self._start(executor, partial(joint.executor, index), load, self._report, "", joint.peers(index))
            self._starting.append(loop.create_task(starting, name="aengine-worker-start"))

    async def _start(
        self,
        executor: Executor,
        make_another: Callable[[], Executor],
        load: dict[str, Any],
        report: ProgressCallback,
        name: str,
        peers: Peers,
    ) -> Started:
        """Start a replica's workers. ``name``: how its errors begin."""
        work = asyncio.Event()
        try:
            ready = await executor.start(load, report, work.set)
        except ModelLoadError as error:
            if not name:
                raise
            raise type(error)(f"{name}{error}") from error

        memory = await run_in_thread("memory", self._new_memory, ready)

        def restart() -> tuple[Executor, Callable[[], Awaitable[dict[str, Any]]]]:
            another = make_another()
            return another, partial(another.start, _load_again(load, ready), _log_progress, work.set)

        return Started(executor, work, ready, restart, peers, memory)

    async def ready(self) -> list[Started]:
        """Wait for all. Raises what the first that fails raises; call `undo` then."""
        return await asyncio.gather(*self._starting)

    def terminate(self) -> None:
        """Kill all workers that were started."""
        for starting in self._starting:
            starting.cancel()
        for executor in self._executors:
            executor.terminate()

    async def undo(self) -> None:
        """Kill what was started, and wait until the processes have ended and their memory is free."""
        self.terminate()
        if self._starting:
            await asyncio.wait(self._starting)
        for starting in self._starting:
            if not starting.cancelled():
                starting.exception()  # its error is retrieved: only the first failure is raised
        await asyncio.gather(*(executor.aclose(0) for executor in self._executors))
        await run_in_thread("tiers", self._drop_tiers)


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return the settings of each replica's workers, which know nothing of the others: its own GPUs, its share of the
    cores (those of other machines are known there). Blocking: reads files."""
    count, ranks = config.data_parallel_size, config.num_ranks
    if config.executor == "ray":
        return [replace(config, data_parallel_size=1)] * count
    num_threads = num_worker_threads(config)
    return [
        replace(config, data_parallel_size=1, num_threads=num_threads, device=device)
        for device in _devices(config.device, count, ranks)
    ]


def _devices(device: str, count: int, ranks: int) -> list[str]:
    """Return the setting ``device`` of each of ``count`` replicas of ``ranks`` ranks."""
    name, colon, listed = device.partition(":")
    if name == "cpu":
        return [device] * count
    places = listed.split(",") if colon else [str(place) for place in range(count * ranks)]
    assert len(places) == count * ranks, "the configuration has checked it"
    return [f"{name}:{','.join(places[start : start + ranks])}" for start in range(0, len(places), ranks)]


def _report_of(report: ProgressCallback, index: int, progress: StartupProgress) -> None:
    detail = f"replica {index}: {progress.detail}" if progress.detail else f"replica {index}"
    report(replace(progress, detail=detail))


def _log_progress(progress: StartupProgress) -> None:
    logger.debug("restart: %s %s", progress.stage, progress.detail)


def _load_again(load: dict[str, Any], ready: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker loads in the place of one that was ready: with as much KV memory, whatever is free now."""
    sizes = [rank["kv_cache_bytes"] for rank in ready.get("ranks", ()) if "kv_cache_bytes" in rank]
    if not sizes:  # a worker of another kind keeps no KV cache
        return load
    return {**load, "config": {**load["config"], "kv_cache_memory_bytes": max(sizes)}}
