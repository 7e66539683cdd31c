"""A model of windows at short and at long contexts, and the embeddings of a decoder beside its prompts. On CUDA.

    python benchmarks/windows.py [--streams 64] [--contexts 4096 32768] [--out FILE]     # a minute or two; JSON

One engine of random weights (Qwen3-0.6B's shape, bfloat16, every layer with a window of 4096 tokens) decodes the same
number of streams at each context. Shown of each: milliseconds between tokens while all of them decode, and the KV
blocks in use against those that hold the windows alone. Then texts of 512 tokens, as prompts whose completion is one
token and as embeddings, in turns: tokens/s of both.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine_bench import SHAPES

from aengine import AsyncLLM, SamplingParams

WINDOW = 4096
DECODED = 192


def write_config(folder: Path, longest: int) -> None:
    shape: dict[str, Any] = SHAPES["qwen3-0.6b"] | {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 0,
        "max_position_embeddings": longest,
    }
    (folder / "config.json").write_text(json.dumps(shape))


def prompts(count: int, length: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(100, 4096) for _ in range(length)] for _ in range(count)]


async def decode(engine: AsyncLLM, streams: int, context: int, rng: random.Random) -> dict[str, float]:
    """Time the tokens that come when the last prompt is computed and until the first stream ends."""
    # The first to begin decode in each step that computes a part of the others' prompts.
    most = DECODED + streams + streams * context // 4096
    params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, detokenize=False)
    begun = used = 0
    times: list[list[float]] = []

    async def read(prompt: list[int]) -> None:
        nonlocal begun, used
        mine: list[float] = []
        times.append(mine)
        async for _ in engine.stream(prompt, params):
            if not mine:
                begun += 1
            mine.append(time.perf_counter())
            if begun == streams and len(mine) % 16 == 0:
                found = engine.statistics()
                used = max(used, found.num_blocks - found.num_free_blocks)

    start = time.perf_counter()
    await asyncio.gather(*(read(prompt) for prompt in prompts(streams, context, rng)))
    all_begun, first_end = max(own[0] for own in times), min(own[-1] for own in times)
    gaps = [b - a for own in times for a, b in itertools.pairwise(own) if a >= all_begun and b <= first_end]
    windows = streams * WINDOW / engine.describe()["block_size"]
    return {
        "itl_ms_p50": 1e3 * statistics.median(gaps),
        "itl_ms_mean": 1e3 * statistics.fmean(gaps),
        "prompts_s": all_begun - start,
        "blocks": used,
        "share_of_windows": used / windows,
    }


async def embeddings(engine: AsyncLLM, rng: random.Random) -> dict[str, float]:
    count, length = 256, 512
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    async def generated(texts: list[list[int]]) -> None:
        await asyncio.gather(*(engine.generate(text, one) for text in texts))

    async def embedded(texts: list[list[int]]) -> None:
        await engine.embed(texts)

    async def rate(way: Callable[[list[list[int]]], Awaitable[None]]) -> float:
        texts = prompts(count, length, rng)
        start = time.perf_counter()
        await way(texts)
        return count * length / (time.perf_counter() - start)

    rates: dict[str, list[float]] = {"prompts": [], "embeddings": []}
    for _ in range(5):
        rates["prompts"].append(await rate(generated))
        rates["embeddings"].append(await rate(embedded))
    medians = {f"{name}_tok_s": statistics.median(found[1:]) for name, found in rates.items()}
    return medians | {"ratio": medians["embeddings_tok_s"] / medians["prompts_tok_s"]}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=[WINDOW, 8 * WINDOW, WINDOW, 8 * WINDOW])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = random.Random(time.time_ns())
    result: dict[str, Any] = {"streams": args.streams, "window": WINDOW}
    with tempfile.TemporaryDirectory() as name:
        longest = max(args.contexts) + DECODED + args.streams * (1 + max(args.contexts) // 4096)
        write_config(Path(name), longest)
        engine = AsyncLLM(
            name,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer=True,
            pooling="last",
            max_model_len=longest,
            device=args.device,
        )
        async with engine:
            await decode(engine, args.streams, 128, rng)
            result["contexts"] = [{"context": n} | await decode(engine, args.streams, n, rng) for n in args.contexts]
            result["embeddings"] = await embeddings(engine, rng)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    asyncio.run(main())
