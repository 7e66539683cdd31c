"""Agents that ask again and again with a growing prompt, with less room for KV than they have; JSON on stdout.

    python benchmarks/agents.py --shape qwen3-0.6b --variants today,keep,unlimited [--agents 64] [--turns 6] [--out F]
    python benchmarks/agents.py --shape llama-3.1-8b --hold 20,60 --variants today,keep,tiers
    python benchmarks/agents.py --device cpu --shape tiny --agents 12 --gap-scale 0.05 --mean 600 --least 300

  today       prefix caching alone, as if nobody had said that they are sessions
  keep        each turn with session_id, and all but the last with keep
  tiers       as keep, and a host tier of --host-tier
  unlimited   as today, with all KV that fits the device

The agents are drawn with a seed (agent_traces.py): the tools' gaps have the published quantiles. The pool of all
variants but the last is a --pool-share of the tokens that all agents have at their ends. The same trace is run on each
variant, with an engine of its own on random weights. --singles has requests
that never come back besides, of 2,000 tokens each. With --hold the number of agents is raised instead, as long as
95 of 100 returning turns begin within a second and their answers come at so many tokens a second.

Another engine (--engine vllm_adapter:Adapter) runs "today" and "unlimited", with --set for what else it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_traces import LONG_GAP, Agent, draw_agents
from engine_bench import SHAPES, pct

VARIANTS = ("today", "keep", "tiers", "unlimited")
OUTPUT_SHARE = 0.95
"""Share of the turns that must be quick enough for their agents to count as held."""


@dataclass
class Seen:
    """What was seen of one turn."""

    first: float  # seconds to its first token
    total: float  # seconds to its last one
    num_prompt: int
    num_out: int
    is_first: bool

    @property
    def speed(self) -> float:
        return (self.num_out - 1) / max(self.total - self.first, 1e-9)


@dataclass
class Run:
    """One run of some agents."""

    turns: list[Seen] = field(default_factory=list)
    wall: float = 0.0

    def figures(self, before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
        """``before``, ``after``: the engine's counters."""
        back = [turn for turn in self.turns if not turn.is_first]
        queries, hits = (after[name] - before[name] for name in ("prefix_cache_queries", "prefix_cache_hits"))
        firsts = sorted(turn.first for turn in back)
        return {
            "wall_s": round(self.wall, 2),
            "turns": len(self.turns),
            "turn_s_sum": round(sum(turn.total for turn in self.turns), 2),
            "ttft_first_turn_p50_s": _round(pct([turn.first for turn in self.turns if turn.is_first], 0.5)),
            "ttft_returning_p50_s": _round(pct(firsts, 0.5)),
            "ttft_returning_p99_s": _round(pct(firsts, 0.99)),
            "ttft_returning_mean_s": _round(statistics.mean(firsts) if firsts else None),
            "tok_s_p50": _round(pct([turn.speed for turn in self.turns if turn.num_out > 1], 0.5)),
            "tok_s_p5": _round(pct([turn.speed for turn in self.turns if turn.num_out > 1], 0.05)),
            "prompt_tokens": queries,
            "computed_tokens": queries - hits,
            "hit_rate": _round(hits / queries if queries else None),
            **{name: after[name] - before[name] for name in after if name not in _OF_CACHE},
        }

    def is_held(self, speed: float) -> bool:
        """Whether most returning turns began within a second, and went on at ``speed`` tokens a second."""
        back = [turn for turn in self.turns if not turn.is_first]
        good = sum(turn.first <= 1.0 and (turn.num_out < 2 or turn.speed >= speed) for turn in back)
        return good >= OUTPUT_SHARE * len(back)


_OF_CACHE = ("prefix_cache_queries", "prefix_cache_hits")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


