"""A layer's four products with their norms and sums, ours against torch's ops, by batch size. On CUDA; a minute.

    python benchmarks/gpu_linear.py          # JSON lines: microseconds a layer, and of reading its weights
    python benchmarks/gpu_linear.py --tune   # tries tilings, and writes the best into kernels/linear_tilings.json
    python benchmarks/gpu_linear.py --fp8    # either, of weights in FP8; torch's are of 16 bits all the same
    python benchmarks/gpu_linear.py --grouped    # each product by weights in 4 and 8 bits, beside a copy's bandwidth
    TRITON_INTERPRET=1 python benchmarks/gpu_linear.py --check    # that both compute the same; also without a GPU

Time: a CUDA graph of 28 layers of Qwen3-0.6B's shape (or 32 of Llama-3.1-8B's), each with weights of its own, median of
replays. The attention between the products is left out. Tilings are tried one product at a time, in a graph of as many
as have more weights than the L2 cache holds; so are --grouped's, whose "share" is that of a copy's bandwidth, read and
written, in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels import linear_tilings
from aengine.kernels.activation import act_and_mul, computed
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.expert_types import InputNorm
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes
from aengine.kernels.linear import add_linear, norm_gated_linear, norm_linear
from aengine.kernels.linear_tilings import LinearShape, StreamedTiling
from aengine.kernels.matrix import Matrix
from aengine.kernels.scaled_product import product
from aengine.kernels.triton import linear_fp8, linear_streamed
from aengine.kernels.triton.launch import compiling, max_shared_memory
from aengine.runner.weights.quantised.fp8 import quantised

SHAPES = {  # hidden, q, qkv, inner, layers
    "qwen3-0.6b": (1024, 2048, 4096, 3072, 28),
    "llama-3.1-8b": (4096, 4096, 6144, 14336, 32),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GROUPED_ROWS = (1, 8, 64, 256, 2048)
TUNED_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
BYTES_PER_US = 4.3e6  # a device-to-device copy on an H200, bytes read and written
BYTES_OF_A_GRAPH = 150e6  # more than any L2 cache holds
EPS = 1e-6

Layers = list[list[Tensor]]


def make_layers(shape: tuple[int, ...], **settings: Any) -> Layers:
    hidden, q, qkv, inner, num_layers = shape
    shapes = ((qkv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner))
    return [[torch.randn(*s, **settings) * 0.02 for s in shapes] for _ in range(num_layers)]


def in_fp8(weight: Tensor, quantises_x: bool = True) -> Matrix:
    codes, scale = quantised(weight)
    return Matrix(codes, None, scale, quantises_x)


def matrix(weight: Tensor, is_fp8: bool) -> Matrix:
    return in_fp8(weight, False) if is_fp8 else Matrix(weight)


def ours(layers: list[list[Matrix]], norm: Tensor, residual: Tensor, attended: Tensor) -> None:
    own = InputNorm(norm, EPS)
    for qkv, o, gate_up, down in layers:
        norm_linear(residual, own, qkv)
        add_linear(residual, attended, o)
        add_linear(residual, norm_gated_linear(residual, own, gate_up), down)


def torchs(layers: Layers, norm: Tensor, residual: Tensor, attended: Tensor) -> None:
    for w_qkv, w_o, w_gate_up, w_down in layers:
        F.linear(F.rms_norm(residual, norm.shape, norm, EPS), w_qkv)
        residual.add_(F.linear(attended, w_o))
        gate, up = F.linear(F.rms_norm(residual, norm.shape, norm, EPS), w_gate_up).chunk(2, -1)
        residual.add_(F.linear(F.silu(gate) * up, w_down))


def microseconds(step: partial[Any]) -> float:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


# -- tilings


def products_of(shape: tuple[int, ...], is_fp8: bool) -> list[LinearShape]:
    hidden, q, qkv, inner, _ = shape
    width = 1 if is_fp8 else 2
    return [
        LinearShape("plain", qkv, hidden, width),
        LinearShape("add", hidden, q, width),
        LinearShape("gated", inner, hidden, width),
        LinearShape("add", hidden, inner, width),
    ]


def candidates(shape: LinearShape, rows: int) -> Iterator[StreamedTiling]:
    """Tiles whose sums fit into registers, with stages for one or two programs a multiprocessor."""
    is_gated, terms = shape.kind == "gated", 3 - shape.weight_bytes
    grid = itertools.product((8, 16, 32, 64, 128, 256), (64, 128), (64, 128, 256), (4, 8))
    for block_m, block_n, block_k, num_warps in grid:
        tiling = StreamedTiling(block_n, block_m, block_k, num_warps, 1)
        sums = terms * (2 if is_gated else 1) * block_n * block_m // (32 * num_warps)
        least = 8 if terms == 2 else 16
        if not 4 <= sums <= 128 * terms or not least <= block_m <= max(16, rows) or 8 * block_m < rows:
            continue
        for per_multiprocessor in (1, 2):
            one = tiling.shared_bytes(is_gated, shape.weight_bytes)
            stages = min(10, max_shared_memory() // per_multiprocessor // one)
            if stages > 2:
                yield tiling._replace(num_stages=stages)


def run_streamed(weights: list[Matrix], x: Tensor, out: Tensor, kind: str, tiling: StreamedTiling) -> None:
    how: dict[str, Any] = {"add": kind == "add", "activation": "silu" if kind == "gated" else None}
    for weight, _, scale, _ in weights:
        assert isinstance(weight, Tensor)
        if scale is None:
            linear_streamed.stream(tiling, x, weight, None, out, **how)
        else:
            linear_fp8.stream(tiling, linear_fp8.split(x), weight, None, scale, out, **how)


def run_library(weights: list[Matrix], x: Tensor, out: Tensor, kind: str) -> None:
    for own in weights:
        if kind == "add" and own.scale is None and isinstance(own.weight, Tensor):
            torch.addmm(out, x, own.weight.t(), out=out)
        elif kind == "add":
            out.add_(product(x, own))
        else:
            y = product(x, own)
            if kind == "gated":
                act_and_mul(y)


def tune(shape: LinearShape, rows: int, weights: list[Matrix]) -> tuple[float, float, StreamedTiling | None]:
    """Microseconds of the library's product and of the fastest tiling, and that; None: the library's is faster."""
    how = {"device": "cuda", "dtype": torch.bfloat16}
    x, out = (torch.randn(rows, size, **how) for size in (shape.in_features, shape.out_features))
    tried = list(candidates(shape, rows))
    with compiling(os.cpu_count() or 1):
        for tiling in tried:
            run_streamed(weights[:1], x, out, shape.kind, tiling)
    library = microseconds(partial(run_library, weights, x, out, shape.kind)) / len(weights)
    times = [
        (microseconds(partial(run_streamed, weights, x, out, shape.kind, tiling)) / len(weights), tiling)
        for tiling in tried
    ]
    time, best = min(times)
    return library, time, best if time < library else None


def write_table(shape: LinearShape, entries: list[list[int | None]]) -> None:
    path = Path(linear_tilings.__file__).with_suffix(".json")
    tables = json.loads(path.read_text())
    tables.setdefault(torch.cuda.get_device_name(), {})[str(shape)] = entries
    devices = []
    for device, own in tables.items():
        rows = (
            f'        "{name}": [\n' + ",\n".join(f"            {json.dumps(e)}" for e in found) + "\n        ]"
            for name, found in own.items()
        )
        devices.append(f"    {json.dumps(device)}: {{\n" + ",\n".join(rows) + "\n    }")
    path.write_text("{\n" + ",\n".join(devices) + "\n}\n")


def tune_all(shape: tuple[int, ...], is_fp8: bool) -> None:
    for one in products_of(shape, is_fp8):
        size = one.out_features * (2 if one.kind == "gated" else 1), one.in_features
        count = max(2, min(28, math.ceil(BYTES_OF_A_GRAPH / (one.weight_bytes * size[0] * size[1]))))
        numbers = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) * size[1] ** -0.5 for _ in range(count))
        weights = [matrix(weight, is_fp8) for weight in numbers]
        entries: list[list[int | None]] = []
        for rows in TUNED_ROWS:
            library, time, best = tune(one, rows, weights)
            entries.append([rows, *(best or [None])])
            write_table(one, entries)  # each time, so that what was found is kept if this is interrupted
            result = {
                "product": str(one),
                "rows": rows,
                "library_us": round(library, 2),
                "streamed_us": round(time, 2),
            }
            print(json.dumps(result | {"tiling": best}), flush=True)


# -- codes in 4 and 8 bits


def random_codes(kind: CodeKind, n: int, k: int, group: int, device: str, **more: Any) -> GroupedCodes:
    """Of all values. ``more``: "scale": its dtype; "zero", "offset", "row_scale": whether there is one; "rows"."""
    has_4_bits, rows = kind in ("int4", "uint4", "e2m1"), more.get("rows", 1)
    width, groups = k // 2 if has_4_bits else k, (-(-n // rows), -(-k // group))
    if kind == "e4m3":
        codes = torch.empty(n, width, device=device).uniform_(-448, 448).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(0, 256, (n, width), dtype=torch.uint8, device=device)
    row_scale = None
    if more.get("row_scale"):
        row_scale = torch.full((n,), 2**-8, device=device)
    size = 1.0 if row_scale is not None else 2**-14 if kind == "e4m3" else 2**-8
    scale = torch.empty(groups, device=device).uniform_(size / 2, size)
    zero = torch.randint(0, 16, groups, dtype=torch.uint8, device=device) if more.get("zero") else None
    offset = (scale * -8).half() if more.get("offset") else None
    return GroupedCodes(kind, codes, scale.to(more["scale"]), group, zero, offset, row_scale, rows)


def plain_weight(n: int, k: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, k, device=device, dtype=dtype) * 0.02


def with_groups(kind: CodeKind, group: int, **more: Any) -> Callable[[int, int, str, torch.dtype], Matrix]:
    return lambda n, k, device, dtype: Matrix(random_codes(kind, n, k, group, device, **more), quantises_x=True)


WEIGHTS: dict[str, Callable[[int, int, str, torch.dtype], Matrix]] = {
    "16 bits": lambda *args: Matrix(plain_weight(*args)),
    "fp8, a row": lambda *args: in_fp8(plain_weight(*args)),
    "fp8, 128 x 128": with_groups("e4m3", 128, rows=128, scale=torch.float32),
    "int4, 128": with_groups("int4", 128, scale=torch.float16),  # W4A16
    "uint4 and zero, 128": with_groups("uint4", 128, zero=True, scale=torch.float16),  # AWQ
    "e2m1, 16": with_groups("e2m1", 16, row_scale=True, scale=torch.float8_e4m3fn),  # NVFP4
    "uint4 and offset, 32": with_groups("uint4", 32, offset=True, row_scale=True, scale=torch.float16),  # Q4_K
}


def bytes_of(matrix: Matrix) -> int:
    weight, _, scale, _ = matrix
    tensors = list(weight.tensors().values()) if isinstance(weight, GroupedCodes) else [weight]
    return sum(tensor.nbytes for tensor in [*tensors, *([] if scale is None else [scale])])


def run_verb(verb: str, weights: list[Matrix], x: Tensor, norm: Tensor, out: Tensor) -> Tensor:
    """Multiply by each weight; returns what the last one gave. ``out``: the residual that "add" adds to. By weights in
    FP8 x of many rows is rounded, as by those of `quantization="fp8"`."""
    made = out
    for weight in weights:
        if verb == "norm":
            made = norm_linear(x, InputNorm(norm, EPS), weight)
        elif verb == "gated":
            made = computed(norm_gated_linear(x, InputNorm(norm, EPS), weight))
        else:
            add_linear(out, x, weight)
    return made


def copy_bandwidth(num_bytes: int = 2**30) -> float:
    """Bytes a microsecond, read and written, of a copy on the GPU."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / microseconds(partial(target.copy_, source))


