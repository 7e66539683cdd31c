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
from ..rotary import Rope
from .decode_parts import (
    apply_rope,
    capped,
    finish,
    load_kv,
    norm_weights,
    own_key_value,
    plan_item,
    rotary_at,
    score_scale,
    write_own_kv,
)
from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch, max_shared_memory
from .write_qkv import Norms

__all__ = ["decode_step_attention"]


class _Tiling(NamedTuple):
    block_n: int  # keys at a time; divides the chunks of the plan
    num_warps: int
    num_stages: int
    preload: bool  # the first keys before the wait for the product, in registers

    def shared_bytes(self, rows: int, head_bytes: int) -> int:
        """Shared memory needed at most: keys, values and queries, scores in float32; counters and the like."""
        return (2 * self.block_n + rows) * head_bytes + 4 * rows * self.block_n + 1024


def _tiling(size: BatchSize, rows: int, head_bytes: int) -> _Tiling:
    """``rows``: query heads of a program, padded; ``head_bytes``: of a key, padded."""
    tiling = _measured(size, head_bytes)
    while tiling.shared_bytes(rows, head_bytes) > max_shared_memory() and tiling.block_n > 16:
        tiling = tiling._replace(block_n=tiling.block_n // 2)
    return tiling


def _measured(size: BatchSize, head_bytes: int) -> _Tiling:
    """Return the tiling that was measured fastest on an H200, between the products of a layer."""
    if size is BatchSize.SMALL:  # as many keys as registers hold
        return _Tiling(min(256, 2**16 // head_bytes), 8, 1, True)
    if size is BatchSize.MIDDLING:
        return _Tiling(64, 2, 4, False)
    return _Tiling(32, 1, 3, False)  # one warp needs no barriers, and many small programs hide each other's latency


def decode_step_attention(
    qkv: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rope: Rope | None,
    norms: Norms,
    num_heads: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    plan: Tensor,
    workspace: DecodeWorkspace,
    is_raw: bool,
    given: Tensor | None,
) -> Tensor:
    n = qkv.shape[0]
    block_size, _, num_kv_heads, head_dim = kv_cache.shape[1:]
    q_norm, k_norm, eps = norms
    padded = max(16, triton.next_power_of_2(head_dim))
    group = triton.next_power_of_2(num_heads // num_kv_heads)
    tiling = _tiling(workspace.batch_size(n), max(16, group), padded * qkv.itemsize)
    out = torch.empty((n, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device) if given is None else given
    turn = rope if is_raw else None
    launch(
        _decode_attention,
        (num_kv_heads, plan.shape[0]),
        qkv,
        kv_cache,
        block_table,
        None if turn is None else turn.table,
        None if turn is None else turn.query_scale,
        None if turn is None else turn.shifts,
        q_norm,
        k_norm,
        sinks,
        out,
        plan,
        workspace.parts,
        workspace.counters,
        eps,
        score_scale(scale, softcap),
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
        BN=tiling.block_n,
        ROTARY=0 if turn is None else turn.table.shape[1],
        INTERLEAVED=turn is not None and turn.interleaved,
        SOFTCAP=softcap,
        NORM=q_norm is not None and is_raw,
        RAW=is_raw,
        CLEAR=given is None,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        # Not raw: the last key, which the launch before has only just written, is among the first.
        PRELOAD=tiling.preload and is_raw,
        num_warps=tiling.num_warps,
    )
    return out


@triton.jit
def _attend(q, k, v, scale, known, top, total, acc, SOFTCAP: tl.constexpr):
    """Add one stretch of keys to the running softmax: maximum and sum [rows], weighted values [rows, DP]."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        s = capped(s, SOFTCAP)
    s = tl.where(known[None, :], s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)  # nothing known so far
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit  # large on purpose: 40 parameters, and one launch instead of four
def _decode_attention(
    qkv,
    cache,
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
    BN: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM: tl.constexpr,
    RAW: tl.constexpr,
    CLEAR: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    PRELOAD: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)  # neighbours read the same blocks
    item = tl.program_id(1)
    seq, row, seq_len, begin, end, first_item, num_splits = plan_item(plan, item, COLUMNS)
    if seq < 0:  # nothing is left for this program
        if PDL:
            gdc_wait()
        return
    GROUP: tl.constexpr = H // KV
    ROWS: tl.constexpr = PADDED if PADDED > 16 else 16
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_head = d < D
    is_query = (g < GROUP)[:, None] & in_head[None, :]
    first = kv_head * (GROUP * D)
    at_head = first + g[:, None] * D + d[None, :]
    out_at = out + seq.to(tl.int64) * (H * D)
    if seq_len == 0:  # padding
        if PDL:
            gdc_wait()
        if CLEAR:
            tl.store(out_at + at_head, tl.zeros((ROWS, DP), out.dtype.element_ty), mask=is_query)
        return
    is_last = end == seq_len
    blocks = table + row.to(tl.int64) * stride_table
    keys = cache + kv_head * stride_head
    strides = (stride_block, stride_token, stride_kv)
    position = seq_len - 1
    if RAW:
        end = tl.minimum(end, position)  # the last key is not in the cache yet
    if PRELOAD:  # the first keys and values are old: they can be on their way while the product before still runs
        t = begin + tl.arange(0, BN)
        known = t < end
        k, v = load_kv(keys, blocks, t, known, in_head, strides, BLOCK_SIZE, DP)
    if RAW:
        turned = position  # place in the table
        if shifts is not None:
            turned += tl.load(shifts + row)
        rotary = rotary_at(rope, turned, D, DP, ROTARY, INTERLEAVED)
        q_weights = norm_weights(q_norm, rotary[0], D, DP, NORM)
        k_weights = norm_weights(k_norm, rotary[0], D, DP, NORM)
    if PDL:
        gdc_wait()
    token = qkv + seq.to(tl.int64) * stride_qkv
    q = tl.load(token + at_head, mask=is_query, other=0.0).to(tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    if RAW:
        at_other = first + g[:, None] * D + rotary[0][None, :]
        q_other = tl.load(token + at_other, mask=is_query, other=0.0).to(tl.float32)
        q = apply_rope(q, q_other, q_weights, rotary, eps, D, NORM, ROTARY)
        if query_scale is not None:
            q = q * tl.load(query_scale + turned)
    q = q.to(qkv.dtype.element_ty)  # as the un-fused path leaves it in memory
    if RAW:
        if is_last:
            own = token + (H + kv_head) * D
            k1, v1 = own_key_value(own, k_weights, rotary, eps, KV, D, DP, NORM, ROTARY)
            write_own_kv(keys, blocks, position, k1, v1, strides, BLOCK_SIZE, D, DP)
            k1, v1 = k1.to(cache.dtype.element_ty), v1.to(cache.dtype.element_ty)  # as a later query reads them
            top = tl.sum(q.to(tl.float32) * k1.to(tl.float32), 1) * scale
            if SOFTCAP > 0:
                top = capped(top, SOFTCAP)
            total = tl.full((ROWS,), 1.0, tl.float32)
            acc = tl.zeros((ROWS, DP), tl.float32) + v1.to(tl.float32)
    if sinks is not None:
        if item == first_item:
            sink = tl.load(sinks + kv_head * GROUP + g, mask=g < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
            top = higher
    rest = begin
    if PRELOAD:
        top, total, acc = _attend(q, k, v, scale, known, top, total, acc, SOFTCAP)
        rest = begin + BN
    for j in tl.range(rest, end, BN, num_stages=STAGES):
        tj = j + tl.arange(0, BN)
        known_j = tj < end
        kj, vj = load_kv(keys, blocks, tj, known_j, in_head, strides, BLOCK_SIZE, DP)
        top, total, acc = _attend(q, kj, vj, scale, known_j, top, total, acc, SOFTCAP)
    where = (seq * KV + kv_head, item, kv_head, first_item, num_splits)
    finish(acc, top, total, out_at + first, parts, counters, where, KV, GROUP, PADDED, ROWS, D, DP)
