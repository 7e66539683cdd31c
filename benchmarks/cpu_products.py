"""What compiled products reach on this CPU, weights cold. JSON lines to stdout.

    python benchmarks/cpu_products.py [--threads 2] [--kinds q4_1 q8_0] [--shape 1536 768] [--rows 1 8] [--float32]

Matrices of each kind, at least ``--megabytes`` of them, are multiplied one after another, so that none is in a cache
when it is read. A line is the best and the median of ``--repeats`` rounds: GB/s of packed weights, GMAC/s, and what a
plain read of the same memory by the same threads reaches in between, which is the limit. One thread's time is the
CPU's, so that it can be measured beside others' work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from aengine.kernels.cpu import codes, library, rows, tape
from aengine.kernels.cpu.codes import PackedMatrix
from aengine.kernels.cpu.compiler.emit import I64, Function
from aengine.kernels.cpu.compiler.target import Target, host
from aengine.kernels.cpu.packed.layouts import LAYOUTS, NUMBERS

_CHUNK = 2**15
GROUPED = [kind for kind in LAYOUTS if kind.upper() not in GGMLQuantizationType.__members__ and kind != "int8"]
KINDS = [kind for kind in LAYOUTS if kind not in GROUPED] + ["int4_128", "uint4_128", *NUMBERS]


def _read(f: Function, target: Target) -> None:
    """words: memory, a sum."""
    place = f.address(f.words, 0) + f.chunk * _CHUNK
    sums = [f.variable(I64 * 8, 0) for _ in range(4)]
    with f.loop(0, _CHUNK, 256) as i:
        for j, total in enumerate(sums):
            f.prefetch(place + (i + (1600 + 64 * j)))
            total.add(f.load(I64 * 8, place + (i + 64 * j)))
    whole = sums[0].get() + sums[1].get() + sums[2].get() + sums[3].get()
    f.store(whole, f.address(f.words, 1) + f.thread * 64)


rows.KERNELS["benchmark_read"] = _read


def matrix(kind: str, out_features: int, in_features: int) -> PackedMatrix:
    if kind in NUMBERS:
        return codes.pack(kind, torch.randn(out_features, in_features).to(getattr(torch, kind)))
    if kind == "int8":
        weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
        return codes.pack(kind, weight, torch.rand(out_features))
    if kind in GROUPED:
        width = in_features * LAYOUTS[kind].bits // 8
        return codes.pack(kind, torch.randint(0, 256, (out_features, width), dtype=torch.uint8))  # scales are zeros
    length, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    blocks = torch.randint(40, 60, (out_features, in_features // length, num_bytes), dtype=torch.uint8)
    return codes.pack(kind, blocks)


def seconds(work: Callable[[], None], clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return clock() - begin


def measure(kind: str, as_codes: bool, args: argparse.Namespace) -> None:
    first = matrix(kind, *args.shape)
    count = max(2, -(-args.megabytes * 2**20 // first.memory.nbytes))
    memory = codes.large_memory(count, first.memory.nbytes)
    packed = [replace(first, memory=place.view_as(first.memory).copy_(first.memory)) for place in memory]
    sums = torch.zeros(args.threads, 8, dtype=torch.int64)
    chunks = memory.nbytes // _CHUNK
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    for num_rows in args.rows:
        of = codes.activations(torch.randn(num_rows, first.in_features), as_codes=as_codes)
        with tape.record(num_rows) as product:
            for own in packed:
                codes.multiply(own, of)
        run = partial(product.run, num_rows)
        read = partial(tape.launch, "benchmark_read", [memory, sums], chunks)
        times, reads = [], []
        for _ in range(args.repeats):
            reads.append(seconds(read, clock))
            times.append(seconds(run, clock))
        macs = count * num_rows * first.out_features * first.in_features
        line: dict[str, object] = {"kind": kind, "activations": of.form, "rows": num_rows}
        line |= {"threads": args.threads, "bits": 8 * memory.nbytes / macs * num_rows}
        for name, of_times in (("best", min), ("median", statistics.median)):
            line[f"{name}_gb_s"] = memory.nbytes / of_times(times) / 1e9
            line[f"{name}_gmac_s"] = macs / of_times(times) / 1e9
            line[f"{name}_read_gb_s"] = chunks * _CHUNK / of_times(reads) / 1e9
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--shape", nargs=2, type=int, default=(1536, 768), metavar=("OUT", "IN"))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 256])
    parser.add_argument("--megabytes", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--float32", action="store_true", help="matrices of codes with float32 activations")
    args = parser.parse_args()
    library.set_num_threads(args.threads)
    print(json.dumps({"cpu": host().cpu, "vnni": host().has_vnni, "shape": args.shape}), flush=True)
    for kind in args.kinds:
        measure(kind, kind in LAYOUTS and not args.float32, args)


if __name__ == "__main__":
    main()
