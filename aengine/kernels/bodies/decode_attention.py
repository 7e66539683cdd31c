"""A chunk of one sequence's keys, for one key-value head and the query heads that share it, a program.

Bytes: 2 * sizeof * num_kv_heads * head_dim a token of context; operations: 4 * num_heads * head_dim a token, far below
the arithmetic limit, so the query heads of a group are padded to the 16 rows of a matrix instruction without loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..decode_attention import LEAST_CHUNK, DecodePlan
from .launch import bucket, has_pdl, launch
from .write_qkv import Norms

if TYPE_CHECKING:
    from ..decode_attention import DecodeWorkspace

__all__ = ["decode_step_attention", "plan_decode"]


class _Tiling(NamedTuple):
    block_n: int  # keys at a time; divides LEAST_CHUNK
    num_warps: int
    num_stages: int
    preload: bool  # the first keys before the wait for the product, in registers


def _tiling(units: int) -> _Tiling:
    """By the number of (sequence, key-value head) pairs; measured on an H200 (benchmarks/gpu_attention.py)."""
    if units <= 64:
        return _Tiling(128, 4, 1, True)
    return _Tiling(64, 2, 4, False)


def plan_decode(seq_lens: Tensor, max_extra: int) -> DecodePlan:
    n, device = seq_lens.shape[0], seq_lens.device
    plan = DecodePlan(
        torch.empty(n + max_extra, dtype=torch.int32, device=device),
        torch.empty(n + 1, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    sizes = {"EXTRA": max_extra, "LEAST": LEAST_CHUNK, "SEQS": bucket(n), "ITEMS": triton.next_power_of_2(max_extra)}
    launch(_plan_decode, (1,), seq_lens, *plan, n, **sizes, PDL=has_pdl())
    return plan


@triton.jit(do_not_specialize=["n"])
def _plan_decode(
    seq_lens,
    items,
    starts,
    chunk_at,
    n,
    EXTRA: tl.constexpr,
    LEAST: tl.constexpr,
    SEQS: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, SEQS)
    lens = tl.load(seq_lens + i, mask=i < n, other=0)
    share = tl.cdiv(tl.sum(lens.to(tl.int64), 0), EXTRA)
    chunk = (tl.maximum(1, tl.cdiv(share, LEAST)) * LEAST).to(tl.int32)
    tl.store(chunk_at, chunk)
    counts = tl.where(i < n, tl.maximum(1, tl.cdiv(lens, chunk)), 0)
    ends = tl.cumsum(counts, 0)
    tl.store(starts + i, ends - counts, mask=i < n)
    tl.store(starts + n, tl.sum(counts, 0))
    most = tl.max(counts, 0)
    part = most * 0
    while part < most:
        tl.store(items + ends - counts + part, i, mask=part < counts)
        part += 1
    rest = tl.sum(counts, 0) + tl.arange(0, ITEMS)
    tl.store(items + rest, tl.full((ITEMS,), -1, tl.int32), mask=rest < n + EXTRA)


def decode_step_attention(
    qkv: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    rope: Tensor,
    norms: Norms,
    num_heads: int,
    scale: float,
    window: int | None,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    is_raw: bool,
    given: Tensor | None,
) -> Tensor:
    n, device = qkv.shape[0], qkv.device
    block_size, _, num_kv_heads, head_dim = kv_cache.shape[1:]
    q_norm, k_norm, eps = norms
    tiling = _tiling(n * num_kv_heads)
    out = torch.empty((n, num_heads * head_dim), dtype=qkv.dtype, device=device) if given is None else given
    launch(
        _decode_attention,
        (num_kv_heads, plan.items.shape[0]),
        qkv,
        kv_cache,
        block_table,
        rows,
        seq_lens,
        rope,
        q_norm,
        k_norm,
        out,
        *plan,
        workspace.parts,
        workspace.counters,
        eps,
        scale * 1.4426950408889634,  # exp2 is what the hardware has
        qkv.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        H=num_heads,
        KV=num_kv_heads,
        ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        D=head_dim,
        DP=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BN=tiling.block_n,
        WINDOW=window or 0,
        NORM=q_norm is not None and is_raw,
        RAW=is_raw,
        CLEAR=given is None,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        PRELOAD=tiling.preload,
        num_warps=tiling.num_warps,
    )
    return out


@triton.jit
def _turn(x, partner, weight, other_weight, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotary of rows x [rows, DP]; ``partner``: each element's other half of the pair. sin is signed."""
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        x = x * scale[:, None] * weight[None, :]
        partner = partner * scale[:, None] * other_weight[None, :]
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def _load_kv(
    keys,
    blocks,
    t,
    known,
    in_head,
    stride_block,
    stride_token,
    stride_kv,
    BLOCK_SIZE: tl.constexpr,
    DP: tl.constexpr,
):
    """Keys and values [BN, DP] at the positions t [BN] of a sequence."""
    d = tl.arange(0, DP)
    block = tl.load(blocks + t // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    place = (keys + block * stride_block + (t % BLOCK_SIZE) * stride_token)[:, None] + d[None, :]
    real = known[:, None] & in_head[None, :]
    return tl.load(place, mask=real, other=0.0), tl.load(place + stride_kv, mask=real, other=0.0)


@triton.jit
def _attend(q, k, v, scale, known, top, total, acc):
    """One stretch of keys into the running softmax: maximum and sum [rows], weighted values [rows, DP]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(known[None, :], s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)  # nothing known so far
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


_MOVING = ["rows", "seq_lens"]


@triton.jit(do_not_specialize_on_alignment=_MOVING)  # large on purpose: one launch instead of four
def _decode_attention(
    qkv,
    cache,
    table,
    rows,
    seq_lens,
    rope,
    q_norm,
    k_norm,
    out,
    items,
    starts,
    chunk_at,
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
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
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
    seq = tl.load(items + item)
    if seq < 0:  # nothing is left for this program
        if PDL:
            gdc_wait()
        return
    GROUP: tl.constexpr = H // KV
    HALF: tl.constexpr = D // 2
    PART: tl.constexpr = DP + 2
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_head = d < D
    is_query = (g < GROUP)[:, None] & in_head[None, :]
    at_head = (kv_head * GROUP + g)[:, None] * D + d[None, :]
    out_at = out + seq.to(tl.int64) * (H * D) + at_head
    seq_len = tl.load(seq_lens + seq)
    if seq_len == 0:  # padding
        if PDL:
            gdc_wait()
        if CLEAR:
            tl.store(out_at, tl.zeros((ROWS, DP), out.dtype.element_ty), mask=is_query)
        return
    first_item = tl.load(starts + seq)
    num_splits = tl.load(starts + seq + 1) - first_item
    chunk = tl.load(chunk_at)
    begin = (item - first_item) * chunk
    end = tl.minimum(begin + chunk, seq_len)
    if WINDOW > 0:  # a program whose keys are all too old has none, and says so
        begin = tl.maximum(begin, tl.minimum(end, tl.maximum(0, seq_len - WINDOW) // BN * BN))
    row = tl.load(rows + seq)
    position = seq_len - 1
    keys = cache + kv_head * stride_head
    end_in_cache = end
    if RAW:
        end_in_cache = tl.minimum(end, position)
    if PDL:
        if not RAW:
            gdc_wait()
    blocks = table + row * stride_table
    if PRELOAD:  # the first keys and values are old: they can be on their way while the product before still runs
        t = begin + tl.arange(0, BN)
        known = t < end_in_cache
        k, v = _load_kv(keys, blocks, t, known, in_head, stride_block, stride_token, stride_kv, BLOCK_SIZE, DP)
    if RAW:
        other = tl.where(d < HALF, d + HALF, d - HALF)
        pair = tl.where(d < HALF, d, d - HALF)
        cos = tl.load(rope + position.to(tl.int64) * D + pair, mask=in_head, other=0.0)
        sin = tl.load(rope + position.to(tl.int64) * D + HALF + pair, mask=in_head, other=0.0)
        sin = tl.where(d < HALF, -sin, sin)
        weight = cos
        other_weight = cos
        if NORM:
            weight = tl.load(q_norm + d, mask=in_head, other=0.0).to(tl.float32)
            other_weight = tl.load(q_norm + other, mask=in_head, other=0.0).to(tl.float32)
    if PDL:
        if RAW:
            gdc_wait()
    token = qkv + seq.to(tl.int64) * stride_qkv
    q = tl.load(token + at_head, mask=is_query, other=0.0).to(tl.float32)
    if RAW:
        at_other = (kv_head * GROUP + g)[:, None] * D + other[None, :]
        q_other = tl.load(token + at_other, mask=is_query, other=0.0).to(tl.float32)
        q = _turn(q, q_other, weight, other_weight, cos, sin, eps, D, NORM)
    q = q.to(qkv.dtype.element_ty)  # as the un-fused path leaves it in memory
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    rest = begin
    if PRELOAD:
        if WINDOW > 0:
            known = known & (t >= seq_len - WINDOW)
        top, total, acc = _attend(q, k, v, scale, known, top, total, acc)
        rest = begin + BN
    for j in tl.range(rest, end_in_cache, BN, num_stages=STAGES):
        tj = j + tl.arange(0, BN)
        known_j = tj < end_in_cache
        kj, vj = _load_kv(keys, blocks, tj, known_j, in_head, stride_block, stride_token, stride_kv, BLOCK_SIZE, DP)
        if WINDOW > 0:
            known_j = known_j & (tj >= seq_len - WINDOW)
        top, total, acc = _attend(q, kj, vj, scale, known_j, top, total, acc)
    if RAW:
        if end == seq_len:  # the program with the last key: it is not in the cache yet
            own = token + (H + kv_head) * D
            own_k = tl.load(own + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
            own_other = tl.load(own + other, mask=in_head, other=0.0).to(tl.float32)[None, :]
            if NORM:
                weight = tl.load(k_norm + d, mask=in_head, other=0.0).to(tl.float32)
                other_weight = tl.load(k_norm + other, mask=in_head, other=0.0).to(tl.float32)
            own_k = _turn(own_k, own_other, weight, other_weight, cos, sin, eps, D, NORM).to(qkv.dtype.element_ty)
            own_v = tl.load(own + KV * D + d, mask=in_head, other=0.0)[None, :]
            own_block = tl.load(blocks + position // BLOCK_SIZE).to(tl.int64)
            own_place = keys + own_block * stride_block + (position % BLOCK_SIZE) * stride_token + d[None, :]
            tl.store(own_place, own_k.to(cache.dtype.element_ty), mask=in_head[None, :])
            tl.store(own_place + stride_kv, own_v.to(cache.dtype.element_ty), mask=in_head[None, :])
            own_s = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
            own_top = tl.maximum(top, own_s)
            own_p = tl.exp2(own_s - own_top)
            own_shrink = tl.exp2(top - own_top)
            total = total * own_shrink + own_p
            acc = acc * own_shrink[:, None] + own_p[:, None] * own_v.to(tl.float32)
            top = own_top
    if num_splits == 1:
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_query)
        return
    unit = seq * KV + kv_head
    mine = parts + ((item * KV + kv_head) * (GROUP * PART)).to(tl.int64)
    tl.store(mine + g[:, None] * PART + d[None, :], acc, mask=(g < GROUP)[:, None])
    tl.store(mine + g * PART + DP, top, mask=g < GROUP)
    tl.store(mine + g * PART + DP + 1, total, mask=g < GROUP)
    tl.debug_barrier()  # all threads' parts are written before one of them says so
    num_done = tl.atomic_add(counters + unit, 1, sem="acq_rel", scope="gpu")
    if num_done == num_splits - 1:
        tl.store(counters + unit, 0)
        first_part = parts + ((first_item * KV + kv_head) * (GROUP * PART)).to(tl.int64)
        for head in tl.static_range(GROUP):
            place = out + seq.to(tl.int64) * (H * D) + (kv_head * GROUP + head) * D
            _combine(first_part + head * PART, num_splits, KV * GROUP * PART, PART, DP, D, place)


@triton.jit
def _combine(
    first,
    num_parts,
    STRIDE: tl.constexpr,
    PART: tl.constexpr,
    DP: tl.constexpr,
    D: tl.constexpr,
    out,
):
    """One head's output from its parts, 16 at a time."""
    d = tl.arange(0, DP)
    top = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((DP,), tl.float32)
    begin = num_parts * 0
    while begin < num_parts:
        i = begin + tl.arange(0, 16)
        part = first + i * STRIDE
        # .cg: past the L1 cache, which does not know what other multiprocessors wrote
        tops = tl.load(part + DP, mask=i < num_parts, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(part + DP + 1, mask=i < num_parts, other=0.0, cache_modifier=".cg")
        accs = tl.load(part[:, None] + d[None, :], mask=(i < num_parts)[:, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # parts before the window only
        shrink = tl.exp2(top - safe)
        share = tl.exp2(tops - safe)
        total = total * shrink + tl.sum(totals * share, 0)
        acc = acc * shrink + tl.sum(accs * share[:, None], 0)
        top = higher
        begin += 16
    tl.store(out + d, (acc / total).to(out.dtype.element_ty), mask=d < D)
