"""Attention on a GPU: errors against float64, then times for choices of tiling. On CUDA; about two minutes.

    python benchmarks/gpu_attention.py                  # table; and $OUT/gpu_attention.json if OUT is set
    TRITON_INTERPRET=1 python benchmarks/gpu_attention.py --check   # errors of small shapes only, also without a GPU

Time of a call: a CUDA graph of calls, each on a cache of its own, together larger than L2; median of replays.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aengine.kernels.decode_attention import DecodeWorkspace, decode_step_attention, plan_decode
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.paged_attention import PromptLayers, Scores
from aengine.kernels.rotary import HeadNorms, Rope
from aengine.kernels.triton import decode_attention as body
from aengine.kernels.triton import varlen_attention as varlen_body
from aengine.kernels.triton.launch import compiling
from aengine.kernels.varlen_attention import plan_prompts, varlen_attention

BLOCK = 16
BUDGET_S = 140  # of the 150 that a run may take
COLD_BYTES = 192 << 20  # more than three times the L2 cache of an H200

SKEWED = [300] * 60 + [8192] * 4
SHORT = {f"B{n} 192": [192] * n for n in (1, 8, 64, 256)}
DECODES = SHORT | {f"B{n} {k // 1024}k": [k] * n for n in (1, 32, 256) for k in (1024, 8192)} | {"skewed": SKEWED}
PREFILLS = {  # lengths of what is new, and how many tokens are before it
    "1x8192": ([8192], 0),
    "8x1024": ([1024] * 8, 0),
    "64x128": ([128] * 64, 0),
    "8x256 at 4096": ([256] * 8, 4096),
    "1x512": ([512], 0),
    "1x1024": ([1024], 0),
    "1x2048": ([2048], 0),
    "1984 at 1984": ([1984], 1984),
    "128 at 3968": ([128], 3968),
    "512 at 3584": ([512], 3584),
    "256 at 8192": ([256], 8192),
    "4x64 at 2500": ([64] * 4, 2500),
}
PREFILL_HEADS = {"a": (16, 8, 128), "b": (32, 8, 128)}  # of Qwen3-0.6B and Llama-3.1-8B
PREFILL_TILINGS = [
    varlen_body._Tiling(block_m, block_n, num_warps, num_stages, max_pack, resident)
    for block_m in (64, 128)
    for block_n in (32, 64, 128)
    for num_warps in (4, 8)
    for num_stages in (1, 2, 3)
    for max_pack, resident in ((4, 1), (4, 2), (1, 1))
    if (block_m, num_warps) != (64, 8)
]
TILINGS = [
    body._Tiling(block_n, num_warps, num_stages)
    for block_n in (32, 64, 128)
    for num_warps in (1, 2, 4, 8)
    for num_stages in (1, 2, 3, 4)
    if 16 <= block_n // num_warps <= 32
]


class Case(NamedTuple):
    """Sequences in scattered blocks; caches are as on the GPU: [blocks, 2, kv heads, block size, dim], permuted."""

    caches: list[Tensor]
    table: Tensor  # int32 [n, width]
    rows: Tensor
    seq_lens: Tensor


def make_case(lens: list[int], kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, copies: int) -> Case:
    counts = [-(-length // BLOCK) for length in lens]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    start = 0
    for i, count in enumerate(counts):
        table[i, :count] = order[start : start + count]
        start += count
    shape = (sum(counts), 2, kv_heads, BLOCK, dim)
    caches = [torch.randn(shape, dtype=dtype, device=device).permute(0, 3, 1, 2, 4) for _ in range(copies)]
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return Case(caches, table.to(device), torch.arange(len(lens), device=device), seq_lens)


def copies_of(lens: list[int], kv_heads: int, dim: int) -> int:
    return max(1, min(32, -(-COLD_BYTES // (sum(lens) * 4 * kv_heads * dim))))


def relative_error(out: Tensor, case: Case, q: Tensor, starts: list[int], scale: float) -> float:
    """|out - exact| / |exact| over all sequences, whose queries [T, H, D] are their last tokens."""
    cache, table = case.caches[0].double().cpu(), case.table.long().cpu()
    wrong, size = 0.0, 0.0
    for i, length in enumerate(case.seq_lens.tolist()):
        keys, values = cache[table[i, : -(-length // BLOCK)]].flatten(0, 1)[:length].unbind(1)
        own = q[starts[i] : starts[i + 1]].double().cpu()
        groups = own.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", own, keys.repeat_interleave(groups, 1)) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(length - len(own) + 1)
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        exact = torch.einsum("hqk,khd->qhd", probs, values.repeat_interleave(groups, 1)).flatten(1)
        got = out[starts[i] : starts[i + 1]].double().cpu()
        wrong += float((got - exact).square().sum())
        size += float(exact.square().sum())
    return (wrong / size) ** 0.5


def check(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors: the raw decode (cos 1, sin 0, so that q and k stay what they are), un-fused decode, prefill."""
    errors = {}
    on_gpu = device.type == "cuda"
    dim, heads, kv_heads = (128, 16, 8) if on_gpu else (64, 4, 2)
    lens = [1, 17, 512, 1025, 3000] if on_gpu else [1, 17, 150]
    case = make_case(lens, kv_heads, dim, dtype, device, 1)
    rope = Rope(torch.cat((torch.ones(max(lens), dim // 2), torch.zeros(max(lens), dim // 2)), 1).to(device))
    workspace = DecodeWorkspace(len(lens), heads, kv_heads, dim, device)
    for raw in (True, False):
        qkv = torch.randn(len(lens), (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
        where = (case.caches[0], case.table, rope, None)
        plan = plan_decode(case.rows, case.seq_lens, workspace)
        qkv = qkv.clone()  # a kernel between the two, as the plan's docstring demands
        out = decode_step_attention(qkv, *where, heads, Scores(dim**-0.5), plan, workspace, is_raw=raw)
        q = qkv[:, : heads * dim].view(-1, heads, dim)
        starts = list(range(len(lens) + 1))
        errors[f"decode {'fused' if raw else 'un-fused'}"] = relative_error(out, case, q, starts, dim**-0.5)
    query_lens = [min(length, 200 if on_gpu else 20) for length in lens]
    starts = [sum(query_lens[:i]) for i in range(len(lens) + 1)]
    q = torch.randn(starts[-1], heads, dim, dtype=dtype, device=device)
    places = torch.tensor(starts, dtype=torch.int32, device=device)
    layers = PromptLayers(heads, kv_heads, dim, dtype)
    prompts = plan_prompts(case.rows, places, case.seq_lens, len(q), layers, skip_single=False)
    q = q.clone()
    out = varlen_attention(q, case.caches[0], case.table, prompts, len(lens), Scores(dim**-0.5))
    errors["prefill"] = relative_error(out, case, q, starts, dim**-0.5)
    return errors


def microseconds(calls: list[Callable[[], Any]], at_least: int = 8) -> float:
    """Median time of a call inside a graph of all of them."""
    calls = calls * -(-at_least // len(calls))
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[1:])


@contextmanager
def tiled(tiling: Any, module: Any = body) -> Iterator[None]:
    before, module._tiling = module._tiling, lambda *args: tiling
    try:
        yield
    finally:
        module._tiling = before


def time_decodes(device: torch.device, deadline: float) -> Iterator[dict[str, Any]]:
    heads, kv_heads, dim = 16, 8, 128
    rope = Rope(torch.zeros(8192, dim, device=device))
    for name, lens in DECODES.items():
        case = make_case(lens, kv_heads, dim, torch.bfloat16, device, copies_of(lens, kv_heads, dim))
        workspace = DecodeWorkspace(len(lens), heads, kv_heads, dim, device)
        qkv = torch.randn(len(lens), (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device=device)
        plan, norm = (
            plan_decode(case.rows, case.seq_lens, workspace),
            torch.ones(dim, dtype=torch.bfloat16, device=device),
        )
        where = (case.table, rope, HeadNorms(norm, norm, 1e-6), heads, Scores(dim**-0.5), plan, workspace)
        calls = [partial(decode_step_attention, qkv, cache, *where) for cache in case.caches]
        times = {"as set": microseconds(calls)}
        with compiling(os.cpu_count() or 1):
            for tiling in TILINGS:
                with tiled(tiling):
                    calls[0]()
        for tiling in TILINGS:
            if time.monotonic() > deadline:
                break
            with tiled(tiling):
                times["/".join(map(str, tiling))] = microseconds(calls)
        yield {"case": name, "us": times, "bytes": sum(lens) * 4 * kv_heads * dim}
        del case, calls
        torch.cuda.empty_cache()


def time_cudnn(heads: tuple[int, int, int], query_len: int, context: int, device: torch.device) -> float:
    """cuDNN's time for a prompt in one piece; behind a context without a mask, for which it has other kernels."""
    num_heads, num_kv_heads, dim = heads
    q = torch.randn(1, num_heads, query_len, dim, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 1, num_kv_heads, context + query_len, dim, dtype=torch.bfloat16, device=device)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        calls: list[Callable[[], Any]] = [
            partial(F.scaled_dot_product_attention, q, k, v, is_causal=not context, enable_gqa=True)
        ]
        return microseconds(calls)


def time_prefills(device: torch.device, shape: str) -> Iterator[dict[str, Any]]:
    heads, kv_heads, dim = PREFILL_HEADS[shape]
    for name, (query_lens, context) in PREFILLS.items():
        lens = [length + context for length in query_lens]
        case = make_case(lens, kv_heads, dim, torch.bfloat16, device, 2)
        q = torch.randn(sum(query_lens), heads, dim, dtype=torch.bfloat16, device=device)
        starts = [sum(query_lens[:i]) for i in range(len(lens) + 1)]
        places = torch.tensor(starts, dtype=torch.int32, device=device)

        def calls_of(case: Case = case, places: Tensor = places, q: Tensor = q) -> list[Callable[[], Any]]:
            batch = (case.rows, places, case.seq_lens, len(q))
            plan = plan_prompts(*batch, PromptLayers(heads, kv_heads, dim, q.dtype), skip_single=False)
            where = (case.table, plan, len(case.rows), Scores(dim**-0.5))
            return [partial(varlen_attention, q, cache, *where) for cache in case.caches]

        pairs = sum(n * context + n * (n + 1) / 2 for n in query_lens)
        times = {"as set": microseconds(calls_of(), at_least=2)}
        if len(query_lens) == 1:
            times["cudnn"] = time_cudnn(PREFILL_HEADS[shape], query_lens[0], context, device)
        with compiling(os.cpu_count() or 1):
            for tiling in PREFILL_TILINGS:
                with tiled(tiling, varlen_body):
                    calls_of()[0]()
        for tiling in PREFILL_TILINGS:
            with tiled(tiling, varlen_body), suppress(triton.OutOfResources):
                times["/".join(map(str, tiling))] = microseconds(calls_of(), at_least=2)
        yield {"case": f"{shape} {name}", "us": times, "tflops": 4 * pairs * heads * dim / times["as set"] / 1e6}


def main() -> None:
    torch.manual_seed(0)
    if "--check" in sys.argv and not torch.cuda.is_available():
        with triton_everywhere():
            print(check(torch.device("cpu"), torch.float32))
        return
    device = torch.device("cuda")
    begin = time.monotonic()
    errors = check(device, torch.bfloat16)
    print("relative error in bfloat16:", {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
    results: list[dict[str, Any]] = []
    if "--prefill" in sys.argv:
        DECODES.clear()
    if "--check" not in sys.argv:
        prefills = (result for shape in PREFILL_HEADS for result in time_prefills(device, shape))
        for result in prefills:  # few and cheap: before the tilings take what is left of the time
            results.append(result)
            us = result["us"]
            best = sorted((t, name) for name, t in us.items() if name != "as set")[:4]
            print(f"prefill {result['case']:16} {us['as set']:9.1f} us {result['tflops']:6.0f} TFLOP/s; best:", end=" ")
            print(", ".join(f"{name} {t:.1f}" for t, name in best), flush=True)
        for result in time_decodes(device, begin + BUDGET_S - 25):
            results.append(result)
            us = result["us"]
            best = sorted((t, name) for name, t in us.items() if name != "as set")[:3]
            rate = result["bytes"] / us["as set"] / 1e6
            print(f"decode {result['case']:8} as set {us['as set']:8.1f} us ({rate:.2f} TB/s); best:", end=" ")
            print(", ".join(f"{name} {t:.1f}" for t, name in best), flush=True)
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "gpu_attention.json"), "w") as file:
            json.dump({"errors": errors, "results": results, "seconds": time.monotonic() - begin}, file, indent=1)


if __name__ == "__main__":
    if "--check" not in sys.argv and not torch.cuda.is_available():
        sys.exit(f"{__doc__}\nTimes need an NVIDIA GPU and a torch with CUDA.")
    main()
