"""What an engine on a real model logs, with the logging that an application has by default, and with more."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from aengine import AsyncLLM, EngineConfig, SamplingParams
from aengine.engine.executor import ProcessExecutor


class BesideADriver(AsyncLLM):
    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="beside_a_driver:load_model"))


SMALL = {"load_format": "dummy", "kv_cache_memory_bytes": 16 * 2**20, "max_model_len": 256}


async def test_a_gpu_that_torch_cannot_use_is_told_of(caplog: pytest.LogCaptureFixture, short_model: str) -> None:
    """At WARNING, which `logging` shows on stderr without any set-up; while the engine lives."""
    async with BesideADriver(short_model, **SMALL) as engine:
        await engine.generate("Hello", SamplingParams(max_tokens=2))
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert record.getMessage().startswith("running on the CPU: torch ") and record.name == "aengine.runner"
        assert record.process == engine.describe()["pid"]


async def test_a_start_is_one_line(caplog: pytest.LogCaptureFixture, short_model: str) -> None:
    with caplog.at_level(logging.INFO, "aengine"):
        async with AsyncLLM(short_model, device="cpu", num_threads=1, **SMALL) as engine:
            pid = engine.describe()["pid"]
            await asyncio.sleep(0)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "aengine"]
    assert re.fullmatch(
        rf"{re.escape(short_model)} is ready after \d+\.\d s: device=cpu dtype=float32 weights=\w+ kv_tokens=\d+ "
        r"kv_memory=[\d.]+GiB\(taken-as-used\) max_model_len=256 "
        rf"attention=(compiled|torch) graphs=0 threads=1 pid={pid}",
        line,
    )
