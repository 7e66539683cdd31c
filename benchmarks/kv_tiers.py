"""Costs and gains of a host tier: where it never hits, over the bus, and for a turn that returns; JSON on stdout.

  python benchmarks/kv_tiers.py --shape llama-3.1-8b                    on a GPU; dummy weights
  python benchmarks/kv_tiers.py --model smollm2-135m --device cpu --prompt 600 --rows 8 --host 1GB

cost       tokens a second of --rows streams of prompts that nobody repeats, without a tier and with one, in turns
link       GB/s of pages copied aside and back by a worker's own means, beside plain copies of pinned memory
returning  seconds to the first token of a prompt of --prompt tokens: computed, in the pool, from the host's memory
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_bench import SHAPES

from aengine import AsyncLLM, SamplingParams
from aengine.engine.tiers.kv_tiers import KVTiers, PageJob
from aengine.engine.tiers.page_copies import PageCopies

FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
copies: list[tuple[bool, int, float]] = []
"""Of each job that has ended: whether it brought pages back, how many, and its seconds."""


def measured(copy: Callable[..., Any]) -> Callable[..., Any]:
    async def measure(self: PageCopies, job: PageJob) -> None:
        begun = time.perf_counter()
        await copy(self, job)
        copies.append((job.is_fetch, len(job.pages), time.perf_counter() - begun))

    return measure


PageCopies._copy = measured(PageCopies._copy)  # type: ignore[method-assign]


def median(values: list[float]) -> float:
    return round(statistics.median(values), 5)


class Prompts:
    """Random tokens that no other prompt begins with."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def new(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(20, self._vocab_size - 20) for _ in range(num_tokens)]


async def rate(engine: AsyncLLM, prompts: Prompts, args: argparse.Namespace) -> float:
    """Tokens a second of all streams together."""
    params = SamplingParams(max_tokens=args.output, temperature=0, ignore_eos=True, detokenize=False)
    asked = [prompts.new(args.row_prompt) for _ in range(args.rows)]
    begun = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))
    return args.rows * args.output / (time.perf_counter() - begun)


async def cost(args: argparse.Namespace, settings: dict[str, Any], prompts: Prompts) -> dict[str, Any]:
    """Both engines live at a time, so that their turns alternate; each has half of the memory for KV."""
    room = {"kv_cache_memory_bytes": args.cost_kv_bytes}
    async with (
        AsyncLLM(args.model, **settings | room, gpu_memory_utilization=0.45) as plain,
        AsyncLLM(args.model, **settings | room, gpu_memory_utilization=0.45, kv_tiers=f"host:{args.host}") as tiered,
    ):
        rates: dict[str, list[float]] = {"plain": [], "tiered": []}
        await rate(tiered, prompts, args)  # it begins to pin the host's memory
        await asyncio.sleep(args.pinning)
        for turn in range(args.rounds + 1):
            for name, engine in (("plain", plain), ("tiered", tiered)):
                found = await rate(engine, prompts, args)
                if turn:
                    rates[name].append(found)
                await asyncio.sleep(0.2)
        tiers = tiers_of(tiered)
        result = {name: median(found) for name, found in rates.items()}
        result["ratio"] = round(result["tiered"] / result["plain"], 4)
        return result | {"rates": rates, "pages_saved": tiers.num_saved, "pages_unsaved": len(tiers.unsaved)}


def tiers_of(engine: AsyncLLM) -> KVTiers:
    core = engine._handle.core  # type: ignore[union-attr]
    assert core is not None
    tiers = core.replicas[0].scheduler.rows.elsewhere
    assert isinstance(tiers, KVTiers)
    return tiers


async def first_token(engine: AsyncLLM, prompt: list[int]) -> float:
    begun = time.perf_counter()
    await engine.generate(prompt, FIRST)
    return time.perf_counter() - begun


async def settle(engine: AsyncLLM) -> None:
    tiers = tiers_of(engine)
    while tiers.unsaved or tiers.jobs:
        await asyncio.sleep(0.01)


