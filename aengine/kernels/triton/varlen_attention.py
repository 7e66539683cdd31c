"""Tiles of queries, of some of the heads that share a key-value head, over the keys that they see.

    few tiles      |--- part 0 ---|--- part 1 ---|--- part 2 ---|  as many parts as fill the GPU once; the last program
    behind long    |--- part 0 ---|--- part 1 ---|--- part 2 ---|  of a tile to end puts its parts together, in the
    contexts                                                       order of the keys
    many tiles     |------|------------|-----------------|----...  each is a program's

Operations: 4 * head_dim a (query, key) pair seen; bytes: q, out, and K and V once a tile, mostly out of the L2 cache.
The parts are written down once a step, for all layers of a kind (`plan_prompts`). Keys and values of this step's tokens
are read by the copy engine, which needs neither addresses nor block tables, the others out of the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..paged_attention import PromptLayers, Scores
from .decode_parts import capped, score_scale
from .kv_codes import as_known, beside_codes, numbers_of, times_scale
from .launch import (
    bucket,
    has_pdl,
    is_interpreted,
    launch,
    launch_next,
    launch_next_and_wait,
    max_shared_memory,
    num_multiprocessors,
    wait_for_previous,
)

FACTS = 9
"""int32 of a part: row, first query, the sequence's first token, its query and sequence lengths, the first block of
keys and the one after the last, which part of how many (`PARTS`), where the tile's first part is kept. Behind them,
of the first part, are counters, left at zero, of the parts that have ended, one for each group of heads."""

PARTS = 1 << 12
LEAST_BLOCKS = 4
"""Fewest blocks of keys of a part."""


class _Tiling(NamedTuple):
    block_m: int  # rows that a program computes: queries times heads
    block_n: int  # keys that a program reads at a time
    num_warps: int
    num_stages: int
    max_pack: int  # most heads whose queries share a tile
    resident: int  # programs of a multiprocessor at a time
    max_registers: int | None = None  # the most that a thread gets; None: as many as it takes

    def shared_bytes(self, head_bytes: int) -> int:
        """Shared memory needed at most: queries, keys and values of the stages under way, scores in float32."""
        keys = 2 * self.block_n * max(2, self.num_stages - 1)
        return (self.block_m + keys) * head_bytes + 4 * self.block_m * self.block_n + 1024

    def pack(self, group: int) -> int:
        """Return the number of heads in a tile: those of a group, as far as they are a power of two."""
        return min(self.max_pack, group & -group)

    def num_programs(self, num_lanes: int) -> int:
        """Return how many programs of each of so many groups of heads run at once."""
        return max(1, num_multiprocessors() * self.resident // num_lanes)


MOST_PADDED = 2304
"""Tokens of a step up to which sequences may be padding (runner/graphs/batch_graphs.py), and say nothing."""
_SHORT = 1024  # tokens a sequence, below which there are more tiles than long ones


def _tiling(layers: PromptLayers, num_tokens: int, num_seqs: int) -> _Tiling:
    padded = _padded(layers.head_dim)
    head_bytes = padded * layers.dtype.itemsize
    tiling = _measured(layers, padded, MOST_PADDED < num_tokens < _SHORT * num_seqs)
    while tiling.shared_bytes(head_bytes) > max_shared_memory():
        if tiling.block_n > 32:
            tiling = tiling._replace(block_n=tiling.block_n // 2)
        elif tiling.block_m > 32:
            tiling = tiling._replace(block_m=tiling.block_m // 2, num_warps=4)
        elif tiling.block_n > 16:
            tiling = tiling._replace(block_n=16)
        else:
            break
    return tiling


def _measured(layers: PromptLayers, padded: int, is_short: bool) -> _Tiling:
    """Return the tiling measured fastest on an H100 (benchmarks/gpu_attention.py), with heads of 128. Several programs
    of a multiprocessor multiply while others compute their softmax: larger tiles, of which it has one, are slower."""
    if layers.dtype == torch.float32:
        return _Tiling(32, 32, 4, 2, 1, 2)
    if layers.is_fp8:  # their numbers take registers
        is_wide = layers.num_heads // layers.num_kv_heads % 4 == 0 and padded <= 128
        return _Tiling(128, 64, 4, 2, 4, 1) if is_wide else _Tiling(64, 64, 4, 2, 2, 2)
    if padded > 128:
        return _Tiling(64, 32, 4, 2, 2, 2)
    return _Tiling(64, 32, 4, 3, 4, 3, max_registers=168) if is_short else _Tiling(64, 64, 4, 3, 4, 2)


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def plan_prompts(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    layers: PromptLayers,
    skip_single: bool,
) -> Tensor:
    tiling = _tiling(layers, num_tokens, len(rows))
    pack = tiling.pack(layers.num_heads // layers.num_kv_heads)
    num_lanes = layers.num_heads // pack
    return plan_tiles(
        rows,
        query_start_loc,
        seq_lens,
        num_tokens,
        tiling.block_m // pack,
        skip_single=skip_single,
        block_n=tiling.block_n,
        window=layers.window,
        num_lanes=num_lanes,
        num_programs=tiling.num_programs(num_lanes),
    )


def plan_tiles(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    queries: int,
    *,
    skip_single: bool,
    is_aligned: bool = False,
    block_n: int = 64,
    window: int | None = None,
    num_lanes: int = 0,
    num_programs: int = 0,
) -> Tensor:
    """int32 [parts, FACTS + num_lanes], tiles of so many ``queries`` with room for every sequence's last, partly filled
    one; row -1: none.

    Args:
        is_aligned: tiles begin at positions that are multiples of their size, so that the first may be partly filled,
            too, and its first query below 0
        num_lanes: groups of heads
        num_programs: of each group, that run at once: into so many parts the keys of few tiles are divided
    """
    n = rows.shape[0]
    shortest = 2 if skip_single else 1
    num_parts = triton.cdiv(num_tokens, queries) + (1 + is_aligned) * min(n, num_tokens // shortest) + num_programs
    plan = torch.empty((num_parts, FACTS + num_lanes), dtype=torch.int32, device=rows.device)
    sizes = {"BM": queries, "REQS": bucket(n), "SHORTEST": shortest, "FACTS": FACTS, "PARTS": PARTS}
    how = {"BN": block_n, "LEAST": LEAST_BLOCKS, "WINDOW": window or 0, "ALIGNED": is_aligned}
    how |= {"LANES": num_lanes, "PADDED": triton.next_power_of_2(max(1, num_lanes)), "PROGRAMS": num_programs}
    where = (rows, query_start_loc, seq_lens, plan, n, num_parts)
    launch(_plan_prompts, (1,), *where, **sizes, **how, PDL=has_pdl())
    return plan


def varlen_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    plan: Tensor,
    num_seqs: int,
    how: Scores,
    kv_scales: Tensor | None,
    new_kv: tuple[Tensor, Tensor] | None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    layers = PromptLayers(num_heads, num_kv_heads, head_dim, q.dtype, how.window, kv_scales is not None)
    tiling = _tiling(layers, num_tokens, num_seqs)
    pack, padded = tiling.pack(num_heads // num_kv_heads), _padded(head_dim)
    num_lanes = num_heads // pack
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    num_parts = tiling.num_programs(num_lanes) * num_lanes
    parts = torch.empty(num_parts * tiling.block_m * (padded + 2), dtype=torch.float32, device=q.device)
    new_keys, new_values = (
        None if kv_scales is not None else _by_engine(x, tiling.block_n) for x in new_kv or (None, None)
    )
    launch(
        _varlen_attention,
        (plan.shape[0], num_lanes),
        q,
        new_keys,
        new_values,
        as_known(kv_cache, kv_scales),
        kv_scales,
        block_table,
        plan,
        how.sinks,
        out,
        parts,
        score_scale(how.scale, how.softcap),
        q.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        H=num_heads,
        GROUP=num_heads // num_kv_heads,
        PACK=pack,
        D=head_dim,
        DP=padded,
        BLOCK_SIZE=kv_cache.shape[1],
        BM=tiling.block_m,
        BN=tiling.block_n,
        FACTS=FACTS,
        PARTS=PARTS,
        WINDOW=how.window or 0,
        SOFTCAP=how.softcap,
        STAGES=tiling.num_stages,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        **({"maxnreg": tiling.max_registers} if tiling.max_registers else {}),
    )
    return out


def _by_engine(x: Tensor | None, block_n: int) -> TensorDescriptor | None:
    """Return how the copy engine reads rows of x [num_tokens, num_kv_heads, head_dim], a head of block_n tokens at a
    time; None if it can't."""
    if x is None or not (has_pdl() or is_interpreted) or x.shape[2] != _padded(x.shape[2]):
        return None
    if x.data_ptr() % 16 or x.stride(0) * x.itemsize % 16 or x.stride(1) != x.shape[2]:
        return None
    shape = [x.shape[0], x.shape[1] * x.shape[2]]
    return TensorDescriptor(x, shape, [x.stride(0), 1], [block_n, x.shape[2]])


