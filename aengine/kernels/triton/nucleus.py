"""A short list of a row's logits, among which are the cutoffs of top-k and top-p, found by all of the GPU.

top-p      pass 1    mass at or above each of a few pivots between the row's lowest and highest logit ─> a bracket
           pass 2    the same between the ends of that                                              ─> a narrower one
           gather    the logits in it: of 150,000 some thousand, however flat the distribution is
top-k      gather    the logits that reach a lower bound of the k-th largest; of these the search finds top-p's, too

A program has a chunk of a row. Masses are added as integers, in units of 2**-36 of the likeliest token's mass: in
whatever order that happens, the sums are the same, so a row is cut alike in every batch.

At least, a launch: 4 * V * n bytes read (n = 64, V = 151936: 39 MB, most of which the L2 cache holds; 10 us), and in
the passes an exponential and a comparison a pivot for each logit. Chunks whose highest logit is below the bracket are
not read, and rows without top-k and top-p cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next_and_wait

COLUMNS = 16  # masses of a row and pass: those at or above each pivot, and, of the first pass, that of all
NUM_PASSES = 2
LIST_SIZE = 8192
_BLOCKS = 4  # blocks of a chunk, which one warp measures
_GATHER_WARPS = 4
_UNIT = tl.constexpr(2.0**36)


class Candidates(NamedTuple):
    """The outcome of `find_candidates` for n rows; of rows without top-k and top-p, nothing is set but the counts."""

    sums: Tensor  # int64 [passes, n, COLUMNS]: masses; zeros before
    counts: Tensor  # int32 [n]: logits in the row's bracket; more than LIST_SIZE: not all are in the list; zeros before
    pivots: Tensor  # float32 [passes, n, COLUMNS]: descending; the last column is the upper end of the bracket before
    bases: Tensor  # int64 [passes, n, 2]: mass at or above that; mass that is wanted, -1 before it is known
    values: Tensor  # float32 [n, LIST_SIZE]: the logits in the last bracket, in any order


def make_candidates(n: int, device: torch.device) -> Candidates:
    return Candidates(
        torch.empty(NUM_PASSES, n, COLUMNS, dtype=torch.int64, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
        torch.empty(NUM_PASSES, n, COLUMNS, dtype=torch.float32, device=device),
        torch.empty(NUM_PASSES, n, 2, dtype=torch.int64, device=device),
        torch.empty(n, LIST_SIZE, dtype=torch.float32, device=device),
    )


def find_candidates(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    stats: Tensor,
    found: Candidates,
    block_size: int,
) -> None:
    """Find the candidates for `find_cutoff`, with its arguments; ``stats`` is that of its first launch, which has set
    the zeros of ``found``."""
    n, vocab_size = logits.shape
    num_blocks = stats.shape[2]
    strides = (logits.stride(0), temperature.stride(0), top_k.stride(0), top_p.stride(0))
    common = (logits, temperature, top_k, top_p, stats, *found, vocab_size, *strides, num_blocks)
    constants = {"COLUMNS": COLUMNS, "BLOCK": block_size, "BLOCKS": _BLOCKS, "PDL": has_pdl()}
    constants["PADDED"] = triton.next_power_of_2(num_blocks)
    grid = (n, triton.cdiv(num_blocks, _BLOCKS))
    for number in range(NUM_PASSES):
        launch(_measure_kernel, grid, *common, NUMBER=number, num_warps=1, **constants)
    last = NUM_PASSES - 1
    launch(_gather_kernel, grid, *common, LAST=last, LIST_SIZE=LIST_SIZE, num_warps=_GATHER_WARPS, **constants)


@triton.jit
def as_mass(x: tl.tensor, peak: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return exp((x - peak) / T) in the unit of masses; a row's sum of them is below 2**55."""
    return (tl.exp(tl.minimum((x - peak) * scale, 0.0)) * _UNIT).to(tl.int64)