async def run_agents(
    engine: Any, agents: list[Agent], *, options: dict[str, Any], seconds: float = 1e9, singles: float = 0.0
) -> Run:
    """Let all agents run to their ends, or until ``seconds`` have gone by. ``singles``: requests a second that
    never come back, meanwhile."""
    run = Run()
    begin = time.perf_counter()

    async def live(agent: Agent) -> None:
        await asyncio.sleep(agent.start)
        context = list(agent.prefix)
        for number, turn in enumerate(agent.turns):
            if time.perf_counter() - begin > seconds:
                return
            is_last = number == len(agent.turns) - 1
            own = {"session_id": agent.name} | ({} if is_last else options) if options else {}
            params = {"max_tokens": turn.num_out, "temperature": 0.6, "ignore_eos": True, "options": own}
            asked = time.perf_counter()
            first = 0.0
            answer: list[int] = []
            async for ids in engine.stream_ids(context, params, f"{agent.name}-{number}"):
                if not answer:
                    first = time.perf_counter() - asked
                answer += ids
            total = time.perf_counter() - asked
            run.turns.append(Seen(first, total, len(context), len(answer), number == 0))
            context += answer + _new_tokens(agent, number, turn.num_new)
            if not is_last:
                await asyncio.sleep(min(turn.gap, begin + seconds - time.perf_counter()))

    others = asyncio.create_task(_ask_once(engine, singles, agents[0].prefix))
    await asyncio.gather(*map(live, agents))
    run.wall = time.perf_counter() - begin
    others.cancel()
    await asyncio.wait([others])
    return run


async def _ask_once(engine: Any, rate: float, beginning: list[int]) -> None:
    """Ask for short answers to prompts of 2,000 tokens, ``rate`` times a second, until it is cancelled."""
    rng = random.Random(0)
    params = {"max_tokens": 32, "temperature": 0.6, "ignore_eos": True}

    async def one(number: int) -> None:
        prompt = beginning[:1000] + rng.choices(beginning, k=1000)
        async for _ in engine.stream_ids(prompt, params, f"single-{number}"):
            pass

    async with asyncio.TaskGroup() as group:
        for number in itertools.count() if rate else ():
            group.create_task(one(number))
            await asyncio.sleep(rng.expovariate(rate))


def _new_tokens(agent: Agent, number: int, count: int) -> list[int]:
    """Return the tokens of a tool's result: those of the agent's own prompt, in another order for each turn."""
    own = agent.prefix[-min(len(agent.prefix), count + number + 1) :]
    return (own[number + 1 :] + own[: number + 1])[:count]


def kv_bytes_per_token(shape: dict[str, Any], num_bytes: int) -> int:
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * num_bytes)


def settings_of(variant: str, args: argparse.Namespace, pool_bytes: int) -> list[str]:
    """Return the ``--set`` items of a variant."""
    items = list(args.set)
    if variant != "unlimited":
        items.append(f"kv_cache_memory_bytes={pool_bytes}")
    elif args.device == "cpu":
        items.append(f"kv_cache_memory_bytes={pool_bytes * 8}")
    if variant == "tiers":
        items.append(f"kv_tiers=host:{args.host_tier}")
    if args.device:
        items.append(f"device={args.device}")
    return items


