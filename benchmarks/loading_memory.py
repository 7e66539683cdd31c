#!/usr/bin/env python3
"""Memory of a GPU that loading a model takes: what is kept, and what was allocated and reserved at most.

    python benchmarks/loading_memory.py --shape qwen3-30b-a3b llama-3.1-8b     random weights
    python benchmarks/loading_memory.py --folder /models/Qwen3-0.6B            a checkpoint
    python benchmarks/loading_memory.py --shape qwen3-30b-a3b --start          then an engine that answers, too
    python benchmarks/loading_memory.py --shape llama-3.1-8b --write --quantization auto fp8 auto fp8

--write puts random weights in 16 bits into files first, which stay in the page cache, so that seconds are those of
reading and of what is made of the tensors; each --quantization is a load of its own.

"over" is the difference between the most that was allocated and what is kept, beside the largest tensor: loading may
take the weights and one tensor. "reserved" is what torch's allocator held for it at most, rounding and gaps included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from engine_bench import SHAPES

from aengine import AsyncLLM, SamplingParams
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.runner.models import build_model, read_config
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.sources.loader import load_weights


def write(folder: str) -> None:
    """Write a checkpoint of random weights in bfloat16 for the folder's config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")


def load(name: str, folder: str, load_format: str, dtype: str, quantization: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    source = resolve_model(EngineConfig.create(folder, {"load_format": load_format}))
    stored = None if load_format == "dummy" else source.hf_config
    formats = choose_formats(dtype, device, stored, quantization=quantization)
    model = build_model(read_config(source.hf_config, folder=folder), formats)
    begun = time.monotonic()
    load_weights(model, source, 0, lambda *report: None)
    torch.cuda.synchronize(device)
    seconds = time.monotonic() - begun
    kept, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    largest = max(prod(place.shape) * place.dtype.itemsize for place, *_ in model.weights.places.values())
    print(
        f"{name:24} {quantization:6} kept {kept / 2**30:6.2f} GiB, at most {most / 2**30:6.2f}, "
        f"over {(most - kept) / 2**20:7.1f} MiB, largest tensor {largest / 2**20:7.1f} MiB, "
        f"reserved {reserved / 2**30:6.2f} GiB, {seconds:.1f} s",
        flush=True,
    )


async def start(folder: str, load_format: str, dtype: str) -> None:
    begun = time.monotonic()
    async with AsyncLLM(folder, load_format=load_format, dtype=dtype, skip_tokenizer=True) as engine:
        ready = time.monotonic() - begun
        answer = await engine.generate(list(range(16)), SamplingParams(max_tokens=8, ignore_eos=True))
        print(f"  an engine is ready after {ready:.1f} s, and gave {len(answer.token_ids)} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--folder", nargs="*", default=[])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quantization", nargs="*", default=["auto"])
    args = parser.parse_args()
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    with tempfile.TemporaryDirectory() as made:
        models = [(Path(folder).name, folder, "auto") for folder in args.folder]
        for shape in args.shape:
            folder = Path(made, shape)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
            if args.write:
                write(str(folder))
                torch.cuda.empty_cache()
            models.append((shape, str(folder), "auto" if args.write else "dummy"))
        for model in models:
            for quantization in args.quantization:
                load(*model, args.dtype, quantization)
            if args.start:
                torch.cuda.empty_cache()
                asyncio.run(start(*model[1:], args.dtype))


if __name__ == "__main__":
    main()
