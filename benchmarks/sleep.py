"""Times of sleeping and waking, and the memory that is left meanwhile.

    python benchmarks/sleep.py MODEL --enable-sleep-mode            on a GPU
    python benchmarks/sleep.py smollm2-135m --device cpu

For each level: seconds of `sleep`, of `wake_up`, and from there to the first token of a short prompt, for each of
``--cycles``; what the driver says is free on the GPU, and the worker's resident memory, awake and asleep. At the end
the tokens of a greedy text must be those of the start. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from typing import Any

from aengine import AsyncLLM, SamplingParams

TEXT = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, detokenize=False)
FIRST = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
PROMPT = list(range(100, 130))  # token ids, so that models without a tokenizer do


def used_on_gpu() -> int | None:
    """Bytes that all processes have of the first GPU, as its driver says; None: there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def memory(engine: AsyncLLM) -> dict[str, int | None]:
    return {"gpu_used": used_on_gpu(), "worker_resident": engine.statistics().worker_memory_bytes}


async def cycle(engine: AsyncLLM, level: int) -> dict[str, Any]:
    begun = time.perf_counter()
    await engine.sleep(level)
    slept = time.perf_counter()
    asleep = memory(engine)
    waking = time.perf_counter()
    await engine.wake_up()
    awake = time.perf_counter()
    await engine.generate(PROMPT, FIRST)
    answered = time.perf_counter()
    return {
        "sleep_s": round(slept - begun, 3),
        "wake_up_s": round(awake - waking, 3),
        "first_token_s": round(answered - waking, 3),
        "asleep": asleep,
        "awake": memory(engine),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--cycles-of-level-2", type=int, default=2)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if not name.startswith(("model", "cycles"))}
    settings["skip_tokenizer"] = True
    before = used_on_gpu()
    begun = time.perf_counter()
    async with AsyncLLM(args.model, **settings) as engine:
        result: dict[str, Any] = {
            "settings": {"model": args.model, **settings},
            "device": engine.describe().get("device_name", engine.describe()["device"]),
            "gpu_used_before": before,
            "start_s": round(time.perf_counter() - begun, 3),
        }
        expected = (await engine.generate(PROMPT, TEXT)).token_ids
        result["awake"] = memory(engine)
        for level, count in ((1, args.cycles), (2, args.cycles_of_level_2)):
            result[f"level_{level}"] = [await cycle(engine, level) for _ in range(count)]
        result["same_tokens"] = (await engine.generate(PROMPT, TEXT)).token_ids == expected
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
