#!/usr/bin/env python3
"""The price of batch_invariant=True: tokens a second beside those of the usual engine, on one GPU in turns; JSON out.

    python benchmarks/batch_invariant.py --shape llama-3.1-8b --streams 1,64 --out r.json

Both engines have the same random weights and are there at once. A turn is one number of streams on one engine: each has
a fresh prompt of random tokens, and so many tokens are decoded. The first turn of each is not counted. "prefill" is the
time to the first token of one long prompt.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from engine_bench import SHAPES

PROMPT, LONG = 512, 4096  # tokens


def make_engine(args, **settings):
    from aengine import AsyncLLM

    folder = Path(tempfile.gettempdir()) / "bench-models" / args.shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    settings |= {"load_format": "dummy", "skip_tokenizer": True, "max_model_len": 8192, "max_num_seqs": 256}
    return AsyncLLM(str(folder), kv_cache_memory_bytes=args.kv_gib << 30, **settings)


async def turn(engine, streams: int, length: int, tokens: int, vocab_size: int) -> float:
    """Seconds until all streams have ended."""
    from aengine import SamplingParams

    prompts = [[random.randrange(vocab_size) for _ in range(length)] for _ in range(streams)]
    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    begun = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    return time.perf_counter() - begun


async def measure(args) -> dict:
    import torch

    vocab_size = SHAPES[args.shape]["vocab_size"]
    result = {"shape": args.shape, "prompt": PROMPT, "tokens": args.tokens, "rounds": args.rounds}
    result["card"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    usual, invariant = make_engine(args), make_engine(args, batch_invariant=True)
    async with usual, invariant:
        result["describe"] = {name: str(value) for name, value in invariant.describe().items()}
        cases = [(f"{n} streams", n, PROMPT, args.tokens) for n in args.streams] + [("prefill", 1, LONG, 1)]
        for name, streams, length, tokens in cases:
            seconds: dict[str, list[float]] = {"usual": [], "invariant": []}
            for number in range(args.rounds + 1):
                for way, engine in (("usual", usual), ("invariant", invariant)):
                    took = await turn(engine, streams, length, tokens, vocab_size)
                    if number:
                        seconds[way].append(took)
            middle = {way: statistics.median(all_of) for way, all_of in seconds.items()}
            rate = {way: round(streams * tokens / took, 1) for way, took in middle.items()}
            result[name] = {"tokens_per_s": rate, "share": round(middle["usual"] / middle["invariant"], 3)}
            result[name]["seconds"] = {way: [round(s, 4) for s in all_of] for way, all_of in seconds.items()}
            print(name, json.dumps(result[name]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--streams", default="1,64", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--tokens", default=256, type=int)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--kv-gib", default=10, type=int)
    parser.add_argument("--out")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    text = json.dumps(result, indent=1)
    if args.out:
        Path(args.out).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
