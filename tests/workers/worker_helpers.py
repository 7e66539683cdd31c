"""Real worker processes with the fake runner, steps for them, and what they may not leave behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from aengine.config import EngineConfig
from aengine.engine.executor import ProcessExecutor
from aengine.errors import EngineError
from aengine.ipc.messages import NewRequest, SchedulerOutput, int32

HERE = Path(__file__).parent


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.create("fake", {"shutdown_timeout": 5.0, **settings})


def make(**settings: Any) -> ProcessExecutor:
    return ProcessExecutor(config(**{"worker": "fake_runner:load_model", **settings}))


async def start(
    executor: ProcessExecutor,
    source: dict | None = None,
    report: Callable[[Any], None] = lambda progress: None,
    failures: list[EngineError | None] | None = None,
) -> dict[str, Any]:
    """``failures`` gets the executor's failure as often as it tells of one."""

    def note_failure() -> None:
        if failures is not None:
            failures.append(executor.failure)

    return await executor.start({"config": config().to_wire(), "source": source or {}}, report, note_failure)


def stage(executor: ProcessExecutor) -> str:
    """What the slowest worker is busy with."""
    return "" if executor._handshake is None else executor._handshake.slowest()[1]


async def start_until(name: str, executor: ProcessExecutor, source: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for the start ends when all ranks are at a stage, however long that takes."""
    limits, timeout = list[asyncio.Timeout](), asyncio.timeout

    def noted(delay: float | None) -> asyncio.Timeout:
        limits.append(timeout(delay))
        return limits[-1]

    monkeypatch.setattr(asyncio, "timeout", noted)
    starting = asyncio.create_task(start(executor, source))
    while stage(executor) != name:
        await asyncio.sleep(0.01)
    limits[0].reschedule(0.0)
    await starting


@asynccontextmanager
async def running(source: dict | None = None, **settings: Any) -> AsyncIterator[ProcessExecutor]:
    executor = make(**settings)
    await start(executor, source)
    try:
        yield executor
    finally:
        await executor.aclose(5)


def step(step_id: int, tokens: list[int], row: int = 0) -> SchedulerOutput:
    """One new request whose whole prompt is computed."""
    new = NewRequest(row, int32(tokens), len(tokens), 0, int32([0]))
    return SchedulerOutput(step_id, new_requests=[new], req_idx=int32([row]), num_scheduled_tokens=int32([len(tokens)]))


def decode(step_id: int, rows: list[int]) -> SchedulerOutput:
    return SchedulerOutput(step_id, req_idx=int32(rows), num_scheduled_tokens=int32([1] * len(rows)))


def leftovers(pid: int = 0) -> list[str]:
    """What the host ``pid``, or this one, has left in /dev/shm. (Other hosts may be starting workers just now.)"""
    return [name for name in os.listdir("/dev/shm") if f"aengine-{pid or os.getpid()}-" in name]


def descriptors() -> set[str]:
    """What this process has open, each as "number target"; without what the tests' own forks are asked by."""
    from forked_workers import DESCRIPTORS  # programs that tests run can't import it, and call other functions here

    found = set()
    for fd in {*os.listdir("/proc/self/fd")} - {str(fd) for fd in DESCRIPTORS}:
        with suppress(FileNotFoundError):  # the one that listed them
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


async def gone(pid: int) -> None:
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{pid} is still there")
