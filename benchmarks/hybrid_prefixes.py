"""Prefix hits of a model with recurrent states: questions behind one instruction, and what keeping states costs. JSON.

    python benchmarks/hybrid_prefixes.py --shape qwen3-next-12 --out hybrid.json          # dummy weights
    python benchmarks/hybrid_prefixes.py --shape gated-delta-8b --lengths 20 400
    python benchmarks/hybrid_prefixes.py --model lfm2-350m --instruction 1000 --instructions 3

One request at a time, of random tokens, with one token each: of ``--instructions`` instructions 4 questions each, then
of one of them ``--questions``. By sighting of the instruction: the share of its tokens that was found in the cache, and
the time to the first token. Then prompts that nothing is shared with, of as many tokens, in turns: with all states kept
("all"), without the guesses ("known"), and with none ("none"). In each kind the median of ``--rounds``.
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

from engine_bench import SHAPES

from aengine import AsyncLLM, SamplingParams
from aengine.engine.scheduler.prefixes.kept_states import KeptStates

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
VOCAB = 1000
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "use_cache": True,
    "initializer_range": 0.02,
}
OWN_SHAPES = {f"qwen3-next-{n}": QWEN3_NEXT | {"num_hidden_layers": n} for n in (4, 8, 12, 16)}
SMALL = {"hidden_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
OWN_SHAPES["qwen3-next-tiny"] = QWEN3_NEXT | SMALL | {"num_hidden_layers": 4, "vocab_size": 2048}
"""Qwen3-Next's layers, and fewer of them; the tiny one has its states."""


class Keeping:
    """Which states a request keeps, as it is measured now."""

    kind = "all"

    def __init__(self) -> None:
        begin = KeptStates.begin

        def begin_measured(states: KeptStates, request: Any, prefix: Any) -> None:
            begin(states, request, prefix)
            guessed = getattr(request.states, "guessed", set())
            if self.kind != "all":
                request.states.planned = [
                    b for b in request.states.planned if self.kind == "known" and b not in guessed
                ]

        KeptStates.begin = begin_measured  # type: ignore[method-assign]


def tokens(count: int) -> list[int]:
    return [random.randrange(10, VOCAB) for _ in range(count)]


async def ask(engine: AsyncLLM, prompt: list[int]) -> tuple[int, float]:
    """Return how many tokens were found, and milliseconds to the first token."""
    begun = time.perf_counter()
    completion = await engine.generate(prompt, ONE)
    return completion.usage.cached_tokens, 1e3 * (time.perf_counter() - begun)


def summary(instruction: int, asked: list[tuple[int, float]]) -> dict[str, Any]:
    found = [min(cached, instruction) / instruction for cached, _ in asked]
    return {
        "asked": len(asked),
        "found": round(statistics.mean(found), 4),
        "found_0.9": round(sum(share >= 0.9 for share in found) / len(found), 4),
        "first_token_ms": round(statistics.median(ms for _, ms in asked), 2),
    }


async def questions(engine: AsyncLLM, args: argparse.Namespace) -> dict[str, Any]:
    sightings: list[list[tuple[int, float]]] = [[] for _ in range(4)]
    for number in range(args.instructions + 1):
        instruction = tokens(args.instruction)
        later = []
        for i in range(4 if number < args.instructions else args.questions):
            one = await ask(engine, instruction + tokens(random.randint(*args.lengths)))
            if number < args.instructions:
                sightings[i].append(one)
            elif i:
                later.append(one)
    result = {f"sighting {i + 1}": summary(args.instruction, asked) for i, asked in enumerate(sightings)}
    return result | {f"{args.questions} questions, from the second on": summary(args.instruction, later)}


async def unshared(engine: AsyncLLM, args: argparse.Namespace, keeping: Keeping) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"all": [], "known": [], "none": []}
    for _ in range(args.rounds):
        for kind, own in seconds.items():
            keeping.kind = kind
            own.append((await ask(engine, tokens(args.instruction + 100)))[1])
    keeping.kind = "all"
    ms = {kind: round(statistics.median(own), 2) for kind, own in seconds.items()}
    return {"first_token_ms": ms, "all_to_none": round(ms["all"] / ms["none"], 4)}


async def measure(model: str, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    keeping = Keeping()
    begun = time.perf_counter()
    async with AsyncLLM(model, **settings) as engine:
        print(f"started in {time.perf_counter() - begun:.1f} s", flush=True)
        for _ in range(3):
            await ask(engine, tokens(args.instruction + 100))
            await ask(engine, tokens(args.instruction + 300))
        memory = {"num_blocks": engine.statistics().num_blocks}
        shared = await questions(engine, args)
        print(json.dumps(shared, indent=1), flush=True)
        return {"settings": settings, "memory": memory, "questions": shared} | {
            "unshared": await unshared(engine, args, keeping)
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = SHAPES | OWN_SHAPES
    parser.add_argument("--model", default="lfm2-350m")
    parser.add_argument("--shape", choices=list(shapes), help="in place of --model: dummy weights")
    parser.add_argument("--set", action="append", default=[], help="a setting, KEY=JSON")
    parser.add_argument("--instruction", type=int, default=4000, help="tokens")
    parser.add_argument("--instructions", type=int, default=8)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs=2, default=[20, 400], help="tokens of a question: least, most")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    random.seed(0)
    settings: dict[str, Any] = {"max_model_len": args.instruction + args.lengths[1] + 512}
    settings |= {key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.shape:
            model = folder
            (Path(folder) / "config.json").write_text(json.dumps(shapes[args.shape]))
            settings |= {"load_format": "dummy", "skip_tokenizer": True}
        result = asyncio.run(measure(model, settings, args))
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