def measure_grouped(
    name: str,
    shape: tuple[int, ...],
    bandwidth: float,
    *,
    time: Callable[[partial[Any]], float] = microseconds,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    graph_bytes: float = BYTES_OF_A_GRAPH,
) -> Iterator[dict[str, Any]]:
    """One result a kind of weight, product and number of rows, and of a layer's four products together."""
    hidden, q, qkv, inner, _ = shape
    products = {"qkv": ("norm", qkv, hidden), "o": ("add", hidden, q)}
    products |= {"gate_up": ("gated", 2 * inner, hidden), "down": ("add", hidden, inner)}
    for kind, make in WEIGHTS.items():
        of_layer = dict.fromkeys(GROUPED_ROWS, (0, 0.0))
        for product_name, (verb, n, k) in products.items():
            first = make(n, k, device, dtype)
            size = bytes_of(first)
            weights = [first, *(make(n, k, device, dtype) for _ in range(max(2, math.ceil(graph_bytes / size)) - 1))]
            steps = {}
            for rows in GROUPED_ROWS:
                x, residual = (torch.randn(rows, width, device=device, dtype=dtype) for width in (k, n))
                norm = torch.rand(k, device=device, dtype=dtype) + 0.5
                steps[rows] = partial(run_verb, verb, weights, x, norm, residual)
            if device == "cuda":
                with compiling(os.cpu_count() or 1):
                    for step in steps.values():
                        run_verb(verb, weights[:1], *step.args[2:])
            for rows, step in steps.items():
                us = time(step) / len(weights)
                of_layer[rows] = of_layer[rows][0] + size, of_layer[rows][1] + us
                result = {"shape": name, "kind": kind, "product": product_name, "rows": rows}
                yield result | figures(size, us, bandwidth)
        for rows, (size, us) in of_layer.items():
            yield {"shape": name, "kind": kind, "product": "layer", "rows": rows} | figures(size, us, bandwidth)


