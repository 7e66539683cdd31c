"""Attention of which a query's bits depend on its position and its sequence alone: prompts, chunks of them and decodes.

A query's keys are cut into parts whose size follows from its position (`_part_size`), from key 0 on. A part is a
running softmax over blocks of BN keys that begins anew; the parts are folded together in their order (`_fold`). A tile
of queries does so in one program. Of a query alone each part has a program, and the last of them to end folds: few
queries fill the GPU no less. What a block adds that a query does not see are zeros.

The two differ in how many rows a program has, and so in the matrix instruction. Both add up in its steps of 16 columns,
from the first on; the sum of a block's weights is a product by ones, so that it has that order, too. The products that
are rounded before a sum are written as `fma`, which leaves the compiler nothing to choose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_plan import PartsWorkspace
from ..paged_attention import Scores
from .decode_parts import capped, score_scale
from .launch import has_pdl, launch, launch_next, max_shared_memory, wait_for_previous
from .varlen_attention import FACTS, plan_tiles

LEAST_PART = 256
"""Keys of a part, of those that see few: a multiple of BN."""


class _Tiling(NamedTuple):
    block_m: int  # rows that a program computes: queries times heads
    num_warps: int
    num_stages: int

    def fit(self, block_n: int, head_bytes: int) -> _Tiling:
        """Return the tiling with fewer stages if shared memory demands it: queries, keys and values under way, and
        scores in float32."""
        tiling = self
        while tiling.num_stages > 1:
            keys = 2 * block_n * max(2, tiling.num_stages - 1)
            if (tiling.block_m + keys) * head_bytes + 4 * tiling.block_m * block_n + 4096 <= max_shared_memory():
                break
            tiling = tiling._replace(num_stages=tiling.num_stages - 1)
        return tiling


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _block_n(head_dim: int) -> int:
    """Return how many keys are looked at together: the same for all kernels, as the softmax is rescaled after each."""
    return 64 if head_dim <= 256 else 32


def _of_tiles(head_dim: int) -> _Tiling:
    return _Tiling(64, 4, 3) if head_dim <= 128 else _Tiling(32, 4, 2)


def _pack(tiling: _Tiling, group: int) -> int:
    """Return the number of heads in a tile: those of a group, as far as they are a power of two."""
    return min(tiling.block_m, group & -group)


def plan_prompts(
    rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, group: int, head_dim: int
) -> Tensor:
    tiling = _of_tiles(head_dim)
    queries = tiling.block_m // _pack(tiling, group)
    return plan_tiles(rows, query_start_loc, seq_lens, num_tokens, queries, skip_single=True, is_aligned=True)


def attend_to_prompts(q: Tensor, kv_cache: Tensor, block_table: Tensor, plan: Tensor, how: Scores) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv_cache.shape[3]
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    tiling = _of_tiles(head_dim).fit(_block_n(head_dim), _padded(head_dim) * q.itemsize)
    pack = _pack(tiling, group)
    launch(
        _invariant_tiles,
        (plan.shape[0], num_heads // pack),
        q,
        kv_cache,
        block_table,
        plan,
        how.sinks,
        out,
        score_scale(how.scale, how.softcap),
        q.stride(0),
        *kv_cache.stride()[:4],
        block_table.stride(0),
        H=num_heads,
        GROUP=group,
        PACK=pack,
        BM=tiling.block_m,
        FACTS=FACTS,
        **_constants(kv_cache, how, tiling),
    )
    return out


def attend_alone(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    how: Scores,
    workspace: PartsWorkspace,
    out: Tensor,
) -> None:
    n, num_heads, head_dim = q.shape
    num_kv_heads, num_parts = kv_cache.shape[3], workspace.MOST_PARTS + (how.window is not None)
    tiling = _Tiling(16, 4, 3).fit(_block_n(head_dim), _padded(head_dim) * q.itemsize)
    launch(
        _invariant_parts,
        (num_kv_heads, n * num_parts),
        q,
        kv_cache,
        block_table,
        rows,
        seq_lens,
        how.sinks,
        out,
        workspace.parts,
        workspace.counters,
        score_scale(how.scale, how.softcap),
        q.stride(0),
        *kv_cache.stride()[:4],
        block_table.stride(0),
        H=num_heads,
        KV=num_kv_heads,
        PADDED=triton.next_power_of_2(num_heads // num_kv_heads),
        PARTS=num_parts,
        **_constants(kv_cache, how, tiling),
    )


def _constants(kv_cache: Tensor, how: Scores, tiling: _Tiling) -> dict[str, Any]:
    head_dim = kv_cache.shape[4]
    return {
        "D": head_dim,
        "DP": _padded(head_dim),
        "BLOCK_SIZE": kv_cache.shape[1],
        "BN": _block_n(head_dim),
        "LEAST": LEAST_PART,
        "MOST": PartsWorkspace.MOST_PARTS,
        "WINDOW": how.window or 0,
        "SOFTCAP": how.softcap,
        "STAGES": tiling.num_stages,
        "PDL": has_pdl(),
        "num_warps": tiling.num_warps,
    }


@triton.jit
def _part_size(position, LEAST: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr):
    """Keys of each part of what the query at this position sees: LEAST, or twice that, ..., so that MOST hold all. It
    changes at multiples of LEAST * MOST alone, so that it is the same for all queries of an aligned tile."""
    seen = position + 1
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    size = seen * 0 + LEAST
    while size * MOST < seen:
        size *= 2
    return size


@triton.jit
def _no_keys(sinks, heads, is_head, ROWS: tl.constexpr, DP: tl.constexpr):
    """Maximum and sum [ROWS] and weighted values [ROWS, DP] of a softmax before the first part: nothing, or the sinks
    of these heads."""
    if sinks is not None:
        top = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full((ROWS,), 1.0, tl.float32)
    else:
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
    return top, total, tl.zeros((ROWS, DP), tl.float32)


@triton.jit
def _begin_part(ROWS: tl.constexpr, DP: tl.constexpr):
    """Maximum [ROWS], sum in each of 16 columns [ROWS, 16] and weighted values [ROWS, DP] before a part's first key."""
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    return top, tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS, DP), tl.float32)


