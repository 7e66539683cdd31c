"""A token and a group of its heads a program. Bytes: qkv twice, k and v once more; operations: some 10 an element."""

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
        (qkv.shape[0],),
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
        HEADS=triton.next_power_of_2(num_heads + 2 * num_kv_heads),
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
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    if ROTARY > 0:
        position = tl.load(positions + token)
    slot = tl.load(slots + token)
    head = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = D // 2
    inside = (head < H + 2 * KV) & (i < half)
    e, apart = _pairs(i, D, ROTARY, INTERLEAVED)
    at = qkv + token * ((H + 2 * KV) * D) + head * D + e
    first_raw = tl.load(at, mask=inside, other=0.0)
    second_raw = tl.load(at + apart, mask=inside, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)
        ok = i < half
        w1 = tl.where(head < H, tl.load(q_norm + e, mask=ok, other=0.0), tl.load(k_norm + e, mask=ok, other=0.0))
        w2 = tl.where(
            head < H, tl.load(q_norm + apart + e, mask=ok, other=0.0), tl.load(k_norm + apart + e, mask=ok, other=0.0)
        )
        first = first * scale[:, None] * w1.to(tl.float32)
        second = second * scale[:, None] * w2.to(tl.float32)
    rotated = head < H + KV
    if ROTARY > 0:
        turn: tl.constexpr = ROTARY // 2
        kept: tl.constexpr = 0.0 if ROTARY == D else 1.0
        cos = tl.load(rope + position * ROTARY + i, mask=i < turn, other=kept)
        sin = tl.load(rope + position * ROTARY + turn + i, mask=i < turn, other=0.0)
        x = first * cos - second * sin
        y = second * cos + first * sin
        if query_scale is not None:
            factor = tl.where(head < H, tl.load(query_scale + position), 1.0)
            x, y = x * factor, y * factor
        one = tl.where(rotated, x.to(qkv.dtype.element_ty), first_raw)
        two = tl.where(rotated, y.to(qkv.dtype.element_ty), second_raw)
    elif NORM:
        one = tl.where(rotated, first.to(qkv.dtype.element_ty), first_raw)
        two = tl.where(rotated, second.to(qkv.dtype.element_ty), second_raw)
    else:
        one, two = first_raw, second_raw
    if ROTARY > 0 or NORM:
        tl.store(at, one, mask=inside & rotated)
        tl.store(at + apart, two, mask=inside & rotated)
    is_value = head >= H + KV
    kv_head = tl.where(is_value, head - H - KV, head - H)
    place = cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    place = place + tl.where(is_value, stride_kv, 0) + kv_head * stride_head + e
    written = inside & (head >= H) & (slot >= 0)
    whose = (kv_scales, head - H, (head >= H) & (head < H + 2 * KV))
    store_kept(place, kept_number(one, *whose, cache), written)
    store_kept(place + apart, kept_number(two, *whose, cache), written)
