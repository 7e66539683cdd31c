"""What a user reads in an error, a log record or a warning, where it was once wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

import pytest
from conftest_api import settled, until_running
from fakes import FakeExecutor

from aengine import AsyncLLM, DeadlineExceededError, InvalidRequestError, SamplingParams, WorkerDiedError

Make = Callable[..., AsyncLLM]
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.mark.parametrize("name", ["max_model_len", "kv_cache_memory_bytes", "worker_spin_us", "seed"])
def test_a_number_that_no_message_can_carry(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="63 bits") as caught:
        AsyncLLM("smollm2-135m", **{name: 10**30})
    assert caught.value.param == name


async def test_who_never_began_has_no_completion(make_engine: Make) -> None:
    async with make_engine(max_num_seqs=1, fake={"delay": 0.01}) as engine:
        running = asyncio.create_task(engine.generate([1, 2], ENDLESS))
        await until_running(engine)
        with pytest.raises(DeadlineExceededError) as caught:
            await engine.generate([3, 4], ENDLESS, deadline=0.05)
        assert caught.value.completion is None
        with pytest.raises(DeadlineExceededError) as caught:
            async for _ in engine.stream([3, 4], ENDLESS, deadline=0.05):
                pass
        assert caught.value.completion is None
        running.cancel()
        await asyncio.wait([running])
        await settled(engine)


async def test_the_limit_of_restarts_is_in_the_message(make_engine: Make) -> None:
    async with make_engine(max_restarts=0, fake={"delay": 0.001}) as engine:
        task = asyncio.create_task(engine.generate([1, 2], ENDLESS))
        await until_running(engine)
        executor: FakeExecutor = engine.executor  # type: ignore[attr-defined]
        executor.fail(WorkerDiedError("worker 0 died of SIGKILL"))
        with pytest.raises(WorkerDiedError, match="died of SIGKILL; the engine gave up after 0 restarts.*max_restarts"):
            await task


async def test_an_id_can_not_forge_a_log_record(make_engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aengine.requests")
    request_id = "a\nCRITICAL all is lost\x1b[31m" + "z" * 900
    async with make_engine() as engine:
        await engine.generate([1, 2], SamplingParams(max_tokens=2), request_id=request_id)
    records = [record for record in caplog.records if record.name == "aengine.requests"]
    assert len(records) == 3
    for record in records:
        text = record.getMessage()
        assert text.isprintable() and "a\\nCRITICAL" in text and len(text) < 500
        assert record.request_id == request_id  # type: ignore[attr-defined]


async def test_a_dropped_engine_warns_once(make_engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = await make_engine().start()
    await engine.generate([1, 2], SamplingParams(max_tokens=2))
    await settled(engine)
    await asyncio.sleep(0.01)  # handles that the loop still has to drop refer to it
    with pytest.warns(ResourceWarning, match="dropped without aclose"):
        del engine
        gc.collect()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