def figures(size: int, us: float, bandwidth: float) -> dict[str, Any]:
    return {"bytes": size, "us": round(us, 2), "share": round(size / us / bandwidth, 3)}


def check() -> None:
    layers, norm = make_layers((128, 64, 192, 128, 2)), torch.rand(128) + 0.5
    for batch in (1, 3, 40):
        residual, attended = torch.randn(batch, 128), torch.randn(batch, 64)
        expected = residual.clone()
        torchs(layers, norm, expected, attended)
        with triton_everywhere():
            ours([[Matrix(weight) for weight in layer] for layer in layers], norm, residual, attended)
        print(f"batch {batch}: largest difference {float((residual - expected).abs().max()):.1e}")


def measure(name: str, shape: tuple[int, ...], is_fp8: bool) -> None:
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, q, num_layers = shape[0], shape[1], shape[4]
    layers, norm = make_layers(shape, **settings), torch.rand(hidden, **settings) + 0.5
    own = [[matrix(weight, is_fp8) for weight in layer] for layer in layers]
    weights = sum(bytes_of(weight) for weight in own[0])
    for batch in BATCHES:
        inputs = (norm, torch.randn(batch, hidden, **settings), torch.randn(batch, q, **settings))
        result = {"shape": name, "batch": batch, "weights_us": round(weights / BYTES_PER_US, 2)}
        result |= {"ours_us": round(microseconds(partial(ours, own, *inputs)) / num_layers, 2)}
        result |= {"torch_us": round(microseconds(partial(torchs, layers, *inputs)) / num_layers, 2)}
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--grouped", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    args = parser.parse_args()
    if args.check:
        return check()
    if not torch.cuda.is_available():
        sys.exit(f"{__doc__}\nTimes need an NVIDIA GPU and a torch with CUDA.")
    if args.grouped:
        bandwidth = copy_bandwidth()
        device = torch.cuda.get_device_name()
        print(json.dumps({"device": device, "copy_tb_s": round(bandwidth / 1e6, 3)}), flush=True)
        for name in args.shape:
            for result in measure_grouped(name, SHAPES[name], bandwidth):
                print(json.dumps(result), flush=True)
        return None
    for name in args.shape:
        if args.tune:
            tune_all(SHAPES[name], args.fp8)
        else:
            measure(name, SHAPES[name], args.fp8)
        torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
