"""What several tests of the public contract ask."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import tokenizers
from scheduler_invariants import check_scheduler

from aengine import AsyncLLM
from aengine.engine.core import EngineCore
from aengine.engine.handles.local import LocalHandle
from aengine.engine.handles.on_thread import ThreadHandle
from aengine.engine.tiers.kv_tiers import KVTiers
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.engine.user_request import UserRequest


def handle_of(engine: AsyncLLM) -> LocalHandle | ThreadHandle:
    """The room behind the public class: the one place where tests reach into it."""
    return engine._handle


def core_of(engine: AsyncLLM) -> EngineCore:
    """The parts of a running engine, whose own interfaces tests then use."""
    core = handle_of(engine).core
    assert core is not None
    return core


def user_requests(engine: AsyncLLM) -> dict[str, UserRequest]:
    """What was asked for and has not ended, by its id."""
    return core_of(engine).admission._requests


def expire(engine: AsyncLLM, request: UserRequest) -> None:
    """Its deadline has passed, in this turn of the loop: no time given with a request makes it that exact."""
    core_of(engine).admission._expire(request, 1000.0)


@functools.cache
def encoder_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The library's own tokenizer, as a judge of ours."""
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


async def check_beside_cancelled(
    engine: AsyncLLM,
    work: Callable[[AsyncLLM, int], list[asyncio.Task[Any]]],
    essence: Callable[[Any], Any],
    expected: Sequence[Any],
    rng: random.Random,
) -> None:
    """``work(engine, 1)`` yields what is ``expected``, beside other work whose requests are cancelled at any time."""
    for _ in range(3):
        others, tasks = work(engine, rng.randrange(1000)), work(engine, 1)
        for task in rng.sample(others, len(others)):
            await asyncio.sleep(rng.random() / 100)
            task.cancel()
        assert [essence(await task) for task in tasks] == expected
        await asyncio.gather(*others, return_exceptions=True)
        await settled(engine)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def tiers_of(engine: AsyncLLM, replica: int = 0) -> KVTiers:
    """Those of an engine with ``kv_tiers``."""
    tiers = core_of(engine).replicas[replica].scheduler.rows.elsewhere
    assert isinstance(tiers, KVTiers)
    return tiers


async def saved(engine: AsyncLLM) -> None:
    """Wait until all that can be kept in the host's memory is."""
    for index in range(len(core_of(engine).replicas)):
        tiers = tiers_of(engine, index)
        await until(lambda tiers=tiers: not tiers.unsaved and not tiers.jobs)


async def until_running(engine: AsyncLLM, count: int = 1) -> None:
    """Wait until so many requests have a row on a worker."""
    await until(lambda: engine.statistics().num_running >= count)


async def until_scheduled(engine: AsyncLLM, count: int = 1) -> None:
    """Wait until so many requests run, or wait for their first step."""
    await until(lambda: engine.statistics().num_running + engine.statistics().num_waiting >= count)


async def settled(engine: AsyncLLM) -> None:
    """Wait until no request is left; then nothing of any may be: no block, no row, no call."""
    core = core_of(engine)

    def is_idle() -> bool:
        now = engine.statistics()
        return not now.num_running and not now.num_waiting and now.num_free_blocks == now.num_blocks

    with suppress(TimeoutError):
        await until(is_idle)
    statistics = engine.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks, statistics
    assert statistics.num_running == statistics.num_waiting == 0
    assert core.admission.is_empty
    for replica in core.replicas:
        check_scheduler(replica.scheduler)


async def leaves(engine: AsyncLLM, call: Coroutine[Any, Any, Any], stream: bool, count: int = 1) -> None:
    """A client that is gone, once its ``count`` requests run, ends them."""
    task = asyncio.create_task(call)
    await until(lambda: engine.statistics().num_running >= count)
    if stream:
        await (await task).close()
    else:
        task.cancel()
    await until(lambda: not engine.statistics().num_running)
    assert engine.statistics().num_aborted == count
