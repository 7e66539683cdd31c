"""Structured output beside plain text, in one run. JSON to stdout, a line a result.

    python benchmarks/structured.py                                        SmolLM2 on this machine
    python benchmarks/structured.py --shape qwen3-0.6b --tokenizer DIR     random weights of engine_bench.py's shape

Streams under a schema of their own each (``schemas.jsonl``, of real life) and plain streams are run in turn, for the
same numbers of tokens: each answer is a list of at least 1,000 such objects, so it can't end before, and plain ones go
past end-of-sequence tokens. ``bounded`` takes the schemas as they are, ``open`` without lengths and bounds of numbers.
The ratio of the rates within one round is what counts. Then a schema's first use; then hostile grammars beside plain
streams, in rounds between rounds without them, with a 1 ms ticker on the loop that says how late it runs; ``--streams``
without a number runs that part alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_bench import SHAPES, unbounded

from aengine import AEngineError, AsyncLLM, SamplingParams, StructuredOutput

Schema = dict[str, Any]


def long_list(schema: Schema) -> Schema:
    """Of what the schema says; its definitions stay where references look for them."""
    items = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$schema")}
    if items.get("type") == "array" and "minItems" in items:  # is one already
        return schema
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {"type": "array", "items": items, "minItems": 1000, **shared}


def load_schemas(path: Path) -> list[Schema]:
    """Those with a reference to their own root can't be made a list of."""
    rows = [json.loads(line)["schema"] for line in path.read_text().splitlines()]
    return [long_list(row) for row in rows if '"$ref": "#"' not in json.dumps(row)]


class Bench:
    def __init__(self, engine: AsyncLLM, tokens: int, vocab_size: int) -> None:
        self.engine = engine
        self.tokens = tokens
        self._vocab_size = min(vocab_size, 40_000)
        self._rng = random.Random(5)

    def prompt(self, length: int = 128) -> list[int]:
        return [self._rng.randrange(100, self._vocab_size) for _ in range(length)]

    async def rate(self, schemas: list[Schema | None]) -> dict[str, float]:
        """``tok_s``: tokens a second from the start of all to the end; ``decode_tok_s``: from each one's first on."""
        firsts: list[float] = []
        begun = time.perf_counter()

        async def one(schema: Schema | None, prompt: list[int], seed: int) -> int:
            shape = None if schema is None else StructuredOutput(json_schema=schema)
            params = SamplingParams(max_tokens=self.tokens, ignore_eos=True, seed=seed, structured_output=shape)
            count = 0
            async for _ in self.engine.stream(prompt, params):
                if not count:
                    firsts.append(time.perf_counter())
                count += 1
            return count

        counts = await asyncio.gather(*(one(schema, self.prompt(), i) for i, schema in enumerate(schemas)))
        end = time.perf_counter()
        assert set(counts) == {self.tokens}, counts
        return {
            "tok_s": sum(counts) / (end - begun),
            "decode_tok_s": sum(count - 1 for count in counts) / (end - max(firsts)),
            "ttft_ms": 1e3 * (statistics.median(firsts) - begun),
        }

    async def ratios(self, streams: int, kinds: dict[str, list[Schema]], rounds: int) -> None:
        """The first round compiles, and is printed apart."""
        results: dict[str, list[dict[str, float]]] = {}
        for i in range(rounds + 1):
            results.setdefault("plain", []).append(await self.rate([None] * streams))
            for kind, schemas in kinds.items():
                chosen = [schemas[k % len(schemas)] for k in range(streams)]
                results.setdefault(kind, []).append(await self.rate(chosen))
            if i == 0:
                first = {kind: round(found[0]["ttft_ms"], 2) for kind, found in results.items()}
                print(json.dumps({"streams": streams, "ttft_ms_of_first_use": first}), flush=True)
                results.clear()
        for kind, found in results.items():
            medians = {key: round(statistics.median(r[key] for r in found), 2) for key in found[0]}
            line: dict[str, Any] = {"streams": streams, "kind": kind, **medians}
            if kind != "plain":
                for key in ("tok_s", "decode_tok_s"):
                    each = [a[key] / b[key] for a, b in zip(found, results["plain"], strict=True)]
                    line[f"{key}_to_plain"] = round(statistics.median(each), 3)
                    line[f"{key}_to_plain_all"] = [round(x, 3) for x in each]
            print(json.dumps(line), flush=True)

    async def first_use(self, schemas: list[Schema]) -> None:
        """Time to first token of one stream whose schema nobody has used, against plain ones in turn."""
        plain, fresh = [], []
        for i, schema in enumerate(schemas[:20]):
            plain.append((await self.rate([None]))["ttft_ms"])
            fresh.append((await self.rate([{**schema, "minItems": 1001 + i}]))["ttft_ms"])
        line = {"plain": statistics.median(plain), "structured": statistics.median(fresh), "worst": max(fresh)}
        print(json.dumps({"ttft_ms_of_one_stream_with_a_new_schema": line}), flush=True)