@triton.jit
def _attend(
    q, base, blocks, strides, j, lowest, last, position, scale, top, total, acc,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add the keys j .. j + BN to a part. All of them are masked, as who sees a whole block depends on the tile."""
    stride_block, stride_token, stride_kv = strides
    t = j + tl.arange(0, BN)
    d = tl.arange(0, DP)
    known = t < last
    if WINDOW > 0:  # blocks before the window are others' by now: what they hold may be anything
        known = known & (t >= lowest)
    block = tl.load(blocks + t // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    place = (base + block * stride_block + (t % BLOCK_SIZE) * stride_token)[:, None] + d[None, :]
    real = known[:, None] & (d < D)[None, :]
    k = tl.load(place, mask=real, other=0.0)
    v = tl.load(place + stride_kv, mask=real, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        s = capped(s, SOFTCAP)
    seen = (t[None, :] <= position[:, None]) & known[None, :]
    if WINDOW > 0:
        seen = seen & (t[None, :] > position[:, None] - WINDOW)
    s = tl.where(seen, s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)  # no key has been seen until now
    p = tl.exp2(s - safe[:, None]).to(v.dtype)
    shrink = tl.exp2(top - safe)
    total = tl.dot(p, tl.full((BN, 16), 1.0, p.dtype), total * shrink[:, None], input_precision="ieee")
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _fold(top, total, acc, part_top, part_total, part_acc):
    """Add a part to the softmax of those before it; one without keys changes nothing."""
    higher = tl.maximum(top, part_top)
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    shrink = tl.exp2(top - safe)
    share = tl.exp2(part_top - safe)
    total = tl.fma(part_total, share, total * shrink)
    acc = tl.fma(part_acc, tl.broadcast_to(share[:, None], acc.shape), acc * shrink[:, None])
    return higher, total, acc


@triton.jit
def _invariant_tiles(
    q, cache, table, plan, sinks, out, scale,
    stride_q, stride_block, stride_token, stride_kv, stride_head, stride_table,
    H: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, FACTS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of queries at positions that begin at a multiple of their number, and PACK heads of a group."""
    launch_next(PDL)
    facts = plan + tl.program_id(0) * FACTS
    row = tl.load(facts)
    first_query = tl.load(facts + 1)  # the tile's among those of the step, or below 0 by what was computed before
    start = tl.load(facts + 2)
    query_len = tl.load(facts + 3)
    seq_len = tl.load(facts + 4)
    wait_for_previous(PDL)
    if row >= 0:
        QUERIES: tl.constexpr = BM // PACK
        r = tl.arange(0, BM)
        d = tl.arange(0, DP)
        m = first_query + r // PACK
        begin = seq_len - query_len + first_query
        position = begin + r // PACK
        is_query = ((m >= 0) & (m < query_len))[:, None] & (d < D)[None, :]
        token = (start + m).to(tl.int64)
        heads = tl.program_id(1) * PACK + r % PACK
        at = (heads * D)[:, None] + d[None, :]
        tile = tl.load(q + token[:, None] * stride_q + at, mask=is_query, other=0.0)
        base = cache + (tl.program_id(1) * PACK // GROUP) * stride_head
        blocks = table + row.to(tl.int64) * stride_table
        strides = (stride_block, stride_token, stride_kv)
        top, total, acc = _no_keys(sinks, heads, heads < H, BM, DP)
        part_top, part_total, part_acc = _begin_part(BM, DP)
        last = tl.minimum(seq_len, begin + QUERIES)
        size = _part_size(begin, LEAST, MOST, WINDOW)
        lowest = 0  # the first key that any of these queries sees
        if WINDOW > 0:
            lowest = tl.maximum(0, begin + tl.maximum(0, -first_query) - WINDOW + 1)
        for j in tl.range(lowest // BN * BN, last, BN, num_stages=STAGES):
            part_top, part_total, part_acc = _attend(
                tile, base, blocks, strides, j, lowest, last, position, scale, part_top, part_total, part_acc,
                D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP,
            )  # fmt: skip
            if (j + BN) % size == 0 or j + BN >= last:
                top, total, acc = _fold(top, total, acc, part_top, tl.max(part_total, 1), part_acc)
                part_top, part_total, part_acc = _begin_part(BM, DP)
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # the total is 0 in rows that are no queries
        tl.store(out + token[:, None] * (H * D) + at, y.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _invariant_parts(
    q, cache, table, rows, seq_lens, sinks, out, parts, counters, scale,
    stride_q, stride_block, stride_token, stride_kv, stride_head, stride_table,
    H: tl.constexpr, KV: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of the keys of a query that is the last of its sequence, and the heads of a group."""
    launch_next(PDL)
    kv_head = tl.program_id(0)
    query, i = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    row = tl.load(rows + query)
    seq_len = tl.load(seq_lens + query)
    GROUP: tl.constexpr = H // KV
    ROWS: tl.constexpr = PADDED if PADDED > 16 else 16
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(0, seq_len - WINDOW)
    size = _part_size(seq_len - 1, LEAST, MOST, WINDOW)
    first = lowest // size
    count = tl.cdiv(seq_len, size) - first
    if seq_len == 0 or i >= count:  # waiting for the kernel before is left to the programs of the first part
        if i == 0:
            wait_for_previous(PDL)
        return
    wait_for_previous(PDL)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    is_head = g < GROUP
    heads = kv_head * GROUP + g
    at = (heads * D)[:, None] + d[None, :]
    is_query = is_head[:, None] & (d < D)[None, :]
    tile = tl.load(q + query.to(tl.int64) * stride_q + at, mask=is_query, other=0.0)
    top, total, acc = _begin_part(ROWS, DP)
    begin = tl.maximum((first + i) * size, lowest // BN * BN)
    end = tl.minimum((first + i + 1) * size, seq_len)
    base, blocks = cache + kv_head * stride_head, table + row.to(tl.int64) * stride_table
    strides = (stride_block, stride_token, stride_kv)
    for j in tl.range(begin, end, BN, num_stages=STAGES):
        top, total, acc = _attend(
            tile, base, blocks, strides, j, lowest, seq_len, g * 0 + seq_len - 1, scale, top, total, acc,
            D, DP, BLOCK_SIZE, BN, WINDOW, SOFTCAP,
        )  # fmt: skip
    out += query.to(tl.int64) * (H * D)
    own = tl.max(total, 1)
    if count == 1:
        none_top, none_total, none_acc = _no_keys(sinks, heads, is_head, ROWS, DP)
        top, own, acc = _fold(none_top, none_total, none_acc, top, own, acc)
        tl.store(out + at, (acc / own[:, None]).to(out.dtype.element_ty), mask=is_query)
    else:
        PART: tl.constexpr = DP + 2
        STRIDE: tl.constexpr = KV * GROUP * PART
        parts += query.to(tl.int64) * (PARTS * STRIDE) + kv_head * (GROUP * PART)
        mine = parts + i * STRIDE + g * PART
        tl.store(mine[:, None] + d[None, :], acc, mask=is_head[:, None])
        tl.store(mine + DP, top, mask=is_head)
        tl.store(mine + DP + 1, own, mask=is_head)
        tl.debug_barrier()  # all threads' parts are written before one of them counts
        num_done = tl.atomic_add(counters + query * KV + kv_head, 1, sem="acq_rel", scope="gpu")
        if num_done == count - 1:
            tl.store(counters + query * KV + kv_head, 0)
            _fold_all(parts, count, sinks, out, kv_head, STRIDE, GROUP, PADDED, PARTS, D, DP)


@triton.jit
def _fold_all(
    parts, count, sinks, out, kv_head, STRIDE: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store the output of a group's heads from their parts, of which those past the last have no keys."""
    g = tl.arange(0, PADDED)
    d = tl.arange(0, DP)
    is_head = g < GROUP
    top, total, acc = _no_keys(sinks, kv_head * GROUP + g, is_head, PADDED, DP)
    for i in tl.static_range(PARTS):
        part = parts + i * STRIDE + g * (DP + 2)
        known = is_head & (i < count)
        # .cg: past the L1 cache, which is not updated when other multiprocessors write
        part_top = tl.load(part + DP, mask=known, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(part + DP + 1, mask=known, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(part[:, None] + d[None, :], mask=known[:, None], other=0.0, cache_modifier=".cg")
        top, total, acc = _fold(top, total, acc, part_top, part_total, part_acc)
    total = tl.where(is_head, total, 1.0)
    at = ((kv_head * GROUP + g) * D)[:, None] + d[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_head[:, None] & (d < D)[None, :])
