"""What sampling parameters cost: tokens a second beside greedy, and how long their first use holds up others.

    python benchmarks/sampling.py --shape qwen3-0.6b --out sampling.json

stalls   32 greedy streams; beside them requests come, one after the other: greedy ones, then the first with all
         parameters, then more of these. Each one's time to its first token, and the longest gap that any of the
         streams had from when it came until its first token and 20 ms more.
speed    of one stream and of 64, for greedy requests, for each parameter alone, and for all together: tokens a second
         between the first token of the last stream and the last token of the first, median of --rounds, and as a
         share of greedy in the same round. The processors do nothing.

One JSON object to --out, a table to stdout. Random weights of a shape of engine_bench.py; milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine_bench import SHAPES

from aengine import AsyncLLM, SamplingParams

BIAS = dict.fromkeys(range(100, 140), 1.5)
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, **PENALTIES},
    "logit_bias": {"temperature": 0.8, "logit_bias": BIAS},
    "min_tokens": {"temperature": 0.8, "min_tokens": 1000, "stop_token_ids": [7, 8, 9]},
    "logprobs": {"temperature": 0.8, "logprobs": 5},
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        **PENALTIES,
        "logit_bias": BIAS,
        "min_tokens": 1000,
        "stop_token_ids": [7, 8, 9],
        "logprobs": 5,
    },
    "a processor": {"temperature": 0.0, "extra_args": {"idle": {}}},
    "a processor in graphs": {"temperature": 0.0, "extra_args": {"idle_in_graphs": {}}},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": list(range(100, 4100))},
    "thinking_budget": {
        "temperature": 0.0,
        "extra_args": {"thinking_budget": {"tokens": 50, "begin": [5], "end": [6, 7]}},
    },
}
PROCESSORS = ["idle_processors:Idle", "idle_processors:IdleInGraphs", "thinking_budget"]
NUM_BESIDE = 32


class Bench:
    def __init__(self, engine: AsyncLLM, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)

    async def times(self, case: dict[str, Any], num_tokens: int) -> list[float]:
        """When each token of one request came."""
        prompt = [self._rng.randint(100, 4000) for _ in range(64)]
        params = dict(case, max_tokens=num_tokens, ignore_eos=True, detokenize=False, seed=self._rng.getrandbits(40))
        params["min_tokens"] = min(params.get("min_tokens", 0), num_tokens)
        return [time.perf_counter() async for _ in self._engine.stream(prompt, SamplingParams(**params))]

    async def tokens_per_second(self, case: dict[str, Any], streams: int, num_tokens: int) -> float:
        times = await asyncio.gather(*(self.times(case, num_tokens) for _ in range(streams)))
        begin, end = max(of[0] for of in times), min(of[-1] for of in times)
        return sum(sum(begin < at <= end for at in of) for of in times) / (end - begin)

    async def speed(
        self, cases: dict[str, dict[str, Any]], streams: int, num_tokens: int, rounds: int
    ) -> dict[str, dict[str, float]]:
        for case in cases.values():
            await self.tokens_per_second(case, streams, 12)
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, case in cases.items():
                found[name].append(await self.tokens_per_second(case, streams, num_tokens))
        shares = {name: [a / b for a, b in zip(of, found["greedy"], strict=True)] for name, of in found.items()}
        return {
            name: {"tokens_per_second": statistics.median(of), "share_of_greedy": statistics.median(shares[name])}
            for name, of in found.items()
        }

    async def stalls(self, num_later: int) -> dict[str, Any]:
        beside: list[list[float]] = [[] for _ in range(NUM_BESIDE)]
        ends = False

        async def run(of: list[float]) -> None:
            prompt = [self._rng.randint(100, 4000) for _ in range(64)]
            params = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True, detokenize=False)
            async for _ in self._engine.stream(prompt, params):
                of.append(time.perf_counter())
                if ends:
                    return

        tasks = [asyncio.create_task(run(of)) for of in beside]
        await asyncio.sleep(0.7)
        results = {}
        for name, count in (("greedy", num_later + 1), ("all", num_later + 1)):
            spans = []
            for _ in range(count):
                sent = time.perf_counter()
                own = await self.times(CASES[name], 16)
                spans.append((sent, own[0], own[-1]))
                await asyncio.sleep(0.1)
            results[name] = [
                {
                    "first_token": 1e3 * (first - sent),
                    "gap_of_others": 1e3 * max(_longest_gap(of, sent, first + 0.02) for of in beside),
                    "gap_of_others_to_its_end": 1e3 * max(_longest_gap(of, sent, last) for of in beside),
                }
                for sent, first, last in spans
            ]
        ends = True
        await asyncio.gather(*tasks)
        return results


def _longest_gap(times: list[float], begin: float, end: float) -> float:
    """The longest between two neighbours of which the later is after ``begin`` and the earlier before ``end``."""
    return max((b - a for a, b in pairwise(times) if b > begin and a < end), default=0.0)


async def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    begun = time.perf_counter()
    settings = dict(item.split("=", 1) for item in args.set)
    values = {key: json.loads(value) for key, value in settings.items()}
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer": True}
    options |= {"logits_processors": PROCESSORS} | values
    cases = {name: case for name, case in CASES.items() if name == "greedy" or not args.cases or name in args.cases}
    engine = AsyncLLM(folder, **options)
    async with engine:
        bench = Bench(engine, args.seed)
        await bench.times(CASES["greedy"], 4)
        result: dict[str, Any] = {"name": args.name, "shape": args.shape, "start": time.perf_counter() - begun}
        await asyncio.sleep(args.settle)
        if "stalls" in args.tasks:
            result["stalls"] = await bench.stalls(args.later)
        for streams in args.streams if "speed" in args.tasks else ():
            result[f"speed_{streams}"] = await bench.speed(cases, streams, args.tokens, args.rounds)
        result["describe"] = engine.describe()
    return result


def show(result: dict[str, Any]) -> None:
    print(f"{result['name']} {result['shape']}: first token {result['start']:.1f} s after the start")
    for name, of in result.get("stalls", {}).items():
        for label, some in (("first", of[:1]), ("later, worst", of[1:])):
            figures = (f"{key} {max(one[key] for one in some):.1f}" for key in some[0])
            print(f"  {name:6} {label:12} ms: {', '.join(figures)}")
    for key in (key for key in result if key.startswith("speed_")):
        cases = (
            f"{name} {of['tokens_per_second']:.0f} ({of['share_of_greedy']:.2f})" for name, of in result[key].items()
        )
        print(f"  {key.removeprefix('speed_')} streams, tokens/s: {', '.join(cases)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--name", default="aengine")
    parser.add_argument("--tasks", default="stalls,speed", type=lambda text: text.split(","))
    parser.add_argument("--streams", default=[1, 64], type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="of speed, beside greedy; else all")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--later", type=int, default=4, help="requests after the first")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds of idleness after the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        result = asyncio.run(measure(args, folder))
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, default=str, indent=1))


if __name__ == "__main__":
    main()
