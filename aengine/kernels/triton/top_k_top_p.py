"""The cutoffs without a sort: statistics of every block of logits, then a search, a program a row.

The cutoff of top-k (top-p) is the largest logit x that has `count(>= x) >= k` (`mass(>= x) >= p * Z_k`). The search
halves an interval of logits, and draws its ends in to logits that occur, so that it ends as soon as one is left.

top-k      looks only at blocks whose highest logit reaches the k-th of these: few, where k is small; so does top-p of
           what top-k left
top-p      alone may keep a hundred thousand tokens. The whole GPU narrows the interval first (nucleus.py), and the
           search goes through a list of those in it

At least: 4 * V * n bytes read by the first launch (n = 256: 156 MB, 32 us at 4.8 TB/s for V = 151936; 131 MB, 27 us for
V = 128256), with an exponential a logit; for top-p as much in each of three more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch
from .nucleus import COLUMNS, LIST_SIZE, NUM_PASSES, as_mass, find_bracket, narrow

__all__ = ["BLOCK", "block_stats", "find_cutoff"]

BLOCK = 256
_BLOCKS = 16  # of a program of the first launch
_GATHERED = 16  # blocks that a pass reads at a time
_TILE = 2048  # of the list of logits, that are looked at at a time


def find_cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    n, vocab_size = logits.shape
    cutoff = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return cutoff
    stats = block_stats(logits, temperature)
    found = narrow(logits, temperature, top_k, top_p, stats, BLOCK)
    num_chunks = found.masses.shape[2]
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
        num_chunks,
        BLOCK=BLOCK,
        PADDED=padded,
        GATHERED=_GATHERED,
        LAST=NUM_PASSES - 1,
        COLUMNS=COLUMNS,
        CHUNKS=triton.next_power_of_2(num_chunks),
        LIST_SIZE=LIST_SIZE,
        TILE=_TILE,
        PDL=has_pdl(),
        num_warps=8,
    )
    return cutoff


def block_stats(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """float32 [3, n, num_blocks] of blocks of BLOCK logits: highest; lowest but -inf; sum of exp((x - highest) / T).

    NaN counts as -inf. A block of -inf: -inf, +inf, 0. A greedy row's T is taken as 1.
    """
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    stats = torch.empty(3, n, num_blocks, dtype=torch.float32, device=logits.device)
    launch(
        _stats_kernel,
        (n, triton.cdiv(num_blocks, _BLOCKS)),
        logits,
        logits if temperature is None else temperature,
        stats,
        vocab_size,
        logits.stride(0),
        1 if temperature is None else temperature.stride(0),
        num_blocks,
        SCALED=temperature is not None,
        BLOCK=BLOCK,
        BLOCKS=_BLOCKS,
        PDL=has_pdl(),
        num_warps=4,
    )
    return stats


@triton.jit
def _stats_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    stats: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    num_blocks: tl.tensor,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    scale = 1.0
    if SCALED:
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
    pivots: tl.tensor,
    masses: tl.tensor,
    bases: tl.tensor,
    values: tl.tensor,
    counts: tl.tensor,
    active: tl.tensor,
    cutoff: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    min_p_stride: tl.tensor,
    num_blocks: tl.tensor,
    num_chunks: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    GATHERED: tl.constexpr,
    LAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
        lowest = tl.min(tl.load(at + step, mask=block < num_blocks, other=float("inf")), axis=0)
        peak = tl.max(peaks, axis=0)
        if tl.abs(peak) < float("inf"):
            x = logits + row * logits_stride
            ids = active + row * PADDED
            total = tl.sum(
                tl.load(at + 2 * step, mask=block < num_blocks, other=0.0) * tl.exp((peaks - peak) * scale), axis=0
            )
            if has_k:
                wanted = k.to(tl.float32)
                floor = _below_kth(peaks, lowest, peak, k)
                result, count, total = _search(
                    x, ids, peaks, peak, floor, wanted, scale, vocab_size, False, BLOCK, PADDED, GATHERED
                )
                # Z_k has of the tokens that tie with the k-th only as many as make k; without a k-th it has all.
                total -= tl.where(count > wanted, (count - wanted) * tl.exp((result - peak) * scale), 0.0)
            if p < 1:
                of_row = LAST * tl.num_programs(0).to(tl.int64) + row
                floor = tl.maximum(result, lowest)
                high = tl.full((), 0.0, tl.float32)
                length = tl.full((), LIST_SIZE + 1, tl.int32)
                base = tl.full((), 0, tl.int64)
                wanted_mass = tl.full((), 0, tl.int64)
                if not has_k:
                    low, high, base, wanted_mass = find_bracket(
                        pivots + of_row * COLUMNS,
                        masses + of_row * num_chunks * COLUMNS,
                        bases + of_row,
                        p,
                        num_chunks,
                        COLUMNS,
                        CHUNKS,
                    )
                    floor = tl.maximum(low, floor)
                    length = tl.where(low > float("-inf"), tl.load(counts + row), length)
                if high == float("inf"):
                    found = floor
                elif (length > 0) & (length <= LIST_SIZE):
                    listed = values + row * LIST_SIZE
                    found = _search_list(listed, length, peak, base, wanted_mass, scale, TILE)
                else:
                    found, _count, _mass = _search(
                        x, ids, peaks, peak, floor, p * total, scale, vocab_size, True, BLOCK, PADDED, GATHERED
                    )
                result = tl.maximum(result, found)
            if least > 0:
                result = tl.maximum(result, peak + t * tl.log(least))
    tl.store(cutoff + row, result)


@triton.jit
def _below_kth(peaks: tl.tensor, lowest: tl.tensor, peak: tl.tensor, k: tl.tensor) -> tl.tensor:
    """A logit not above the k-th largest of the row, and near the k-th largest of the blocks' peaks."""
    low = lowest
    high = peak
    for _i in range(8):
        middle = low * 0.5 + high * 0.5
        is_low = tl.sum((peaks >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    return low


@triton.jit
def _search_list(
    listed: tl.tensor,
    length: tl.tensor,
    peak: tl.tensor,
    base: tl.tensor,
    wanted: tl.tensor,
    scale: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The largest of the listed logits whose mass at or above, ``base`` included, is ``wanted``; the lowest of them if
    none reaches it, for want of digits."""
    low = tl.full((), float("-inf"), tl.float32)  # both become logits of the list
    high = tl.full((), float("inf"), tl.float32)
    while low < high:
        if low == float("-inf"):
            pivot = low  # finds the lowest
        elif high == float("inf"):
            pivot = high  # finds the highest
        else:
            pivot = low * 0.5 + high * 0.5
            pivot = tl.where(pivot > low, pivot, high)
        mass = tl.zeros((TILE,), tl.int64)
        above = tl.full((TILE,), float("inf"), tl.float32)
        below = tl.full((TILE,), float("-inf"), tl.float32)
        i = 0
        while i < length:
            at = i + tl.arange(0, TILE)
            x = tl.load(listed + at, mask=at < length, other=float("-inf"))
            is_there = at < length
            is_in = is_there & (x >= pivot)
            mass += tl.where(is_in, as_mass(x, peak, scale), 0)
            above = tl.minimum(above, tl.where(is_in, x, float("inf")))
            below = tl.maximum(below, tl.where(is_there & (x < pivot), x, float("-inf")))
            i += TILE
        reached = (base + tl.sum(mass, axis=0) >= wanted) | (low == float("-inf"))
        if reached:
            low = tl.min(above, axis=0)
        else:
            high = tl.max(below, axis=0)
    return low


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
            # Nothing below ``lowest`` is looked for: then high = low = -inf ends the search.
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
