"""Adapters that are given as tensors: checked as files are, also from another process, and kept in memory alone."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_api import until
from fakes import FakeExecutor

from aengine import EngineConfig, InvalidRequestError
from aengine.engine.adapters import registry
from aengine.engine.adapters.memory import LoraMemory
from aengine.remote import connect, serve_engine

Q = "model.layers.0.self_attn.q_proj"


def tensors(rank: int = 4, dtype: Any = np.float32) -> dict[str, Any]:
    return {f"{Q}.lora_A.weight": np.ones((rank, 8), dtype), f"{Q}.lora_B.weight": np.ones((12, rank), dtype)}


@pytest.mark.parametrize("is_remote", [False, True])
async def test_adapters_of_tensors(make_engine: Any, tmp_path: Path, is_remote: bool) -> None:
    """Their memory goes with them; that of a process which has gone is refused."""

    class LoraLLM(make_engine):  # type: ignore[misc]  # `FakeLLM`
        def _make_executor(self, config: EngineConfig) -> FakeExecutor:
            self.executor = FakeExecutor(**self.fake)
            self.executor.ready["lora_matrices"] = {Q: [12, 8]}
            return self.executor

    place = str(tmp_path / "socket")
    async with LoraLLM(max_loras=1) as engine, serve_engine(engine, place, admin=True), connect(place) as remote:
        caller: Any = remote if is_remote else engine
        before = len(os.listdir("/proc/self/fd"))
        await caller.add_lora("a", tensors(dtype=np.float16), config={"lora_alpha": 4, "target_modules": {"q_proj"}})
        assert (await caller.list_loras())["a"]["rank"] == 4
        for given, config, message in (
            (tensors(2, np.float64), {}, "float32, float16 or bfloat16"),
            (tensors(32), {}, "max_lora_rank=16"),
            (tensors() | {"x": np.ones(1, np.float32)}, {}, "no lora_A"),
            ({"x": "y"}, {}, "x is no tensor"),
            ({7: np.ones(1, np.float32)}, {}, "7 is no name"),
            ({}, {}, "no tensors"),
            (tensors(), {"use_dora": True}, "DoRA"),
            (tensors(), {"r": object()}, "to_dict"),
            (tensors(), None, "to_dict"),
            ("folder", {}, "no effect"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                await caller.add_lora("b", given, config=config)
        await caller.add_lora("a", tensors(3), config={}, replace=True)
        assert (await caller.list_loras())["a"]["rank"] == 3
        await caller.remove_lora("a")
        await until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) <= before)
        closed = LoraLLM(max_loras=1)
        async with closed:
            await closed.add_lora("a", tensors(), config={})
        await until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) <= before)
        assert closed.state == "closed"
        with pytest.raises(InvalidRequestError, match="have gone"):
            LoraMemory.open("/proc/self/fd/0")


async def test_many_at_once_are_no_more_than_may_be_kept(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are renewed take no place of others."""

    class LoraLLM(make_engine):  # type: ignore[misc]  # `FakeLLM`
        def _make_executor(self, config: EngineConfig) -> FakeExecutor:
            executor = FakeExecutor(**self.fake)
            executor.ready["lora_matrices"] = {Q: [12, 8]}
            return executor

    monkeypatch.setattr(registry, "MOST_KEPT", 2)
    async with LoraLLM(max_loras=1) as engine:
        adding = [engine.add_lora(name, tensors(), config={}) for name in "abc"]
        ends = await asyncio.gather(*adding, return_exceptions=True)
        assert [type(one) for one in ends] == [type(None), type(None), InvalidRequestError]
        await engine.add_lora("a", tensors(3), config={}, replace=True)
        assert (await engine.list_loras())["a"]["rank"] == 3
