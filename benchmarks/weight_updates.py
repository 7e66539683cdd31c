"""Time in which streams stand still while their engine gets new weights, by source; JSON to stdout.

    python benchmarks/weight_updates.py FOLDER --sources ipc path tensors     on a GPU
    python benchmarks/weight_updates.py FOLDER --sources group --device cuda:1     a trainer on the first GPU, by NCCL
    python benchmarks/weight_updates.py smollm2-folder --sources path tensors group --device cpu

FOLDER is a checkpoint in safetensors, or has a config.json alone: then the weights are random ones. ``ipc`` needs room
for them twice on the GPU. Streams generate without an end. Each update is seconds from `start_weight_update` to the
end of `finish_weight_update`, and the longest gap between two deltas of a stream meanwhile; ``disk_s`` is the time to
read the files in this process, from the page cache. All sources bring the same weights, so the greedy tokens behind
each must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from aengine import AsyncLLM, IpcTensors, SamplingParams, TrainerGroup

PROMPT = list(range(100, 130))
TEXT = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, detokenize=False)


def tensors_of(folder: Path, device: str) -> dict[str, Any]:
    """The weights of a checkpoint; of a config alone random ones, the same on each call."""
    if paths := sorted(folder.glob("*.safetensors")):
        return {name: tensor for path in paths for name, tensor in load_file(path, device).items()}
    gen = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(shape, generator=gen, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)
        for name, dtype, shape in forms_of(folder)
    }


def forms_of(folder: Path) -> list[tuple[str, Any, list[int]]]:
    """Name, dtype and shape of each tensor of a config's model."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return [(name, one.dtype, [*one.shape]) for name, one in model.state_dict().items() if name not in tied]


def train(folder: Path, port: int, size: int, is_gpu: bool, ready: Any, turns: Any) -> None:
    """A trainer's process: it says what it has, and sends it once for each turn."""
    state = tensors_of(folder, "cuda:0" if is_gpu else "cpu")
    patience = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=patience)
    ready.put([(name, str(tensor.dtype)[6:], [*tensor.shape]) for name, tensor in state.items()])
    turns.get()
    backend: Any = dist.ProcessGroupNCCL if is_gpu else dist.ProcessGroupGloo
    group = backend(dist.PrefixStore("aengine-weights", store), 0, size, patience)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    while True:
        for tensor in state.values():
            group.broadcast([tensor], options).wait()
        turns.get()


@contextmanager
def trainer(folder: Path, size: int, is_gpu: bool) -> Iterator[tuple[TrainerGroup, Any]]:
    """A trainer, and the queue by which it is told to send."""
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ready, turns = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=train, args=(folder, port, size, is_gpu, ready, turns), daemon=True)
    process.start()
    try:
        yield TrainerGroup("127.0.0.1", port, ready.get(), backend="nccl" if is_gpu else "gloo"), turns
    finally:
        process.kill()
        process.join()


async def stream(engine: AsyncLLM, index: int, gaps: list[float]) -> None:
    last = 0.0
    while True:
        params = SamplingParams(max_tokens=1000, ignore_eos=True, detokenize=False)
        async for _ in engine.stream([index + 200, *PROMPT], params):
            now = time.perf_counter()
            gaps.append(now - last if last else 0.0)
            last = now


async def update(engine: AsyncLLM, source: Any, gaps: list[float]) -> dict[str, float]:
    await asyncio.sleep(0.3)  # what made the source may have held up the loop
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


@contextmanager
def source_of(name: str, folder: Path, about: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """What `update_weights` takes, and a queue that is told of each update."""
    device = about["ranks"][0]["device"]
    if name == "group":
        with trainer(folder, 1 + len(about["ranks"]), device != "cpu") as found:
            yield found
    elif name == "ipc":
        tensors = tensors_of(folder, device)
        yield IpcTensors.of(tensors), multiprocessing.Queue()
    else:
        yield folder if name == "path" else tensors_of(folder, "cpu"), multiprocessing.Queue()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--sources", nargs="+", choices=("ipc", "path", "tensors", "group"), default=["path", "tensors"]
    )
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
    result: dict[str, Any] = {"argv": vars(args) | {"folder": str(args.folder)}}
    if any(args.folder.glob("*.safetensors")):
        begun = time.perf_counter()
        tensors_of(args.folder, "cpu")
        result["disk_s"] = time.perf_counter() - begun
    else:
        settings["load_format"] = "dummy"
    async with AsyncLLM(args.folder, **settings) as engine:
        about = engine.describe()
        result["device"] = about.get("device_name", about["device"])
        gaps: list[float] = []
        running = [asyncio.create_task(stream(engine, i, gaps)) for i in range(args.streams)]
        while len(gaps) < 10 * args.streams:
            await asyncio.sleep(0.01)
        found = []
        for name in args.sources:
            result[name] = []
            with source_of(name, args.folder, about) as (source, turns):
                for _ in range(args.rounds):
                    turns.put(None)
                    result[name].append(await update(engine, source, gaps))
                    print(name, result[name][-1], flush=True)
            found.append((await engine.generate(PROMPT, TEXT)).token_ids)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        result["same_tokens"] = all(each == found[0] for each in found)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
