"""A layer of experts: microseconds by batch size, against the limit by bytes of the experts that are touched. On CUDA.

    python benchmarks/moe.py            # JSON lines; some minutes
    python benchmarks/moe.py --tune     # also tries tilings, and writes the best into kernels/expert_tilings.json
    TRITON_INTERPRET=1 python benchmarks/moe.py --check    # that all ways compute the same; also without a GPU

Time: a CUDA graph of some layers, each with weights of its own (more than the L2 cache holds), from the router's logits
to the sum in the residual stream; median of replays. The limit is the larger of bytes / bandwidth and operations /
speed; the choice of experts is uniform, as of random weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from aengine.kernels import expert_tilings
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import ExpertShape, ExpertTiling, ProductTile, choose_tiling, default_tiling
from aengine.kernels.expert_types import ExpertCodes, ExpertGate, ExpertMatrices, InputNorm, RoutingRule, can_group
from aengine.kernels.experts import add_experts, expert_product
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes
from aengine.kernels.routing import route
from aengine.kernels.triton.launch import compiling

CLAMPED = ExpertGate("clamped_swiglu", is_interleaved=True)
QWEN3_30B, GPT_OSS_20B = ExpertShape(128, 2048, 768, 8), ExpertShape(32, 2880, 2880, 4)
SHAPES: dict[str, tuple[ExpertShape, ExpertGate, bool, str]] = {  # whether there are biases; a key of FORMATS, or ""
    "qwen3-30b-a3b": (QWEN3_30B, ExpertGate(), False, ""),
    "qwen3-30b-a3b-fp8": (QWEN3_30B, ExpertGate(), False, "fp8"),
    "qwen3-30b-a3b-int4": (QWEN3_30B, ExpertGate(), False, "int4"),
    "gpt-oss-20b": (GPT_OSS_20B, CLAMPED, True, ""),
    "gpt-oss-20b-mxfp4": (GPT_OSS_20B, CLAMPED, True, "mxfp4"),
}


class Format(NamedTuple):
    """Codes with a scale a group."""

    kind: CodeKind
    group: int
    rows: int  # that share a scale
    scale: torch.dtype


FORMATS = {
    "fp8": Format("e4m3", 128, 128, torch.float32),
    "int4": Format("int4", 128, 1, torch.float16),
    "mxfp4": Format("e2m1", 32, 1, torch.float8_e8m0fnu),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BYTES_PER_US = {"NVIDIA H100 80GB HBM3": 3.0e6, "NVIDIA H200": 4.3e6}  # a copy on the device, read and written
OPERATIONS_PER_US = 790e6  # bf16 products on an H200, and on an H100
LAYERS = 4


class Layer(NamedTuple):
    """Weights of one layer."""

    first: ExpertMatrices | ExpertCodes
    second: ExpertMatrices | ExpertCodes
    logits: Tensor  # [most tokens, num_experts]


class Case(NamedTuple):
    layers: list[Layer]
    shape: ExpertShape
    gate: ExpertGate
    norm: InputNorm
    kind: CodeKind | None  # of codes with a scale a group


def random_codes(form: Format, n: int, k: int, device: str) -> GroupedCodes:
    """Of numbers of about k^-0.5."""
    has_8_bits = form.kind in ("int8", "uint8", "e4m3")
    codes = torch.randint(0, 256, (n, k if has_8_bits else k // 2), dtype=torch.uint8, device=device)
    if form.kind == "e4m3":
        codes = codes.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # below 2, none of them no number
    groups = (n // form.rows, k // form.group)
    scale = torch.full(groups, {"e4m3": 1.5, "int4": 0.2}.get(form.kind, 0.35) * k**-0.5, device=device)
    if form.scale == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.log2(scale).round())
    return GroupedCodes(form.kind, codes, scale.to(form.scale), form.group, rows=form.rows)


def make_case(
    shape: ExpertShape,
    gate: ExpertGate,
    biased: bool,
    num_layers: int,
    most_tokens: int,
    device: str,
    dtype: torch.dtype,
    form: Format | None = None,
) -> Case:
    def matrices(rows: int, columns: int) -> ExpertMatrices | ExpertCodes:
        if form is not None:
            bias = torch.randn(shape.num_experts, rows, device=device) if biased else None
            return ExpertCodes(random_codes(form, shape.num_experts * rows, columns, device), shape.num_experts, bias)
        weight = torch.empty(shape.num_experts, rows, columns, device=device, dtype=dtype)
        for expert in weight:  # not all at once: in float32 they would take twice the room
            expert.copy_(torch.randn(rows, columns, device=device) * columns**-0.5)
        bias = torch.randn(shape.num_experts, rows, device=device, dtype=dtype) if biased else None
        return ExpertMatrices(weight, bias)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    layers = [
        Layer(
            matrices(2 * inner, hidden),
            matrices(hidden, inner),
            torch.randn(most_tokens, shape.num_experts, device=device),
        )
        for _ in range(num_layers)
    ]
    norm = InputNorm(torch.ones(hidden, device=device, dtype=dtype), 1e-6)
    return Case(layers, shape, gate, norm, None if form is None else form.kind)


def run_layers(case: Case, residual: Tensor, tiling: ExpertTiling | None) -> None:
    rule = RoutingRule(case.shape.top_k)
    for layer in case.layers:
        is_fit = can_group(layer.first, layer.second)
        routing = route(layer.logits[: len(residual)], rule)
        plan = plan_experts(routing, case.shape, tiling, can_group=is_fit, kind=case.kind)
        hidden = expert_product(residual, layer.first, plan, case.gate, case.norm)
        add_experts(residual, hidden, layer.second, plan)


def microseconds(case: Case, num_tokens: int, tiling: ExpertTiling | None) -> float:
    """Of one layer."""
    norm = case.norm.weight
    residual = torch.randn(num_tokens, len(norm), device=norm.device, dtype=norm.dtype)
    run_layers(case, residual, tiling)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_layers(case, residual, tiling)
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(case.layers))
    return statistics.median(times[2:])


def limit_us(case: Case, num_tokens: int) -> float:
    """The larger of the times of reading the touched experts and of multiplying."""
    shape, layer = case.shape, case.layers[0]
    ids = route(layer.logits[:num_tokens], RoutingRule(shape.top_k)).expert_ids
    weights = 3 * shape.hidden_size * shape.intermediate_size
    bytes_per_us = BYTES_PER_US.get(torch.cuda.get_device_name(), 4.3e6)
    if isinstance(layer.first, ExpertCodes):
        size = sum(tensor.nbytes for tensor in layer.first.codes.tensors().values()) / prod(layer.first.shape)
    else:
        size = layer.first.weight.element_size()
    read = len(ids.unique()) * weights * size / bytes_per_us
    return max(read, 2 * weights * ids.numel() / OPERATIONS_PER_US)


def candidates(shape: ExpertShape, num_tokens: int, kind: CodeKind | None) -> Iterator[ExpertTiling]:
    """Tilings to try; the tiles of both products are changed one after the other."""
    average = num_tokens * shape.top_k / shape.num_experts
    if num_tokens <= 8:
        for tile in (ProductTile(*sizes, 1) for sizes in itertools.product((1, 2, 4), (256, 512, 1024), (1, 2, 4))):
            yield ExpertTiling("pairs", 1, tile, tile)
    if num_tokens <= 8 and kind is not None:
        for tile in (ProductTile(*sizes, 1) for sizes in itertools.product((2, 4, 8), (1024, 2048, 4096), (1, 2, 4))):
            yield ExpertTiling("pairs", 1, tile, tile)
    if num_tokens > 2:
        for m in (16, 32, 64, 128):
            if min(average / 4, 64) <= m <= max(16, 2 * average):
                for tile in block_tiles(m):
                    yield ExpertTiling("blocks", m, tile, tile)
    if num_tokens >= 1024 and kind is None:
        yield default_tiling(shape, 10**9, can_group=True)


def block_tiles(block_m: int) -> Iterator[ProductTile]:
    """Narrow blocks wait for weights, so that many bytes must be on their way; wide ones for the products."""
    if block_m <= 32:
        stages = ((64, 3), (64, 4), (128, 2), (128, 3), (128, 4))
        for n, (k, count), warps in itertools.product((32, 64, 128), stages, (4, 8)):
            yield ProductTile(n, k, warps, count)
        return
    for n, (k, count), warps in itertools.product((64, 128), ((64, 3), (64, 4), (128, 2)), (4, 8)):
        yield ProductTile(n, k, warps, count)
    for count in (3, 4):
        yield ProductTile(256, 64, 8, count)


def tune(case: Case, num_tokens: int) -> ExpertTiling:
    """The fastest. Of each way and block, the tile of the first product is chosen, then that of the second."""
    best: dict[tuple[str, int], tuple[float, ExpertTiling]] = {}
    tried = list(candidates(case.shape, num_tokens, case.kind))
    norm = case.norm.weight
    residual = torch.zeros(num_tokens, len(norm), device=norm.device, dtype=norm.dtype)
    with compiling(os.cpu_count() or 1):
        for tiling in tried:
            run_layers(case, residual, tiling)
    torch.cuda.synchronize()
    for turn in ("first", "second"):
        for tiling in tried:
            key = (tiling.way, tiling.block_m)
            start = best[key][1] if key in best else tiling
            tiling = start._replace(**{turn: getattr(tiling, turn)})
            try:
                time = microseconds(case, num_tokens, tiling)
            except Exception as error:  # Triton's own classes too: too many registers, or too much shared memory
                print(f"# {tiling}: {error!r:.120}", file=sys.stderr)
                continue
            if key not in best or time < best[key][0]:
                best[key] = time, tiling
    return min(best.values(), key=lambda entry: entry[0])[1]


def write_table(case: Case, found: list[tuple[int, ExpertTiling]]) -> None:
    """Each tiling holds from half-way (in powers of two) after the size before to half-way before the next."""
    path = Path(expert_tilings.__file__).with_suffix(".json")
    tables = json.loads(path.read_text())
    entries = []
    for (num_tokens, tiling), following in itertools.zip_longest(found, found[1:]):
        most = 10**9 if following is None else int((num_tokens * following[0]) ** 0.5)
        entries.append([most, tiling.way, tiling.block_m, list(tiling.first), list(tiling.second)])
    key = str(case.shape) if case.kind is None else f"{case.shape} {case.kind}"
    tables.setdefault(torch.cuda.get_device_name(), {})[key] = entries
    lines = (f"    {json.dumps(name)}: {{\n{_rows(own)}\n    }}" for name, own in tables.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rows(own: dict[str, list[list[object]]]) -> str:
    rows = (
        f"        {json.dumps(shape)}: [\n"
        + ",\n".join(f"            {json.dumps(e)}" for e in entries)
        + "\n        ]"
        for shape, entries in own.items()
    )
    return ",\n".join(rows)


def check() -> None:
    tile, pair = ProductTile(32, 32, 4, 2), ProductTile(4, 64, 4, 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for gate, biased, form in ((ExpertGate(), False, ""), (CLAMPED, True, ""), (CLAMPED, True, "mxfp4")):
        case = make_case(ExpertShape(8, 64, 96, 2), gate, biased, 2, 40, device, torch.float32, FORMATS.get(form))
        for num_tokens in (1, 3, 40):
            start = torch.randn(num_tokens, 64, device=device)
            outcomes = []
            with triton_everywhere():
                for tiling in (ExpertTiling("pairs", 1, pair, pair), ExpertTiling("blocks", 16, tile, tile)):
                    outcomes.append(start.clone())
                    run_layers(case, outcomes[-1], tiling)
            print(f"{num_tokens} tokens: largest difference {float((outcomes[0] - outcomes[1]).abs().max()):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    args = parser.parse_args()
    if args.check:
        return check()
    if not torch.cuda.is_available():
        sys.exit(f"{__doc__}\nTimes need an NVIDIA GPU and a torch with CUDA.")
    device = torch.cuda.get_device_name()
    for name in args.shape:
        shape, gate, biased, form = SHAPES[name]
        case = make_case(shape, gate, biased, LAYERS, max(args.tokens), "cuda", torch.bfloat16, FORMATS.get(form))
        found = []
        for num_tokens in sorted(args.tokens):
            tiling = choose_tiling(device, shape, num_tokens, can_group=case.kind is None, kind=case.kind)
            if args.tune:
                tiling = tune(case, num_tokens)
                found.append((num_tokens, tiling))
                write_table(case, found)  # each time, so that what was found is kept if this is interrupted
            time, limit = microseconds(case, num_tokens, tiling), limit_us(case, num_tokens)
            result = {"shape": name, "tokens": num_tokens, "us": round(time, 2), "limit_us": round(limit, 2)}
            result |= {"share": round(limit / time, 3), "way": tiling.way, "block": tiling.block_m}
            print(json.dumps(result | {"first": tiling.first, "second": tiling.second}), flush=True)
        del case
        torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
