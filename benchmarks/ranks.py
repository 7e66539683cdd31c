"""What several ranks cost the host: its CPU a token with one, two and four workers that answer at once. JSON to stdout.

    python benchmarks/ranks.py [--ranks 1 2 4] [--streams 1 64 256] [--tokens 400]

Every rank is a real process with fake_worker.py, and gets every frame over a ring of its own; rank 0 answers. Rounds
alternate between the numbers of ranks, as other processes disturb them all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from host import FakeWorkerLLM, burst, cpu_per_token


async def measure(args: argparse.Namespace) -> dict[str, float]:
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        engines = {}
        for ranks in args.ranks:
            engine = FakeWorkerLLM("smollm2-135m", max_num_seqs=1024, tensor_parallel_size=ranks, device="cpu")
            engines[ranks] = await stack.enter_async_context(engine)
            await burst(engine, 4, 20)
        gc.collect()
        gc.freeze()
        for _ in range(args.rounds):
            for streams in args.streams:
                for ranks, engine in engines.items():
                    run = await cpu_per_token(engine, streams, args.tokens)
                    found[ranks, streams].append(run["host_cpu_us_per_token"])
    result: dict[str, float] = {}
    for (ranks, streams), values in found.items():
        result[f"host_cpu_us_per_token_{ranks}_ranks_{streams}"] = round(statistics.median(values), 2)
    for ranks, streams in found:
        if ranks != args.ranks[0]:
            alone = statistics.median(found[args.ranks[0], streams])
            result[f"times_{ranks}_ranks_{streams}"] = round(statistics.median(found[ranks, streams]) / alone, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # this is our own process: the workers find fake_worker.py
    print(json.dumps(uvloop.run(measure(args))))


if __name__ == "__main__":
    main()
