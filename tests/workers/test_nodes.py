"""Workers behind a node's connection: what they answer, their deaths, and that nothing of them stays. No Ray needed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import pytest
from fake_runner import HANG
from worker_helpers import config, decode, descriptors, gone, leftovers, start, step

from aengine.config import EngineConfig
from aengine.engine.executor import ProcessExecutor
from aengine.errors import EngineClosedError, EngineError, InternalError, WorkerDiedError
from aengine.ipc.link import AuthenticationError, authenticate
from aengine.workers.rank import Rank
from aengine.workers.remote.group import RemoteGroup, StartedNode
from aengine.workers.remote.node import Node


class NodesHere:
    """A `ClusterNodes` whose nodes are threads of this process."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.is_released = False
        self.port = 0  # instead of the last node's

    def start(self, config: EngineConfig, ranks: Sequence[Rank], target: str, token: bytes) -> list[StartedNode]:
        size, started = config.tensor_parallel_size, []
        for begin in range(0, len(ranks), size):
            stage = ranks[begin : begin + size]
            node = Node(token, "127.0.0.1")
            answer = node.start(config.to_wire(), [rank.to_wire() for rank in stage], target)
            self.nodes.append(node)
            if "error" in answer:
                raise EngineError(answer["error"])
            port = self.port or answer["port"]
            started.append(StartedNode(stage, answer["address"], port, answer["meeting_port"], answer["places"]))
        return started

    def release(self) -> None:
        self.is_released = True


def make(**settings: Any) -> tuple[ProcessExecutor, NodesHere]:
    cluster = NodesHere()
    settings = {"worker": "fake_runner:load_model", "num_threads": 1, "device": "cpu", **settings}
    return ProcessExecutor(config(**settings), RemoteGroup(cluster)), cluster


async def all_gone(cluster: NodesHere, pids: Sequence[int]) -> None:
    for pid in pids:
        await gone(pid)
    for node in cluster.nodes:
        await asyncio.to_thread(node.ended.wait, 10)
        assert node.ended.is_set()
    assert cluster.is_released
    assert not leftovers()


def pids_of(ready: dict[str, Any]) -> list[int]:
    return [rank["pid"] for rank in ready["ranks"]]


async def test_ranks_on_two_nodes_answer_like_those_of_one_machine() -> None:
    before = descriptors()
    executor, cluster = make(tensor_parallel_size=2, pipeline_parallel_size=2)
    ready = await start(executor)
    assert len(set(pids_of(ready))) == 4 and len(cluster.nodes) == 2
    answer = await (await executor.execute_model(step(0, [1, 2, 3])))
    assert answer is not None and list(answer.token_ids) == [260 + 3]
    assert abs(answer.answered_at - time.monotonic()) < 60, "by this machine's clock"
    answers = [await executor.execute_model(decode(i, [0])) for i in range(1, 50)]
    for i, answer in enumerate(await asyncio.gather(*answers), 1):
        assert answer is not None and list(answer.token_ids) == [260 + 3 + i]
    assert await executor.call("ping", timeout=5) is not None
    beats = executor.liveness().num_heartbeats
    while executor.liveness().num_heartbeats <= beats:
        await asyncio.sleep(0.01)
    resident, _ = executor.memory()
    assert resident is not None and resident > 4 * 5e6
    assert executor.bitmask(100) is None
    await executor.aclose(5)
    await all_gone(cluster, pids_of(ready))
    assert descriptors() <= before


async def test_messages_larger_than_rings_and_buffers() -> None:
    executor, _ = make(ring_bytes=65536)
    await start(executor)
    sent = list(range(1000, 49000)) * 60  # 11 MB
    steps = [asyncio.ensure_future(executor.execute_model(step(i, sent, row=i))) for i in range(3)]
    for answer in await asyncio.gather(*steps):
        assert (await answer).token_ids[0] == 260 + len(sent) % 997
    await executor.aclose(5)


