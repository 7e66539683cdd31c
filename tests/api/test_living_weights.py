"""Sleep, updates and adapters by the blocking calls, and what becomes of calls whose callers give up, wherever they
are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from conftest_api import until_running
from fakes import FakeExecutor

from aengine import AsyncLLM, EngineClosedError, EngineConfig, InvalidRequestError, SamplingParams
from aengine.testing import FakeAsyncLLM, FakeLLM

Q = "model.layers.0.self_attn.q_proj"


def tensors(rank: int = 4) -> dict[str, Any]:
    shapes = {"A": (rank, 8), "B": (12, rank)}
    return {f"{Q}.lora_{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}


def test_blocking_sleep_and_updates() -> None:
    with FakeLLM("yes", sleep_after=0.005) as llm:
        assert llm.generate("x").text == "yes"
        while not llm.is_sleeping:
            pass
        llm.wake_up()
        llm.sleep()
        llm.sleep(level=2)
        assert llm.is_sleeping and llm.state == "asleep"
        llm.wake_up(["weights"])
        assert llm.is_sleeping
        assert [one.text for one in llm.generate(["x", "y"])] == ["yes", "yes"]
        with pytest.raises(InvalidRequestError, match="level"):
            llm.sleep(3)
    with FakeLLM("yes", when_asleep="error") as llm:
        llm.sleep()
        with pytest.raises(EngineClosedError, match="asleep"):
            llm.generate("x")
        llm.wake_up()
        assert llm.pause("keep") and llm.state == "paused"
        llm.resume()
        llm.start_weight_update("wait")
        llm.update_weights({"w": np.ones(3)})
        assert llm.finish_weight_update("of mine") == "of mine"
        llm.start_weight_update()
        llm.abort_weight_update()
        completion = llm.generate("x")
        assert completion.text == "yes" and completion.weight_versions == ("of mine",)
        assert llm.weights_checksum()["version"] == "of mine" and llm.state == "running"


class Lora(FakeExecutor):
    def __init__(self, **fake: Any) -> None:
        super().__init__(**fake)
        self.ready["lora_matrices"] = {Q: [12, 8]}

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        return ["ready"] if method == "load_lora" else await super().call(method, *args, timeout=timeout)


def test_blocking_calls_of_adapters(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_engine, "_make_executor", lambda self, config: Lora(**self.fake))
    engine: AsyncLLM = make_engine(own_thread=True, max_loras=2)
    with engine.sync as llm:
        llm.add_lora("a", tensors(), config={})
        llm.pin_lora("a")
        assert llm.has_lora("a") and not llm.has_lora("b")
        llm.sleep()
        llm.add_lora("b", tensors(3), config={})  # an engine that sleeps learns of adapters, too
        assert [one["rank"] for one in llm.list_loras().values()] == [4, 3]
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate([1, 2], params, lora="b").token_ids) == 2
        llm.remove_lora("a")
        with pytest.raises(InvalidRequestError, match="there is no adapter 'a'"):
            llm.generate([1, 2], params, lora="a")


async def given_up(call: Awaitable[object], turns: int) -> None:
    """Begin a call, and give it up after some turns of the loop, unless it has ended before."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        assert isinstance(task.exception(), InvalidRequestError | None)


@pytest.mark.parametrize("method", ["pause", "start", "update", "finish", "abort", "sleep", "wake_up", "drain"])
async def test_who_gives_up_any_call_leaves_an_engine_that_goes_on(method: str, rng: random.Random) -> None:
    """Whatever the call has done by then can be ended by another."""
    async with FakeAsyncLLM("abc" * 50, token_delay=0.0001) as engine:
        for _ in range(12):
            running = asyncio.create_task(engine.generate("x", SamplingParams(max_tokens=40)))
            await until_running(engine, 1)
            if method in ("update", "finish", "abort"):
                await engine.start_weight_update()
            if method in ("finish", "abort"):
                await engine.update_weights({"w": np.ones(3)})
            if method == "wake_up":
                await engine.sleep()
            mode = rng.choice(["keep", "wait"])
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "pause": lambda mode=mode: engine.pause(mode),
                "start": lambda mode=mode: engine.start_weight_update(mode),
                "update": lambda: engine.update_weights({f"w{i}": np.ones(9) for i in range(3)}),
                "finish": engine.finish_weight_update,
                "abort": engine.abort_weight_update,
                "sleep": engine.sleep,
                "wake_up": engine.wake_up,
                "drain": engine.drain,
            }
            await given_up(calls[method](), rng.randrange(12))
            with suppress(InvalidRequestError):  # none is under way
                await engine.abort_weight_update()
            await engine.resume()
            await engine.wake_up()
            assert engine.state == "running"
            assert (await running).usage.completion_tokens == 40


async def test_an_engine_that_drains_falls_asleep_no_more() -> None:
    async with FakeAsyncLLM("abc" * 50, token_delay=0.001, sleep_after=0.001) as engine:
        running = asyncio.create_task(engine.generate("x", SamplingParams(max_tokens=40)))
        await until_running(engine, 1)
        draining = asyncio.create_task(engine.drain())
        while engine.state != "draining":
            await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.sleep()
        assert await draining is True and (await running).usage.completion_tokens == 40
        await asyncio.sleep(0.01)  # it would have fallen asleep by now
        assert engine.state == "draining" and not engine.is_sleeping
        await engine.resume()
        while not engine.is_sleeping:
            await asyncio.sleep(0.001)
        falling = asyncio.create_task(engine.sleep(level=2))
        assert await engine.drain() is True
        with suppress(EngineClosedError):
            await falling
        assert engine.state == "draining"


async def test_an_engine_that_is_woken_by_many_at_once_wakes_once(make_engine: Any) -> None:
    made: list[FakeExecutor] = []

    class Counted(make_engine):  # type: ignore[misc]  # `FakeLLM`
        def _make_executor(self, config: EngineConfig) -> FakeExecutor:
            made.append(FakeExecutor(**self.fake))
            return made[-1]

    async with Counted() as engine:
        await engine.sleep(level=2)
        short = SamplingParams(max_tokens=2, ignore_eos=True)
        asking = [engine.generate([1], short) for _ in range(3)]
        tags = [None, None, ["weights"], ["kv_cache"]]
        await asyncio.gather(*asking, *(engine.wake_up(some) for some in tags))
        assert engine.state == "running" and len(made) == 2
