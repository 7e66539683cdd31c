"""Where in a row the cutoff of top-p lies, found by all of the GPU, however flat the distribution.

    pass 1   mass at or above each of a few pivots between the row's lowest and highest logit  ─> the bracket [low, high)
    pass 2   the same between the two                                                         ─> a narrower bracket
    gather   the logits in the bracket into a list, for one program a row to search (top_k_top_p.py)

A program has a chunk of a row; each adds up the chunks' masses of the pass before for itself, so that no launch is
needed in between. Masses are added as integers, units of 2**-36 of the likeliest token's: whoever adds them, and in
whatever order, gets the same bracket, so a row is cut alike in every batch.

At least, a pass: 4 * V * n bytes read (n = 64, V = 151936: 39 MB, which the L2 cache holds mostly; 10 us), an
exponential and a comparison a pivot for each logit. Chunks whose highest logit is below the bracket are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch

__all__ = ["COLUMNS", "Brackets", "as_mass", "find_bracket", "narrow"]

COLUMNS = 16  # of a chunk's masses: those at or above each pivot, and that of all
NUM_PASSES = 2
LIST_SIZE = 8192
_BLOCKS = 16  # of a chunk


class Brackets(NamedTuple):
    """The outcome of `narrow` for n rows; of rows without top-p, and of those with top-k, nothing is set."""

    pivots: Tensor  # float32 [passes, n, COLUMNS]: descending; the last column is the upper end of the bracket before
    masses: Tensor  # int64 [passes, n, chunks, COLUMNS]
    bases: Tensor  # int64 [passes, n]: mass at or above the upper end of the bracket before
    values: Tensor  # float32 [n, LIST_SIZE]: the logits in the last bracket, in any order
    counts: Tensor  # int32 [n]: how many they are; more than LIST_SIZE: not all are in the list


def narrow(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, stats: Tensor, block_size: int
) -> Brackets:
    """Arguments as of `find_cutoff`; ``stats``: of `block_stats`."""
    n, vocab_size = logits.shape
    num_blocks = stats.shape[2]
    num_chunks = triton.cdiv(num_blocks, _BLOCKS)
    device = logits.device
    found = Brackets(
        torch.empty(NUM_PASSES, n, COLUMNS, dtype=torch.float32, device=device),
        torch.empty(NUM_PASSES, n, num_chunks, COLUMNS, dtype=torch.int64, device=device),
        torch.empty(NUM_PASSES, n, dtype=torch.int64, device=device),
        torch.empty(n, LIST_SIZE, dtype=torch.float32, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
    )
    strides = (logits.stride(0), temperature.stride(0), top_k.stride(0), top_p.stride(0))
    common = (logits, temperature, top_k, top_p, stats, *found, vocab_size, *strides, num_blocks)
    constants = {"COLUMNS": COLUMNS, "BLOCK": block_size, "BLOCKS": _BLOCKS, "PDL": has_pdl(), "num_warps": 4}
    constants["CHUNKS"] = triton.next_power_of_2(num_chunks)
    for number in range(NUM_PASSES):
        padded = triton.next_power_of_2(num_blocks)
        launch(_measure_kernel, (n, num_chunks), *common, NUMBER=number, PADDED=padded, **constants)
    launch(_gather_kernel, (n, num_chunks), *common, LAST=NUM_PASSES - 1, LIST_SIZE=LIST_SIZE, **constants)
    return found


@triton.jit
def as_mass(x: tl.tensor, peak: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """exp((x - peak) / T) in units of 2**-36; a row's sum of them is below 2**55."""
    return (tl.exp(tl.minimum((x - peak) * scale, 0.0)) * 68719476736.0).to(tl.int64)