def nested(depth: int) -> Schema:
    inner: Schema = {"type": "integer"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"x": inner}, "required": ["x"]}
    return inner


HOSTILE: dict[str, dict[str, Any]] = {
    "regex bomb": {"regex": "(((a{100}){100}){100}){100}"},
    "long repeats": {"regex": "[xy](a{300}){300}"},
    "overlapping options": {"regex": "(a?b?c?d?e?f?g?h?){30}x"},
    "enum of 50,000": {"json_schema": {"enum": [f"option {i}" for i in range(50_000)]}},
    "1,000 optional properties": {
        "json_schema": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    },
    "recursive": {
        "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    },
    "remote $ref": {"json_schema": {"$ref": "https://example.com/schema.json"}},
    "200 levels": {"json_schema": nested(200)},
}


async def lags_while(task: asyncio.Task[Any]) -> list[float]:
    lags = []
    while not task.done():
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        lags.append((time.perf_counter() - due) * 1e3)
    return lags


class Hostile:
    """Plain streams beside hostile grammars, beside as many short plain requests, and alone; in turn."""

    def __init__(self, bench: Bench, tokens: int) -> None:
        self._bench = bench
        self._tokens = tokens
        self._prompts = [bench.prompt(3) for _ in range(4)]

    async def steady(self) -> tuple[list[tuple[int, ...]], float]:
        """Their ids, and tokens a second."""
        plain = SamplingParams(max_tokens=self._tokens, ignore_eos=True, temperature=0)
        begun = time.perf_counter()
        done = await asyncio.gather(*(self._bench.engine.generate(prompt, plain) for prompt in self._prompts))
        return [c.token_ids for c in done], 4 * self._tokens / (time.perf_counter() - begun)

    async def _ask(self, **wanted: Any) -> str:
        shape = StructuredOutput(**wanted) if wanted else None
        params = SamplingParams(max_tokens=8, ignore_eos=shape is None, structured_output=shape)
        try:
            return (await self._bench.engine.generate(self._bench.prompt(1), params)).finish_reason
        except AEngineError as error:
            return f"{type(error).__name__}: {getattr(error, 'kind', '')}"

    async def beside(self, number: int | None) -> tuple[tuple[list[tuple[int, ...]], float], list[str]]:
        """The streams, and in the midst of them an attack; plain requests if it has no ``number``. Each attack has a
        bomb of its own: one that failed is remembered."""
        attack: list[dict[str, Any]] = [{}] * len(HOSTILE)
        if number is not None:
            bomb = {"regex": HOSTILE["regex bomb"]["regex"] + "b" * number}
            attack = list((HOSTILE | {"regex bomb": bomb}).values())
        steady = asyncio.create_task(self.steady())
        await asyncio.sleep(0.2)
        ends = await asyncio.gather(*(self._ask(**wanted) for wanted in attack))
        return await steady, ends

    async def _changes(self, before: list[tuple[int, ...]], after: list[tuple[int, ...]]) -> list[dict[str, float]]:
        """Where streams have parted, and by how much one id was likelier than the other there: next to nothing where
        16 bits have rounded otherwise in a batch of another size."""
        found = []
        for prompt, one, other in zip(self._prompts, before, after, strict=True):
            place = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
            if place is not None:
                params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, logprobs=20)
                completion = await self._bench.engine.generate([*prompt, *one[:place]], params)
                likely = {entry.token_id: entry.logprob for entry in completion.logprobs[0]}
                gap = abs(likely.get(one[place], -99) - likely.get(other[place], -99))
                found.append({"at": place, "log_probability_gap": round(gap, 4)})
        return found

    async def run(self, rounds: int) -> dict[str, Any]:
        await self.beside(1000)
        to_alone: list[float] = []
        to_plain: list[float] = []
        ends: list[str] = []
        changes: dict[str, list[dict[str, float]]] = {"alone": [], "attacked": []}
        lags: dict[str, list[float]] = {"alone": [], "attacked": []}
        ids, before = await self.steady()
        for i in range(rounds):
            attacked = asyncio.create_task(self.beside(i))
            lags["attacked"] += await lags_while(attacked)
            (attacked_ids, rate), ends = attacked.result()
            (_, beside_plain), _ = await self.beside(None)
            alone = asyncio.create_task(self.steady())
            lags["alone"] += await lags_while(alone)
            alone_ids, after = alone.result()
            changes["attacked"] += await self._changes(ids, attacked_ids)
            changes["alone"] += await self._changes(ids, alone_ids)
            to_alone.append(rate / ((before + after) / 2))
            to_plain.append(rate / beside_plain)
            before = after
        return {
            "ends": [f"{name}: {end}" for name, end in zip(HOSTILE, ends, strict=True)],
            "plain_tokens_changed": changes,
            "plain_rate_attacked_to_alone": round(statistics.median(to_alone), 3),
            "to_beside_as_many_plain_requests": round(statistics.median(to_plain), 3),
            "all": [[round(a, 3), round(b, 3)] for a, b in zip(to_alone, to_plain, strict=True)],
            "loop_lag_p99_ms": {key: round(sorted(x)[int(len(x) * 0.99)], 2) for key, x in lags.items()},
        }


