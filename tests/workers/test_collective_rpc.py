"""`AsyncLLM.collective_rpc` on real worker processes with the fake runner, with one rank and several."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from conftest_api import core_of

from aengine import LLM, AsyncLLM, InvalidRequestError, SamplingParams, WorkerCallError, WorkerDiedError
from aengine.errors import ModelLoadError

SETTINGS: dict[str, Any] = {
    "worker": "fake_runner:load_model",
    "worker_extension": "extension_sample:Extension",
    "skip_tokenizer": True,
}
LONG = SamplingParams(max_tokens=300, ignore_eos=True, detokenize=False)


def make(**settings: Any) -> AsyncLLM:
    return AsyncLLM("smollm2-135m", **{**SETTINGS, **settings})


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_every_rank_answers_in_order(num_ranks: int) -> None:
    async with make(tensor_parallel_size=num_ranks) as engine:
        given: tuple[Any, ...] = (None, True, -(2**63), 1.5, "\N{SNOWMAN}", b"\0", [1, [2]], {"a": {3: (4,)}})
        answers = await engine.collective_rpc("where", *given)
        pids = [rank["pid"] for rank in engine.describe()["ranks"]] if num_ranks > 1 else [engine.describe()["pid"]]
        taken = [*given[:-1], {"a": {3: [4]}}]
        assert answers == [[rank, "FakeRunner", pids[rank], taken] for rank in range(num_ranks)]
        assert [one["pid"] for one in await engine.collective_rpc("ping")] == pids
        assert all(one["resident"] for one in await engine.collective_rpc("memory_info"))

        last = num_ranks - 1
        with pytest.raises(WorkerCallError, match=f"fail failed on rank {last}: ZeroDivisionError: nothing") as caught:
            await engine.collective_rpc("fail", last)
        assert caught.value.rank == last and "extension_sample.py" in caught.value.worker_traceback
        assert "extension_sample.py" in caught.value.__notes__[0]
        for method in ("unpackable", "unreadable"):
            with pytest.raises(WorkerCallError, match=f"{method} failed on rank"):
                await engine.collective_rpc(method)
        with pytest.raises(WorkerCallError, match="TypeError"):
            await engine.collective_rpc("fail")
        with pytest.raises(WorkerCallError, match="with_await is an async function: a worker has no event loop"):
            await engine.collective_rpc("with_await")
        for missing in ("attribute", "allocate", "start_profile", "load", "mro"):
            with pytest.raises(InvalidRequestError, match="there is no method .* has die, fail, hang, memory") as wrong:
                await engine.collective_rpc(missing)
            assert wrong.value.param == "method"
        for name in ("_private", "__init__", "a.b", "", 5):
            with pytest.raises(InvalidRequestError, match="public name"):
                await engine.collective_rpc(name)  # type: ignore[arg-type]
        for arg in (object(), 2**64, {(1, 2): 3}, "\udcff", datetime.now()):
            with pytest.raises(InvalidRequestError, match="argument 1 of where can't be sent") as wrong:
                await engine.collective_rpc("where", 0, arg)
            assert wrong.value.param == "args"
        with pytest.raises(InvalidRequestError, match="timeout"):
            await engine.collective_rpc("where", timeout=0)
        assert len(await engine.collective_rpc("where")) == num_ranks, "and all of them go on"
        assert engine.statistics().num_restarts == 0


@pytest.mark.slow
async def test_a_slow_method_is_no_hang_before_its_timeout() -> None:
    async with make(tensor_parallel_size=2, hang_timeout=1.0) as engine:

        async def tokens() -> tuple[int, ...]:
            return (await engine.generate([1], LONG)).token_ids

        expected = await tokens()
        running = asyncio.create_task(tokens())
        assert await engine.collective_rpc("sleep", 1.6) == [None, None]
        assert await running == expected
        call = asyncio.create_task(engine.collective_rpc("sleep", 1.6))
        await asyncio.sleep(0.2)  # the workers have begun the call
        call.cancel()  # its caller goes; the workers are still in it
        assert await tokens() == expected
        assert engine.statistics().num_restarts == 0
        with pytest.raises(WorkerCallError, match="hang has not returned on rank 0 within timeout=0.1 s") as caught:
            await engine.collective_rpc("hang", 0, timeout=0.1)
        assert caught.value.rank == 0
        assert await tokens() == expected, "of workers that were started again"
        assert engine.statistics().num_restarts == 1
        with pytest.raises(WorkerDiedError):
            await engine.collective_rpc("die", 1)


async def test_all_replicas_are_called() -> None:
    async with make(data_parallel_size=2, device="cpu") as engine:
        answers = await engine.collective_rpc("where")
        pids = [replica.worker.ready["pid"] for replica in core_of(engine).replicas]
        assert [answer[2] for answer in answers] == pids and len(set(pids)) == 2


async def test_with_a_thread_of_its_own() -> None:
    async with make(own_thread=True) as engine:
        assert (await engine.collective_rpc("where", 1))[0][3] == [1]
        with pytest.raises(WorkerCallError, match="ZeroDivisionError"):
            await engine.collective_rpc("fail", 0)


def test_of_a_program_without_a_loop() -> None:
    with LLM("smollm2-135m", **SETTINGS) as llm:
        assert llm.collective_rpc("where", 1)[0][3] == [1]
        with pytest.raises(InvalidRequestError, match="public name"):
            llm.collective_rpc("_private")


async def test_an_extension_that_is_not_there() -> None:
    async with make(worker_extension=None) as engine:
        with pytest.raises(
            InvalidRequestError, match="without a worker_extension there are memory_info, ping, reload_weights"
        ):
            await engine.collective_rpc("where")
    with pytest.raises(ModelLoadError, match="worker_extension='extension_sample:Nothing' can't be imported"):
        await make(worker_extension="extension_sample:Nothing").start()
    with pytest.raises(ModelLoadError, match="is no class"):
        await make(worker_extension="extension_sample:function").start()
    for wrong in ("", "a", "a:", "a:b.c", 5):
        with pytest.raises(InvalidRequestError, match="'module:Class', or None"):
            make(worker_extension=wrong)