async def returning(args: argparse.Namespace, settings: dict[str, Any], prompts: Prompts) -> dict[str, Any]:
    room = {"kv_cache_memory_bytes": args.kv_bytes, "kv_tiers": f"host:{args.host}"}
    async with AsyncLLM(args.model, **settings | room) as engine:
        described = engine.describe()
        page_bytes = described["kv_cache_bytes"] // described["num_blocks"]
        block_size = described["block_size"]
        evicting = -(-described["num_blocks"] * block_size // args.prompt) + 1
        times: dict[str, list[float]] = {"computed": [], "in_pool": [], "from_host": []}
        await first_token(engine, prompts.new(args.prompt))
        begun = time.perf_counter()
        await asyncio.sleep(args.pinning)
        copies.clear()
        for _ in range(args.rounds):
            prompt = prompts.new(args.prompt)
            times["computed"].append(await first_token(engine, prompt))
            times["in_pool"].append(await first_token(engine, prompt))
            for _ in range(evicting):
                await first_token(engine, prompts.new(args.prompt))
            await settle(engine)
            times["from_host"].append(await first_token(engine, prompt))
        by_way = {
            name: [page_bytes * pages / seconds / 1e9 for is_fetch, pages, seconds in copies if is_fetch is wanted]
            for name, wanted in (("fetch_GB_s", True), ("save_GB_s", False))
        }
        result: dict[str, Any] = {name: median(found) for name, found in times.items()}
        result["of_computing"] = round(result["from_host"] / result["computed"], 4)
        return result | {
            "GB": page_bytes * (args.prompt // block_size) / 1e9,
            "page_bytes": page_bytes,
            "jobs": {name: [round(value, 2) for value in sorted(found)[-5:]] for name, found in by_way.items()},
            "fetched": tiers_of(engine).num_fetched,
            "all": times,
            "waited_for_pinning_s": round(time.perf_counter() - begun, 1),
        }


def link(args: argparse.Namespace) -> dict[str, Any]:
    """A process of its own: it has the device to itself."""
    import torch

    from aengine.ipc.messages import KVCacheGroup
    from aengine.runner.attention.kv_format import KVFormat
    from aengine.runner.attention.kv_pages import KVPages
    from aengine.runner.kv_spec import KVLayout
    from aengine.runner.platforms.choice import choose_platform
    from aengine.runner.tiers.tier_pages import TierPages

    shape = SHAPES[args.shape or "llama-3.1-8b"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    slab = 2 * shape["num_key_value_heads"] * head_dim * 2 * 16
    platform = choose_platform("cuda")
    platform.open()
    num_slabs, num_pages = shape["num_hidden_layers"], args.link_pages
    layout = KVLayout((KVCacheGroup("full", 16),), (), num_slabs, slab)
    pages = KVPages(layout, num_pages, KVFormat(torch.bfloat16), platform.device)
    fd = os.memfd_create("pages", os.MFD_CLOEXEC)
    os.truncate(fd, num_pages * layout.page_bytes)
    tier = TierPages(pages, platform, 0)
    begun = time.perf_counter()
    tier.map(os.getpid(), [fd], num_pages)
    tier.pinning.join()
    pinned = time.perf_counter() - begun
    total = num_pages * layout.page_bytes
    device, host = torch.empty(total, dtype=torch.uint8, device="cuda"), torch.empty(total, dtype=torch.uint8)
    assert platform.share(host)

    def seconds(work: Callable[[], None]) -> float:
        found = []
        for _ in range(args.rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return min(found)

    def copy(is_fetch: bool, places: list[int]) -> Callable[[], None]:
        numbers = [torch.tensor(own, dtype=torch.int32).numpy().tobytes() for own in (order, places)]

        def work() -> None:
            copied = tier.copy(is_fetch, *numbers)
            launched.append(time.perf_counter())
            while not copied.ready():
                time.sleep(0.0001)

        return work

    order = random.Random(1).sample(range(num_pages), num_pages)
    launched: list[float] = []
    result: dict[str, Any] = {"GB": total / 1e9, "pinned_s": round(pinned, 2), "device": platform.name}
    result["to_host_memcpy_GB_s"] = total / 1e9 / seconds(lambda: host.copy_(device, non_blocking=True))
    result["from_host_memcpy_GB_s"] = total / 1e9 / seconds(lambda: device.copy_(host, non_blocking=True))
    for name, places in (("runs", list(range(num_pages))), ("scattered", random.Random(2).sample(order, num_pages))):
        for way, is_fetch in (("to_host", False), ("from_host", True)):
            work = copy(is_fetch, places)
            start = time.perf_counter()
            result[f"{way}_{name}_GB_s"] = total / 1e9 / seconds(work)
            result[f"{way}_{name}_launch_s"] = launched[0] - start
            result[f"{way}_{name}_share"] = result[f"{way}_{name}_GB_s"] / result[f"{way}_memcpy_GB_s"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


async def engines(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"device": args.device, "max_model_len": args.prompt + 64, "skip_tokenizer": True}
    settings |= {"load_format": "dummy"} if args.shape else {}
    settings |= {key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)}
    vocab_size = SHAPES[args.shape]["vocab_size"] if args.shape else 1000
    prompts, result = Prompts(args.seed, vocab_size), {}
    if "returning" in args.tasks:
        result["returning"] = await returning(args, settings, prompts)
    if "cost" in args.tasks:
        result["cost"] = await cost(args, settings, prompts)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", default="link,returning,cost")
    parser.add_argument("--host", default="48GB", help="size of the host tier")
    parser.add_argument("--prompt", type=int, default=16000, help="tokens of a turn that returns")
    parser.add_argument("--kv-bytes", type=int, default=5 << 30, help="the pool of that engine")
    parser.add_argument("--cost-kv-bytes", type=int, default=12 << 30, help="the pool of each engine that is compared")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--row-prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pinning", type=float, default=0.0, help="seconds to wait until the host's memory is pinned")
    parser.add_argument("--link-pages", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="a setting, KEY=JSON")
    parser.add_argument("--out")
    args = parser.parse_args()
    result: dict[str, Any] = {"settings": vars(args).copy()}
    if "link" in args.tasks and args.device != "cpu":
        result["link"] = link(args)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            args.model = folder
            Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        result |= asyncio.run(engines(args))
    text = json.dumps(result, indent=1)
    if args.out:
        Path(args.out).write_text(text)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
