"""A layer's four products with their norms and sums, ours against torch's ops, by batch size. On CUDA; a minute.

    python benchmarks/gpu_linear.py          # JSON lines: microseconds a layer, and of reading its weights
    TRITON_INTERPRET=1 python benchmarks/gpu_linear.py --check    # that both compute the same; also without a GPU

Time: a CUDA graph of 28 layers of Qwen3-0.6B's shape (or 32 of Llama-3.1-8B's), each with weights of its own, median of
replays. The attention between the products is left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.linear import add_linear, norm_gated_linear, norm_linear

SHAPES = {  # hidden, q, qkv, inner, layers
    "qwen3-0.6b": (1024, 2048, 4096, 3072, 28),
    "llama-3.1-8b": (4096, 4096, 6144, 14336, 32),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BYTES_PER_US = 4.3e6  # a device-to-device copy on an H200, bytes read and written
EPS = 1e-6

Layers = list[list[Tensor]]


def make_layers(shape: tuple[int, ...], **settings: Any) -> Layers:
    hidden, q, qkv, inner, num_layers = shape
    shapes = ((qkv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner))
    return [[torch.randn(*s, **settings) * 0.02 for s in shapes] for _ in range(num_layers)]


def ours(layers: Layers, norm: Tensor, residual: Tensor, attended: Tensor) -> None:
    for w_qkv, w_o, w_gate_up, w_down in layers:
        norm_linear(residual, norm, EPS, w_qkv)
        add_linear(residual, attended, w_o)
        add_linear(residual, norm_gated_linear(residual, norm, EPS, w_gate_up), w_down)


def torchs(layers: Layers, norm: Tensor, residual: Tensor, attended: Tensor) -> None:
    for w_qkv, w_o, w_gate_up, w_down in layers:
        F.linear(F.rms_norm(residual, norm.shape, norm, EPS), w_qkv)
        residual.add_(F.linear(attended, w_o))
        gate, up = F.linear(F.rms_norm(residual, norm.shape, norm, EPS), w_gate_up).chunk(2, -1)
        residual.add_(F.linear(F.silu(gate) * up, w_down))


def microseconds(step: partial[None]) -> float:
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


def check() -> None:
    layers, norm = make_layers((128, 64, 192, 128, 2)), torch.rand(128) + 0.5
    for batch in (1, 3, 40):
        residual, attended = torch.randn(batch, 128), torch.randn(batch, 64)
        expected = residual.clone()
        torchs(layers, norm, expected, attended)
        with triton_everywhere():
            ours(layers, norm, residual, attended)
        print(f"batch {batch}: largest difference {float((residual - expected).abs().max()):.1e}")


def main() -> None:
    if "--check" in sys.argv:
        return check()
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    for name, shape in SHAPES.items():
        hidden, q, num_layers = shape[0], shape[1], shape[4]
        layers, norm = make_layers(shape, **settings), torch.rand(hidden, **settings) + 0.5
        weights = sum(w.numel() * w.element_size() for w in layers[0])
        for batch in BATCHES:
            inputs = (layers, norm, torch.randn(batch, hidden, **settings), torch.randn(batch, q, **settings))
            result = {"shape": name, "batch": batch, "weights_us": round(weights / BYTES_PER_US, 2)}
            result |= {"ours_us": round(microseconds(partial(ours, *inputs)) / num_layers, 2)}
            result |= {"torch_us": round(microseconds(partial(torchs, *inputs)) / num_layers, 2)}
            print(json.dumps(result), flush=True)
        del layers
        torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    if "--check" not in sys.argv and not torch.cuda.is_available():
        sys.exit(f"{__doc__}\nTimes need an NVIDIA GPU and a torch with CUDA.")
    main()
