"""Which of several models are awake: over engines that take their part of one memory, at any order of events."""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

from aengine import EngineClosedError, EngineOverloadedError, ModelLoadError, NotEnoughMemoryError
from aengine.server.several import awake
from aengine.server.several.awake import AwakeModels


class Memory:
    """What all engines of a test share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.users: dict[str, int] = {}
        self.order: list[str] = []  # of waking


class Engine:
    """An engine of which only life and size are real."""

    def __init__(self, name: str, size: int, memory: Memory, rng: random.Random | None = None, **config: Any) -> None:
        self.name, self._size, self._memory, self._rng = name, size, memory, rng
        self.state = "new"
        self.fault: Exception | None = None
        settings = {"device": "cuda", "gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 1, "admission": "wait"}
        self.config = SimpleNamespace(**{**settings, "max_num_queued_requests": 100, **config})

    async def _some_time(self) -> None:
        for _ in range(self._rng.randrange(5) if self._rng else 1):
            await asyncio.sleep(0)

    async def start(self) -> None:
        self.state = "starting"
        await self._some_time()
        if self.fault or self._memory.taken + self._size > self._memory.size:
            self.state = "failed"
            raise self.fault or NotEnoughMemoryError(f"{self.name} does not fit")
        self._memory.taken += self._size
        self._memory.order.append(self.name)
        self.state = "running"

    wake_up = start

    def stays_awake(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def sleep(self, level: int) -> None:
        assert level == 1 and self.state == "running" and not self._memory.users.get(self.name)
        await self._some_time()
        assert not self._memory.users.get(self.name)
        self._memory.taken -= self._size
        self.state = "asleep"
        if self._rng and self._rng.random() < 0.1:
            raise NotEnoughMemoryError("the host has no memory for its weights")  # and it is closed

    async def aclose(self, *, drain: float = 0.0) -> None:
        self.state = "closed"

    def statistics(self) -> Any:
        if self.state == "new":
            raise EngineClosedError("it was not started")
        numbers = dict.fromkeys(awake.SumsOfModels._fields, 0)
        return SimpleNamespace(**numbers, device_memory_bytes=self._size, device_memory_total_bytes=self._memory.size)


def models_of(memory: Memory, sizes: dict[str, int], rng: random.Random | None = None, **how: Any) -> AwakeModels:
    engines: Any = {name: Engine(name, size, memory, rng) for name, size in sizes.items()}
    return AwakeModels(engines, **how)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "PATIENCE", 0.0)


async def hold(models: AwakeModels, memory: Memory, name: str, turns: int = 3) -> None:
    async with models.use(name):
        assert models.engines[name].state == "running"
        memory.users[name] = memory.users.get(name, 0) + 1
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        finally:
            memory.users[name] -= 1


async def test_any_order_of_requests_gets_its_turns(rng: random.Random) -> None:
    """None sleeps that is used (the engines assert it), all are served, and those that are cancelled leave nothing."""
    for _ in range(30):
        memory = Memory(rng.randint(10, 25))
        sizes = {name: rng.randint(1, 10) for name in "abcd"}
        models = models_of(memory, sizes, rng, most_awake=rng.choice([None, 1, 2]))
        tasks = []
        for _ in range(rng.randint(5, 60)):
            tasks.append(asyncio.create_task(hold(models, memory, rng.choice("abcd"), rng.randrange(8))))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in done} <= {type(None), asyncio.CancelledError}
        assert not any(memory.users.values()) and not models.statistics().num_waiting
        await asyncio.gather(*(hold(models, memory, name) for name in "abcd"))  # nothing is held by those that left
        await models.aclose()


async def test_models_asked_in_turns_get_their_turns() -> None:
    """Though the first one is never without a user."""
    memory = Memory(10)
    models = models_of(memory, {"a": 8, "b": 8})
    is_over = False

    async def keep_asking() -> None:
        async def one() -> None:
            while not is_over:
                await hold(models, memory, "a", 5)

        await asyncio.gather(one(), one())

    asking = asyncio.create_task(keep_asking())
    for _ in range(5):
        while models.engines["a"].state != "running":
            await asyncio.sleep(0)
        await hold(models, memory, "b", 1)
    is_over = True
    await asking
    assert memory.order[:10] == ["a", "b"] * 5, "b had its turn each time that it asked"


async def test_a_model_that_is_broken_puts_no_other_to_sleep() -> None:
    memory = Memory(20)
    models = models_of(memory, {"a": 5, "b": 5})
    await hold(models, memory, "a")
    broken: Any = models.engines["b"]
    broken.fault = ModelLoadError("it is not there")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="it is not there"):
            await hold(models, memory, "b")
    assert models.engines["a"].state == "running"
    broken.fault = None
    await hold(models, memory, "b")
    with pytest.raises(NotEnoughMemoryError):
        await hold(models_of(memory, {"c": 30}), memory, "c")


async def test_what_finds_no_room_is_told_so() -> None:
    memory = Memory(10)
    models = models_of(memory, {"a": 8, "b": 8}, wait=0.01)
    models.engines["b"].config.admission = "error"  # type: ignore[misc]
    models.engines["b"].config.max_num_queued_requests = 2  # type: ignore[misc]
    async with models.use("a"):
        asked = await asyncio.gather(*(hold(models, memory, "b") for _ in range(3)), return_exceptions=True)
        assert {type(one) for one in asked} == {EngineOverloadedError}
        assert "requests are being answered by 'a'" in str(asked[0])
        assert sorted(str(one)[:27] for one in asked) == [
            "2 requests wait for the mod",
            *["the model 'b' has no room: "] * 2,
        ]
        await hold(models, memory, "a")  # nobody waits for its memory any more
    await hold(models, memory, "b")


async def test_shares_of_a_gpu_are_known_before_they_are_taken() -> None:
    """Each start that finds no memory has read weights for nothing."""
    memory = Memory(100)
    engines: Any = {name: Engine(name, 60, memory, kv_cache_memory_bytes=None) for name in "ab"}
    models = AwakeModels(engines)
    await hold(models, memory, "a")
    await hold(models, memory, "b")
    assert [engines[name].state for name in "ab"] == ["asleep", "running"]
    assert memory.order == ["a", "b"]


async def test_the_end_of_the_server_ends_all_waiting() -> None:
    memory = Memory(10)
    models = models_of(memory, {"a": 8, "b": 8})
    async with models.use("a"):
        waiting = asyncio.create_task(hold(models, memory, "b"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(models.aclose())
        with pytest.raises(EngineClosedError):
            await waiting
        await closing
    with pytest.raises(EngineClosedError):
        await hold(models, memory, "b")
    assert models.state == "closed"