@triton.jit
def find_bracket(
    pivots: tl.tensor,
    masses: tl.tensor,
    bases: tl.tensor,
    top_p: tl.tensor,
    num_chunks: tl.tensor,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """(low, high, mass at or above high, mass that is wanted) of a pass, whose own row the pointers point to.

    The cutoff is in [low, high). high = inf: it is low. low = -inf: it is below all pivots.
    """
    column = tl.arange(0, COLUMNS)
    chunk = tl.arange(0, CHUNKS)
    at = masses + chunk[:, None] * COLUMNS + column[None, :]
    sums = tl.sum(tl.load(at, mask=chunk[:, None] < num_chunks, other=0), axis=0)
    total = tl.sum(tl.where(column == COLUMNS - 1, sums, 0), axis=0)
    wanted = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    is_reached = (sums >= wanted) & (column < COLUMNS - 1)
    first = tl.min(tl.where(is_reached, column, COLUMNS - 1), axis=0)
    pivot = tl.load(pivots + column)
    low = tl.sum(tl.where(column == first, pivot, 0.0), axis=0)
    high = tl.sum(tl.where(column == (first + COLUMNS - 1) % COLUMNS, pivot, 0.0), axis=0)
    base = tl.sum(tl.where(column == first - 1, sums, 0), axis=0)
    low = tl.where(first == COLUMNS - 1, float("-inf"), low)
    base = tl.where(first == 0, tl.load(bases), base)
    return low, high, base, wanted


@triton.jit
def _measure_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    stats: tl.tensor,
    pivots: tl.tensor,
    masses: tl.tensor,
    bases: tl.tensor,
    values: tl.tensor,
    counts: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    num_blocks: tl.tensor,
    NUMBER: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.num_programs(0).to(tl.int64)
    num_chunks = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    if (t > 0) & (p < 1) & ((k <= 0) | (k >= vocab_size)):
        scale = 1.0 / t
        all_blocks = tl.arange(0, PADDED)
        row_stats = stats + row * num_blocks
        peaks = tl.load(row_stats + all_blocks, mask=all_blocks < num_blocks, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        is_good = tl.abs(peak) < float("inf")
        peak = tl.where(is_good, peak, 0.0)
        column = tl.arange(0, COLUMNS)
        step = n * num_chunks * COLUMNS
        own_masses = masses + NUMBER * step + row * num_chunks * COLUMNS
        if NUMBER == 0:
            lows = tl.load(row_stats + n * num_blocks + all_blocks, mask=all_blocks < num_blocks, other=float("inf"))
            # All tokens below this together have 2e-9 of the likeliest one's mass at most.
            lowest = tl.where(is_good, tl.min(lows, axis=0), 0.0)
            low = tl.maximum(lowest, peak - t * (tl.log(vocab_size.to(tl.float32)) + 20.0))
            high = peak
            upper = tl.full((), float("inf"), tl.float32)
            base = tl.full((), 0, tl.int64)
            share = column.to(tl.float32) / (COLUMNS - 2)  # the first pivot is the highest logit itself
        else:
            before = NUMBER - 1
            low, upper, base, _wanted = find_bracket(
                pivots + (before * n + row) * COLUMNS,
                own_masses - step,
                bases + before * n + row,
                p,
                num_chunks,
                COLUMNS,
                CHUNKS,
            )
            high = tl.where(upper == float("inf"), low, upper)
            share = (column + 1).to(tl.float32) / (COLUMNS - 1)
        share = tl.minimum(share, 1.0)
        pivot = high * (1.0 - share) + low * share
        pivot = tl.where(column == COLUMNS - 2, low, pivot)
        if NUMBER == 0:
            pivot = tl.where(column == 0, high, pivot)
        pivot = tl.where(is_good, pivot, float("-inf"))
        out = own_masses + chunk * COLUMNS + column
        if chunk == 0:
            of_row = NUMBER * n + row
            tl.store(pivots + of_row * COLUMNS + column, tl.where(column == COLUMNS - 1, upper, pivot))
            tl.store(bases + of_row, base)
            if NUMBER == 0:
                tl.store(counts + row, 0)
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
        x = tl.where(x == x, x, float("-inf"))
        mass = tl.exp(tl.minimum((x - peak) * scale, 0.0))
        sums = tl.zeros((COLUMNS,), tl.float32)
        for i in tl.static_range(COLUMNS - 1):
            least = tl.sum(tl.where(column == i, pivot, 0.0), axis=0)
            part = tl.sum(tl.sum(tl.where(x >= least, mass, 0.0), axis=0), axis=0)
            sums = tl.where(column == i, part, sums)
        sums = tl.where(column == COLUMNS - 1, tl.sum(tl.sum(mass, axis=0), axis=0), sums)
        tl.store(out, (sums * 68719476736.0).to(tl.int64))


@triton.jit
def _gather_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    stats: tl.tensor,
    pivots: tl.tensor,
    masses: tl.tensor,
    bases: tl.tensor,
    values: tl.tensor,
    counts: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    num_blocks: tl.tensor,
    LAST: tl.constexpr,
    LIST_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.num_programs(0).to(tl.int64)
    num_chunks = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    if (t > 0) & (p < 1) & ((k <= 0) | (k >= vocab_size)):
        of_row = LAST * n + row
        low, high, _base, _wanted = find_bracket(
            pivots + of_row * COLUMNS,
            masses + of_row * num_chunks * COLUMNS,
            bases + of_row,
            p,
            num_chunks,
            COLUMNS,
            CHUNKS,
        )
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        peaks = tl.load(stats + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
        if (tl.max(peaks, axis=0) >= low) & (low > float("-inf")) & (high < float("inf")):
            token = chunk * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)
            x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
            is_in = (x >= low) & (x < high)
            place = tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            begin = tl.atomic_add(counts + row, tl.sum(is_in.to(tl.int32), axis=0), sem="relaxed")
            place += begin
            tl.store(values + row * LIST_SIZE + place, x, mask=is_in & (place < LIST_SIZE))
