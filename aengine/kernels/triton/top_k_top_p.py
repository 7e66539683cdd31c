"""The cutoffs without a sort: statistics of every block of logits, a short list of candidates, then a search.

The cutoff of top-k (top-p) is the largest x that has `count(>= x) >= k` (`mass(>= x) >= p * Z_k`). nucleus.py makes the
list, with all of the GPU. The search, a program a row, halves an interval of floats, all of which are in order as
integers: 20 to 30 passes over some thousand logits.

Where a list is too short for its bracket (many logits that tie, or k in the thousands), the program searches among the
logits themselves. A pass at a pivot then reads only the blocks whose maximum reaches it, and the interval's ends are
drawn in to logits that occur.

At least: 4 * V * n bytes read by the first launch (n = 256: 156 MB, 32 us at 4.8 TB/s for V = 151936; 131 MB, 27 us for
V = 128256), with an exponential a logit; for top-k as much in one more, for top-p in three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import nucleus
from .launch import has_pdl, launch, launch_next_and_wait
from .nucleus import Candidates, as_mass, find_bracket, find_candidates, make_candidates

__all__ = ["BLOCK", "block_stats", "find_cutoff"]

BLOCK = 256
_BLOCKS = 16  # blocks that a program of the first launch takes
_GATHERED = 16  # blocks that a pass reads at a time
_SEARCH_WARPS = 8
_TILE = 2048  # listed logits that are read at a time
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def find_cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    n, vocab_size = logits.shape
    cutoff = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return cutoff
    found = make_candidates(n, logits.device)
    stats = block_stats(logits, temperature, found)
    find_candidates(logits, temperature, top_k, top_p, stats, found, BLOCK)
    num_blocks = stats.shape[2]
    padded = triton.next_power_of_2(num_blocks)
    active = torch.empty(n, padded, dtype=torch.int32, device=logits.device)
    launch(
        _search_kernel,
        (n,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        stats,
        *found,
        active,
        cutoff,
        vocab_size,
        logits.stride(0),
        temperature.stride(0),
        top_k.stride(0),
        top_p.stride(0),
        min_p.stride(0),
        num_blocks,
        BLOCK=BLOCK,
        PADDED=padded,
        GATHERED=_GATHERED,
        LAST=nucleus.NUM_PASSES - 1,
        COLUMNS=nucleus.COLUMNS,
        LIST_SIZE=nucleus.LIST_SIZE,
        TILE=_TILE,
        PDL=has_pdl(),
        num_warps=_SEARCH_WARPS,
    )
    return cutoff


def block_stats(logits: Tensor, temperature: Tensor, found: Candidates) -> Tensor:
    """float32 [3, n, num_blocks] of blocks of BLOCK logits: highest; lowest but -inf; sum of exp((x - highest) / T).

    NaN counts as -inf. A block of -inf: -inf, +inf, 0. A greedy row's T is taken as 1. Sets the zeros of ``found``.
    """
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    stats = torch.empty(3, n, num_blocks, dtype=torch.float32, device=logits.device)
    launch(
        _stats_kernel,
        (n, triton.cdiv(num_blocks, _BLOCKS)),
        logits,
        temperature,
        stats,
        found.sums,
        found.counts,
        vocab_size,
        logits.stride(0),
        temperature.stride(0),
        num_blocks,
        BLOCK=BLOCK,
        BLOCKS=_BLOCKS,
        COLUMNS=nucleus.COLUMNS,
        NUM_PASSES=nucleus.NUM_PASSES,
        PDL=has_pdl(),
        num_warps=4,
    )
    return stats


@triton.jit
def _stats_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_PASSES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(counts + row, 0)
        for number in tl.static_range(NUM_PASSES):
            of_row = number * tl.num_programs(0).to(tl.int64) + row
            tl.store(sums + of_row * COLUMNS + tl.arange(0, COLUMNS), tl.zeros((COLUMNS,), tl.int64))
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    t = tl.load(temperature + row * temperature_stride)
    scale = 1.0 / tl.where(t > 0, t, 1.0)
    highest = tl.max(x, axis=1)
    lowest = tl.min(tl.where(x == float("-inf"), float("inf"), x), axis=1)
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    mass = tl.sum(tl.exp((x - base[:, None]) * scale), axis=1)
    out = stats + row * num_blocks + block
    step = tl.num_programs(0).to(tl.int64) * num_blocks
    tl.store(out, highest, mask=block < num_blocks)
    tl.store(out + step, lowest, mask=block < num_blocks)
    tl.store(out + 2 * step, mass, mask=block < num_blocks)


@triton.jit
def _search_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    pivots: tl.tensor,
    bases: tl.tensor,
    values: tl.tensor,
    active: tl.tensor,
    cutoff: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    min_p_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    GATHERED: tl.constexpr,
    LAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIST_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    least = tl.load(min_p + row * min_p_stride)
    result = tl.full((), float("-inf"), tl.float32)
    has_k = (k > 0) & (k < vocab_size)
    if (t > 0) & (has_k | (p < 1) | (least > 0)):
        scale = 1.0 / t
        block = tl.arange(0, PADDED)
        at = stats + row * num_blocks + block
        step = tl.num_programs(0).to(tl.int64) * num_blocks
        peaks = tl.load(at, mask=block < num_blocks, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        if tl.abs(peak) < float("inf"):
            length = tl.load(counts + row)
            listed = values + row * LIST_SIZE
            low = tl.full((), float("-inf"), tl.float32)
            high = tl.full((), float("inf"), tl.float32)
            base = tl.full((), 0, tl.int64)
            wanted = tl.full((), 0, tl.int64)
            if (p < 1) & (has_k == 0):
                of_row = LAST * tl.num_programs(0).to(tl.int64) + row
                low, high, base, wanted = find_bracket(
                    sums + of_row * COLUMNS, pivots + of_row * COLUMNS, bases + of_row * 2, p, COLUMNS
                )
            if (low > float("-inf")) & (high == float("inf")):
                result = low
            elif (has_k | (p < 1)) & (length > 0) & (length <= LIST_SIZE):
                if has_k:
                    result = _search_list(listed, length, low, high, k.to(tl.int64), peak, scale, False, TILE)
                    count, mass = _measure_list(listed, length, tl.maximum(result, _LOWEST), peak, scale, TILE)
                    # Z_k has of the tokens that tie with the k-th only as many as make k.
                    mass -= tl.maximum(count - k, 0) * as_mass(result, peak, scale)
                    wanted = (p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
                    low = result
                if p < 1:
                    result = _search_list(listed, length, low, high, wanted - base, peak, scale, True, TILE)
            elif has_k | (p < 1):
                x, ids = logits + row * logits_stride, active + row * PADDED
                result = _search_row(
                    x, ids, at, step, peaks, peak, has_k, k, p, scale, vocab_size, num_blocks, BLOCK, PADDED, GATHERED
                )
            if least > 0:
                result = tl.maximum(result, peak + t * tl.log(least))
    tl.store(cutoff + row, result)


@triton.jit
def _place(x: tl.tensor) -> tl.tensor:
    """Map floats to int64 so that the integers sort as the floats do."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_at(place: tl.tensor) -> tl.tensor:
    bits = place.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search_list(
    listed: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    wanted: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the largest of the listed logits in [low, high) whose count (mass) at or above is >= ``wanted``; the
    lowest of them if none has as much, for want of digits. low = -inf: as low as they come, or -inf if none has as
    much."""
    at = tl.arange(0, TILE)
    first = tl.load(listed + at, mask=at < length, other=float("-inf"))
    own = tl.where(first > float("-inf"), as_mass(first, peak, scale), 0) if BY_MASS else first
    # invariant: all values at or above ``begin`` have the wanted mass together, those at or above ``end`` do not
    end = _place(tl.minimum(high, peak)) + 1
    begin = _place(low)
    while end - begin > 1:
        middle = (begin + end) // 2
        pivot = _float_at(middle)
        if BY_MASS:
            amount = tl.sum(tl.where(first >= pivot, own, 0), axis=0)
        else:
            amount = tl.sum((first >= pivot).to(tl.int32), axis=0).to(tl.int64)
        i = TILE
        while i < length:
            x = tl.load(listed + i + at, mask=i + at < length, other=float("-inf"))
            if BY_MASS:
                amount += tl.sum(tl.where(x >= pivot, as_mass(x, peak, scale), 0), axis=0)
            else:
                amount += tl.sum((x >= pivot).to(tl.int32), axis=0)
            i += TILE
        if amount >= wanted:
            begin = middle
        else:
            end = middle
    return _float_at(begin)


@triton.jit
def _measure_list(
    listed: tl.tensor, length: tl.tensor, least: tl.tensor, peak: tl.tensor, scale: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """(count, mass) of the listed logits >= ``least``."""
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 0, tl.int64)
    i = 0
    while i < length:
        at = i + tl.arange(0, TILE)
        x = tl.load(listed + at, mask=at < length, other=float("-inf"))
        count += tl.sum((x >= least).to(tl.int32), axis=0)
        mass += tl.sum(tl.where(x >= least, as_mass(x, peak, scale), 0), axis=0)
        i += TILE
    return count, mass


@triton.jit
def _search_row(
    x: tl.tensor,
    ids: tl.tensor,
    at: tl.tensor,
    step: tl.tensor,
    peaks: tl.tensor,
    peak: tl.tensor,
    has_k: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    scale: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    GATHERED: tl.constexpr,
) -> tl.tensor:
    """Return the higher cutoff of top-k and top-p, searched among the row's logits at ``x``; ``at``: its stats."""
    is_block = tl.arange(0, PADDED) < num_blocks
    lowest = tl.min(tl.load(at + step, mask=is_block, other=float("inf")), axis=0)
    total = tl.sum(tl.load(at + 2 * step, mask=is_block, other=0.0) * tl.exp((peaks - peak) * scale), axis=0)
    result = tl.full((), float("-inf"), tl.float32)
    if has_k:
        wanted = k.to(tl.float32)
        result, count, total = _search(
            x, ids, peaks, peak, lowest, wanted, scale, vocab_size, False, BLOCK, PADDED, GATHERED
        )
        # Z_k has of the tokens that tie with the k-th only as many as make k; without a k-th it has all.
        total -= tl.where(count > wanted, (count - wanted) * tl.exp((result - peak) * scale), 0.0)
    if p < 1:
        floor = tl.maximum(result, lowest)
        found, _count, _mass = _search(
            x, ids, peaks, peak, floor, p * total, scale, vocab_size, True, BLOCK, PADDED, GATHERED
        )
        result = tl.maximum(result, found)
    return result


@triton.jit
def _search(
    x: tl.tensor,
    ids: tl.tensor,
    peaks: tl.tensor,
    peak: tl.tensor,
    lowest: tl.tensor,
    wanted: tl.tensor,
    scale: tl.tensor,
    vocab_size: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    GATHERED: tl.constexpr,
) -> tl.tensor:
    """(cutoff, count, mass): the largest logit, not below ``lowest``, whose count (mass) at or above is >= ``wanted``.

    -inf, with the count and mass from ``lowest`` on, if there is none. ``low`` and ``high`` are logits that occur, or
    -inf: the cutoff is one of them or between them.
    """
    low = tl.full((), float("-inf"), tl.float32)
    high = peak
    step = 1.0 / scale
    low_count = tl.full((), 0.0, tl.float32)
    low_mass = tl.full((), 0.0, tl.float32)
    while low < high:
        if low == float("-inf"):
            pivot = tl.maximum(peak - step, lowest)
            step *= 4.0
        else:
            pivot = low * 0.5 + high * 0.5  # their distance may be more than a float32 holds
            pivot = tl.where(pivot > low, pivot, high)
        count, mass, above, below = _pass(x, ids, peaks, peak, pivot, scale, vocab_size, BLOCK, PADDED, GATHERED)
        reached = (mass if BY_MASS else count) >= wanted
        is_last = pivot == lowest
        if reached | is_last:
            low_count, low_mass = count, mass
        if reached:
            low = above
        else:
            # The search does not go below ``lowest``: high = low = -inf ends it.
            high = tl.where(is_last, float("-inf"), below)
    return low, low_count, low_mass


@triton.jit
def _pass(
    x: tl.tensor,
    ids: tl.tensor,
    peaks: tl.tensor,
    peak: tl.tensor,
    pivot: tl.tensor,
    scale: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    GATHERED: tl.constexpr,
) -> tl.tensor:
    """Count of the logits >= pivot, their sum of exp((x - peak) / T), the lowest of them, and the highest below."""
    block = tl.arange(0, PADDED)
    reaches = peaks >= pivot
    place = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
    num_active = tl.sum(reaches.to(tl.int32), axis=0)
    tl.debug_barrier()  # every thread has read the list of the pass before
    tl.store(ids + place, block, mask=reaches)
    tl.debug_barrier()
    counts = tl.zeros((GATHERED, BLOCK), tl.float32)
    masses = tl.zeros((GATHERED, BLOCK), tl.float32)
    above = tl.full((GATHERED, BLOCK), float("inf"), tl.float32)
    below = tl.full((GATHERED, BLOCK), float("-inf"), tl.float32)
    i = 0
    while i < num_active:
        at = i + tl.arange(0, GATHERED)
        which = tl.load(ids + at, mask=at < num_active, other=PADDED)
        token = which[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        value = tl.load(x + token, mask=token < vocab_size, other=float("-inf"))
        value = tl.where(value == value, value, float("-inf"))
        is_in = value >= pivot
        counts += is_in.to(tl.float32)
        masses += tl.where(is_in, tl.exp((value - peak) * scale), 0.0)
        above = tl.minimum(above, tl.where(is_in, value, float("inf")))
        below = tl.maximum(below, tl.where(is_in, float("-inf"), value))
        i += GATHERED
    highest_below = tl.maximum(
        tl.max(tl.max(below, axis=1), axis=0), tl.max(tl.where(reaches, float("-inf"), peaks), axis=0)
    )
    return (
        tl.sum(tl.sum(counts, axis=1), axis=0),
        tl.sum(tl.sum(masses, axis=1), axis=0),
        tl.min(tl.min(above, axis=1), axis=0),
        highest_below,
    )