@triton.jit
def find_bracket(
    sums: tl.tensor,
    pivots: tl.tensor,
    bases: tl.tensor,
    top_p: tl.tensor,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return (low, high, mass at or above high, mass that is wanted) after a pass, whose own row the pointers point to.

    The cutoff is in [low, high). high = inf: it is low. low = -inf: it is below all pivots.
    """
    column = tl.arange(0, COLUMNS)
    mass = tl.load(sums + column)
    wanted = tl.load(bases + 1)
    total = tl.sum(tl.where(column == COLUMNS - 1, mass, 0), axis=0)
    wanted = tl.where(wanted < 0, (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), wanted)
    is_reached = (mass >= wanted) & (column < COLUMNS - 1)
    first = tl.min(tl.where(is_reached, column, COLUMNS - 1), axis=0)
    pivot = tl.load(pivots + column)
    low = tl.sum(tl.where(column == first, pivot, 0.0), axis=0)
    low = tl.where(first == COLUMNS - 1, float("-inf"), low)
    high = tl.sum(tl.where(column == (first + COLUMNS - 1) % COLUMNS, pivot, 0.0), axis=0)
    base = tl.sum(tl.where(column == first - 1, mass, 0), axis=0)
    base = tl.where(first == 0, tl.load(bases), base)
    return low, high, base, wanted


@triton.jit
def _below_kth(peaks: tl.tensor, lowest: tl.tensor, peak: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Return a logit not above the k-th largest of the row, and near the k-th largest of the blocks' peaks."""
    low = lowest
    high = peak
    for _i in range(8):
        middle = low * 0.5 + high * 0.5
        is_low = tl.sum((peaks >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    return low


@triton.jit
def _peak_of_chunk(stats: tl.tensor, chunk: tl.tensor, num_blocks: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    return tl.max(tl.load(stats + block, mask=block < num_blocks, other=float("-inf")), axis=0)


@triton.jit
def _measure_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    pivots: tl.tensor,
    bases: tl.tensor,
    values: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    num_blocks: tl.tensor,
    NUMBER: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    n = tl.num_programs(0).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    if (t > 0) & (p < 1) & ((k <= 0) | (k >= vocab_size)):
        scale = 1.0 / t
        block = tl.arange(0, PADDED)
        row_stats = stats + row * num_blocks
        peak = tl.max(tl.load(row_stats + block, mask=block < num_blocks, other=float("-inf")), axis=0)
        is_good = tl.abs(peak) < float("inf")
        peak = tl.where(is_good, peak, 0.0)
        own_peak = _peak_of_chunk(row_stats, chunk, num_blocks, BLOCKS)
        of_row = NUMBER * n + row
        if NUMBER == 0:
            lows = tl.load(row_stats + n * num_blocks + block, mask=block < num_blocks, other=float("inf"))
            lowest = tl.where(is_good, tl.min(lows, axis=0), 0.0)
            # All tokens below this together have 2e-9 of the likeliest one's mass at most.
            low = tl.maximum(lowest, peak - t * (tl.log(tl.full((), vocab_size, tl.float32)) + 20.0))
            high = peak
            upper = tl.full((), float("inf"), tl.float32)
            base = tl.full((), 0, tl.int64)
            wanted = tl.full((), -1, tl.int64)
        else:
            before = of_row - n
            low, upper, base, wanted = find_bracket(
                sums + before * COLUMNS, pivots + before * COLUMNS, bases + before * 2, p, COLUMNS
            )
            high = tl.where(upper == float("inf"), low, upper)
        if chunk == 0:
            tl.store(bases + of_row * 2, base)
            tl.store(bases + of_row * 2 + 1, wanted)
            tl.store(pivots + of_row * COLUMNS + COLUMNS - 1, upper)
        x = tl.full((BLOCKS * BLOCK,), float("-inf"), tl.float32)
        if own_peak >= low:
            token = chunk * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)
            x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
            x = tl.where(x == x, x, float("-inf"))
        mass = tl.exp(tl.minimum((x - peak) * scale, 0.0))
        column, parts = tl.arange(0, COLUMNS), tl.zeros((COLUMNS,), tl.float32)
        for i in tl.static_range(COLUMNS - 1):
            # The first pass begins at the highest logit itself; the last pivot is the lower end itself.
            share = i / (COLUMNS - 2) if NUMBER == 0 else (i + 1) / (COLUMNS - 1)
            pivot = low if i == COLUMNS - 2 else (high if share == 0 else high * (1.0 - share) + low * share)
            pivot = tl.where(is_good, pivot, float("-inf"))
            if chunk == 0:
                tl.store(pivots + of_row * COLUMNS + i, pivot)
            part = tl.sum(tl.where(x >= pivot, mass, 0.0), axis=0)
            parts = tl.where(column == i, part, parts)
        if NUMBER == 0:
            parts = tl.where(column == COLUMNS - 1, tl.sum(mass, axis=0), parts)
        tl.atomic_add(sums + of_row * COLUMNS + column, (parts * _UNIT).to(tl.int64), sem="relaxed")


@triton.jit
def _gather_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    pivots: tl.tensor,
    bases: tl.tensor,
    values: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    num_blocks: tl.tensor,
    LAST: tl.constexpr,
    LIST_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    n = tl.num_programs(0).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    has_k = (k > 0) & (k < vocab_size)
    if (t > 0) & ((p < 1) | has_k):
        row_stats = stats + row * num_blocks
        low = tl.full((), float("-inf"), tl.float32)
        high = tl.full((), float("inf"), tl.float32)
        if has_k:
            block = tl.arange(0, PADDED)
            peaks = tl.load(row_stats + block, mask=block < num_blocks, other=float("-inf"))
            lows = tl.load(row_stats + n * num_blocks + block, mask=block < num_blocks, other=float("inf"))
            peak = tl.max(peaks, axis=0)
            if tl.abs(peak) < float("inf"):
                low = _below_kth(peaks, tl.min(lows, axis=0), peak, k)
        else:
            of_row = LAST * n + row
            low, high, _base, _wanted = find_bracket(
                sums + of_row * COLUMNS, pivots + of_row * COLUMNS, bases + of_row * 2, p, COLUMNS
            )
        own_peak = _peak_of_chunk(row_stats, chunk, num_blocks, BLOCKS)
        if (own_peak >= low) & (low > float("-inf")) & (has_k | (high < float("inf"))):
            token = chunk * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)
            x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
            is_in = (x >= low) & (x < high)
            number = is_in.to(tl.int32)
            begin = tl.atomic_add(counts + row, tl.sum(number, axis=0), sem="relaxed")
            place = begin + tl.cumsum(number, axis=0) - 1
            tl.store(values + row * LIST_SIZE + place, x, mask=is_in & (place < LIST_SIZE))
