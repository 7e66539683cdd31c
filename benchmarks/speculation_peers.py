"""Guesses by n-grams in vLLM beside ours: tokens a second of rewriting, each engine with and without. One engine a
process; a JSON line for each number of streams.

    python benchmarks/speculation_peers.py --save /tmp/smollm2.gguf /tmp/smol_hf           # the folder that both read
    python benchmarks/speculation_peers.py --engine vllm --way ngram --model /tmp/smol_hf --ids vllm.json
    python benchmarks/speculation_peers.py --engine aengine --way suffix --model /tmp/smol_hf --ids ours.json

Prompts are those of speculation.py's ``edit``, as token ids that are the same for all, greedy, past end-of-sequence
tokens, without detokenizing; they are in the prefix cache, from a round that does not count. ``--together FOLDER N``: N
processes start at the same time, as starts take a minute, and measure one after the other, when all are ready or
``--patience`` seconds have passed. ``--ids`` gets the token ids of the last round, by which outputs can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import statistics
import time
from pathlib import Path
from typing import Any

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320]


class Vllm:
    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        settings: dict[str, Any] = {"speculative_config": NGRAM} if args.way == "ngram" else {}
        settings |= {"compilation_config": {"cudagraph_capture_sizes": SIZES}, "kv_cache_memory_bytes": 4 << 30}
        settings |= {"gpu_memory_utilization": 0.3}  # others are on the device
        made = AsyncEngineArgs(
            model=args.model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=2048, seed=0, **settings
        )
        self.llm = AsyncLLM.from_engine_args(made, usage_context=UsageContext.OPENAI_API_SERVER)

    async def begin(self) -> None:
        pass

    async def generate(self, prompt: list[int], tokens: int, name: str) -> list[int]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        how = {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **how)
        async for output in self.llm.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
            last = output
        return list(last.outputs[0].token_ids)

    def statistics(self) -> dict[str, Any]:
        return {}

    async def end(self) -> None:
        self.llm.shutdown()


class Ours:
    def __init__(self, args: argparse.Namespace) -> None:
        from aengine import AsyncLLM

        settings = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_memory_bytes": 4 << 30}
        self.llm = AsyncLLM(args.model, speculation=args.way, **settings)

    async def begin(self) -> None:
        await self.llm.start()

    async def generate(self, prompt: list[int], tokens: int, name: str) -> list[int]:
        from aengine import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return (await self.llm.generate(prompt, params, request_id=name)).token_ids

    def statistics(self) -> dict[str, Any]:
        now = self.llm.statistics()
        return {"steps": now.num_steps, "drafted": now.drafted_tokens, "accepted": now.accepted_tokens}

    async def end(self) -> None:
        await self.llm.aclose()


def save(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a folder of transformers, and the prompts' token ids beside it."""
    import torch
    from speculation import prompt_of
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where = {"gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(gguf.parent, **where)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # `from_pretrained` does the same, but refuses to without the package accelerate.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    tokenizer.save_pretrained(folder)
    prompts = [tokenizer.encode(prompt_of("edit", number)) for number in range(64)]
    (folder / "prompts.json").write_text(json.dumps(prompts))


async def rate(engine: Any, prompts: list[list[int]], tokens: int, name: str) -> tuple[float, list[list[int]]]:
    begun = time.perf_counter()
    calls = [engine.generate(prompt, tokens, f"{name}-{number}") for number, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*calls)
    return sum(map(len, answers)) / (time.perf_counter() - begun), answers


async def wait_for_others(folder: str, count: int, name: str, until: float) -> Any:
    """Return a lock that is held while no other process measures."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{name}.ready").touch()
    while len(list(Path(folder).glob("*.ready"))) < count and time.monotonic() < until:
        await asyncio.sleep(0.2)
    lock = (Path(folder) / "lock").open("w")
    await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
    return lock


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", nargs=2, type=Path, metavar=("GGUF", "FOLDER"))
    parser.add_argument("--engine", choices=["vllm", "aengine"], default="aengine")
    parser.add_argument("--way", default="none")
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", nargs=2, metavar=("FOLDER", "N"))
    parser.add_argument("--patience", type=float, default=90.0)
    parser.add_argument("--ids", type=Path)
    args = parser.parse_args()
    if args.save:
        return save(*args.save)
    begun = time.monotonic()
    prompts = json.loads((Path(args.model) / "prompts.json").read_text())
    engine = Vllm(args) if args.engine == "vllm" else Ours(args)
    await engine.begin()
    await rate(engine, prompts[:1], 8, "begin")
    started = time.monotonic() - begun
    if args.together:
        where = args.together[0], int(args.together[1])
        lock = await wait_for_others(*where, f"{args.engine}-{args.way}", begun + args.patience)
    ids = {}
    for streams in args.streams:
        rates = []
        for number in range(1 + args.rounds):
            before = engine.statistics()
            value, ids[streams] = await rate(engine, prompts[:streams], args.tokens, f"{streams}-{number}")
            rates.append(round(value, 1))
        counted = {key: value - before[key] for key, value in engine.statistics().items()}
        line = {"engine": args.engine, "way": args.way, "streams": streams, "started_s": round(started, 1)}
        line |= {"tok_s": statistics.median(rates[1:]), "rounds": rates[1:], "first": rates[0]} | counted
        print(json.dumps(line), flush=True)
        if args.ids:
            args.ids.write_text(json.dumps(ids))
    if args.together:
        lock.close()
    await engine.end()
    return None


if __name__ == "__main__":
    asyncio.run(main())
