"""Ragged writes: some programs a run, each finding where its run begins in ``values``.

At least: 8 bytes a value (read, written) and 16 a run; no arithmetic to speak of.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_TILE = 1024
_MAX_PARTS = 16


def apply_staged_writes(target: Tensor, starts: Tensor, lengths: Tensor, values: Tensor) -> None:
    if starts.shape[0] == 0:
        return
    # The host knows only the largest length that a run can have.
    parts = min(_MAX_PARTS, triton.cdiv(values.shape[0], 4 * _TILE))
    launch(_write_kernel, (starts.shape[0], max(parts, 1)), target, starts, lengths, values, TILE=_TILE)


@triton.jit(do_not_specialize=["starts", "lengths", "values"])
def _write_kernel(
    target: tl.tensor, starts: tl.tensor, lengths: tl.tensor, values: tl.tensor, TILE: tl.constexpr
) -> None:
    run = tl.program_id(0)
    offsets = tl.arange(0, TILE)
    before = tl.zeros((TILE,), tl.int64)
    done = 0
    while done < run:
        before += tl.load(lengths + done + offsets, mask=done + offsets < run, other=0)
        done += TILE
    source = values + tl.sum(before)
    begin = target + tl.load(starts + run)
    length = tl.load(lengths + run)
    i = tl.program_id(1).to(tl.int64) * TILE
    while i < length:
        at = i + offsets
        tl.store(begin + at, tl.load(source + at, mask=at < length), mask=at < length)
        i += tl.num_programs(1) * TILE
