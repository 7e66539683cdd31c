"""How the Triton bodies are launched: at once, or, while `compiling`, only compiled, many at a time.

Programmatic dependent launch (Hopper and later): a kernel may begin while the one before it ends, and waits
(`gdc_wait`) before it reads what that one wrote. So the time to start a grid, and the first reads of weights, which
nobody writes, hide behind the end of the grid before. Every kernel here that is launched so waits, whatever it reads,
since the one after it relies on it: what N + 1 has waited for includes all that N had waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

__all__ = ["compiling", "has_pdl", "is_interpreted", "launch"]

is_interpreted = bool(triton.knobs.runtime.interpret)
_compile_only = False


@functools.cache
def has_pdl() -> bool:
    """Whether this GPU overlaps launches: compute capability 9.0 or more."""
    return not is_interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel; one that takes PDL as a constexpr is told whether to wait, and launched accordingly."""
    if "PDL" in options and options["PDL"]:
        options["launch_pdl"] = True
    if _compile_only:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def compiling(num_threads: int) -> Iterator[None]:
    """Within, `launch` compiles and does not run; at the end all are compiled. What is on disk already takes no time."""
    global _compile_only
    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool, triton.AsyncCompileMode(pool):
        _compile_only = True
        try:
            yield
        finally:
            _compile_only = False
