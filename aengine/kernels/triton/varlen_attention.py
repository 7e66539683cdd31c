"""A block of queries a program, of some of the heads that share a key-value head: short prompts have few queries, and
what is read for one head does for the others.

Operations: 4 * head_dim a (query, key) pair seen; bytes: q, out, and K and V once a block of queries, mostly out of the
L2 cache. Which queries a block has is written down once a step, for all layers and heads (`plan_prompts`): a program
gets it in one read instead of searching.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paged_attention import Scores
from .decode_parts import capped, score_scale
from .kv_codes import as_known, beside_codes, numbers_of, times_scale
from .launch import bucket, has_pdl, launch, launch_next, launch_next_and_wait, max_shared_memory, wait_for_previous

FACTS = 8  # int32 of a block: row, first query, the sequence's first token, its query and sequence lengths; a sector


class _Tiling(NamedTuple):
    block_m: int  # rows that a program computes: queries times heads
    block_n: int  # keys that a program reads at a time
    num_warps: int
    num_stages: int
    max_pack: int  # most heads whose queries share a block

    def shared_bytes(self, head_bytes: int) -> int:
        """Shared memory needed at most: queries, keys and values of the stages under way, scores in float32."""
        keys = 2 * self.block_n * max(2, self.num_stages - 1)
        return (self.block_m + keys) * head_bytes + 4 * self.block_m * self.block_n + 1024


LARGE_TILES_FROM = 3072
"""Tokens for each sequence of a step, with which larger tiles pay: nearly all of them are then below the diagonal."""


def _tiling(
    dtype: torch.dtype, head_dim: int, num_tokens: int, num_seqs: int, is_fp8: bool = False, group: int = 1
) -> _Tiling:
    """``is_fp8``: of the cache; the blocks of queries, which a plan has, are the same. ``group``: query heads that
    share a key-value head."""
    padded = _padded(head_dim)
    head_bytes = padded * dtype.itemsize
    tiling = _measured(dtype, padded, num_tokens, num_seqs)
    tiling = _of_codes(tiling, group, head_bytes) if is_fp8 else tiling
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


def _measured(dtype: torch.dtype, padded: int, num_tokens: int, num_seqs: int) -> _Tiling:
    """Return the tiling measured fastest on an H200 (benchmarks/gpu_attention.py), with heads of 64 and 128."""
    if dtype == torch.float32 or num_tokens <= 64:
        return _Tiling(32, 32, 4, 2, 1)
    is_small = num_tokens < LARGE_TILES_FROM * num_seqs or padded > 128
    return _Tiling(64, 32, 4, 2, 2) if is_small else _Tiling(128, 128, 8, 3, 1)


def _of_codes(tiling: _Tiling, group: int, head_bytes: int) -> _Tiling:
    """Return the tiling for keys and values in FP8, whose numbers take registers: measured fastest on an H100 among
    those with the same blocks of queries, which the plan has."""
    if tiling.block_m == 64:
        wide = _Tiling(128, 64, 4, 2, 4)  # it has the same queries of twice as many heads
        is_fit = head_bytes <= 256 and wide.shared_bytes(head_bytes) <= max_shared_memory()
        return wide if group % 4 == 0 and is_fit else tiling._replace(block_n=64, num_stages=2)
    return tiling._replace(num_stages=2) if tiling.block_m == 128 else tiling


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _queries(tiling: _Tiling, group: int) -> int:
    """Return the number of queries in a block when ``group`` heads share a key-value head."""
    return tiling.block_m // _pack(tiling, group)


def _pack(tiling: _Tiling, group: int) -> int:
    """Return the number of heads in a block: those of a group, as far as they are a power of two."""
    return min(tiling.max_pack, group & -group)


def plan_prompts(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    group: int,
    dtype: torch.dtype,
    head_dim: int,
    skip_single: bool,
) -> Tensor:
    n = rows.shape[0]
    queries = _queries(_tiling(dtype, head_dim, num_tokens, n), group)
    return plan_tiles(rows, query_start_loc, seq_lens, num_tokens, queries, skip_single=skip_single)


def plan_tiles(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    queries: int,
    *,
    skip_single: bool,
    is_aligned: bool = False,
) -> Tensor:
    """int32 [blocks, 8], blocks of so many ``queries`` with room for every sequence's last, partly filled one; row -1:
    none. ``is_aligned``: blocks begin at positions that are multiples of their size, so that the first may be partly
    filled, too, and its first query below 0."""
    n = rows.shape[0]
    num_blocks = triton.cdiv(num_tokens, queries) + (2 if is_aligned else 1) * n
    plan = torch.empty((num_blocks, FACTS), dtype=torch.int32, device=rows.device)
    sizes = {"BM": queries, "REQS": bucket(n), "SHORTEST": 2 if skip_single else 1, "FACTS": FACTS}
    where = (rows, query_start_loc, seq_lens, plan, n, num_blocks)
    launch(_plan_prompts, (1,), *where, **sizes, ALIGNED=is_aligned, PDL=has_pdl())
    return plan


def varlen_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    plan: Tensor,
    num_seqs: int,
    how: Scores,
    kv_scales: Tensor | None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv_cache.shape[3]
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    tiling = _tiling(q.dtype, head_dim, num_tokens, num_seqs, kv_scales is not None, group)
    launch(
        _varlen_attention,
        (plan.shape[0], num_heads // _pack(tiling, group)),
        q,
        as_known(kv_cache, kv_scales),
        kv_scales,
        block_table,
        plan,
        how.sinks,
        out,
        score_scale(how.scale, how.softcap),
        q.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        H=num_heads,
        GROUP=group,
        PACK=_pack(tiling, group),
        D=head_dim,
        DP=_padded(head_dim),
        BLOCK_SIZE=kv_cache.shape[1],
        BM=tiling.block_m,
        BN=tiling.block_n,
        FACTS=FACTS,
        WINDOW=how.window or 0,
        SOFTCAP=how.softcap,
        STAGES=tiling.num_stages,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
    )
    return out


# Pointers whose alignment depends on the batch: specialised on it, kernels would be compiled while serving.
_MOVING = ["rows", "query_start_loc", "seq_lens"]


@triton.jit(do_not_specialize=["n", "num_blocks"], do_not_specialize_on_alignment=_MOVING)
def _plan_prompts(
    rows,
    query_start_loc,
    seq_lens,
    plan,
    n,
    num_blocks,
    BM: tl.constexpr,
    REQS: tl.constexpr,
    SHORTEST: tl.constexpr,
    FACTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
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
    ends = tl.cumsum(counts, 0)
    most = tl.max(counts, 0)
    part = most * 0
    while part < most:
        facts = plan + (ends - counts + part) * FACTS
        has = part < counts
        tl.store(facts, row, mask=has)
        # The last queries see the most keys: they come first, so that the short programs fill the end.
        tl.store(facts + 1, (counts - 1 - part) * BM - before, mask=has)
        tl.store(facts + 2, starts, mask=has)
        tl.store(facts + 3, lens, mask=has)
        tl.store(facts + 4, seq_len, mask=has)
        part += 1
    empty = tl.sum(counts, 0)
    while empty < num_blocks:
        at = empty + i
        tl.store(plan + at * FACTS, tl.full((REQS,), -1, tl.int32), mask=at < num_blocks)
        empty += REQS


@triton.jit
def _attend(
    tile,
    base,
    blocks,
    j,
    lowest,
    last,
    position,
    scale,
    top,
    total,
    acc,
    stride_block,
    stride_token,
    stride_kv,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The keys from j on into the running softmax. Not MASKED: every query sees all of them."""
    t = j + tl.arange(0, BN)
    d = tl.arange(0, DP)
    known = t < last
    if WINDOW > 0:  # blocks before the window are others' by now: what they hold may be anything
        known = known & (t >= lowest)
    if MASKED:
        block = tl.load(blocks + t // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        real = known[:, None] & (d < D)[None, :]
    else:
        block = tl.load(blocks + t // BLOCK_SIZE).to(tl.int64)
        real = (t >= 0)[:, None] & (d < D)[None, :]
    place = (base + block * stride_block + (t % BLOCK_SIZE) * stride_token)[:, None] + d[None, :]
    k = numbers_of(tl.load(place, mask=real, other=0.0), tile)
    v = numbers_of(tl.load(place + stride_kv, mask=real, other=0.0), tile)
    s = tl.dot(tile, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        s = capped(s, SOFTCAP)
    if MASKED:
        seen = (t[None, :] <= position[:, None]) & known[None, :]
        if WINDOW > 0:
            seen = seen & (t[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    safe = higher
    if MASKED:
        safe = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _begin_softmax(sinks, heads, BM: tl.constexpr):
    """Maximum and sum of the running softmax [BM] before the first key: nothing, or the sinks of these heads."""
    if sinks is not None:
        top = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        total = tl.full((BM,), 1.0, tl.float32)
    else:
        top = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
    return top, total


@triton.jit
def _varlen_attention(
    q,
    cache,
    kv_scales,
    table,
    plan,
    sinks,
    out,
    scale,
    stride_q,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    stride_table,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FACTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    facts = plan + tl.program_id(0) * FACTS
    head = tl.program_id(1) * PACK
    row = tl.load(facts)
    first_query = tl.load(facts + 1)
    start = tl.load(facts + 2)
    query_len = tl.load(facts + 3)
    seq_len = tl.load(facts + 4)
    wait_for_previous(PDL)
    if row >= 0:
        r = tl.arange(0, BM)  # the rows are queries, and of each its PACK heads
        m = first_query + r // PACK
        d = tl.arange(0, DP)
        begin = seq_len - query_len + first_query  # position of the first query
        position = begin + r // PACK
        is_query = (m < query_len)[:, None] & (d < D)[None, :]
        token = (start + m).to(tl.int64)
        at_head = ((head + r % PACK) * D)[:, None] + d[None, :]
        tile = tl.load(q + token[:, None] * stride_q + at_head, mask=is_query, other=0.0)
        tile = beside_codes(tile, kv_scales)
        top, total = _begin_softmax(sinks, head + r % PACK, BM)
        acc = tl.zeros((BM, DP), tl.float32)
        last = tl.minimum(seq_len, begin + BM // PACK)
        scale = times_scale(scale, kv_scales, head // GROUP)
        base = cache + (head // GROUP) * stride_head
        blocks = table + row.to(tl.int64) * stride_table
        strides = (stride_block, stride_token, stride_kv)
        lowest = 0  # position of the first key that any of these queries sees
        full = 0  # from here to ``rest`` every query sees all keys
        rest = (begin + 1) // BN * BN
        if WINDOW > 0:
            lowest = tl.maximum(0, begin - WINDOW + 1)
            full = tl.minimum(rest, tl.cdiv(tl.maximum(0, begin + BM // PACK - WINDOW), BN) * BN)
            for j in tl.range(lowest // BN * BN, full, BN, num_stages=STAGES):
                state = (lowest, last, position, scale, top, total, acc)
                top, total, acc = _attend(
                    tile, base, blocks, j, *state, *strides, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, True
                )
        for j in tl.range(full, rest, BN, num_stages=STAGES):
            state = (lowest, last, position, scale, top, total, acc)
            top, total, acc = _attend(
                tile, base, blocks, j, *state, *strides, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, False
            )
        for j in tl.range(rest, last, BN, num_stages=STAGES):
            state = (lowest, last, position, scale, top, total, acc)
            top, total, acc = _attend(
                tile, base, blocks, j, *state, *strides, D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP, True
            )
        acc = times_scale(acc, kv_scales, (H + head) // GROUP)
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # the total is 0 in rows past the last query
        tl.store(out + token[:, None] * (H * D) + at_head, y.to(out.dtype.element_ty), mask=is_query)
