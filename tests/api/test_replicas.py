"""Several replicas of the model behind one engine, over fake executors: who computes what, and what deaths change."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of, settled
from fakes import FakeExecutor
from prometheus_client import CollectorRegistry
from test_recovery import Poisoned, death, essence, work

from aengine import AsyncLLM, EngineConfig, InternalError, InvalidRequestError, SamplingParams, WorkerDiedError
from aengine.engine import recovery
from aengine.engine.replicas.load_balancer import Load
from aengine.errors import DeadlineExceededError, EngineClosedError, ModelLoadError
from aengine.telemetry.prometheus import PrometheusCollector

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)


@pytest.fixture
def make_two(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A factory of engines of two replicas."""

    def make_executor(self: Any, config: EngineConfig) -> FakeExecutor:
        assert config.data_parallel_size == 1
        return FakeExecutor(**self.fake)

    monkeypatch.setattr(make_engine, "_make_executor", make_executor)
    return lambda **config: make_engine(**{"data_parallel_size": 2, "num_threads": 1} | config)


def kill(engine: AsyncLLM, index: int) -> None:
    core_of(engine).replicas[index].worker.executor.fail(death())


def states(engine: AsyncLLM) -> list[str]:
    return [replica.state for replica in engine.statistics().replicas]


def tokens(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **params)


class Gate:
    """Holds the starts of executors while it is closed, or has them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = asyncio.Event()
        self.error: Exception | None = None
        start = FakeExecutor.start

        async def gated(executor: FakeExecutor, *args: Any) -> dict[str, Any]:
            await self.is_open.wait()
            if self.error is not None:
                raise self.error
            return await start(executor, *args)

        monkeypatch.setattr(FakeExecutor, "start", gated)


async def running_on(engine: AsyncLLM, *least: int) -> None:
    """Wait until each replica has so many requests with a row."""
    while any(r.num_running < n for r, n in zip(engine.statistics().replicas, least, strict=True)):
        await asyncio.sleep(0.001)


async def test_requests_are_spread(make_two: Make) -> None:
    async with make_two(fake={"delay": 0.001}) as engine:
        tasks = [asyncio.create_task(engine.generate([i, 2], tokens(30))) for i in range(1, 9)]
        await running_on(engine, 4, 4)
        statistics = engine.statistics()
        assert statistics.num_running == 8 and statistics.num_blocks == 2 * 512
        assert [replica.num_blocks for replica in statistics.replicas] == [512, 512]
        for completion in await asyncio.gather(*tasks):
            assert list(completion.token_ids) == [260 + position for position in range(2, 32)]
        assert len(engine.describe()["replicas"]) == 2 and engine.describe()["num_blocks"] == 512
        assert 0 < await engine.check_health() < 10
        await settled(engine)


async def test_prefixes_of_all_replicas_are_forgotten(make_two: Make) -> None:
    async with make_two() as engine:
        prompts = [[i] * 200 for i in range(300, 306)]
        for is_known in (False, True, False):
            if not is_known:
                assert (await engine.reset_prefix_cache() > 0) == (engine.statistics().num_finished > 0)
            before = engine.statistics().prefix_cache_hits
            await asyncio.gather(*(engine.generate(prompt, tokens(2)) for prompt in prompts))
            assert (engine.statistics().prefix_cache_hits > before) == is_known
        assert all(replica.num_blocks for replica in engine.statistics().replicas)


async def test_a_turn_finds_its_replica(make_two: Make) -> None:
    """The history of a chat is on one of them; the other one has less to do."""
    async with make_two() as engine:
        histories = [[i] * 200 for i in range(300, 306)]
        await asyncio.gather(*(engine.generate(history, tokens(2)) for history in histories))
        before = [replica.prefix_cache_hits for replica in engine.statistics().replicas]
        assert before == [0, 0]
        completions = [await engine.generate([*history, 7, 8], tokens(2)) for history in reversed(histories)]
        assert all(completion.usage.cached_tokens == 192 for completion in completions)
        assert all(replica.prefix_cache_hits >= 2 * 192 for replica in engine.statistics().replicas)


async def test_a_burst_that_begins_alike_stays_together_while_it_is_short(make_two: Make) -> None:
    async with make_two(max_num_seqs=32) as engine:
        shared = list(range(300, 1100))
        await asyncio.gather(*(engine.generate([*shared, i], tokens(2)) for i in range(4)))
        queries = [replica.prefix_cache_queries for replica in engine.statistics().replicas]
        assert queries == [4 * 801, 0]
        await asyncio.gather(*(engine.generate([*shared, i], tokens(2)) for i in range(60)))
        assert all(replica.prefix_cache_hits > 10 * 800 for replica in engine.statistics().replicas)


async def test_completions_of_a_call_stay_together(make_two: Make) -> None:
    async with make_two(fake={"delay": 0.001}) as engine:
        tasks = [asyncio.create_task(engine.generate([i] * 40, tokens(20, n=4, seed=i))) for i in range(1, 5)]
        await running_on(engine, 8, 8)
        for request in core_of(engine).admission._requests.values():
            scheduler = request.replica.scheduler
            assert len(request.requests) == 4 and all(one in scheduler.rows.running for one in request.requests)
        assert all(len(c.choices) == 4 for c in await asyncio.gather(*tasks))
        await settled(engine)


async def test_many_deaths_change_nothing(make_engine: Make, make_two: Make, rng: random.Random) -> None:
    async with make_engine() as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
    async with make_two(max_restarts=1000, fake={"delay": 0.0005}) as engine:
        tasks = work(engine, 1)
        while not all(task.done() for task in tasks):
            # Whoever is suspected is given the time of a trial in between.
            least = engine.statistics().generated_tokens + rng.randint(30, 100)
            while engine.statistics().generated_tokens < least and not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)  # a loop that spins keeps the threads that fill bitmasks waiting
            kill(engine, rng.randrange(2))
        got = [essence(task.result()) for task in tasks]
        await settled(engine)
        assert engine.statistics().num_restarts >= 3 and engine.state == "running"
    assert got == expected


async def test_streams_go_on_elsewhere(make_two: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token once and in order, before the dead worker's replacement is there."""
    params = tokens(50, n=2, seed=4)
    async with make_two() as engine:
        expected = sorted([(t.index, t.token_id) async for t in engine.stream([5, 6], params)], key=lambda t: t[0])
    async with make_two(fake={"delay": 0.0005}) as engine:
        gate, unbegun = Gate(monkeypatch), list[str]()
        remove = Load.remove

        def noted(self: Load, request_id: str) -> None:
            unbegun.extend(self._waiting.keys() & {request_id})
            remove(self, request_id)

        monkeypatch.setattr(Load, "remove", noted)
        streams = [engine.stream([5, 6], params) for _ in range(4)]

        async def read(stream: Any) -> list[tuple[int, int]]:
            return [(token.index, token.token_id) async for token in stream]

        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await running_on(engine, 4, 4)
        kill(engine, 0)
        for got in await asyncio.gather(*readers):
            assert sorted(got, key=lambda pair: pair[0]) == expected
        assert not unbegun, "a request that goes on elsewhere has no prompt that waits"
        assert states(engine) == ["restarting", "running"] and await engine.check_health() > 0
        gate.is_open.set()
        while states(engine) != ["running", "running"]:
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(engine.generate([i, 2], tokens(30))) for i in range(1, 5)]
        await running_on(engine, 2, 2)
        await asyncio.gather(*tasks)
        await settled(engine)


