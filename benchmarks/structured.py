"""Structured output beside plain text, in one run. JSON to stdout.

    python benchmarks/structured.py                        SmolLM2 on this machine
    python benchmarks/structured.py --streams 64 --rounds 3

Plain streams and streams under a schema of their own each are run in turn, for the same numbers of tokens: the schema's
string can't end before, and plain ones go past end-of-sequence tokens. The ratio of their rates is what counts. Then
hostile grammars are sent beside plain streams, and a 1 ms ticker on the loop says how late it runs, with and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from aengine import AEngineError, AsyncLLM, SamplingParams, StructuredOutput

TOKENS = 64


def schema(i: int) -> dict[str, Any]:
    """Different for each i; open strings are long enough for every token of the run."""
    fields = {f"note_{i}": {"type": "string", "minLength": 6 * TOKENS}, "count": {"type": "integer", "minimum": i}}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


async def rate(engine: AsyncLLM, streams: int, structured: bool, salt: int) -> float:
    """Tokens a second after each stream has its first."""
    firsts: list[float] = []

    async def one(i: int) -> int:
        shape = StructuredOutput(json_schema=schema(i)) if structured else None
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=i, structured_output=shape)
        count = 0
        async for _ in engine.stream([100 + (7 * i + salt + k) % 40000 for k in range(32)], params):
            if not count:
                firsts.append(time.perf_counter())
            count += 1
        return count

    counts = await asyncio.gather(*map(one, range(streams)))
    assert set(counts) == {TOKENS}, counts
    return streams * (TOKENS - 1) / (time.perf_counter() - max(firsts))


HOSTILE: dict[str, dict[str, Any]] = {
    "regex bomb": {"regex": "(((a{100}){100}){100}){100}"},
    "overlapping options": {"regex": "(a?b?c?d?e?f?g?h?){30}x"},
    "enum of 50,000": {"json_schema": {"enum": [f"option {i}" for i in range(50_000)]}},
    "1,000 optional properties": {
        "json_schema": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    },
    "recursive": {
        "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    },
    "remote $ref": {"json_schema": {"$ref": "https://example.com/schema.json"}},
}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"x": inner}, "required": ["x"]}
    return inner


async def lags_while(task: asyncio.Task[Any]) -> list[float]:
    lags = []
    while not task.done():
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        lags.append((time.perf_counter() - due) * 1e3)
    return sorted(lags)


async def hostile(engine: AsyncLLM) -> dict[str, Any]:
    """What each hostile grammar ends in, and what the plain streams beside them notice."""
    plain = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    prompts = [[300 + i, 301, 302] for i in range(4)]

    async def steady() -> list[tuple[int, ...]]:
        return [c.token_ids for c in await asyncio.gather(*(engine.generate(p, plain) for p in prompts))]

    async def attack(wanted: dict[str, Any]) -> str:
        params = SamplingParams(max_tokens=8, structured_output=StructuredOutput(**wanted))
        try:
            return (await engine.generate([5], params)).finish_reason
        except AEngineError as error:
            return f"{type(error).__name__}: {getattr(error, 'kind', '')}"

    async def both() -> tuple[list[tuple[int, ...]], list[str]]:
        cases = {**HOSTILE, "200 levels": {"json_schema": nested(200)}}
        tokens, ends = await asyncio.gather(steady(), asyncio.gather(*map(attack, cases.values())))
        return tokens, [f"{name}: {end}" for name, end in zip(cases, ends, strict=True)]

    await steady()
    alone = asyncio.create_task(steady())
    lags_alone = await lags_while(alone)
    attacked = asyncio.create_task(both())
    lags_attacked = await lags_while(attacked)
    tokens, ends = attacked.result()
    return {
        "ends": ends,
        "plain_tokens_unchanged": tokens == alone.result(),
        "loop_lag_p99_ms": {
            "alone": lags_alone[int(len(lags_alone) * 0.99)],
            "attacked": lags_attacked[int(len(lags_attacked) * 0.99)],
        },
    }


async def main(args: argparse.Namespace) -> None:
    async with AsyncLLM(args.model) as engine:
        await rate(engine, args.streams, True, 0)  # compiles
        ratios = []
        for i in range(args.rounds):
            plain, shaped = await rate(engine, args.streams, False, i), await rate(engine, args.streams, True, i)
            ratios.append(shaped / plain)
        print(json.dumps({"streams": args.streams, "structured_to_plain": statistics.median(ratios), "all": ratios}))
        print(json.dumps(await hostile(engine)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
