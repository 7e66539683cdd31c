"""``aengine bench``: tokens per second, time to first token and inter-token latency of a model on this machine.

Prompts are random token ids, fresh for each run, so that no prefix cache hits. Clocks are the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

from ..async_llm import AsyncLLM
from ..params import SamplingParams
from .engine_options import engine_config
from .progress import tell


async def bench(args: argparse.Namespace) -> int:
    begun = time.monotonic()
    async with AsyncLLM(engine_config(args)) as engine:
        result: dict[str, Any] = {"model": args.model, "engine": engine.describe()}
        await measure(engine, 1, 8, 1)
        result["first_token_s"] = round(time.monotonic() - begun, 2)
        for streams in args.streams:
            runs = [await measure(engine, streams, args.input_len, args.output_len) for _ in range(args.repeats)]
            row = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
            result[f"streams_{streams}"] = row
            if not args.quiet:
                tell(f"{streams} streams: {row}")
    print(json.dumps(result))
    return 0


async def measure(engine: AsyncLLM, streams: int, input_len: int, output_len: int) -> dict[str, float]:
    """Send one burst of ``streams`` requests and measure it. Times are in milliseconds, rates in tokens per second."""
    vocab_size = engine.describe()["vocab_size"]
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [[random.randrange(100, vocab_size) for _ in range(input_len)] for _ in range(streams)]
    firsts: list[float] = []
    gaps: list[float] = []

    async def one(prompt: list[int]) -> None:
        last = begun
        async for token in engine.stream(prompt, params):
            now = time.perf_counter()
            (gaps if token.position else firsts).append(now - last)
            last = now

    begun = time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    wall = time.perf_counter() - begun
    prefilled = max(firsts)  # time of the last stream's first token, after which all steps are decodes
    decoded = streams * (output_len - 1)
    return {
        "tokens_per_s": streams * output_len / wall,
        "decode_tokens_per_s": decoded / (wall - prefilled) if decoded else 0.0,
        "prefill_tokens_per_s": streams * input_len / prefilled,
        "ttft_ms_p50": statistics.median(firsts) * 1e3,
        "itl_ms_p50": statistics.median(gaps) * 1e3 if gaps else 0.0,
    }
