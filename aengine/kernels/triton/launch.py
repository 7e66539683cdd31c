"""Launching the Triton kernels: at once, or, while `compiling`, only compiled, many at a time.

Programmatic dependent launch (Hopper and later): each kernel lets the next one begin at once (`gdc_launch_dependents`),
which then waits (`gdc_wait`) before it reads what its predecessors write. So the time to start a grid, and its reads of
weights, hide behind the grids before. Of every kernel that is launched so some program waits, and every program that
reads or writes what a step writes: then the end of one, which is the end of all its programs, means the end of all
before it. Programs without work end at once; if they waited, they would keep later ones from the multiprocessors. Ahead
of its wait a kernel may read what is never written in a step (weights), and what was written before the step's last
kernel that is not launched so: the lookup of the embeddings, so all that describes the batch, and the KV cache of the
steps before. A kernel that lets the next one begin only after its own wait lets it read all that this was for: so the
second product of experts knows the choice of experts at once.

That wait is the quickest way from one kernel to the next: 1.8 us in a chain of 140 products of one row on an H200. With
counters that one thread of each program polls it was 2.7 to 3.3, with words that carry the number of the step, polled
by all threads, 7 to 9: several kernels are resident at once, and all of them poll.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import build

from .compile_once import CompileOnce

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton for other GPUs; there `has_pdl` is False, and neither is ever called
    gdc_launch_dependents = gdc_wait = None

is_interpreted = bool(triton.knobs.runtime.interpret)
HAS_PTX = tl.constexpr(not is_interpreted and torch.version.hip is None)
"""Whether kernels may hold NVIDIA's instructions as they are written."""
_compile_only = False


@functools.cache
def _target() -> Any:
    """Return Triton's description of the GPU that it compiles for: its backend and arch; None where there is no GPU."""
    try:
        return None if is_interpreted else triton.runtime.driver.active.get_current_target()
    except RuntimeError:  # no driver is active
        return None


@functools.cache
def device_name() -> str:
    """Return the GPU's name, such as "NVIDIA H200"; "" where there is none."""
    if _target() is None:
        return ""
    accelerator = torch.accelerator.current_accelerator()
    return "" if accelerator is None else str(torch.get_device_module(accelerator).get_device_name())


@functools.cache
def has_pdl() -> bool:
    """Return whether this GPU overlaps launches: NVIDIA GPUs of compute capability 9.0 or more do."""
    target = _target()
    return target is not None and target.backend == "cuda" and target.arch >= 90


def has_mma() -> bool:
    """Return whether kernels may hold `mma` of bfloat16 as it is written: NVIDIA GPUs of compute capability 8.0 or more
    have it; the interpreter passes for one, and computes the same otherwise."""
    target = _target()
    return is_interpreted or (target is not None and (target.backend == "cuda" and target.arch >= 80))


def has_fp8() -> bool:
    """Return whether the GPU's instructions know float8_e4m3fn: those of compute capability 8.9 and later do."""
    target = _target()
    return is_interpreted or (target is not None and (target.backend != "cuda" or target.arch >= 89))


def known(weight: Tensor) -> Tensor:
    """Return ``weight``, with FP8 codes as bytes where the GPU does not know that type."""
    return weight if weight.dtype != torch.float8_e4m3fn or has_fp8() else weight.view(torch.int8)


def is_hopper() -> bool:
    """Return whether the GPU is of compute capability 9.0, for which some tilings are made; the interpreter passes for
    one."""
    target = _target()
    return is_interpreted or (target is not None and target.backend == "cuda" and target.arch == 90)


@functools.cache
def max_shared_memory() -> int:
    """Return how many bytes of shared memory a program may have on this GPU; an H200's where there is none.

    232,448 on compute capability 9.0 and 10.0, 166,912 on 8.0, 101,376 on 8.6, 8.9 and 12.0, 65,536 on 7.5. Tilings are
    chosen by what the kernels need at most; tests/kernels/test_compiles.py compares that with what the compiler takes.
    """
    if _target() is None:
        return 232_448
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(driver.get_current_device())
    return int(properties["max_shared_mem"])


@functools.cache
def num_multiprocessors() -> int:
    """Return how many multiprocessors this GPU has; 4 where there is none: an interpreter runs programs in turn."""
    if _target() is None:
        return 4
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"])


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel; one that takes PDL as a constexpr is told whether to wait, and launched accordingly."""
    if options.get("PDL"):
        options["launch_pdl"] = True
    if _compile_only:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


def bucket(count: int) -> int:
    """Return a power of two that holds ``count``, of few: each is a kernel of its own to be compiled."""
    return next(size for size in (16, 256, 1024, 1 << 16) if count <= size)


def _compilers() -> ThreadPoolExecutor:
    """Return threads that compile kernels, and that wait for those which other processes compile."""
    device = torch.accelerator.current_device_index()  # new threads would begin with the first device
    return ThreadPoolExecutor(256, "compile", torch.accelerator.set_device_index, (device,))


class _CompileAndLoad(CompileOnce):
    """Also loads the kernels: with some versions of Triton, what launches one is a module in C, which is compiled too
    at first."""

    def compiled(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with suppress(Exception):  # the kernel may be too large for this GPU: then the launch raises
            kernel[(1, 1, 1)]  # loads it, and launches nothing yet
        return kernel


@contextmanager
def _loading_apart() -> Iterator[None]:
    """Let threads load modules in C side by side. Those that launch kernels have one name; one that is loaded a second
    time would become the content of whichever `sys.modules` has by that name, which another thread may be about to use.
    """
    load, lock = build._load_module_from_path, threading.Lock()

    def load_apart(name: str, path: str) -> Any:
        with lock:
            sys.modules.pop(name, None)
            return load(name, path)

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextmanager
def compiling(num_threads: int) -> Iterator[None]:
    """Make `launch` compile instead of run, ``num_threads`` kernels at a time; at the end all are compiled, and on the
    GPU. Kernels cached on disk take little time, and so do those that another process compiles meanwhile."""
    global _compile_only
    with _loading_apart(), _compilers() as pool, _CompileAndLoad(pool, num_threads):
        _compile_only = True
        try:
            yield
        finally:
            _compile_only = False


def only_compiles() -> bool:
    """Return whether `launch` compiles, so that what kernels should have written is not there."""
    return _compile_only


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Let the next kernel begin, see above; nothing without PDL, as of the two below."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the end of all kernels before."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_next_and_wait(PDL: tl.constexpr):
    launch_next(PDL)
    wait_for_previous(PDL)


@triton.jit
def prefetch(pointer, index, COUNT: tl.constexpr):
    """Prefetch (most of) the ``index``-th COUNT elements from ``pointer`` on into the L2 cache: for kernels with
    PDL, ahead of their wait. In 128 pieces of a multiple of 16 bytes; where they begin is aligned to 16."""
    PIECE: tl.constexpr = COUNT * pointer.dtype.element_ty.primitive_bitwidth // 8 // 2048 * 16
    begin = pointer + index.to(tl.int64) * COUNT
    at = begin.to(tl.int64, bitcast=True) + tl.arange(0, 128).to(tl.int64) * PIECE
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at, tl.full((128,), PIECE, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