def options_of(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    if variant not in ("keep", "tiers"):
        return {}
    return {"keep": args.keep if args.keep is not None else LONG_GAP * 1.5 * args.gap_scale}


def drawn(args: argparse.Namespace, num_agents: int, seed: int, vocab_size: int, spread: float = 5.0) -> list[Agent]:
    sizes = {name: getattr(args, name) for name in ("least", "most", "mean", "shared", "num_out", "gap_scale")}
    more = {"num_turns": args.turns or None, "vocab_size": min(vocab_size, 10_000), "spread": spread}
    return draw_agents(num_agents, seed=seed, **more, **sizes)


async def measure(variant: str, args: argparse.Namespace, folder: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Start an engine and run the agents on it."""
    agents = drawn(args, args.agents, args.seed, shape["vocab_size"])
    num_tokens = sum(
        len(agent.prefix) - args.shared + sum(turn.num_new + turn.num_out for turn in agent.turns) for agent in agents
    )
    pool_tokens = max(int((num_tokens + args.shared) * args.pool_share), 2 * args.most)
    pool_bytes = pool_tokens * kv_bytes_per_token(shape, 4 if args.device == "cpu" else 2)
    module, _, name = args.engine.partition(":")
    engine = getattr(importlib.import_module(module), name)()
    own = argparse.Namespace(**{**vars(args), "set": settings_of(variant, args, pool_bytes)})
    begin = time.perf_counter()
    await engine.start(folder, own)
    figures: dict[str, Any] = {
        "variant": variant,
        "start_s": round(time.perf_counter() - begin, 1),
        "tokens_at_the_end": num_tokens,
        "pool_tokens": None if variant == "unlimited" else pool_tokens,
    }
    try:
        if variant == "tiers" and not args.at_once:
            figures["pinned_s"] = round(await engine.settle(), 1)
        options = options_of(variant, args)
        warm = drawn(args, 2, args.seed + 1000, shape["vocab_size"])
        for agent in warm:
            agent.start, agent.turns, agent.name = 0.0, agent.turns[:1], f"warm-{agent.name}"
        await run_agents(engine, warm, options={})
        if args.hold:
            figures["held"] = await hold(engine, args, shape, options)
        else:
            before = engine.statistics()
            run = await run_agents(engine, agents, options=options, singles=args.singles)
            figures |= run.figures(before, engine.statistics())
    finally:
        await engine.stop()
    return figures


async def hold(engine: Any, args: argparse.Namespace, shape: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return for each speed how many agents are held at it: the numbers are raised by half each. Their first turns come
    four a second."""
    speeds = [float(speed) for speed in args.hold.split(",")]
    held = dict.fromkeys(speeds, 0)
    count, runs = args.hold_from, []
    while count <= args.hold_most:
        spread = count / 4
        agents = drawn(args, count, args.seed + count, shape["vocab_size"], spread)
        for agent in agents:
            agent.name = f"{count}-{agent.name}"
        before = engine.statistics()
        run = await run_agents(engine, agents, options=options, seconds=spread + args.hold_seconds)
        runs.append({"agents": count} | run.figures(before, engine.statistics()))
        good = [speed for speed in speeds if run.is_held(speed)]
        held |= dict.fromkeys(good, count)
        print(json.dumps(runs[-1] | {"held_at": good}), file=sys.stderr, flush=True)
        if not good:
            break
        count = max(count + 1, count * 3 // 2)
    return {"agents": {f"{speed:g}": number for speed, number in held.items()}, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--variants", default="today,keep,unlimited")
    parser.add_argument("--engine", default="aengine_adapter:Adapter")
    parser.add_argument("--tokenizer", default=None)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--device", default="")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6, help="of each agent; 0: drawn around the median of 43")
    parser.add_argument("--least", type=int, default=2000)
    parser.add_argument("--most", type=int, default=16_000)
    parser.add_argument("--mean", type=int, default=5000)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--num-out", type=int, default=64, help="median tokens of an answer")
    parser.add_argument("--gap-scale", type=float, default=1.0, help="all gaps are multiplied by it")
    parser.add_argument("--pool-share", type=float, default=0.25)
    parser.add_argument("--singles", type=float, default=0.0, help="requests a second that never come back")
    parser.add_argument("--keep", type=float, default=None, help="seconds; by default longer than the longest gap")
    parser.add_argument("--host-tier", default="48GB")
    parser.add_argument("--at-once", action="store_true", help="do not wait until a tier's memory is pinned")
    parser.add_argument("--hold", default="", help="tokens a second, as 20,60: how many agents are held at each")
    parser.add_argument("--hold-from", type=int, default=16)
    parser.add_argument("--hold-most", type=int, default=512)
    parser.add_argument("--hold-seconds", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    variants = args.variants.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}")
    shape = SHAPES[args.shape] | {"max_position_embeddings": max(args.most * 2, 4096)}
    result: dict[str, Any] = {"benchmark": "agents", "args": vars(args), "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": shape["eos_token_id"]}))
        for variant in variants:
            result["runs"].append(asyncio.run(measure(variant, args, folder, shape)))
            print(json.dumps(result["runs"][-1]), file=sys.stderr, flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(result, indent=1) + os.linesep)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
