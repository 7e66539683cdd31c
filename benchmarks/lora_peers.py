#!/usr/bin/env python3
"""Streams of an engine with LoRA adapters beside streams without, through its public API; JSON out.

    python lora_peers.py --engine aengine_adapter:Adapter --streams 1,64 --out ours.json
    python lora_peers.py --engine vllm_adapter:Adapter --streams 1,64 --out theirs.json

Random weights, and random adapters of all linear layers; stream i has adapter i modulo their number. Both
kinds run in turns on one engine that has all adapters loaded. ``ratio``: tokens a second with by those without.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from adapters import write_adapter
from engine_bench import SHAPES


def settings_of(args: argparse.Namespace, folders: list[Path]) -> list[str]:
    """Return the ``--set`` items that give the engine its adapters."""
    if args.engine.startswith("vllm"):
        return ["enable_lora=true", f"max_loras={len(folders)}", f"max_lora_rank={args.rank}", *args.set]
    loras = {f"lora-{i}": str(folder) for i, folder in enumerate(folders)}
    return [f"loras={json.dumps(loras)}", f"max_loras={len(folders)}", f"max_lora_rank={args.rank}", *args.set]


def how_of(args: argparse.Namespace, folders: list[Path], number: int) -> dict[str, Any]:
    """Return what a request is given so that it has the adapter of a number."""
    if args.engine.startswith("vllm"):
        return {"lora": (f"lora-{number}", number + 1, str(folders[number]))}
    return {"options": {"lora": f"lora-{number}"}}


async def tokens_per_second(engine: Any, args: argparse.Namespace, hows: list[dict[str, Any]], name: str) -> float:
    """Return those between the last stream's first token and the first stream's last."""
    begins, ends = [], []

    async def run(i: int, how: dict[str, Any]) -> None:
        prompt = [random.randrange(3, 4000) for _ in range(args.prompt)]
        times = []
        given = {"temperature": 0.0, "max_tokens": args.output, "ignore_eos": True, **how}
        async for token_ids in engine.stream_ids(prompt, given, f"{name}-{i}"):
            times += [time.perf_counter()] * len(token_ids)
        begins.append(times)
        ends.append(times[-1])

    await asyncio.gather(*(run(i, how) for i, how in enumerate(hows)))
    start, end = max(times[0] for times in begins), min(ends)
    return sum(start < moment <= end for times in begins for moment in times) / (end - start)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[args.shape]
    root = Path(tempfile.gettempdir()) / "bench-models"
    model = root / args.shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(shape))
    folders = [write_adapter(root / f"{args.shape}-lora-{i}", shape, args.rank) for i in range(args.adapters)]
    module, _, name = args.engine.partition(":")
    engine = getattr(importlib.import_module(module), name)()
    await engine.start(str(model), argparse.Namespace(**vars(args) | {"set": settings_of(args, folders)}))
    figures: dict[str, Any] = {"engine": args.engine, "args": vars(args), "streams": {}}
    try:
        for count in args.streams:
            kinds: dict[str, list[dict[str, Any]]] = {
                "without": [{} for _ in range(count)],
                "with": [how_of(args, folders, i % args.adapters) for i in range(count)],
            }
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(args.rounds + 1):
                for kind, hows in kinds.items():
                    rate = await tokens_per_second(engine, args, hows, f"{count}-{turn}-{kind}")
                    if turn:  # the first one warms up
                        rates[kind].append(round(rate, 1))
            middle = {kind: statistics.median(found) for kind, found in rates.items()}
            ratio = round(middle["with"] / middle["without"], 4)
            figures["streams"][count] = {"rates": rates, **middle, "ratio": ratio}
            Path(args.out).write_text(json.dumps(figures, indent=1))
            print(json.dumps({"streams": count, **figures["streams"][count]}), flush=True)
    finally:
        await engine.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="aengine_adapter:Adapter")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", default=None)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--streams", type=lambda text: [int(one) for one in text.split(",")], default=[1, 64])
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", required=True)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
