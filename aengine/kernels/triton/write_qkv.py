"""A token's queries, or its keys and values, a program. Bytes: qkv twice, k and v once more; operations: some 10 an
element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..rotary import HeadNorms, Rope
from .kv_codes import as_known, kept_number, store_kept
from .launch import has_pdl, launch, launch_next_and_wait


def apply_rope_and_write_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rope: Rope | None,
    norms: HeadNorms | None,
    num_heads: int,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
) -> None:
    block_size, _, num_kv_heads, head_dim = kv_cache.shape[1:]
    launch(
        _apply_rope_and_write_kv,
        (qkv.shape[0], 2),
        qkv,
        positions,
        slot_mapping,
        None if rope is None else rope.table,
        None if rope is None else rope.query_scale,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        as_known(kv_cache, kv_scales),
        kv_scales,
        0.0 if norms is None else norms.eps,
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        H=num_heads,
        KV=num_kv_heads,
        QUERIES=triton.next_power_of_2(num_heads),
        KEPT=triton.next_power_of_2(2 * num_kv_heads),
        D=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        ROTARY=0 if rope is None else rope.table.shape[1],
        INTERLEAVED=rope is not None and rope.interleaved,
        BLOCK_SIZE=block_size,
        NORM=norms is not None,
        PDL=has_pdl(),
        num_warps=4,
    )


@triton.jit
def _pairs(i, D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the first element of each pair, and how far the second is away. Past ROTARY the pairs are any that are
    left."""
    if INTERLEAVED:
        first = 2 * i
        apart = i * 0 + 1
    elif ROTARY == D or ROTARY == 0:
        first = i
        apart = i * 0 + D // 2
    else:
        is_turned = i < ROTARY // 2
        first = tl.where(is_turned, i, ROTARY // 2 + i)
        apart = tl.where(is_turned, ROTARY // 2, D // 2 - ROTARY // 2)
    return first, apart


@triton.jit
def _write_heads(
    qkv,
    positions,
    slots,
    rope,
    query_scale,
    norm,
    cache,
    kv_scales,
    eps,
    strides,
    H: tl.constexpr,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    IS_KEPT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalise and rotate a token's queries, or IS_KEPT its keys, which with its values go to the cache as well."""
    stride_block, stride_token, stride_kv, stride_head = strides
    token = tl.program_id(0).to(tl.int64)
    if ROTARY > 0:
        position = tl.load(positions + token)
    head = tl.arange(0, HEADS)[:, None]
    is_head = head < (2 * KV if IS_KEPT else H)
    rotated = head < (KV if IS_KEPT else H)
    i = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = D // 2
    inside = is_head & (i < half)
    e, apart = _pairs(i, D, ROTARY, INTERLEAVED)
    at = qkv + token * ((H + 2 * KV) * D) + (head + (H if IS_KEPT else 0)) * D + e
    first_raw = tl.load(at, mask=inside, other=0.0)
    second_raw = tl.load(at + apart, mask=inside, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)
        first = first * scale[:, None] * tl.load(norm + e, mask=i < half, other=0.0).to(tl.float32)
        second = second * scale[:, None] * tl.load(norm + apart + e, mask=i < half, other=0.0).to(tl.float32)
    if ROTARY > 0:
        turn: tl.constexpr = ROTARY // 2
        unturned: tl.constexpr = 0.0 if ROTARY == D else 1.0
        cos = tl.load(rope + position * ROTARY + i, mask=i < turn, other=unturned)
        sin = tl.load(rope + position * ROTARY + turn + i, mask=i < turn, other=0.0)
        x = first * cos - second * sin
        second = second * cos + first * sin
        first = x
        if query_scale is not None and not IS_KEPT:
            factor = tl.load(query_scale + position)
            first, second = first * factor, second * factor
    if ROTARY > 0 or NORM:
        first_raw = tl.where(rotated, first.to(first_raw.dtype), first_raw)
        second_raw = tl.where(rotated, second.to(first_raw.dtype), second_raw)
        tl.store(at, first_raw, mask=inside & rotated)
        tl.store(at + apart, second_raw, mask=inside & rotated)
    if IS_KEPT:
        slot = tl.load(slots + token)
        place = cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
        place = place + tl.where(rotated, 0, stride_kv) + tl.where(rotated, head, head - KV) * stride_head + e
        store_kept(place, kept_number(first_raw, kv_scales, head, is_head, cache), inside & (slot >= 0))
        store_kept(place + apart, kept_number(second_raw, kv_scales, head, is_head, cache), inside & (slot >= 0))


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _apply_rope_and_write_kv(
    qkv,
    positions,
    slots,
    rope,
    query_scale,
    q_norm,
    k_norm,
    cache,
    kv_scales,
    eps,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    H: tl.constexpr,
    KV: tl.constexpr,
    QUERIES: tl.constexpr,
    KEPT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """QUERIES, KEPT: powers of two that hold a token's heads of queries, and of keys and values. They are apart since
    only these are rounded to codes, which takes long."""
    launch_next_and_wait(PDL)
    strides = (stride_block, stride_token, stride_kv, stride_head)
    where = (qkv, positions, slots, rope, query_scale)
    to = (cache, kv_scales, eps, strides, H, KV)
    if tl.program_id(1) == 0:
        _write_heads(*where, q_norm, *to, QUERIES, False, D, HALF, ROTARY, INTERLEAVED, BLOCK_SIZE, NORM)
    else:
        _write_heads(*where, k_norm, *to, KEPT, True, D, HALF, ROTARY, INTERLEAVED, BLOCK_SIZE, NORM)
