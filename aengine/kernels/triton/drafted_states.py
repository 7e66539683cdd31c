"""Columns of a head's state a program, of one sequence with all its tokens: the state is read and written once.

Bytes: 8 * num_sequences * num_value_heads * key_dim * value_dim, beside those of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta_memory import DeltaInputs, DeltaMemory
from .launch import has_pdl, launch, launch_next_and_wait
from .short_conv import conv_input, conv_output

_COLUMNS = 32


def gated_delta_of_drafts(inputs: DeltaInputs, memory: DeltaMemory, pages: Tensor, positions: Tensor) -> Tensor:
    v = inputs.v
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    decay, beta = inputs.decay.contiguous(), inputs.beta.contiguous()
    given = (*inputs[:3], decay, beta, out)
    _launch(given, memory, pages, positions, inputs.q.shape[1], [x.stride(0) for x in inputs[:3]], settles=False)
    return out


def settle_pending(memory: DeltaMemory, pages: Tensor, positions: Tensor) -> None:
    heads, key_dim, value_dim = memory.states.shape[1:]
    keys = memory.pending.shape[2] - heads * (value_dim + 2)
    _launch((memory.pending,) * 6, memory, pages, positions, keys // key_dim, [0, 0, 0], settles=True)


def _launch(
    given: tuple[Tensor, ...],
    memory: DeltaMemory,
    pages: Tensor,
    positions: Tensor,
    num_key_heads: int,
    strides: list[int],
    *,
    settles: bool,
) -> None:
    states, pending, tags = memory
    _, num_heads, key_dim, value_dim = states.shape
    length = tags.shape[1]
    bv = min(_COLUMNS, triton.next_power_of_2(value_dim))
    launch(
        _gated_delta,
        (len(pages), num_heads, triton.cdiv(value_dim, bv)),
        *given,
        states,
        pending,
        tags,
        pages,
        positions,
        len(pages),
        *strides,
        states.stride(0),
        pending.stride(0),
        tags.stride(0),
        key_dim**-0.5,
        TIMES=num_heads // num_key_heads,
        K=key_dim,
        V=value_dim,
        LENGTH=length,
        SETTLES=settles,
        BK=triton.next_power_of_2(key_dim),
        BV=bv,
        BL=triton.next_power_of_2(length),
        num_warps=4,
    )


@triton.jit
def _moved(state, k, v, decay, beta):
    k /= tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    state *= tl.exp(decay)
    correction = (v - tl.sum(state * k[:, None], 0)) * beta
    return state + k[:, None] * correction[None, :]


@triton.jit
def _count_own(pages_ptr, positions_ptr, i, n, page, first, LENGTH: tl.constexpr, BL: tl.constexpr):
    """Tokens of the sequence whose first is token i; 0 if another is, whose program computes this one."""
    page_before = tl.load(pages_ptr + i - 1, mask=i > 0, other=-1)
    before = tl.load(positions_ptr + i - 1, mask=i > 0, other=-2)
    lanes = tl.arange(0, BL)
    is_there = (i + lanes < n) & (lanes < LENGTH // 2)
    own = tl.load(pages_ptr + i + lanes, mask=is_there, other=-1) == page
    own &= tl.load(positions_ptr + i + lanes, mask=is_there, other=-1) == first + lanes
    return tl.where((page_before == page) & (before + 1 == first), 0, tl.sum(own.to(tl.int32), 0))


@triton.jit
def _count_pending(tags, first, LENGTH: tl.constexpr, BL: tl.constexpr):
    """Tokens before position ``first`` that are not in the state. Places that this step writes are read here, too, but
    lie behind one that does not match."""
    lanes = tl.arange(0, BL)
    wanted = first - 1 - lanes
    is_there = (lanes < LENGTH) & (wanted >= 0)
    found = tl.load(tags + wanted % LENGTH, mask=is_there, other=-1)
    return tl.min(tl.where(is_there & (found.to(tl.int64) == wanted), BL, lanes), 0)


@triton.jit
def _inputs(k_ptr, v_ptr, decay_ptr, beta_ptr, is_k, is_v):
    k = tl.load(k_ptr, mask=is_k, other=0.0).to(tl.float32)
    v = tl.load(v_ptr, mask=is_v, other=0.0).to(tl.float32)
    return k, v, tl.load(decay_ptr), tl.load(beta_ptr)


@triton.jit(do_not_specialize=["n"])
def _gated_delta(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    out_ptr,
    memory_ptr,
    pending_ptr,
    tags_ptr,
    pages_ptr,
    positions_ptr,
    n,
    stride_q,
    stride_k,
    stride_v,
    stride_page,
    stride_pending,
    stride_tags,
    scale,
    TIMES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LENGTH: tl.constexpr,
    SETTLES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
):
    """``SETTLES``: what is pending is put into the states, and no token is computed."""
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    keys = num_heads // TIMES * K
    # Of a token in ``pending``.
    width = keys + num_heads * (V + 2)
    page, first = tl.load(pages_ptr + i), tl.load(positions_ptr + i)
    count = 0
    if not SETTLES:
        count = _count_own(pages_ptr, positions_ptr, i, n, page, first, LENGTH, BL)
        if count == 0:
            return
    tags = tags_ptr + page * stride_tags
    num_pending = _count_pending(tags, first, LENGTH, BL)
    at_k, at_v = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    is_k, is_v = at_k < K, at_v < V
    places = memory_ptr + page * stride_page + head * K * V + at_k[:, None] * V + at_v[None, :]
    inside = is_k[:, None] & is_v[None, :]
    # Another request may have left NaN in the page, so it is not read.
    state = tl.load(places, mask=inside & (first > 0), other=0.0)
    of_key, of_value = head // TIMES * K + at_k, head * V + at_v
    pending = pending_ptr + page * stride_pending
    for back in range(num_pending):
        kept = pending + (first - num_pending + back) % LENGTH * width
        of_head = kept + keys + num_heads * V + head
        k, v, decay, beta = _inputs(kept + of_key, kept + keys + of_value, of_head, of_head + num_heads, is_k, is_v)
        state = _moved(state, k, v, decay, beta)
    if SETTLES:
        tl.store(places, state, mask=inside)
    for place in range(count):
        at = i + place
        q = tl.load(q_ptr + at * stride_q + of_key, mask=is_k, other=0.0).to(tl.float32)
        own_k, own_v, at_head = k_ptr + at * stride_k + of_key, v_ptr + at * stride_v + of_value, at * num_heads + head
        k, v, decay, beta = _inputs(own_k, own_v, decay_ptr + at_head, beta_ptr + at_head, is_k, is_v)
        state = _moved(state, k, v, decay, beta)
        q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
        tl.store(out_ptr + at * num_heads * V + of_value, tl.sum(state * q[:, None], 0), mask=is_v)
        slot = (first + place) % LENGTH
        is_first_of_head = tl.program_id(2) == 0
        if place == 0:
            tl.store(places, state, mask=inside)
        else:
            kept = pending + slot * width
            tl.store(kept + of_key, k, mask=is_k & is_first_of_head & (head % TIMES == 0))
            tl.store(kept + keys + of_value, v, mask=is_v)
            tl.store(kept + keys + num_heads * V + head, decay, mask=is_first_of_head)
            tl.store(kept + keys + num_heads * (V + 1) + head, beta, mask=is_first_of_head)
        tag = tl.where(place == 0, -1, first + place).to(tl.int32)
        tl.store(tags + slot, tag, mask=is_first_of_head & (head == 0))


def conv_of_drafts(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, pages: Tensor, positions: Tensor, num_kept: int
) -> Tensor:
    n, channels = len(x), weight.shape[1]
    out = torch.empty((n, channels), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(channels))
    launch(
        _conv,
        (n, triton.cdiv(channels, block)),
        x,
        weight,
        bias,
        ring,
        pages,
        positions,
        out,
        num_kept,
        x.stride(0),
        ring.stride(0),
        channels,
        WIDTH=weight.shape[0],
        LENGTH=ring.shape[1],
        GATED=x.shape[1] > channels,
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["num_kept"])
def _conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ring_ptr,
    pages_ptr,
    positions_ptr,
    out_ptr,
    num_kept,
    stride_x,
    stride_page,
    channels,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    page, position = tl.load(pages_ptr + i), tl.load(positions_ptr + i)
    ring = ring_ptr + page * stride_page + at
    x = conv_input(x_ptr + i * stride_x, at, channels, inside, GATED)
    y = x * tl.load(weight_ptr + (WIDTH - 1) * channels + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=inside, other=0.0)
    for tap in tl.static_range(WIDTH - 1):
        source, wanted = i - (WIDTH - 1 - tap), position - (WIDTH - 1 - tap)
        is_new = tl.load(pages_ptr + source, mask=source >= 0, other=-1) == page
        is_new &= tl.load(positions_ptr + source, mask=source >= 0, other=-1) == wanted
        is_new &= wanted >= 0
        value = conv_input(x_ptr + source * stride_x, at, channels, inside & is_new, GATED)
        is_old = inside & (wanted >= 0) & (is_new == 0)
        value += tl.load(ring + wanted % LENGTH * channels, mask=is_old, other=0.0)
        y += value * tl.load(weight_ptr + tap * channels + at, mask=inside, other=0.0)
    tl.store(ring + position % LENGTH * channels, x, mask=inside & (i < num_kept))
    y = conv_output(y, x_ptr + i * stride_x, at, channels, inside, GATED)
    tl.store(out_ptr + i * channels + at, y.to(out_ptr.dtype.element_ty), mask=inside)
