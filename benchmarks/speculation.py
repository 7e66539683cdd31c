"""Tokens a second with and without drafts, in turns over three engines in one run: without, with those that the host
finds, with those that the worker finds. JSON to stdout, a line a task, number of streams and way.

    python benchmarks/speculation.py [--model smollm2-135m] [--streams 1 4] [--tokens 200] [--rounds 3]

``copy``: chats that ask for a text of the prompt once more; ``free``: chats that ask for a story. Greedy, past
end-of-sequence tokens. ``ratio``: the rate with drafts by that without, of the same round, the median of the rounds;
``equal``: the share of requests whose tokens are the same in both: in 16 bits a step of several tokens may round in
another way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

from aengine import AsyncLLM, SamplingParams

TEXTS = (
    "The ferry leaves the island at seven in the morning and returns at nine in the evening. Tickets are sold "
    + "on board. Dogs travel free of charge, bicycles cost two euros, and cars must be registered a day before.",
    "The library opens at ten on weekdays and at noon on Sundays. Readers may borrow up to six books for four weeks. "
    + "Newspapers stay in the reading room, and magazines of the last month can be copied at the desk.",
    "The garden has three ponds, a small bridge and a long wall of old roses. Visitors are asked to stay on the paths. "
    + "Tea is served on the terrace in the afternoon, and the gate is closed when the sun goes down.",
)
WAYS = ("ngram", "ngram_worker")
STORIES = ("a lighthouse keeper who paints", "two rivers that meet after the rain", "a clock that was never late")


def chat(task: str, number: int) -> list[dict[str, str]]:
    if task == "copy":
        text = TEXTS[number % len(TEXTS)]
        return [{"role": "user", "content": f"Repeat this text word for word, several times:\n\n{text}"}]
    return [{"role": "user", "content": f"Tell a story about {STORIES[number % len(STORIES)]}, number {number}."}]


async def rate(engine: AsyncLLM, task: str, streams: int, tokens: int) -> tuple[float, list[Any]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begun = time.perf_counter()
    answers = await asyncio.gather(*(engine.chat(chat(task, i), params) for i in range(streams)))
    return streams * tokens / (time.perf_counter() - begun), answers


async def compare(engines: dict[str, AsyncLLM], task: str, streams: int, tokens: int, rounds: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, list[Any]] = {}
    before = {name: engine.statistics() for name, engine in engines.items()}
    for _ in range(rounds):
        for name, engine in engines.items():
            value, answers[name] = await rate(engine, task, streams, tokens)
            rates[name].append(value)
    for name in WAYS:
        after = engines[name].statistics()
        pairs = list(zip(answers["none"], answers[name], strict=True))
        result = {
            "task": task,
            "streams": streams,
            "speculation": name,
            "tok_s": [round(statistics.median(rates[which]), 1) for which in ("none", name)],
            "ratio": round(statistics.median(b / a for a, b in zip(rates["none"], rates[name], strict=True)), 3),
            "drafted": after.drafted_tokens - before[name].drafted_tokens,
            "accepted": after.accepted_tokens - before[name].accepted_tokens,
            "tokens_a_step": round(rounds * tokens * streams / (after.num_steps - before[name].num_steps), 2),
            "equal": sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
        }
        print(json.dumps(result), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = {"dtype": args.dtype, "max_model_len": 2048, "kv_cache_memory_bytes": 2 << 30}  # they share a device
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(AsyncLLM(args.model, speculation=name, **settings))
            for name in ("none", *WAYS)
        }
        for engine in engines.values():
            await rate(engine, "free", 1, 8)
        for task in ("copy", "free"):
            for streams in args.streams:
                await compare(engines, task, streams, args.tokens, args.rounds)


if __name__ == "__main__":
    asyncio.run(main())
