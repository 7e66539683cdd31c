"""How fast this machine is at two fixed things, as a line of JSON: hosts of one kind differ by 10 to 20%.

On a GPU (torch with CUDA): TB/s of copying 1 GiB, read and written; TFLOP/s of a bf16 product of 8192 x 8192 matrices.
Elsewhere (numpy): GB/s of copying 256 MiB; GFLOP/s of an fp32 product of 2048 x 2048 matrices.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def on_gpu(torch: Any) -> dict[str, Any]:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn_like(a)
    c = torch.empty_like(a)

    def timed(work: Callable[[], Any], inner: int) -> float:
        def whole() -> None:
            for _ in range(inner):
                work()
            torch.cuda.synchronize()

        whole()
        return median_seconds(whole, 7) / inner

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_s": round(2 * 2**30 / timed(lambda: target.copy_(source), 20) / 1e12, 3),
        "matmul_tflop_s": round(2 * 8192**3 / timed(lambda: torch.matmul(a, b, out=c), 10) / 1e12, 1),
    }


def on_cpu() -> dict[str, Any]:
    import numpy

    source = numpy.ones(2**25)
    target = numpy.empty_like(source)
    a = numpy.ones((2048, 2048), dtype=numpy.float32)
    copy = median_seconds(lambda: numpy.copyto(target, source), 7)
    product = median_seconds(lambda: a @ a, 7)
    return {
        "device": "cpu",
        "copy_gb_s": round(2 * source.nbytes / copy / 1e9, 2),
        "matmul_gflop_s": round(2 * 2048**3 / product / 1e9, 1),
    }


def main() -> None:
    try:
        import torch
    except ImportError:
        torch = None
    print(json.dumps(on_gpu(torch) if torch is not None and torch.cuda.is_available() else on_cpu()))


if __name__ == "__main__":
    main()