@pytest.mark.parametrize("hit", ["worker", "node"])
async def test_a_death_is_told_with_its_cause(hit: str) -> None:
    executor, cluster = make(tensor_parallel_size=2)
    failures: list[EngineError | None] = []
    ready = await start(executor, failures=failures)
    await (await executor.execute_model(step(0, [1])))
    waiting = await executor.execute_model(step(1, [HANG], row=1))
    if hit == "worker":
        os.kill(pids_of(ready)[1], signal.SIGKILL)
        expected = r"worker 1 \(pid \d+\) died of SIGKILL .*\(on 127.0.0.1\)"
    else:
        node = cluster.nodes[0]
        assert node._link is not None
        node._link.hang_up()
        expected = "the connection to worker 0 on 127.0.0.1 is lost: the other side has closed it"
    with pytest.raises(WorkerDiedError, match=expected):
        await waiting
    assert len(failures) == 1
    with pytest.raises(WorkerDiedError):
        await executor.execute_model(step(2, [1]))
    await executor.aclose(5)
    await all_gone(cluster, pids_of(ready))


async def test_a_host_that_ends_leaves_no_worker() -> None:
    executor, cluster = make(tensor_parallel_size=2)
    ready = await start(executor)
    links = executor.workers._links  # type: ignore[attr-defined]
    links[0].link.close()  # as the kernel does for a process that was killed
    await asyncio.gather(*map(gone, pids_of(ready)))
    await executor.aclose(5)
    await all_gone(cluster, pids_of(ready))


async def test_a_stopped_worker_shows_no_sign_of_life() -> None:
    executor, cluster = make(tensor_parallel_size=2)
    ready = await start(executor)
    os.kill(pids_of(ready)[1], signal.SIGSTOP)
    await asyncio.sleep(0.7)  # those that are on their way
    beats = executor.liveness().num_heartbeats
    await asyncio.sleep(1.0)  # several beats of a worker that runs
    assert executor.liveness().num_heartbeats == beats
    executor.terminate()
    await executor.aclose(5)
    await all_gone(cluster, pids_of(ready))


async def test_a_connection_that_ends_behind_an_error_of_its_rank_is_a_death() -> None:
    """Not the end of the engine: the step that is given meanwhile has it start other workers."""
    executor, cluster = make(pipeline_parallel_size=2)
    ready = await start(executor)
    executor._fail_by_report(1, InternalError("worker 1: a peer has closed the connection"))
    executor.workers._links[1].link._end("reset by peer")  # type: ignore[attr-defined]
    assert executor.failure is None, "whether another rank's death is the cause is known soon"
    with pytest.raises(WorkerDiedError, match="the connection to the other machine has ended"):
        await executor.execute_model(step(0, [1, 2, 3]))
    await executor.aclose(5)
    await all_gone(cluster, pids_of(ready))


async def test_terminated_while_nodes_start() -> None:
    executor, cluster = make(tensor_parallel_size=2)
    starting = asyncio.create_task(start(executor))
    while not cluster.nodes:
        await asyncio.sleep(0.001)
    executor.terminate()
    with pytest.raises(EngineClosedError):
        await starting
    await executor.aclose(5)
    while not cluster.is_released:
        await asyncio.sleep(0.001)


async def test_who_can_not_be_reached() -> None:
    executor, cluster = make()
    with socket.create_server(("127.0.0.1", 0)) as other:
        cluster.port = other.getsockname()[1]
    with pytest.raises(EngineError, match="127.0.0.1, port .* can't be reached from here .*firewall"):
        await start(executor)


async def test_strangers_are_refused_and_the_host_is_not() -> None:
    token = os.urandom(32)
    node = Node(token, "127.0.0.1")
    settings = config(worker="fake_runner:load_model", num_threads=1, device="cpu")
    target = "fake_runner:load_model"
    answer = await asyncio.to_thread(node.start, settings.to_wire(), [Rank().to_wire()], target)
    place = answer["address"], answer["port"]

    almost = token[:-1] + bytes([token[-1] ^ 1])

    def knock() -> None:
        for stranger_token, error in ((b"x" * 32, AuthenticationError), (almost, AuthenticationError)):
            with socket.create_connection(place, timeout=5) as stranger, pytest.raises(error):
                authenticate(stranger, stranger_token, is_host=True)
        with socket.create_connection(place, timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: there\r\nAccept: */*\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        with socket.create_connection(place, timeout=5) as mirror:  # sends back what it gets
            with pytest.raises(OSError):
                while data := mirror.recv(4096):
                    mirror.sendall(data)
                raise ConnectionError
        with socket.create_connection(place, timeout=5) as host:
            authenticate(host, token, is_host=True)
            host.sendall(struct.pack("<BxHxxxxQQ", 2, 7, 0, 0))  # for a rank that is not there

    await asyncio.to_thread(knock)
    assert await asyncio.to_thread(node.ended.wait, 10)
