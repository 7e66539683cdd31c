"""What a disk brings to an engine that begins anew: seconds to the first token of earlier prompts; JSON on stdout.

  python benchmarks/kv_stores.py --shape llama-3.1-8b                   on a GPU; dummy weights
  python benchmarks/kv_stores.py --model smollm2-135m --device cpu --prompt 2000 --host 1GB --disk 4GB

computed      by the first engine, while it saves them
from_disk     by the second one, of files that the system has in memory
from_platter  of files that it has let go
new           prompts of 64 tokens that nobody has had, with the disk and without: what it costs to ask
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_bench import SHAPES

from aengine import AsyncLLM, SamplingParams

FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)


def median(values: list[float]) -> float:
    return round(statistics.median(values), 5)


async def first_token(engine: AsyncLLM, prompt: list[int]) -> float:
    begun = time.perf_counter()
    await engine.generate(prompt, FIRST)
    return time.perf_counter() - begun


def let_go(folder: str) -> None:
    """Have the system write the files, and keep none of them in memory."""
    for path in Path(folder).glob("*/*"):
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def saved(engine: AsyncLLM, num_pages: int) -> float:
    begun = time.perf_counter()
    while engine.statistics().kv_tiers[1].num_saved < num_pages and time.perf_counter() < begun + 30:
        await asyncio.sleep(0.005)
    return time.perf_counter() - begun


async def measured(args: argparse.Namespace, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    rng = random.Random(1)

    def new(num_tokens: int) -> list[int]:
        return [rng.randrange(1000, args.vocab) for _ in range(num_tokens)]

    short = [new(64) for _ in range(2 * args.short)]
    prompts = [new(args.prompt) for _ in range(2 * args.rounds)]
    tiers = {"kv_tiers": f"host:{args.host},disk:{folder}:{args.disk}"}
    result: dict[str, Any] = {}
    async with AsyncLLM(args.model, **settings | tiers) as engine:
        described = engine.describe()
        page_bytes = described["kv_cache_bytes"] // described["num_blocks"]
        num_pages = args.prompt // described["block_size"]
        await first_token(engine, new(args.prompt))
        times, saving = [], []
        for prompt in prompts:
            before = engine.statistics().kv_tiers[1].num_saved
            times.append(await first_token(engine, prompt))
            saving.append(await saved(engine, before + num_pages))
        result |= {"computed": median(times), "saved_after": median(saving), "GB": num_pages * page_bytes / 1e9}
        result["page_bytes"] = page_bytes
    print(result, file=sys.stderr, flush=True)
    async with AsyncLLM(args.model, **settings | tiers) as engine:
        await first_token(engine, new(args.prompt))
        result["from_disk"] = median([await first_token(engine, prompt) for prompt in prompts[: args.rounds]])
        let_go(folder)
        result["from_platter"] = median([await first_token(engine, prompt) for prompt in prompts[args.rounds :]])
        tier = engine.statistics().kv_tiers[1]
        result |= {"fetched": tier.num_fetched, "lost": tier.num_lost}
        result["new"] = median([await first_token(engine, prompt) for prompt in short[: args.short]])
    print(result, file=sys.stderr, flush=True)
    async with AsyncLLM(args.model, **settings) as engine:
        await first_token(engine, new(args.prompt))
        result["new_without"] = median([await first_token(engine, prompt) for prompt in short[args.short :]])
    return result | {"of_computing": round(result["from_disk"] / result["computed"], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--short", type=int, default=50)
    parser.add_argument("--host", default="16GB")
    parser.add_argument("--disk", default="40GB")
    parser.add_argument("--folder", help="where the files lie; else a temporary folder")
    args = parser.parse_args()
    settings: dict[str, Any] = {"device": args.device, "max_model_len": args.prompt + 64, "max_num_seqs": 4}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.vocab = 40_000
        if args.shape:
            args.model = str(Path(folder, "model"))
            Path(args.model).mkdir()
            Path(args.model, "config.json").write_text(json.dumps(SHAPES[args.shape]))
            settings |= {"load_format": "dummy", "skip_tokenizer": True}
        result = asyncio.run(measured(args, settings, str(Path(folder, "kv"))))
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
