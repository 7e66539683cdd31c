"""What it costs that ranks are behind a node's connection: latency and the host's CPU a token. JSON to stdout.

    python benchmarks/remote_ranks.py [--streams 1 64 256] [--tokens 400] [--ranks 1]

The node is a process on this machine, as a Ray actor would be, without Ray: what is measured is the connection and the
copying between it and the rings. The workers answer at once (fake_worker.py), so all time is the way there and back.
Rounds alternate between ranks of this process and those of the node, as other processes disturb both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from host import FakeWorkerLLM, burst, cpu_per_token

from aengine.config import EngineConfig
from aengine.engine.executor import ProcessExecutor
from aengine.workers.rank import Rank
from aengine.workers.remote.group import RemoteGroup, StartedNode
from aengine.workers.remote.node import Node


class NodeProcess:
    """A `ClusterNodes` of one other process."""

    def start(self, config: EngineConfig, ranks: Sequence[Rank], target: str, token: bytes) -> list[StartedNode]:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        wire = {"config": config.to_wire(), "ranks": [rank.to_wire() for rank in ranks], "target": target}
        print(json.dumps({"token": token.hex(), **wire}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return [StartedNode(ranks, answer["address"], answer["port"], answer["meeting_port"], answer["places"])]

    def release(self) -> None:
        self._process.communicate()


class RemoteLLM(FakeWorkerLLM):
    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="fake_worker:load_model"), RemoteGroup(NodeProcess()))


def serve_node() -> None:
    order = json.loads(sys.stdin.readline())
    node = Node(bytes.fromhex(order.pop("token")), "127.0.0.1")
    print(json.dumps(node.start(**order)), flush=True)
    node.ended.wait()


async def between_tokens(engine: FakeWorkerLLM, tokens: int) -> float:
    """Microseconds between two tokens of one stream."""
    begun = time.perf_counter()
    await burst(engine, 1, tokens)
    return (time.perf_counter() - begun) / tokens * 1e6


async def measure(args: argparse.Namespace) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        engines: dict[str, FakeWorkerLLM] = {}
        for name, kind in (("local", FakeWorkerLLM), ("remote", RemoteLLM)):
            engine = kind("smollm2-135m", max_num_seqs=1024, tensor_parallel_size=args.ranks, device="cpu")
            engines[name] = await stack.enter_async_context(engine)
            await burst(engine, 4, 20)
        gc.collect()
        gc.freeze()
        for _ in range(args.rounds):
            for name, engine in engines.items():
                found[f"{name}_us_between_tokens_1"].append(await between_tokens(engine, args.tokens))
                for streams in args.streams:
                    run = await cpu_per_token(engine, streams, args.tokens)
                    found[f"{name}_host_cpu_us_per_token_{streams}"].append(run["host_cpu_us_per_token"])
    result = {name: round(statistics.median(values), 2) for name, values in found.items()}
    for name in [name for name in found if name.startswith("remote")]:
        ratios = [there / here for there, here in zip(found[name], found["local" + name[6:]], strict=True)]
        result["times" + name[6:]] = round(statistics.median(ratios), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node:
        serve_node()
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    print(json.dumps(uvloop.run(measure(args))))


if __name__ == "__main__":
    main()
