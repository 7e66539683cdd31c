"""Tokens a second while the host blocks its event loop, against an undisturbed loop in the same run. JSON to stdout.

    python benchmarks/blocked_loop.py                                   SmolLM2 on this machine
    python benchmarks/blocked_loop.py --shape qwen3-0.6b                random weights of engine_bench.py's shape
    python benchmarks/blocked_loop.py --stages 2                        on two pipeline stages
    python benchmarks/blocked_loop.py --busy --held-ms 20               Python computes for 20 ms out of every 100

A coroutine of the host sleeps with the loop held (`time.sleep`) for 50 ms out of every 100, or, with ``--busy``,
computes: then it holds the interpreter's lock too, for which an engine in a thread of its own has to wait. With leases
the worker has the steps of that time already; with ``max_leased_steps=0`` it has two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

from engine_bench import SHAPES
from structured import random_weights

from aengine import AsyncLLM, SamplingParams


async def rate(engine: AsyncLLM, streams: int, tokens: int) -> float:
    """Tokens a second of all streams, from the first of the last one on."""
    firsts: list[float] = []
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)

    async def one() -> int:
        count = 0
        async for _ in engine.stream([random.randrange(100, 9000) for _ in range(64)], params):
            if not count:
                firsts.append(time.perf_counter())
            count += 1
        return count

    counts = await asyncio.gather(*(one() for _ in range(streams)))
    assert set(counts) == {tokens}
    return streams * (tokens - 1) / (time.perf_counter() - max(firsts))


def compute(seconds: float) -> None:
    """Hold the interpreter's lock, as other Python code does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(i * i for i in range(200))


async def blocker(args: argparse.Namespace) -> None:
    while True:
        (compute if args.busy else time.sleep)(args.held_ms / 1000)
        await asyncio.sleep((args.period_ms - args.held_ms) / 1000)


async def blocked_rate(engine: AsyncLLM, args: argparse.Namespace) -> float:
    task = asyncio.create_task(blocker(args))
    try:
        return await rate(engine, args.streams, args.tokens)
    finally:
        task.cancel()


async def measure(settings: dict[str, Any], model: str, args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncLLM(model, **settings) as engine:
        await rate(engine, args.streams, 32)
        pairs = []
        for _ in range(args.rounds):
            plain = await rate(engine, args.streams, args.tokens)
            pairs.append((plain, await blocked_rate(engine, args)))
    return {
        "undisturbed_tok_s": round(statistics.median(plain for plain, _ in pairs), 1),
        "blocked_tok_s": round(statistics.median(blocked for _, blocked in pairs), 1),
        "blocked_to_undisturbed": round(statistics.median(blocked / plain for plain, blocked in pairs), 3),
        "all": [round(blocked / plain, 3) for plain, blocked in pairs],
    }


async def main(args: argparse.Namespace) -> None:
    model: str = args.model
    settings: dict[str, Any] = {"pipeline_parallel_size": args.stages}
    if args.shape:
        model = random_weights(args.shape)
        settings |= {"load_format": "dummy", "skip_tokenizer": True}
    ways: dict[str, dict[str, Any]] = {
        "leases": {},
        "no leases": {"max_leased_steps": 0},
        "own_thread": {"own_thread": True},
        "own_thread, no leases": {"own_thread": True, "max_leased_steps": 0},
    }
    for name, more in ways.items():
        result = await measure({**settings, **more}, model, args)
        print(json.dumps({"streams": args.streams, "stages": args.stages, "with": name, **result}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="compute in Python while the loop is held")
    parser.add_argument("--held-ms", type=float, default=50)
    parser.add_argument("--period-ms", type=float, default=100)
    asyncio.run(main(parser.parse_args()))
