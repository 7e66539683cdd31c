"""Time in which streams stand still while their engine gets new weights, by source; JSON to stdout.

    python benchmarks/weight_updates.py FOLDER --sources ipc path tensors     on a GPU
    python benchmarks/weight_updates.py smollm2-folder --sources path tensors --device cpu

FOLDER is a checkpoint in safetensors; ``ipc`` needs room for it twice on the GPU. Streams generate without an end. Each
update is seconds from `start_weight_update` to the end of `finish_weight_update`, and the longest gap between two
deltas of a stream meanwhile; ``disk_s`` is the time to read the files in this process, from the page cache. At the end
the greedy tokens must be those of the start, since all updates bring the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from aengine import AsyncLLM, IpcTensors, SamplingParams

PROMPT = list(range(100, 130))
TEXT = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, detokenize=False)


def tensors_of(folder: Path, device: str) -> dict[str, Any]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path, device).items()
    }


async def stream(engine: AsyncLLM, index: int, gaps: list[float]) -> None:
    last = 0.0
    while True:
        params = SamplingParams(max_tokens=1000, ignore_eos=True, detokenize=False)
        async for _ in engine.stream([index + 200, *PROMPT], params):
            now = time.perf_counter()
            gaps.append(now - last if last else 0.0)
            last = now


async def update(engine: AsyncLLM, source: Any, gaps: list[float]) -> dict[str, float]:
    gaps.clear()
    begun = time.perf_counter()
    await engine.start_weight_update()
    paused = time.perf_counter()
    await engine.update_weights(source)
    sent = time.perf_counter()
    await engine.finish_weight_update()
    ended = time.perf_counter()
    while not gaps:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    return {
        "pause_s": round(paused - begun, 3),
        "send_s": round(sent - paused, 3),
        "finish_s": round(ended - sent, 3),
        "total_s": round(ended - begun, 3),
        "worst_gap_s": round(max(gaps), 3),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sources", nargs="+", choices=("ipc", "path", "tensors"), default=["path", "tensors"])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=4 << 30)
    args = parser.parse_args()
    names = ("device", "quantization", "kv_cache_memory_bytes")
    settings = {name: getattr(args, name) for name in names} | {
        "skip_tokenizer": True,
        "max_num_seqs": args.streams + 1,
    }
    begun = time.perf_counter()
    tensors_of(args.folder, "cpu")
    result: dict[str, Any] = {"argv": vars(args) | {"folder": str(args.folder)}, "disk_s": time.perf_counter() - begun}
    async with AsyncLLM(args.folder, **settings) as engine:
        result["device"] = engine.describe().get("device_name", engine.describe()["device"])
        expected = (await engine.generate(PROMPT, TEXT)).token_ids
        gaps: list[float] = []
        running = [asyncio.create_task(stream(engine, i, gaps)) for i in range(args.streams)]
        while len(gaps) < 10 * args.streams:
            await asyncio.sleep(0.01)
        for name in args.sources:
            source: Any = args.folder
            if name != "path":
                source = tensors_of(args.folder, "cuda:0" if name == "ipc" else "cpu")
            result[name] = [
                await update(engine, IpcTensors.of(source) if name == "ipc" else source, gaps)
                for _ in range(args.rounds)
            ]
            print(name, result[name], flush=True)
            del source
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        result["same_tokens"] = (await engine.generate(PROMPT, TEXT)).token_ids == expected
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
