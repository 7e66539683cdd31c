"""What a tenant that floods an engine costs another that asks once a second; one JSON object on stdout.

    python benchmarks/tenants.py [--model M] [--flood 200] [--seconds 20] [--engine max_num_seqs=256 ...]

A call of the light tenant has a prompt of its own and a short completion; its first token and its end are timed from
the call. The flood is so many calls at a time, each followed by another as it ends, with prompts of their own.

  alone    nothing else runs
  rows     beside as many completions of its own as the flood has, which only decode
  flood    beside the flood of another tenant
  quota    beside that flood, which may have --quota rows at once
  plain    beside the flood, where no request names a tenant

``beyond_rows`` is what the flood costs the light tenant beyond the rows, ``quota_to_alone`` its first token under the
quota against alone, each of medians; ``throughput`` the tokens of all in flood against plain, prompts and outputs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_bench import SHAPES

from aengine import AsyncLLM, SamplingParams, Tenant


class Load:
    """Calls of one engine with prompts of random tokens, and how many tokens they had."""

    def __init__(self, engine: AsyncLLM, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        self.rng = random.Random(args.seed)
        self.most_id = min(engine.describe()["vocab_size"], 30_000) - 1
        self.num_tokens = 0

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randint(100, self.most_id) for _ in range(length)]

    async def call(self, length: int, num_output: int, tenant: str | None) -> tuple[float, float]:
        """Make one call. Returns the seconds to its first token and to its end."""
        options = {} if tenant is None else {"tenant": tenant}
        params = SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0, detokenize=False)
        begin, first = time.perf_counter(), 0.0
        async for token in self.engine.stream(self.prompt(length), params, **options):
            if not first:
                first = time.perf_counter() - begin
                self.num_tokens += length
            self.num_tokens += token.token_id >= 0
        return first, time.perf_counter() - begin

    async def flood_one(self, tenant: str | None) -> None:
        args = self.args
        while True:
            num_output = self.rng.randint(args.flood_output // 2, args.flood_output * 3 // 2)
            await self.call(args.flood_prompt, num_output, tenant)

    async def light(self, tenant: str | None) -> dict[str, Any]:
        """Ask once a second, and return what it took."""
        args, calls = self.args, []
        begin, before = time.perf_counter(), self.num_tokens
        for number in range(args.seconds):
            await asyncio.sleep(max(0.0, begin + number - time.perf_counter()))
            calls.append(asyncio.create_task(self.call(args.prompt, args.output, tenant)))
        results = await asyncio.gather(*calls)
        elapsed = time.perf_counter() - begin
        columns = {"first_token": [first for first, _ in results], "end": [end for _, end in results]}
        return {
            f"{name}_{label}_ms": round(1000 * value, 2)
            for name, values in columns.items()
            for label, value in (("p50", statistics.median(values)), ("worst", max(values)))
        } | {"tokens_per_second": round((self.num_tokens - before) / elapsed, 1)}

    async def beside(self, others: list[Any], tenant: str | None) -> dict[str, Any]:
        tasks = [asyncio.create_task(one) for one in others]
        await asyncio.sleep(self.args.warm_up)
        found = await self.light(tenant)
        found["num_running"] = self.engine.statistics().num_running
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None
        while self.engine.statistics().num_running:
            await asyncio.sleep(0.05)
        return found


async def run(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = dict(one.partition("=")[::2] for one in args.engine)
    settings = {name: int(value) if value.isdecimal() else value for name, value in settings.items()}
    most = max(args.long_rows, args.flood_prompt + 2 * args.flood_output, args.prompt + args.output) + 64
    settings |= {"max_model_len": most, "load_format": args.load_format, "skip_tokenizer": bool(args.shape)}
    cases: dict[str, Any] = {}
    async with AsyncLLM(args.model, **settings) as engine:
        load = Load(engine, args)
        await asyncio.gather(*(load.call(args.flood_prompt, 8, None) for _ in range(args.flood)))
        cases["plain"] = await load.beside([load.flood_one(None) for _ in range(args.flood)], None)
        machine = {name: engine.describe().get(name) for name in ("device", "dtype")}
    async with AsyncLLM(args.model, **settings, tenants={"capped": Tenant(max_running=args.quota)}) as engine:
        load = Load(engine, args)
        await asyncio.gather(*(load.call(args.flood_prompt, 8, "warm-up") for _ in range(args.flood)))
        cases["alone"] = await load.beside([], "light")
        rows = [load.call(args.flood_prompt, args.long_rows - args.flood_prompt, "light") for _ in range(args.flood)]
        cases["rows"] = await load.beside(rows, "light")
        cases["flood"] = await load.beside([load.flood_one("flood") for _ in range(args.flood)], "light")
        cases["quota"] = await load.beside([load.flood_one("capped") for _ in range(args.flood)], "light")
        tenants = {one.name: one.num_requests for one in engine.statistics().tenants}

    def ratio(name: str, one: str, other: str) -> float:
        return round(cases[one][name] / cases[other][name], 3)

    return {
        "benchmark": "tenants",
        "cases": cases,
        "beyond_rows": {
            name: round(ratio(name, "flood", "rows") - 1, 3) for name in ("first_token_p50_ms", "end_p50_ms")
        },
        "quota_to_alone": ratio("first_token_p50_ms", "quota", "alone"),
        "throughput": ratio("tokens_per_second", "flood", "plain"),
        "tenants": tenants,
        "machine": machine,
        "load": {name: value for name, value in vars(args).items() if name != "engine"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a model without weights of its own, in its place")
    parser.add_argument("--flood", type=int, default=200, help="calls of the flood at a time")
    parser.add_argument("--flood-prompt", type=int, default=256)
    parser.add_argument("--flood-output", type=int, default=128, help="mean length of its completions")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--quota", type=int, default=16)
    parser.add_argument("--long-rows", type=int, default=8192, help="tokens of the rows that only decode, at most")
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", nargs="*", default=[], metavar="SETTING=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            shape = SHAPES[args.shape] | {"max_position_embeddings": max(args.long_rows + 64, 4096)}
            Path(folder, "config.json").write_text(json.dumps(shape))
            args.model, args.load_format = folder, "dummy"
        json.dump(asyncio.run(run(args)), sys.stdout)
    print()


if __name__ == "__main__":
    main()
