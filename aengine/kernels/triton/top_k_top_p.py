"""The cutoffs without a sort: extremes of every block of logits, a short list of candidates, then a search.

The cutoff of top-k (top-p) is the largest x that has `count(>= x) >= k` (`mass(>= x) >= p * Z_k`). nucleus.py makes the
list, with all of the GPU. The search, a program a row, halves an interval of floats, all of which are in order as
integers: 20 to 30 passes over some thousand logits.

Where a list is too short for its bracket (many logits that tie, or k beyond its size), the program searches in the same
way among all logits of the row: a pass then reads 4 * V bytes.

At least: 4 * V * n bytes read by the first launch (n = 256: 156 MB, 32 us at 4.8 TB/s for V = 151936; 131 MB, 27 us for
V = 128256); for top-k as much in one more, for top-p in three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import nucleus
from .launch import has_pdl, launch, launch_next_and_wait
from .nucleus import Candidates, as_mass, find_bracket, find_candidates, make_candidates

BLOCK = 256
_BLOCKS = 16  # blocks that a program of the first launch takes
_SEARCH_WARPS = 8
_TILE = 2048  # listed logits that are read at a time
_ROW_TILE = 8192  # the same of a whole row
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def find_cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    n, vocab_size = logits.shape
    cutoff = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return cutoff
    found = make_candidates(n, logits.device)
    stats = _extremes(logits, found)
    find_candidates(logits, temperature, top_k, top_p, stats, found, BLOCK)
    num_blocks = stats.shape[2]
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
        cutoff,
        vocab_size,
        logits.stride(0),
        temperature.stride(0),
        top_k.stride(0),
        top_p.stride(0),
        min_p.stride(0),
        num_blocks,
        PADDED=triton.next_power_of_2(num_blocks),
        LAST=nucleus.NUM_PASSES - 1,
        COLUMNS=nucleus.COLUMNS,
        LIST_SIZE=nucleus.LIST_SIZE,
        TILE=_TILE,
        ROW_TILE=_ROW_TILE,
        PDL=has_pdl(),
        num_warps=_SEARCH_WARPS,
    )
    return cutoff


def _extremes(logits: Tensor, found: Candidates) -> Tensor:
    """Return float32 [2, n, num_blocks] of blocks of BLOCK logits: highest; lowest but -inf.

    NaN counts as -inf. A block of -inf: -inf, +inf. Sets the zeros of ``found``.
    """
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    stats = torch.empty(2, n, num_blocks, dtype=torch.float32, device=logits.device)
    launch(
        _extremes_kernel,
        (n, triton.cdiv(num_blocks, _BLOCKS)),
        logits,
        stats,
        found.sums,
        found.counts,
        vocab_size,
        logits.stride(0),
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
def _extremes_kernel(
    logits: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
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
    highest = tl.max(x, axis=1)
    lowest = tl.min(tl.where(x == float("-inf"), float("inf"), x), axis=1)
    out = stats + row * num_blocks + block
    tl.store(out, highest, mask=block < num_blocks)
    tl.store(out + tl.num_programs(0).to(tl.int64) * num_blocks, lowest, mask=block < num_blocks)


@triton.jit(do_not_specialize=["vocab_size"])  # a vocabulary of one token would be a constant, over which no tile loops
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
    cutoff: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    min_p_stride: tl.tensor,
    num_blocks: tl.tensor,
    PADDED: tl.constexpr,
    LAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIST_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
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
        peaks = tl.load(stats + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        if tl.abs(peak) < float("inf"):
            length = tl.load(counts + row)
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
                bracket = (low, high, wanted - base)
                result = _search(values + row * LIST_SIZE, length, *bracket, has_k, k, p, peak, scale, TILE)
            elif has_k | (p < 1):
                low = tl.full((), float("-inf"), tl.float32)
                high = tl.full((), float("inf"), tl.float32)
                x = logits + row * logits_stride
                result = _search(x, vocab_size, low, high, wanted, has_k, k, p, peak, scale, ROW_TILE)
            if least > 0:
                result = tl.maximum(result, peak + t * tl.log(least))
    tl.store(cutoff + row, result)


@triton.jit
def _search(
    listed: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    wanted: tl.tensor,
    has_k: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the higher cutoff of top-k and top-p among the listed logits. Without top-k top-p's is in [low, high), and
    ``wanted`` is the mass from it up to ``high``."""
    result = low
    if has_k:
        result = _search_list(listed, length, low, high, k.to(tl.int64), peak, scale, False, TILE)
        count, mass = _measure_list(listed, length, tl.maximum(result, _LOWEST), peak, scale, TILE)
        # Z_k has of the tokens that tie with the k-th only as many as make k.
        mass -= tl.maximum(count - k, 0) * as_mass(result, peak, scale)
        wanted = (p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
    if p < 1:
        result = _search_list(listed, length, result, high, wanted, peak, scale, True, TILE)
    return result


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
    """Return (count, mass) of the listed logits >= ``least``."""
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