async def test_what_waits_goes_to_the_first_worker_that_is_back(
    make_two: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_two(fake={"delay": 0.0005}) as engine:
        tasks = [asyncio.create_task(engine.generate([i, 2], tokens(60))) for i in range(1, 9)]
        await running_on(engine, 4, 4)
        kept, gates = FakeExecutor.start, []

        async def gated(executor: FakeExecutor, *args: Any) -> dict[str, Any]:
            gates.append(asyncio.Event())
            await gates[-1].wait()
            return await kept(executor, *args)

        monkeypatch.setattr(FakeExecutor, "start", gated)
        kill(engine, 0)
        kill(engine, 1)
        late = asyncio.create_task(engine.generate([9, 2], tokens(5)))
        while len(gates) < 2:
            await asyncio.sleep(0.001)
        assert states(engine) == ["restarting", "restarting"] and engine.state == "running"
        with pytest.raises(WorkerDiedError, match="being started again"):
            await engine.check_health()
        gates[1].set()
        assert all(len(c.token_ids) == 60 for c in await asyncio.gather(*tasks)) and len((await late).token_ids) == 5
        assert sorted(states(engine)) == ["restarting", "running"]
        await settled(engine)


async def test_the_engine_goes_on_with_fewer_replicas(make_two: Make) -> None:
    async with make_two(max_restarts=0, fake={"delay": 0.001}) as engine:
        tasks = [asyncio.create_task(engine.generate([i, 2], tokens(50))) for i in range(1, 9)]
        await running_on(engine, 4, 4)
        kill(engine, 0)
        assert all(len(c.token_ids) == 50 for c in await asyncio.gather(*tasks))
        assert states(engine) == ["failed", "running"] and engine.state == "running"
        assert await engine.check_health() > 0
        await settled(engine)
        task = asyncio.create_task(engine.generate([1, 2], tokens(500)))
        await running_on(engine, 0, 1)
        kill(engine, 1)
        with pytest.raises(WorkerDiedError, match="max_restarts"):
            await task
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            await engine.generate([1])
        assert engine.state == "failed"


async def test_a_poison_request_kills_the_second_replica_once(
    make_engine: Make, make_two: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_engine, "_make_executor", lambda self, config: Poisoned(**self.fake))
    async with make_two(fake={"delay": 0.0005}) as engine:
        others = [asyncio.create_task(engine.generate([i, 2], tokens(60))) for i in range(1, 17)]
        await running_on(engine, 8, 8)
        with pytest.raises(WorkerDiedError, match="again and again"):
            await engine.generate([666, 1], tokens(60), request_id="the-poison")
        assert all(len(c.token_ids) == 60 for c in await asyncio.gather(*others))
        restarts = [replica.num_restarts for replica in engine.statistics().replicas]
        assert min(restarts) == 1 and max(restarts) <= 6
        await settled(engine)


async def test_a_free_replica_takes_over_what_waits(make_two: Make) -> None:
    """Two rows each: the short ones end, and those that wait behind the long ones go on there."""
    async with make_two(max_num_seqs=2, fake={"delay": 0.001}) as engine:
        ends: list[str] = []
        lengths = [900, 5, 900, 5, 40, 30, 40, 30, 40, 30]  # the first, third and so on: of replica 0

        async def one(i: int, length: int) -> None:
            await engine.generate([i + 1, 2], tokens(length))
            ends.append("long" if length == 900 else "short")

        await asyncio.gather(*(one(i, length) for i, length in enumerate(lengths)))
        assert ends == ["short"] * 8 + ["long"] * 2
        await settled(engine)


async def test_every_way_out(make_two: Make) -> None:
    async with make_two(fake={"delay": 0.001}, max_leased_steps=0) as engine:  # leased, 64 steps take as long as one
        tasks = [
            asyncio.create_task(engine.generate([i, 2], tokens(800), request_id=f"r{i}", deadline=0.2 if i > 6 else 60))
            for i in range(1, 9)
        ]
        await running_on(engine, 4, 4)
        assert engine.abort("r1") and engine.abort("r2") and not engine.abort("r1")
        for task in tasks[6:]:
            with pytest.raises(DeadlineExceededError):
                await task
        assert not await engine.drain(0.01) and engine.state == "draining"
        await engine.resume()
        assert engine.abort_all() == 4 and await engine.drain()
        await engine.resume()
        assert [(await task).finish_reason for task in tasks[:6]] == ["abort"] * 6
        await settled(engine)


async def test_a_start_that_fails_is_undone(make_engine: Make, make_two: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeExecutor] = []

    def make_executor(self: Any, config: EngineConfig) -> FakeExecutor:
        made.append(FakeExecutor(**self.fake))
        return made[-1]

    async def start(executor: FakeExecutor, *args: Any) -> dict[str, Any]:
        if executor is made[1]:
            raise ModelLoadError("no memory is left")
        return await asyncio.Event().wait()  # type: ignore[func-returns-value]

    monkeypatch.setattr(make_engine, "_make_executor", make_executor)
    monkeypatch.setattr(FakeExecutor, "start", start)
    engine = make_two()
    with pytest.raises(ModelLoadError, match=r"replica 1 \(data_parallel_size=2, device='auto:1'\): no memory is left"):
        await engine.start()
    assert len(made) == 2 and all(executor.terminated for executor in made)
    starting = asyncio.create_task(make_two().start())
    while len(made) < 4:
        await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(made) == 4 and all(executor.terminated for executor in made)


@pytest.mark.parametrize("way", ["aclose", "terminate"])
async def test_an_end_while_one_is_started_again(make_two: Make, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    engine = await make_two(fake={"delay": 0.001}).start()
    Gate(monkeypatch)
    tasks = [asyncio.create_task(engine.generate([i, 2], tokens(900))) for i in range(1, 5)]
    await running_on(engine, 2, 2)
    kill(engine, 1)
    while states(engine) != ["running", "restarting"]:
        await asyncio.sleep(0.001)
    if way == "aclose":
        await engine.aclose()
    else:
        engine.terminate()
    for task in tasks:
        with pytest.raises(EngineClosedError):
            await task
    assert engine.state == "closed"
    await engine.aclose()


async def test_grammars_on_both(make_two: Make) -> None:
    async with make_two() as engine:
        completions = await asyncio.gather(*work(engine, 3))
        assert all(replica.prefix_cache_queries for replica in engine.statistics().replicas)
        assert [c.text for c in completions[5::6]] == ["a long answer, all of it forced"] * 4
        await settled(engine)


async def test_a_profile_is_of_all(make_two: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_two() as engine:
        called: list[tuple[Any, ...]] = []

        async def call(executor: FakeExecutor, method: str, *args: Any, timeout: float) -> Any:
            called.append((method, *args))
            return [{"path": args[0] if args else "trace"}]

        monkeypatch.setattr(FakeExecutor, "call", call)
        folder = await engine.start_profile("traces")
        assert called == [("start_profile", folder)] * 2
        assert await engine.stop_profile() == "trace" and called[2:] == [("stop_profile",)] * 2


async def test_workers_know_how_many_replicas_share_the_machine(
    make_two: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a replica that starts again."""
    places: list[list[int]] = []
    start = FakeExecutor.start

    async def noting(self: FakeExecutor, load: dict[str, Any], *callbacks: Any) -> dict[str, Any]:
        places.append(load["replica"])
        return await start(self, load, *callbacks)

    monkeypatch.setattr(FakeExecutor, "start", noting)
    async with make_two() as engine:
        assert sorted(places) == [[0, 2], [1, 2]]
        kill(engine, 1)
        while len(places) < 3:
            await asyncio.sleep(0.001)
        assert places[2:] == [[1, 2]]


def test_settings_of_each_replica() -> None:
    from aengine.engine.replicas.start import replica_configs

    def devices(device: str, **settings: Any) -> list[str]:
        config = EngineConfig.create("x", {"device": device, "data_parallel_size": 2, **settings})
        return [own.device for own in replica_configs(config)]

    assert devices("cuda") == ["cuda:0", "cuda:1"] and devices("auto") == ["auto:0", "auto:1"]
    assert devices("cuda:5,3") == ["cuda:5", "cuda:3"] and devices("cpu") == ["cpu", "cpu"]
    pairs = devices("cuda", tensor_parallel_size=2, worker="x:y")
    assert pairs == ["cuda:0,1", "cuda:2,3"]
    assert [own.num_threads for own in replica_configs(EngineConfig(model="x", data_parallel_size=2, num_threads=3))]
    for device in ("cuda:1", "cuda:1,1", "cuda:0,1,2", "cpu:0,1"):
        with pytest.raises(InvalidRequestError, match="device"):
            devices(device)


async def test_metrics_and_logs_of_each(
    make_two: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    caplog.set_level(logging.INFO, "aengine")
    async with make_two(fake={"delay": 0.001}) as engine:
        registry.register(PrometheusCollector(engine, model_name="m"))
        assert [f"replica {index}, is ready" in caplog.text for index in range(3)] == [True, True, False]
        tasks = [asyncio.create_task(engine.generate([i, 2], tokens(300))) for i in range(1, 9)]
        await running_on(engine, 4, 4)
        Gate(monkeypatch)
        kill(engine, 1)
        while states(engine) != ["running", "restarting"]:
            await asyncio.sleep(0.001)
        assert "the worker of replica 1 is started again: " in caplog.text and "replica 0 is started" not in caplog.text

        def of(name: str) -> list[float | None]:
            labels = {"model_name": "m", "engine": "0"}
            return [registry.get_sample_value(f"aengine:{name}", labels | {"replica": str(i)}) for i in range(3)]

        assert of("replica_running") == [1, 0, None]
        assert of("replica_worker_restarts_total") == [0, 1, None]
        assert of("replica_prefix_cache_queries_total")[:2] == [
            replica.prefix_cache_queries for replica in engine.statistics().replicas
        ]
        assert len(of("replica_kv_cache_usage_perc")) == len(of("replica_requests_waiting")) == 3
        assert engine.abort_all() == 8
        await asyncio.gather(*tasks)


async def test_the_engine_is_well_while_any_worker_answers(make_two: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_two() as engine:
        workers = [replica.worker for replica in core_of(engine).replicas]

        async def hang(method: str, *args: Any, timeout: float) -> Any:
            raise TimeoutError

        monkeypatch.setattr(workers[0].executor, "call", hang)
        assert await engine.check_health(0.1) > 0
        monkeypatch.setattr(workers[1].executor, "call", hang)
        with pytest.raises(InternalError, match="the worker of replica 0 did not answer ping"):
            await engine.check_health(0.1)


async def test_what_waits_for_room_comes_back(make_two: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that have begun, too: no step of the replica to which they went has had them."""
    async with make_two(max_num_seqs=2, fake={"delay": 0.001}) as engine:
        tasks = [asyncio.create_task(engine.generate([i, 2], tokens(700, n=1 + i % 2, seed=1))) for i in range(1, 4)]
        tasks.append(asyncio.create_task(engine.generate([9, 2], tokens(700))))
        await running_on(engine, 2, 2)
        gate = Gate(monkeypatch)
        kill(engine, 0)
        while states(engine) != ["restarting", "running"]:
            await asyncio.sleep(0.001)
        assert engine.statistics().num_waiting
        gate.is_open.set()
        await running_on(engine, 2, 2)
        assert all(len(choice.token_ids) == 700 for c in await asyncio.gather(*tasks) for choice in c.choices)
        await settled(engine)
