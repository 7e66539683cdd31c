"""Tokens a second while the host blocks its event loop, against an undisturbed loop in the same run. JSON to stdout.

    python benchmarks/blocked_loop.py                                   SmolLM2 on this machine
    python benchmarks/blocked_loop.py --shape qwen3-0.6b                random weights of engine_bench.py's shape
    python benchmarks/blocked_loop.py --stages 2                        on two pipeline stages

A coroutine of the host sleeps with the loop held (`time.sleep`) for 50 ms out of every 100. With leases the worker has
the steps of that time already; with ``max_leased_steps=0`` it has two.
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


async def blocker(held: float, free: float) -> None:
    while True:
        time.sleep(held)
        await asyncio.sleep(free)


async def blocked_rate(engine: AsyncLLM, streams: int, tokens: int) -> float:
    task = asyncio.create_task(blocker(0.05, 0.05))
    try:
        return await rate(engine, streams, tokens)
    finally:
        task.cancel()


async def measure(settings: dict[str, Any], model: str, args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncLLM(model, **settings) as engine:
        await rate(engine, args.streams, 32)
        pairs = []
        for _ in range(args.rounds):
            plain = await rate(engine, args.streams, args.tokens)
            pairs.append((plain, await blocked_rate(engine, args.streams, args.tokens)))
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
    for name, more in (("leases", {}), ("no leases", {"max_leased_steps": 0}), ("own_thread", {"own_thread": True})):
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
    asyncio.run(main(parser.parse_args()))
