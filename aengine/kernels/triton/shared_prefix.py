"""A chunk of a prefix that several sequences share, for one key-value head and the queries of a tile of them.

Bytes: 2 * sizeof * num_kv_heads * head_dim a token of the prefix and tile; operations: 4 * num_heads * head_dim a token
and sequence. At 64 rows a tile that is 64 operations a byte, of which the tiles of a prefix find most in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..decode_plan import DecodeWorkspace
from ..paged_attention import Scores
from ..rotary import HeadNorms, Rope
from ..shared_prefix import ITEM_COLUMNS, SharedKeys
from .decode_parts import attend, blocks_of, empty_softmax, load_stretch, norm_weights, score_scale
from .kv_codes import as_known, beside_codes, times_scale
from .launch import has_pdl, launch, launch_next, max_shared_memory, wait_for_previous


class _Tiling(NamedTuple):
    block_n: int  # keys that a program reads at a time
    num_warps: int
    num_stages: int

    def shared_bytes(self, rows: int, head_bytes: int) -> int:
        """Shared memory needed at most: queries, keys and values under way, scores in float32."""
        return (rows + 2 * self.block_n * self.num_stages) * head_bytes + 4 * rows * self.block_n + 1024


def _tiling(rows: int, head_bytes: int, itemsize: int) -> _Tiling:
    """Return the tiling that was measured fastest on an H100 among those with heads of 128."""
    if itemsize == 4:
        return _Tiling(32, 4, 1)
    tiling = _Tiling(64, 4, 4)
    while tiling.shared_bytes(rows, head_bytes) > max_shared_memory() and tiling.block_n > 16:
        if tiling.num_stages > 2:
            tiling = tiling._replace(num_stages=tiling.num_stages - 1)
        else:
            tiling = tiling._replace(block_n=tiling.block_n // 2)
    return tiling


def attend_to_shared(
    qkv: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rope: Rope | None,
    norms: HeadNorms | None,
    num_heads: int,
    how: Scores,
    shared: SharedKeys,
    workspace: DecodeWorkspace,
    kv_scales: Tensor | None,
) -> None:
    """Leave the parts of all sequences that share keys in the workspace. ``rope``, ``norms``: None if q is rotated
    already."""
    block_size, _, num_kv_heads, head_dim = kv_cache.shape[1:]
    padded = max(16, triton.next_power_of_2(head_dim))
    group = num_heads // num_kv_heads
    tile_seqs = shared.members.shape[1]
    rows = max(16, tile_seqs * triton.next_power_of_2(group))
    tiling = _tiling(rows, padded * qkv.itemsize, qkv.itemsize)
    launch(
        _attend_to_shared,
        (num_kv_heads, len(shared.items)),
        qkv,
        as_known(kv_cache, kv_scales),
        kv_scales,
        block_table,
        None if rope is None else rope.table,
        None if rope is None else rope.query_scale,
        None if rope is None else rope.shifts,
        None if norms is None else norms.q,
        shared.items,
        shared.members,
        shared.rows,
        shared.seq_lens,
        workspace.parts,
        workspace.num_items,
        0.0 if norms is None else norms.eps,
        score_scale(how.scale, how.softcap),
        qkv.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        KV=num_kv_heads,
        GROUP=group,
        PADDED=triton.next_power_of_2(group),
        SEQS=tile_seqs,
        ROWS=rows,
        D=head_dim,
        DP=padded,
        BLOCK_SIZE=block_size,
        COLUMNS=ITEM_COLUMNS,
        BN=tiling.block_n,
        ROTARY=0 if rope is None else rope.table.shape[1],
        INTERLEAVED=rope is not None and rope.interleaved,
        SOFTCAP=how.softcap,
        NORM=norms is not None,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


@triton.jit
def _partners(D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return of each element of a head [DP] its partner, the number of the pair, and whether it is the first of it.
    What is past ROTARY is its own partner."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, DP)
    if INTERLEAVED:
        is_first = d % 2 == 0
        other = tl.where(is_first, d + 1, d - 1)
        pair = d // 2
    else:
        is_first = d < HALF
        other = tl.where(is_first, d + HALF, d - HALF)
        pair = tl.where(is_first, d, d - HALF)
    return tl.where(d < ROTARY, other, d), pair, is_first


@triton.jit
def _load_queries(
    qkv,
    at_head,
    is_query,
    place,
    rope,
    query_scale,
    q_norm,
    eps,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Queries [ROWS, DP] of several sequences, normalised and rotated. ``at_head``: [ROWS], where each begins in qkv;
    ``is_query``: [ROWS]; ``place``: [ROWS], of each row's token in the tables."""
    d = tl.arange(0, DP)
    mask = is_query[:, None] & (d < D)[None, :]
    q = tl.load(qkv + at_head[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM or ROTARY > 0:
        other, pair, is_first = _partners(D, DP, ROTARY, INTERLEAVED)
        if ROTARY > 0:
            partner = tl.load(qkv + at_head[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            weight, other_weight = norm_weights(q_norm, other, D, DP, NORM)
            scale = (1.0 / tl.sqrt(tl.sum(q * q, 1) / D + eps))[:, None]
            q = q * scale * weight[None, :]
            if ROTARY > 0:
                partner = partner * scale * other_weight[None, :]
        if ROTARY > 0:
            row = rope + place.to(tl.int64)[:, None] * ROTARY + pair[None, :]
            turned = is_query[:, None] & (d < ROTARY)[None, :]
            cos = tl.load(row, mask=turned, other=1.0)
            sin = tl.load(row + ROTARY // 2, mask=turned, other=0.0)
            q = q * cos + partner * tl.where(is_first[None, :], -sin, sin)
    if query_scale is not None:
        q = q * tl.load(query_scale + place, mask=is_query, other=0.0)[:, None]
    return q.to(qkv.dtype.element_ty)


@triton.jit(do_not_specialize=["first"])
def _attend_to_shared(
    qkv,
    cache,
    kv_scales,
    table,
    rope,
    query_scale,
    shifts,
    q_norm,
    items,
    members,
    rows,
    seq_lens,
    parts,
    first,
    eps,
    scale,
    stride_qkv,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    stride_table,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BN: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    launch_next(PDL)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    tile = tl.load(items + item * COLUMNS)
    if tile < 0:
        if item == 0:  # some program of each kernel waits for those before
            wait_for_previous(PDL)
        return
    row = tl.load(items + item * COLUMNS + 1)
    begin = tl.load(items + item * COLUMNS + 2)
    end = tl.load(items + item * COLUMNS + 3)
    m = tl.arange(0, ROWS)
    slot, g = m // PADDED, m % PADDED
    seq = tl.load(members + tile * SEQS + slot, mask=slot < SEQS, other=-1)
    is_query = (seq >= 0) & (g < GROUP)
    place = tl.maximum(tl.load(seq_lens + seq, mask=is_query, other=1), 1) - 1
    if shifts is not None:
        place += tl.load(shifts + tl.load(rows + seq, mask=is_query, other=0), mask=is_query, other=0)
    kv = cache + kv_head * stride_head, table + row.to(tl.int64) * stride_table, (stride_block, stride_token, stride_kv)
    block = blocks_of(kv, begin, end, BLOCK_SIZE, BN)
    scale = times_scale(scale, kv_scales, kv_head)
    wait_for_previous(PDL)
    at_head = seq.to(tl.int64) * stride_qkv + (kv_head * GROUP + g) * D
    q = _load_queries(qkv, at_head, is_query, place, rope, query_scale, q_norm, eps, D, DP, ROTARY, INTERLEAVED, NORM)
    q = beside_codes(q, kv_scales)
    top, total, acc = empty_softmax(ROWS, DP)
    for j in tl.range(begin, end, BN, num_stages=STAGES):
        stretch = load_stretch(kv, block, j, end, D, DP, BLOCK_SIZE, BN)
        block = blocks_of(kv, j + BN, end, BLOCK_SIZE, BN)
        top, total, acc = attend(q, stretch, scale, top, total, acc, SOFTCAP)
    acc = times_scale(acc, kv_scales, KV + kv_head)
    part = parts + (((first + item * SEQS + slot).to(tl.int64) * KV + kv_head) * GROUP + g) * (DP + 2)
    tl.store(part[:, None] + tl.arange(0, DP)[None, :], acc, mask=is_query[:, None])
    tl.store(part + DP, top, mask=is_query)
    tl.store(part + DP + 1, total, mask=is_query)
