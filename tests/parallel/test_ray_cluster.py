"""Engines whose ranks are on the nodes of a Ray cluster: the answers of one process, whoever dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from conftest_api import core_of, settled

from aengine import AsyncLLM, Completion, EngineConfig, EngineError, InvalidRequestError, ModelLoadError, SamplingParams
from aengine.engine.executor import ProcessExecutor, new_executor
from aengine.engine.pacing.steps_in_flight import StepsInFlight

TinyModel = Callable[..., Path]
HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "workers"))  # Ray's processes get it, too
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_model_len": 128,
    "max_num_batched_tokens": 40,
    "kv_cache_memory_bytes": 1 << 20,
    "num_threads": 1,
    "logits_processors": ["callers_processors:Residues"],
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:::ray"),
    pytest.mark.timeout(300),
]


class Cluster:
    """Nodes of two CPUs each, and a head that has none."""

    def __init__(self, num_nodes: int) -> None:
        command = [sys.executable, str(HERE / "ray_cluster_program.py"), *["2"] * num_nodes]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.address = self._answer().removeprefix("address ")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("address ", "done")):
                return line.strip()
        pytest.fail("the cluster has ended")

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        assert self._answer() == "done"

    def close(self) -> None:
        disconnect()
        self._process.communicate(timeout=60)


def disconnect() -> None:
    import ray

    ray.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3)


def work(engine: AsyncLLM) -> list[asyncio.Task[Completion]]:
    rng = random.Random(1)
    residues = {"residues": {"modulus": 7}}
    kinds = [
        GREEDY,
        GREEDY.replace(temperature=0.9, seed=5, extra_args=residues),
        GREEDY.replace(temperature=1.1, top_k=7, seed=6, n=2),
    ]
    prompts = [[rng.randrange(20, 200) for _ in range(rng.randint(1, 70))] for _ in range(9)]
    return [asyncio.create_task(engine.generate(p, kinds[i % len(kinds)])) for i, p in enumerate(prompts)]


def tokens(completions: list[Completion]) -> Any:
    return [[choice.token_ids for choice in completion.choices] for completion in completions]


@pytest.fixture(scope="module")
def right(model: Path) -> Any:
    async def answers() -> Any:
        async with AsyncLLM(model, **SETTINGS) as engine:
            return tokens(await asyncio.gather(*work(engine)))

    return asyncio.run(answers())


def workers_of(engine: AsyncLLM) -> list[psutil.Process]:
    return [psutil.Process(rank["pid"]) for rank in engine.describe()["ranks"]]


async def computed(engine: AsyncLLM, right: Any, strike: Callable[[], Any]) -> None:
    """``strike`` in the middle of the work, all of which has the right answers."""
    running = work(engine)
    while engine.statistics().num_running < 4:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(strike)
    assert tokens(await asyncio.gather(*running)) == right


async def test_a_rank_that_dies_costs_no_token(cluster: Cluster, model: Path, right: Any) -> None:
    settings = SETTINGS | {"pipeline_parallel_size": 2, "num_threads": 2}
    async with AsyncLLM(model, executor="ray", ray_address=cluster.address, **settings) as engine:
        workers = workers_of(engine)
        in_flight = core_of(engine).replicas[0].steps.in_flight
        assert type(in_flight) is StepsInFlight, "no step is leased: each machine has a Lead of its own"
        await computed(engine, right, workers[1].kill)
        assert not any(worker.is_running() for worker in workers)
        workers = workers_of(engine)
        await settled(engine)
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.extended
async def test_replicas_are_on_several_nodes(cluster: Cluster, model: Path, right: Any) -> None:
    settings = SETTINGS | {"num_threads": 2, "data_parallel_size": 2}
    async with AsyncLLM(model, executor="ray", ray_address=cluster.address, **settings) as engine:
        assert tokens(await asyncio.gather(*work(engine))) == right
        pids = [replica["pid"] for replica in engine.describe()["replicas"]]
        assert len({psutil.Process(pid).parent().parent() for pid in pids}) == 2
        assert engine.describe()["replicas"][0]["device"] == "cpu"
        await settled(engine)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tensor_parallel_size": 6}, "no room for 1 x 6 CPU.*have: [02] CPU; [02] CPU; [02] CPU.*lower tensor_para"),
        ({"pipeline_parallel_size": 3, "num_threads": 2}, "no room for 3 x 2 CPU, .*lower pipeline_parallel_size"),
        ({"device": "cuda"}, "no room for 1 x 1 GPU"),
    ],
)
async def test_more_than_the_cluster_has(
    cluster: Cluster, model: Path, settings: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aengine.workers.remote.ray_cluster._GROWTH_SECONDS", 0.5)
    with pytest.raises(ModelLoadError, match=text):
        await AsyncLLM(model, executor="ray", ray_address=cluster.address, **SETTINGS | settings).start()


def fake(cluster: Cluster, **settings: Any) -> ProcessExecutor:
    """Ranks without a model, which start soon, on both nodes."""
    given = {"pipeline_parallel_size": 2, "num_threads": 2, "device": "cpu", "executor": "ray", **settings}
    config = EngineConfig.create("fake", {"worker": "fake_runner:load_model", "ray_address": cluster.address, **given})
    executor = new_executor(config)
    assert isinstance(executor, ProcessExecutor)
    return executor


async def started(executor: ProcessExecutor) -> dict[str, Any]:
    load = {"config": executor._config.to_wire(), "source": {"hf_config": {}}}
    return await executor.start(load, lambda progress: None, lambda: None)


@pytest.mark.extended
async def test_room_that_others_have(cluster: Cluster) -> None:
    first = fake(cluster)
    await started(first)
    with pytest.raises(ModelLoadError, match="had no room for 2 x 2 CPU .* 0 CPU are free"):
        await started(fake(cluster, startup_timeout=1.0))
    second = fake(cluster)
    waiting = asyncio.create_task(started(second))
    await asyncio.sleep(0.3)  # one that did not wait for room would have failed by now
    assert not waiting.done()
    await first.aclose(5)
    await waiting
    await second.aclose(5)


HOST = """
import asyncio, json, sys
import test_ray_cluster as ours
async def main():
    executor = ours.fake(ours.Address(sys.argv[1]), tensor_parallel_size=2, num_threads=1)
    ready = await ours.started(executor)
    print(json.dumps([rank["pid"] for rank in ready["ranks"]]), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


class Address(NamedTuple):
    address: str


def test_ranks_are_on_their_nodes_and_none_outlives_the_host(cluster: Cluster) -> None:
    paths = os.pathsep.join(
        [str(HERE), str(HERE.parent), str(HERE.parent / "workers"), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-c", HOST, cluster.address]
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as host:
        assert host.stdout is not None
        workers = [psutil.Process(pid) for pid in json.loads(host.stdout.readline())]
        nodes = [worker.parent() for worker in workers]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3], "the ranks of a stage are on one node"
        assert nodes[0].parent() != nodes[2].parent(), "each node has two CPUs: the stages are on two of them"
        host.kill()
        assert not psutil.wait_procs(workers, timeout=10)[1]
        assert not psutil.wait_procs(nodes, timeout=60)[1], "Ray ends a dead job's actors"


@pytest.mark.extended
async def test_nodes_that_go_and_come(
    cluster: Cluster, model: Path, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one with this cluster."""
    settings = {**SETTINGS, "num_threads": 2, "pipeline_parallel_size": 2, "max_restarts": 4}
    async with AsyncLLM(model, executor="ray", ray_address=cluster.address, **settings) as engine:

        def replace_node() -> None:
            cluster.tell("remove 0")
            cluster.tell("add 2")

        await computed(engine, right, replace_node)
        monkeypatch.setattr("aengine.workers.remote.ray_cluster._GROWTH_SECONDS", 0.5)

        async def requests() -> None:
            while True:
                await engine.generate([5, 6, 7], GREEDY.replace(max_tokens=120))

        running = asyncio.create_task(requests())
        await asyncio.to_thread(cluster.tell, "remove 1")
        with pytest.raises(EngineError, match="no room for 2 x 2 CPU|Ray could not start|lost"):
            await running
        assert engine.state == "failed"


async def test_no_cluster(model: Path, cluster: Cluster) -> None:
    """The last one: it needs a process without a connection."""
    disconnect()
    with pytest.raises(EngineError, match="no Ray cluster can be reached .*the host connects to the others"):
        await AsyncLLM(model, executor="ray", ray_address="ray://127.0.0.1:10001", **SETTINGS).start()
    with pytest.raises(EngineError, match="no Ray cluster can be reached .*ray start --head"):
        await AsyncLLM(model, executor="ray", ray_address="127.0.0.1:1", **SETTINGS).start()


async def test_no_ray(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidRequestError, match="pip install ray, here and on all machines"):
        await AsyncLLM(model, executor="ray", **SETTINGS).start()
