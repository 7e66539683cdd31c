"""A chunk of one sequence's keys, for one key-value head and the query heads that share it, a program.

Bytes: 2 * sizeof * num_kv_heads * head_dim a token of context; operations: 4 * num_heads * head_dim a token, far below
the arithmetic limit, so the query heads of a group are padded to the 16 rows of a matrix instruction without loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_plan import PLAN_COLUMNS, BatchSize, DecodeWorkspace
from ..paged_attention import Scores
from ..rotary import HeadNorms, Rope
from ..shared_prefix import SharedKeys
from .decode_parts import (
    apply_rope,
    attend,
    blocks_of,
    capped,
    empty_softmax,
    finish,
    load_stretch,
    norm_weights,
    own_key_value,
    plan_item,
    rotary_at,
    score_scale,
    write_own_kv,
)
from .kv_codes import as_known, beside_codes, kept_number, numbers_of, times_scale
from .launch import has_pdl, launch, launch_next, max_shared_memory, wait_for_previous
from .shared_prefix import attend_to_shared


class _Tiling(NamedTuple):
    block_n: int  # keys that a program reads at a time; the chunks of a plan are multiples of it
    num_warps: int
    num_stages: int

    def shared_bytes(self, rows: int, head_bytes: int) -> int:
        """Shared memory needed at most: keys and values under way, queries, scores in float32; counters, scratch."""
        keys = 2 * self.block_n * max(1, self.num_stages - 1)
        return (keys + rows) * head_bytes + 4 * rows * self.block_n + 1024


def _tiling(size: BatchSize, rows: int, head_bytes: int, is_narrow: bool, is_fp8: bool) -> _Tiling:
    """``rows``: query heads of a program, padded; ``head_bytes``: of a key in the queries' dtype, padded;
    ``is_narrow``: see `DecodeWorkspace`; ``is_fp8``: of the cache."""
    tiling = _measured(size, head_bytes, is_narrow, is_fp8)
    while tiling.shared_bytes(rows, head_bytes) > max_shared_memory() and tiling.block_n > 16:
        tiling = tiling._replace(block_n=tiling.block_n // 2)
    return tiling


def _measured(size: BatchSize, head_bytes: int, is_narrow: bool, is_fp8: bool) -> _Tiling:
    """Return the tiling that was measured fastest on an H200, between the products of a layer; of codes on an H100."""
    if size in (BatchSize.FEW, BatchSize.SMALL) and is_narrow:
        return _Tiling(min(256, 2**16 // head_bytes), 8, 1)  # as many keys as fit the registers
    if size is BatchSize.FEW:
        return _Tiling(128, 4, 1)  # 4000 tokens take 9.7 us on an H100, 64 at a time 11.9
    if size is BatchSize.SMALL:
        return _Tiling(64, 4, 2)
    if size is BatchSize.MIDDLING:
        return _Tiling(64 if is_fp8 else 32, 2, 3)
    # One warp needs no barriers, and many small programs hide each other's latency.
    return _Tiling(32, 1, 3 if is_fp8 else 2)


def decode_step_attention(
    qkv: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rope: Rope | None,
    norms: HeadNorms | None,
    num_heads: int,
    how: Scores,
    plan: Tensor,
    workspace: DecodeWorkspace,
    is_raw: bool,
    given: Tensor | None,
    kv_scales: Tensor | None,
    shared: SharedKeys | None,
) -> Tensor:
    n = qkv.shape[0]
    block_size, _, num_kv_heads, head_dim = kv_cache.shape[1:]
    padded = max(16, triton.next_power_of_2(head_dim))
    group = triton.next_power_of_2(num_heads // num_kv_heads)
    size, is_fp8 = workspace.batch_size(n), kv_scales is not None
    tiling = _tiling(size, max(16, group), padded * qkv.itemsize, workspace.is_narrow, is_fp8)
    out = torch.empty((n, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device) if given is None else given
    turn = rope if is_raw else None
    if shared is not None:
        turned_by = turn, norms if is_raw else None
        attend_to_shared(qkv, kv_cache, block_table, *turned_by, num_heads, how, shared, workspace, kv_scales)
    launch(
        _decode_attention,
        (num_kv_heads, plan.shape[0]),
        qkv,
        as_known(kv_cache, kv_scales),
        kv_scales,
        block_table,
        None if turn is None else turn.table,
        None if turn is None else turn.query_scale,
        None if turn is None else turn.shifts,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        how.sinks,
        out,
        plan,
        workspace.parts,
        workspace.counters,
        0.0 if norms is None else norms.eps,
        score_scale(how.scale, how.softcap),
        qkv.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        H=num_heads,
        KV=num_kv_heads,
        PADDED=group,
        D=head_dim,
        DP=padded,
        BLOCK_SIZE=block_size,
        COLUMNS=PLAN_COLUMNS,
        SHARED=0 if shared is None else shared.members.shape[1],
        BN=tiling.block_n,
        ROTARY=0 if turn is None else turn.table.shape[1],
        INTERLEAVED=turn is not None and turn.interleaved,
        SOFTCAP=how.softcap,
        NORM=norms is not None and is_raw,
        RAW=is_raw,
        CLEAR=given is None,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        FEW=max(2, 2048 * tiling.num_warps // (group * padded)),  # 64 registers of each thread
        num_warps=tiling.num_warps,
    )
    return out


@triton.jit
def _pad(at, is_query, CLEAR: tl.constexpr, PDL: tl.constexpr):
    """The end of a program whose sequence is padding: zeros as its output if CLEAR."""
    wait_for_previous(PDL)
    if CLEAR:
        tl.store(at, tl.zeros(is_query.shape, at.dtype.element_ty), mask=is_query)


@triton.jit
def _places(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Where the GROUP heads of a key-value head, the first of ROWS rows, are in a row of q, or of the output: which of
    [ROWS, DP] are elements, the first element, and the offsets of the heads [ROWS, 1] and of all elements."""
    is_query = (tl.arange(0, ROWS) < GROUP)[:, None] & (tl.arange(0, DP) < D)[None, :]
    first = kv_head * (GROUP * D)
    heads = first + tl.arange(0, ROWS)[:, None] * D
    return is_query, first, heads, heads + tl.arange(0, DP)[None, :]


