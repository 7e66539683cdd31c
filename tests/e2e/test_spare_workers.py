"""Spare workers on a real model: what they become, when, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conftest_api import core_of

from aengine import AsyncLLM, EngineConfig, InvalidRequestError, ModelLoadError, SamplingParams, SpareWorkers
from aengine.config import worker_environment
from aengine.workers.host import spares as spares_module

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from tiny import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 8 * 2**20, "device": "cpu", "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(folder: Path) -> AsyncIterator[list[int]]:
    """What is generated without spares."""
    async with AsyncLLM(str(folder), **SETTINGS) as engine:
        yield list((await engine.generate([1, 2, 3], PARAMS)).token_ids)


def pid_of(engine: AsyncLLM) -> int:
    return int(core_of(engine).replicas[0].worker.ready["pid"])


async def has_ended(pid: int) -> bool:
    for _ in range(500):
        if not os.path.exists(f"/proc/{pid}"):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_start_and_a_restart(folder: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a spare, which then is a worker as any other: with its engine's environment, and dying with it."""
    monkeypatch.setattr(spares_module, "_REST", 1000.0)
    with SpareWorkers(2) as spares:
        first, second = spares.pids
        await asyncio.to_thread(spares.wait)
        async with AsyncLLM(str(folder), **SETTINGS, spare_workers=spares) as engine:
            assert pid_of(engine) == first and spares.pids == [second]
            assert list((await engine.generate([1, 2, 3], PARAMS)).token_ids) == alone
            assert engine.describe()["num_threads"] == 1
            stream = engine.stream([1, 2, 3], PARAMS)
            got = [(await anext(stream)).token_id]
            os.kill(first, signal.SIGKILL)
            got += [token.token_id async for token in stream]
            assert got == alone and pid_of(engine) == second and not spares.pids
            assert engine.statistics().num_restarts == 1
            os.kill(second, signal.SIGKILL)  # there is no spare left: a new process
            assert list((await engine.generate([1, 2, 3], PARAMS)).token_ids) == alone
            assert engine.statistics().num_restarts == 2
        assert await has_ended(first) and await has_ended(second)


async def test_one_that_was_taken_is_replaced(folder: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "_REST", 0.0)
    with SpareWorkers() as spares:
        (taken,) = spares.pids
        async with AsyncLLM(str(folder), **SETTINGS, spare_workers=spares) as engine:
            assert pid_of(engine) == taken
            while not spares.pids:
                await asyncio.sleep(0.01)
            (left,) = spares.pids
            spares.close()  # while an engine runs
            assert await has_ended(left) and not spares.pids
            assert list((await engine.generate([1, 2, 3], PARAMS)).token_ids) == alone
    spares.close()


async def test_a_spare_that_can_not_be_the_worker(
    folder: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has another environment, or has died: a process is started as ever."""
    for why in ("environment", "death"):
        with SpareWorkers() as spares:
            (pid,) = spares.pids
            if why == "environment":
                monkeypatch.setenv("AENGINE_TEST_SPARES", "1")
            else:
                os.kill(pid, signal.SIGKILL)
            async with AsyncLLM(str(folder), **SETTINGS, spare_workers=spares) as engine:
                assert pid_of(engine) != pid
                assert list((await engine.generate([1, 2, 3], PARAMS)).token_ids) == alone
            assert await has_ended(pid)


async def test_errors_of_a_start_are_told(tmp_path: Path) -> None:
    with SpareWorkers() as spares:
        engine = AsyncLLM("smollm2-135m", device="cpu", gguf_file="none", spare_workers=spares)
        with pytest.raises(ModelLoadError):
            await engine.start()


async def test_the_end_of_the_host_ends_them() -> None:
    """Also of one that is killed, and while they import."""
    program = (
        "import time, sys\nfrom aengine import SpareWorkers\nspares = SpareWorkers(2)\n"
        "print(*spares.pids, flush=True)\ntime.sleep(float(sys.argv[1]))\n"
    )
    for seconds, how in (("100", signal.SIGKILL), ("0", None)):
        host = subprocess.Popen([sys.executable, "-c", program, seconds], stdout=subprocess.PIPE)
        assert host.stdout is not None
        line = await asyncio.to_thread(host.stdout.readline)
        if how is not None:
            host.send_signal(how)
        await asyncio.to_thread(host.communicate)
        pids = [int(pid) for pid in line.split()]
        assert len(pids) == 2 and all([await has_ended(pid) for pid in pids])


@pytest.mark.parametrize("count", [0, -1, 65, 1.0, True, None, "2"])
async def test_wrong_counts(count: Any) -> None:
    with pytest.raises(InvalidRequestError, match="count=.* is not valid: it must be from 1 to 64"):
        SpareWorkers(count)


async def test_wrong_settings() -> None:
    with pytest.raises(InvalidRequestError, match="spare_workers=2 is not valid: it must be a SpareWorkers, or None"):
        EngineConfig(model="m", spare_workers=2)  # type: ignore[arg-type]
    with SpareWorkers() as spares:
        with pytest.raises(InvalidRequestError, match="no effect without executor='process'"):
            EngineConfig(model="m", spare_workers=spares, executor="ray")
        config = EngineConfig(model="m", spare_workers=spares)
        assert "spare_workers" not in config.to_wire()
        assert spares.take(worker_environment() | {"X": "1"}) is None and not spares.pids
    spares.close()
    assert spares.take(worker_environment()) is None
