"""What the parts of chaos.py share: promises and what became of them, memory, and an engine with a fake worker."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1]))
from conftest_api import core_of
from scheduler_invariants import check_scheduler

from aengine import AsyncLLM, EngineConfig
from aengine.engine.executor import ProcessExecutor

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
WORKER_PATH = [str(HERE), str(REPOSITORY / "benchmarks"), str(REPOSITORY)]  # chaos_worker.py, fake_worker.py, aengine
MIB = 2**20


class FakeWorkerLLM(AsyncLLM):
    """A real worker process, in which a runner without a model answers (chaos_worker.py)."""

    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        os.environ["PYTHONPATH"] = os.pathsep.join(WORKER_PATH)  # this is our own process
        return ProcessExecutor(config.replace(worker="chaos_worker:load_model"))


def model_for(ranks: int, by: str = "tensor") -> str:
    """SmolLM2, or, for several ranks, a tiny model that they can divide: written once a process."""
    return "smollm2-135m" if ranks == 1 else _tiny_model("qwen3_moe" if by == "experts" else "qwen3")


def division(ranks: int, by: str) -> dict[str, Any]:
    """The settings of so many ranks."""
    if by == "experts":
        return {"data_parallel_size": ranks, "enable_expert_parallel": ranks > 1}
    return {f"{by}_parallel_size": ranks}


@cache
def _tiny_model(family: str) -> str:
    sys.path.append(str(REPOSITORY / "tests" / "models"))
    from tiny import write_tiny_model

    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    return str(write_tiny_model(folder, family, seed=3, num_hidden_layers=4, **sizes))


class Promises:
    """Those that did not hold, with what was seen instead."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def hold(self, what: str, kept: bool, seen: object = "") -> None:
        if not kept:
            self.broken.append(f"{what}: {seen}" if seen != "" else what)
            say(f"BROKEN PROMISE: {self.broken[-1]}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ProcessResources:
    """Resources that a process should not have more of after its work than before: memory, descriptors, threads."""

    def __init__(self) -> None:
        gc.collect()
        self._process = psutil.Process()
        self._rss, self._fds, self._threads = self._now()

    def _now(self) -> tuple[int, int, int]:
        return self._process.memory_info().rss, self._process.num_fds(), self._process.num_threads()

    def growth(self) -> dict[str, float]:
        gc.collect()
        rss, fds, threads = self._now()
        return {
            "rss_growth_mib": round((rss - self._rss) / MIB, 2),
            "fds_growth": fds - self._fds,
            "threads_growth": threads - self._threads,
        }


def seconds(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"count": 0}
    return {"count": len(values), "p50": round(statistics.median(values), 2), "max": round(max(values), 2)}


async def settle(engine: AsyncLLM, promises: Promises) -> None:
    """Wait until no request is left; then nothing of any may be: no block, no row, no call."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        now = engine.statistics()
        if not now.num_running and not now.num_waiting and now.num_free_blocks == now.num_blocks:
            break
        await asyncio.sleep(0.01)
    core = core_of(engine)
    left = (now.num_running, now.num_waiting, now.num_blocks - now.num_free_blocks)
    promises.hold("no request and no KV block is left (running, waiting, blocks)", left == (0, 0, 0), left)
    num_requests = core.admission.count(set())
    promises.hold("the engine holds no request", num_requests == 0, num_requests)
    try:
        for replica in core.replicas:
            check_scheduler(replica.scheduler)
    except AssertionError as error:
        promises.hold("the scheduler's state is consistent", False, repr(error))
