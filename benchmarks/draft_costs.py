"""What a step with drafts takes beside a plain one: k drafts behind the token of each row, all wrong. JSON lines.

    python benchmarks/draft_costs.py --shape llama-3.1-8b --rows 1 8 32 --drafts 3 7     # dummy weights
    python benchmarks/draft_costs.py --shape llama-3.1-8b --set quantization='"fp8"' --prompt-logprobs 8192
    python benchmarks/draft_costs.py --model smollm2-135m --rows 1 4 16 --drafts 1 3 7 15
    python benchmarks/draft_costs.py --shape llama-3.1-8b --draft-shape llama-3.2-1b --rows 1 8 32 --drafts 1 3 4
    python benchmarks/draft_costs.py --shape llama-3.1-8b --draft-shape eagle3 --rows 1 8 32 --drafts 3
    python benchmarks/draft_costs.py --shape qwen3-30b-a3b --quant fp8_block --rows 1 16 --drafts 3

In the whole engine: as each step brings each stream one token, milliseconds a step are seconds by tokens. Plain steps
and those with drafts take turns in one engine; medians of the rounds. "drafts" is how many a row had in the mean: less
than k where there was no room for more. "cpu_ms" is the worker's CPU time, which says more than "ms" where other
programs run and the worker has one thread. ``--prompt-logprobs``: milliseconds of a prompt of so many tokens with
log-probabilities of each, beside a plain prefill of as many, in turns. ``--draft-shape``: a draft model in the worker
makes the drafts, or an EAGLE-3 head of the shape's own sizes with 32,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_bench import QUANT, SHAPES

from aengine import AsyncLLM, SamplingParams
from aengine.config import SpeculationSettings
from aengine.engine.scheduler.request import Request
from aengine.engine.speculation import choice, proposer
from aengine.engine.speculation.budget import DraftBudget
from aengine.engine.speculation.history import NO_GUESS, NONE_CANCELLABLE, DraftHistory, Guess, PendingTokens

EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}


class Wrong(DraftHistory):
    """Drafts of random tokens, as many as are measured now."""

    count, vocab_size, in_worker = 0, 1000, False

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass

    def guess(self, request: Request, most: int, pending: PendingTokens = NONE_CANCELLABLE) -> Guess:
        count = min(Wrong.count, most)
        if not count:
            return NO_GUESS
        ids = [-1 if Wrong.in_worker else random.randrange(Wrong.vocab_size) for _ in range(count)]
        return Guess(ids, [1.0] * count)


def drafts_of_any_cost(chosen: SpeculationSettings, vocab_size: int) -> type[Wrong]:
    Wrong.vocab_size, Wrong.in_worker = vocab_size, chosen.method not in ("ngram", "suffix", "suffix_past")
    return Wrong


def cpu_seconds(engine: AsyncLLM) -> float:
    """Return the CPU time that the worker had until now, of all its threads."""
    fields = Path(f"/proc/{engine.describe()['pid']}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def step_seconds(engine: AsyncLLM, rows: int, prompt: int, steps: int, vocab_size: int) -> tuple[float, float]:
    """Return the mean time of a step while all rows decode, and the worker's CPU time."""
    params = SamplingParams(max_tokens=steps + 24, ignore_eos=True, temperature=0.0)
    count, marks = 0, list[tuple[float, float]]()

    async def read(token_ids: list[int]) -> None:
        nonlocal count
        async for _ in engine.stream(token_ids, params):
            count += 1
            if count in (rows * 16, rows * (16 + steps)):
                marks.append((time.perf_counter(), cpu_seconds(engine)))

    await asyncio.gather(*(read([random.randrange(vocab_size) for _ in range(prompt)]) for _ in range(rows)))
    return (marks[1][0] - marks[0][0]) / steps, (marks[1][1] - marks[0][1]) / steps


async def steps_of(engine: AsyncLLM, args: argparse.Namespace, rows: int, counts: Sequence[int]) -> None:
    seconds: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    had: dict[int, float] = {}
    for _ in range(args.rounds):
        for count in counts:
            Wrong.count = count
            before = engine.statistics()
            seconds[count].append(await step_seconds(engine, rows, args.prompt, args.steps, Wrong.vocab_size))
            after = engine.statistics()
            num_steps = rows * (after.num_steps - before.num_steps)
            had[count] = (after.drafted_tokens - before.drafted_tokens) / num_steps
    for count in counts:
        ms, cpu_ms = (round(1e3 * statistics.median(some), 3) for some in zip(*seconds[count], strict=True))
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(seconds[count], seconds[0], strict=True))
        result = {"rows": rows, "k": count, "positions": rows * (1 + count), "ms": ms, "cpu_ms": cpu_ms}
        print(json.dumps(result | {"ratio": round(ratio, 3), "drafts": round(had[count], 2)}), flush=True)


async def prompts_of(engine: AsyncLLM, length: int, rounds: int) -> None:
    kinds = {"plain": SamplingParams(max_tokens=1), "logprobs": SamplingParams(max_tokens=1, prompt_logprobs=1)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, params in kinds.items():
            token_ids = [random.randrange(Wrong.vocab_size) for _ in range(length)]
            begun = time.perf_counter()
            completion = await engine.generate(token_ids, params)
            seconds[name].append(time.perf_counter() - begun)
            assert name == "plain" or len(completion.prompt_logprobs or ()) == length
    ms = {name: round(1e3 * statistics.median(some[1:]), 2) for name, some in seconds.items()}
    print(json.dumps({"prompt": length, "ms": ms, "ratio": round(ms["logprobs"] / ms["plain"], 3)}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=list(SHAPES), help="in place of --model: dummy weights")
    parser.add_argument("--quant", choices=list(QUANT), help="of --shape's weights, as a checkpoint says it")
    parser.add_argument("--draft-shape", choices=[*SHAPES, "eagle3"], help="of a draft model in the worker")
    parser.add_argument("--set", action="append", default=[], help="a setting, KEY=JSON")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-logprobs", type=int, default=0)
    args = parser.parse_args()
    proposer.new_history = drafts_of_any_cost  # type: ignore[assignment]
    choice.CostBudget = lambda most_positions, growth: DraftBudget(most_positions)  # type: ignore[assignment,misc]
    settings: dict[str, Any] = {"speculation": "suffix", "max_model_len": 1024 + args.prompt_logprobs}
    settings |= {key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as drafting:
        if args.draft_shape:
            is_head = args.draft_shape == "eagle3"
            shape = SHAPES[args.shape] | EAGLE3 if is_head else SHAPES[args.draft_shape]
            (Path(drafting) / "config.json").write_text(json.dumps(shape))
            method = "eagle3" if is_head else "draft_model"
            settings["speculation"] = {"method": method, "model": drafting, "tokens": max(args.drafts)}
        model = args.model
        if args.shape:
            model = folder
            shape = SHAPES[args.shape]
            shape |= {"quantization_config": QUANT[args.quant][0](shape)} if args.quant else {}
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            settings |= {"load_format": "dummy", "skip_tokenizer": True}
        begun = time.perf_counter()
        async with AsyncLLM(model, **settings) as engine:
            print(json.dumps({"settings": settings, "start": round(time.perf_counter() - begun, 1)}), flush=True)
            await step_seconds(engine, 2, args.prompt, 8, 1000)
            for rows in args.rows:
                await steps_of(engine, args, rows, [0, *args.drafts])
            if args.prompt_logprobs:
                await prompts_of(engine, args.prompt_logprobs, args.rounds)


if __name__ == "__main__":
    asyncio.run(main())