def random_weights(shape: str) -> str:
    """A folder with the settings of a model of that shape."""
    folder = Path(tempfile.mkdtemp(prefix="bench-model-"))
    settings = SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(settings))
    ids = {key: settings[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return str(folder)


async def main(args: argparse.Namespace) -> None:
    model, settings, vocab_size = args.model, {}, 49_152
    if args.shape:
        model, vocab_size = random_weights(args.shape), SHAPES[args.shape]["vocab_size"]
        settings = {"load_format": "dummy", "dtype": "bfloat16", "tokenizer": args.tokenizer}
    if args.dtype:
        settings["dtype"] = args.dtype
    schemas = load_schemas(args.schemas)
    kinds = {"bounded": schemas, "open": [unbounded(s) | {"minItems": 1000} for s in schemas]}
    async with AsyncLLM(model, **settings) as engine:
        bench = Bench(engine, args.tokens, vocab_size)
        await asyncio.sleep(args.idle)
        for streams in args.streams:
            await bench.ratios(streams, kinds, args.rounds)
        if args.streams:
            await bench.first_use(schemas)
        print(json.dumps(await Hostile(bench, args.hostile_tokens).run(args.rounds)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--tokenizer", help="for --shape: a folder with its tokenizer.json")
    parser.add_argument("--schemas", type=Path, default=Path(__file__).with_name("schemas.jsonl"))
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hostile-tokens", type=int, default=256)
    parser.add_argument("--dtype", help="float32: near-ties of 16 bits may fall otherwise in a larger batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds, in which graphs are captured")
    arguments = parser.parse_args()
    try:
        import uvloop

        uvloop.run(main(arguments))
    except ImportError:
        asyncio.run(main(arguments))