# Pointers whose alignment depends on the batch: specialised on it, kernels would be compiled while serving.
_MOVING = ["rows", "query_start_loc", "seq_lens"]


@triton.jit
def _blocks_of_tile(seq_len, query_len, first_query, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """Return how many blocks of BN keys BM queries see, from ``first_query`` of a sequence on."""
    begin = seq_len - query_len + first_query
    blocks = tl.cdiv(tl.minimum(seq_len, begin + BM), BN)
    if WINDOW > 0:
        blocks -= tl.maximum(0, begin - WINDOW + 1) // BN
    return blocks


@triton.jit
def _num_parts(blocks, share, has):
    return tl.where(has, tl.maximum(1, blocks // share), 0)


@triton.jit(do_not_specialize=["n", "num_parts"], do_not_specialize_on_alignment=_MOVING)
def _plan_prompts(
    rows, query_start_loc, seq_lens, plan, n, num_parts, BM: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr,
    WINDOW: tl.constexpr, REQS: tl.constexpr, SHORTEST: tl.constexpr, FACTS: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr, PADDED: tl.constexpr, PROGRAMS: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next_and_wait(PDL)
    i = tl.arange(0, REQS)
    starts = tl.load(query_start_loc + i, mask=i < n, other=0)
    lens = tl.load(query_start_loc + i + 1, mask=i < n, other=0) - starts
    seq_len = tl.load(seq_lens + i, mask=i < n, other=0)
    row = tl.load(rows + i, mask=i < n, other=-1).to(tl.int32)
    before = starts * 0
    if ALIGNED:
        before = (seq_len - lens) % BM
    counts = tl.where(lens >= SHORTEST, (before + lens + BM - 1) // BM, 0)
    most = tl.max(counts, 0)
    own = counts  # parts of a sequence's tiles
    divided = starts * 0  # and of those tiles that have several
    share = most * 0 + 2147483647  # blocks of keys that a tile must have for each part
    if PROGRAMS > 0:
        work = starts * 0
        tile = most * 0
        while tile < most:
            blocks = _blocks_of_tile(seq_len, lens, tile * BM - before, BM, BN, WINDOW)
            work += tl.where(tile < counts, blocks, 0)
            tile += 1
        share = tl.maximum(LEAST, tl.cdiv(tl.sum(work.to(tl.int64), 0), PROGRAMS)).to(tl.int32)
        own = starts * 0
        tile = most * 0
        while tile < most:
            blocks = _blocks_of_tile(seq_len, lens, tile * BM - before, BM, BN, WINDOW)
            parts = _num_parts(blocks, share, tile < counts)
            own += parts
            divided += tl.where(parts > 1, parts, 0)
            tile += 1
    item = tl.cumsum(own, 0) - own
    place = tl.cumsum(divided, 0) - divided
    tile = most * 0
    while tile < most:
        # The last queries see the most keys: they come first, so that the short programs fill the end.
        first_query = (counts - 1 - tile) * BM - before
        blocks = _blocks_of_tile(seq_len, lens, first_query, BM, BN, WINDOW)
        parts = _num_parts(blocks, share, tile < counts)
        part = most * 0
        while part < tl.max(parts, 0):
            facts = plan + (item + part) * (FACTS + LANES)
            has = part < parts
            some = tl.maximum(parts, 1)
            tl.store(facts, row, mask=has)
            tl.store(facts + 1, first_query, mask=has)
            tl.store(facts + 2, starts, mask=has)
            tl.store(facts + 3, lens, mask=has)
            tl.store(facts + 4, seq_len, mask=has)
            tl.store(facts + 5, (part * blocks.to(tl.int64) // some).to(tl.int32), mask=has)
            tl.store(facts + 6, ((part + 1) * blocks.to(tl.int64) // some).to(tl.int32), mask=has)
            tl.store(facts + 7, part * PARTS + parts, mask=has)
            tl.store(facts + 8, place, mask=has)
            if LANES > 0:
                lane = tl.arange(0, PADDED)
                counters = facts[:, None] + FACTS + lane[None, :]
                is_counter = (has & (parts > 1))[:, None] & (lane < LANES)[None, :]
                tl.store(counters, tl.zeros((REQS, PADDED), tl.int32), mask=is_counter)
            part += 1
        item += parts
        place += tl.where(parts > 1, parts, 0)
        tile += 1
    empty = tl.sum(own, 0)
    while empty < num_parts:
        at = empty + i
        tl.store(plan + at * (FACTS + LANES), tl.full((REQS,), -1, tl.int32), mask=at < num_parts)
        empty += REQS


@triton.jit
def _pages_of(blocks, j, lowest, last, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """Return the cache's blocks [BN] of the keys from j on, as far as the tile sees them: blocks before the window are
    others' by now."""
    i = tl.arange(0, BN)
    known = j + i < last
    if WINDOW > 0:
        known = known & (j + i >= lowest)
    if BN % BLOCK_SIZE == 0:  # j is a multiple of BN
        at = j // BLOCK_SIZE + i // BLOCK_SIZE
    else:
        at = (j + i) // BLOCK_SIZE
    return tl.load(blocks + at, mask=known, other=0)


@triton.jit
def _attend(
    tile, where, new, block, j, position, scale, state, D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys from j on, which are in these blocks, into the running softmax; returned with the blocks of those that
    follow, which are read ahead. Not MASKED: every query sees all of them."""
    base, blocks, strides, lowest, last = where
    top, total, acc = state
    stride_block, stride_token, stride_kv = strides
    t = j + tl.arange(0, BN)
    d = tl.arange(0, DP)
    known = t < last
    if WINDOW > 0:  # what blocks before the window hold may be anything
        known = known & (t >= lowest)
    if new is not None:
        k = new[0].load([new[2] + j, new[3]])
        v = new[1].load([new[2] + j, new[3]])
    else:
        within = tl.arange(0, BN) % BLOCK_SIZE if BN % BLOCK_SIZE == 0 else t % BLOCK_SIZE
        place = (base + block.to(tl.int64) * stride_block + within * stride_token)[:, None] + d[None, :]
        block = _pages_of(blocks, j + BN, lowest, last, BLOCK_SIZE, BN, WINDOW)
        if MASKED:
            real = known[:, None] & (d < D)[None, :]
            k = tl.load(place, mask=real, other=0.0)
            v = tl.load(place + stride_kv, mask=real, other=0.0)
        elif D == DP:
            k = tl.load(place)
            v = tl.load(place + stride_kv)
        else:
            k = tl.load(place, mask=(d < D)[None, :], other=0.0)
            v = tl.load(place + stride_kv, mask=(d < D)[None, :], other=0.0)
    k, v = numbers_of(k, tile), numbers_of(v, tile)
    s = tl.dot(tile, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        s = capped(s * scale, SOFTCAP)
        scale = 1.0
    if MASKED:
        seen = (t[None, :] <= position[:, None]) & known[None, :]
        if WINDOW > 0:
            seen = seen & (t[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1) * scale)
    safe = higher
    if MASKED:
        safe = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return block, (higher, total, acc)


@triton.jit
def _begin_softmax(sinks, heads, is_first, BM: tl.constexpr):
    """Maximum and sum of the running softmax [BM] before the first key: nothing, or, where the part is a tile's first,
    the sinks of these heads."""
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        top = tl.where(is_first, sink, -float("inf"))
        total = tl.full((BM,), 1.0, tl.float32) * is_first.to(tl.float32)
    else:
        top = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
    return top, total


@triton.jit
def _attend_to_blocks(
    tile, where, new, begin, position, first_block, end_block, scale, top, total, acc, QUERIES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The keys of some of the blocks that a tile sees into its running softmax. ``begin``: position of its first query;
    ``new``: what the copy engine reads (`_attend`), and the position from which on it does; None: nothing."""
    lowest, last = where[3], where[4]
    j = (lowest // BN + first_block) * BN
    end = tl.minimum(last, (lowest // BN + end_block) * BN)
    rest = tl.minimum((begin + 1) // BN * BN, end)  # before it, and after the window's first, all queries see all keys
    state = (top, total, acc)
    if WINDOW > 0:
        full = tl.cdiv(tl.maximum(0, begin + QUERIES - WINDOW), BN) * BN
        full = tl.maximum(j, tl.minimum(full, rest))
        block = _pages_of(where[1], j, lowest, last, BLOCK_SIZE, BN, WINDOW)
        for k in tl.range(j, full, BN, num_stages=STAGES):
            block, state = _attend(
                tile, where, None, block, k, position, scale, state, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, True
            )
        j = full
    middle = rest
    if new is not None:
        middle = tl.minimum(rest, tl.cdiv(new[4], BN) * BN)
    block = _pages_of(where[1], j, lowest, last, BLOCK_SIZE, BN, WINDOW)
    for k in tl.range(j, middle, BN, num_stages=STAGES):
        block, state = _attend(
            tile, where, None, block, k, position, scale, state, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, False
        )
    if new is not None:
        j = tl.maximum(j, middle)
        for k in tl.range(j, rest, BN, num_stages=STAGES):
            block, state = _attend(
                tile, where, new, block, k, position, scale, state, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, False
            )
    j = tl.maximum(j, rest)
    block = _pages_of(where[1], j, lowest, last, BLOCK_SIZE, BN, WINDOW)  # anew: left over, it would be read twice
    for k in tl.range(j, end, BN, num_stages=STAGES):
        block, state = _attend(
            tile, where, None, block, k, position, scale, state, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, True
        )
    return state


@triton.jit
def _put_together(part, count, BM: tl.constexpr, DP: tl.constexpr):
    """Sum [BM] and weighted values [BM, DP] of a tile from so many parts that programs have left."""
    r = tl.arange(0, BM)
    place = r[:, None] * DP + tl.arange(0, DP)[None, :]
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    i = count * 0
    while i < count:
        # .cg: past the L1 cache, which is not updated when other multiprocessors write
        part_top = tl.load(part + BM * DP + r, cache_modifier=".cg")
        part_total = tl.load(part + BM * DP + BM + r, cache_modifier=".cg")
        part_acc = tl.load(part + place, cache_modifier=".cg")
        higher = tl.maximum(top, part_top)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        shrink, share = tl.exp2(top - safe), tl.exp2(part_top - safe)
        total = total * shrink + part_total * share
        acc = acc * shrink[:, None] + part_acc * share[:, None]
        top = higher
        part += BM * (DP + 2)
        i += 1
    return total, acc


@triton.jit
def _varlen_attention(
    q, new_keys, new_values, cache, kv_scales, table, plan, sinks, out, parts, scale, stride_q, stride_block,
    stride_token, stride_kv, stride_head, stride_table, H: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FACTS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    LANES: tl.constexpr = H // PACK
    item, lane = tl.program_id(0), tl.program_id(1)
    facts = plan + item * (FACTS + LANES)
    row = tl.load(facts)
    first_query = tl.load(facts + 1)
    start = tl.load(facts + 2)
    query_len = tl.load(facts + 3)
    seq_len = tl.load(facts + 4)
    first_block = tl.load(facts + 5)
    end_block = tl.load(facts + 6)
    which = tl.load(facts + 7)
    place = tl.load(facts + 8)
    part_at, num_parts = which // PARTS, which % PARTS
    head = lane * PACK
    if row < 0:  # waiting for the kernel before is left to the programs of the first part
        if item == 0:
            wait_for_previous(PDL)
    else:
        wait_for_previous(PDL)
        QUERIES: tl.constexpr = BM // PACK
        r = tl.arange(0, BM)  # the rows are queries, and of each its PACK heads
        d = tl.arange(0, DP)
        m = first_query + r // PACK
        before = seq_len - query_len  # tokens of the sequence before those of this step
        begin = before + first_query  # position of the first query
        is_query = (m < query_len)[:, None] & (d < D)[None, :]
        token = (start + m).to(tl.int64)
        at_head = ((head + r % PACK) * D)[:, None] + d[None, :]
        tile = tl.load(q + token[:, None] * stride_q + at_head, mask=is_query, other=0.0)
        tile = beside_codes(tile, kv_scales)
        top, total = _begin_softmax(sinks, head + r % PACK, part_at == 0, BM)
        acc = tl.zeros((BM, DP), tl.float32)
        lowest = 0  # position of the first key that any of these queries sees
        if WINDOW > 0:
            lowest = tl.maximum(0, begin - WINDOW + 1)
        keys = cache + (head // GROUP) * stride_head
        blocks = table + row.to(tl.int64) * stride_table
        strides = (stride_block, stride_token, stride_kv)
        where = (keys, blocks, strides, lowest, tl.minimum(seq_len, begin + QUERIES))
        new = None
        if new_keys is not None:
            new = (new_keys, new_values, start - before, head // GROUP * D, before)
        top, total, acc = _attend_to_blocks(
            tile, where, new, begin, begin + r // PACK, first_block, end_block,
            times_scale(scale, kv_scales, head // GROUP), top, total, acc,
            QUERIES, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, STAGES,
        )  # fmt: skip
        is_last = num_parts == 1
        if num_parts > 1:
            mine = parts + ((place * LANES + lane * num_parts).to(tl.int64)) * (BM * (DP + 2))
            part = mine + part_at.to(tl.int64) * (BM * (DP + 2))
            tl.store(part + r[:, None] * DP + d[None, :], acc)
            tl.store(part + BM * DP + r, top)
            tl.store(part + BM * DP + BM + r, total)
            tl.debug_barrier()  # all threads' parts are written before one of them counts
            counter = facts - part_at * (FACTS + LANES) + FACTS + lane
            num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            is_last = num_done == num_parts - 1
            if is_last:
                tl.store(counter, 0)
                total, acc = _put_together(mine, num_parts, BM, DP)
        if is_last:
            y = times_scale(acc, kv_scales, (H + head) // GROUP)
            y = y / tl.where(total == 0.0, 1.0, total)[:, None]  # the total is 0 in rows past the last query
            tl.store(out + token[:, None] * (H * D) + at_head, y.to(out.dtype.element_ty), mask=is_query)