@triton.jit
def _rotation(
    rope,
    shifts,
    q_norm,
    k_norm,
    row,
    position,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """What the token's q and k are normalised and rotated by: the place in the tables, what `rotary_at` returns, and
    the weights of both norms."""
    place = position
    if shifts is not None:
        place += tl.load(shifts + row)
    rotary = rotary_at(rope, place, D, DP, ROTARY, INTERLEAVED)
    q_weights = norm_weights(q_norm, rotary[0], D, DP, NORM)
    k_weights = norm_weights(k_norm, rotary[0], D, DP, NORM)
    return place, rotary, q_weights, k_weights


@triton.jit
def _load_query(
    token,
    heads,
    at_head,
    is_query,
    rotation,
    query_scale,
    eps,
    kv_scales,
    D: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """The token's queries [rows, DP], as the un-fused path leaves them in memory. ``heads``: [rows, 1], where each
    begins; ``at_head``, ``is_query``: [rows, DP], of its elements."""
    place, rotary, weights, _ = rotation
    q = tl.load(token + at_head, mask=is_query, other=0.0).to(tl.float32)
    if NORM or ROTARY > 0:
        partner = tl.load(token + (heads + rotary[0][None, :]), mask=is_query, other=0.0).to(tl.float32)
        q = apply_rope(q, partner, weights, rotary, eps, D, NORM, ROTARY)
    if query_scale is not None:
        q = q * tl.load(query_scale + place)
    return beside_codes(q.to(token.dtype.element_ty), kv_scales)


@triton.jit
def _begin_with_own_key(
    q,
    own,
    kv,
    position,
    rotation,
    eps,
    scale,
    kv_scales,
    kv_head,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Write the token's own key, which ``own`` points to in its qkv, and value to the cache; returns the running
    softmax of them alone."""
    keys, blocks, strides = kv
    _, rotary, _, weights = rotation
    k, v = own_key_value(own, weights, rotary, eps, KV, D, DP, NORM, ROTARY)
    k = kept_number(k, kv_scales, kv_head, True, keys)  # rounded as the cache will have them
    v = kept_number(v, kv_scales, KV + kv_head, True, keys)
    write_own_kv(keys, blocks, position, k, v, strides, BLOCK_SIZE, D, DP)
    top = tl.sum(q.to(tl.float32) * numbers_of(k, scale), 1) * scale
    if SOFTCAP > 0:
        top = capped(top, SOFTCAP)
    total = tl.full((q.shape[0],), 1.0, tl.float32)
    acc = tl.zeros((q.shape[0], DP), tl.float32) + numbers_of(v, scale)
    return top, total, acc


@triton.jit
def _add_sinks(sinks, kv_head, is_first, top, total, acc, GROUP: tl.constexpr):
    """Add the sinks of GROUP heads, the first of the rows, to the running softmax of a sequence's first item. They have
    no value. ``sinks``: None: there are none."""
    if sinks is not None:
        if is_first:
            g = tl.arange(0, top.shape[0])
            sink = tl.load(sinks + kv_head * GROUP + g, mask=g < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
            top = higher
    return top, total, acc


@triton.jit
def _decode_attention(
    qkv,
    cache,
    kv_scales,
    table,
    rope,
    query_scale,
    shifts,
    q_norm,
    k_norm,
    sinks,
    out,
    plan,
    parts,
    counters,
    eps,
    scale,
    stride_qkv,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    stride_table,
    H: tl.constexpr,
    KV: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM: tl.constexpr,
    RAW: tl.constexpr,
    CLEAR: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    FEW: tl.constexpr,
):
    launch_next(PDL)
    kv_head, item = tl.program_id(0), tl.program_id(1)  # neighbours read the same blocks
    seq, row, seq_len, begin, end, first_item, num_splits, shared = plan_item(plan, item, COLUMNS)
    if seq < 0:  # no item is left; waiting for the kernel before is left to the programs of the first item
        return
    GROUP: tl.constexpr = H // KV
    ROWS: tl.constexpr = PADDED if PADDED > 16 else 16
    is_query, first, heads, at_head = _places(kv_head, GROUP, ROWS, D, DP)
    out += seq.to(tl.int64) * (H * D)
    if seq_len == 0:
        _pad(out + at_head, is_query, CLEAR, PDL)
        return
    kv = cache + kv_head * stride_head, table + row.to(tl.int64) * stride_table, (stride_block, stride_token, stride_kv)
    scale = times_scale(scale, kv_scales, kv_head)
    position = seq_len - 1
    old = tl.minimum(end, position) if RAW else end  # raw: the last key is not in the cache yet
    rotation = _rotation(rope, shifts, q_norm, k_norm, row, position, D, DP, ROTARY, INTERLEAVED, NORM)
    qkv += seq.to(tl.int64) * stride_qkv
    q = beside_codes(tl.zeros((ROWS, DP), qkv.dtype.element_ty), kv_scales)
    top, total, acc = empty_softmax(ROWS, DP)
    if not RAW:  # the launch before has only just written the last key
        wait_for_previous(PDL)
    block = blocks_of(kv, begin, old, BLOCK_SIZE, BN)
    for j in tl.range(begin, tl.maximum(old, begin + 1), BN, num_stages=STAGES):
        stretch = load_stretch(kv, block, j, old, D, DP, BLOCK_SIZE, BN)
        block = blocks_of(kv, j + BN, old, BLOCK_SIZE, BN)
        if j == begin:  # the first keys are old: they are on their way while the product before still runs
            if RAW:
                wait_for_previous(PDL)
            q = _load_query(qkv, heads, at_head, is_query, rotation, query_scale, eps, kv_scales, D, NORM, ROTARY)
            if RAW:
                if end == seq_len:
                    own = (q, qkv + (H + kv_head) * D, kv, position, rotation, eps, scale, kv_scales, kv_head)
                    top, total, acc = _begin_with_own_key(*own, KV, D, DP, BLOCK_SIZE, SOFTCAP, NORM, ROTARY)
            top, total, acc = _add_sinks(sinks, kv_head, item == first_item, top, total, acc, GROUP)
        top, total, acc = attend(q, stretch, scale, top, total, acc, SOFTCAP)
    where = (seq * KV + kv_head, item, kv_head, first_item, num_splits, shared)
    finish(acc, top, total, out + first, parts, counters, kv_scales, where, SHARED, KV, GROUP, PADDED, ROWS, D, DP, FEW)
