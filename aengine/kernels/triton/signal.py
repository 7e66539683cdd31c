"""One program, of which one thread writes or polls a counter. Neither overlaps other launches (no PDL): what comes
before has ended, and what comes behind has not begun."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch


def signal(counter: Tensor, number: int) -> None:
    launch(_signal, (1,), counter, number, num_warps=1)


def wait(counter: Tensor, number: int) -> None:
    launch(_wait, (1,), counter, number, num_warps=1)


@triton.jit
def _counter_at(counter_ptr):
    return tl.load(counter_ptr).to(tl.pointer_type(tl.int64))


@triton.jit(do_not_specialize=["number"])
def _signal(counter_ptr, number):
    tl.atomic_xchg(_counter_at(counter_ptr), number.to(tl.int64), sem="release", scope="sys")


@triton.jit(do_not_specialize=["number"])
def _wait(counter_ptr, number):
    counter = _counter_at(counter_ptr)
    while tl.atomic_add(counter, number.to(tl.int64) * 0, sem="acquire", scope="sys") < number:
        pass
