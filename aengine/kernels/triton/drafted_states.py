"""A head of a sequence with all its tokens a program: the state is read and written once.

Bytes: 8 * num_sequences * num_value_heads * key_dim * value_dim, beside those of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta_memory import DeltaGates, DeltaInputs, DeltaMemory
from .gated_delta import WARPS, decay_of, gated_norm, silu
from .launch import has_pdl, launch, launch_next_and_wait
from .short_conv import conv_input, conv_output


def gated_delta_of_drafts(
    inputs: DeltaInputs, gates: DeltaGates, memory: DeltaMemory, pages: Tensor, positions: Tensor
) -> Tensor:
    out = inputs.new_output()
    strides = [x.stride(0) for x in inputs.tensors]
    given = *inputs.tensors, *gates, out
    _launch(given, strides, memory, pages, positions, inputs.num_key_heads, settles=False)
    return out


def settle_pending(memory: DeltaMemory, pages: Tensor, positions: Tensor) -> None:
    heads, key_dim, value_dim = memory.states.shape[1:]
    keys = memory.pending.shape[2] - heads * (value_dim + 2)
    given = *(memory.pending,) * 7, 0.0, memory.pending
    _launch(given, [0] * 4, memory, pages, positions, keys // key_dim, settles=True)


def _launch(
    given: tuple[Tensor | float, ...],
    strides: list[int],
    memory: DeltaMemory,
    pages: Tensor,
    positions: Tensor,
    num_key_heads: int,
    *,
    settles: bool,
) -> None:
    states, pending, tags = memory
    _, num_heads, key_dim, value_dim = states.shape
    length = tags.shape[1]
    launch(
        _gated_delta,
        (len(pages), num_heads),
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
        BV=triton.next_power_of_2(value_dim),
        BL=triton.next_power_of_2(length),
        num_warps=WARPS,
    )


@triton.jit
def _moved(state, k, v, decay, beta):
    k /= tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    state *= tl.exp(decay)
    correction = (v - tl.sum(state * k[:, None], 0)) * beta
    return state + k[:, None] * correction[None, :]


@triton.jit
def _own(mixed, of_key, keys, of_value, is_k, is_v):
    q = silu(tl.load(mixed + of_key, mask=is_k, other=0.0).to(tl.float32))
    k = silu(tl.load(mixed + keys + of_key, mask=is_k, other=0.0).to(tl.float32))
    return q, k, silu(tl.load(mixed + 2 * keys + of_value, mask=is_v, other=0.0).to(tl.float32))


@triton.jit
def _keep(kept, k, v, decay, beta, of_key, of_value, is_k, is_v, keys, head, V: tl.constexpr):
    of_head = kept + keys + tl.num_programs(1) * V + head
    tl.store(kept + of_key, k, mask=is_k)
    tl.store(kept + keys + of_value, v, mask=is_v)
    tl.store(of_head, decay)
    tl.store(of_head + tl.num_programs(1), beta)


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


@triton.jit(do_not_specialize=["n"])
def _gated_delta(
    mixed_ptr,
    z_ptr,
    b_ptr,
    a_ptr,
    rate_ptr,
    bias_ptr,
    norm_ptr,
    eps,
    out_ptr,
    memory_ptr,
    pending_ptr,
    tags_ptr,
    pages_ptr,
    positions_ptr,
    n,
    stride_mixed,
    stride_z,
    stride_b,
    stride_a,
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
    width = keys + num_heads * (V + 2)  # elements that ``pending`` has of a token
    page, first = tl.load(pages_ptr + i), tl.load(positions_ptr + i)
    count = 0
    if not SETTLES:
        count = _count_own(pages_ptr, positions_ptr, i, n, page, first, LENGTH, BL)
        if count == 0:
            return
    tags = tags_ptr + page * stride_tags
    num_pending = _count_pending(tags, first, LENGTH, BL)
    at_k, at_v = tl.arange(0, BK), tl.arange(0, BV)
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
        k = tl.load(kept + of_key, mask=is_k, other=0.0)
        v = tl.load(kept + keys + of_value, mask=is_v, other=0.0)
        state = _moved(state, k, v, tl.load(of_head), tl.load(of_head + num_heads))
    if SETTLES:
        tl.store(places, state, mask=inside)
    else:
        weight = tl.load(norm_ptr + at_v, mask=is_v, other=0.0).to(tl.float32)
        for place in range(count):
            at = i + place
            q, k, v = _own(mixed_ptr + at * stride_mixed, of_key, keys, of_value, is_k, is_v)
            decay = decay_of(tl.load(a_ptr + at * stride_a + head), tl.load(rate_ptr + head), tl.load(bias_ptr + head))
            beta = tl.sigmoid(tl.load(b_ptr + at * stride_b + head).to(tl.float32))
            state = _moved(state, k, v, decay, beta)
            z = tl.load(z_ptr + at * stride_z + of_value, mask=is_v, other=0.0)
            q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
            out = gated_norm(tl.sum(state * q[:, None], 0), z, weight, eps, V)
            tl.store(out_ptr + at * num_heads * V + of_value, out.to(out_ptr.dtype.element_ty), mask=is_v)
            if place == 0:
                tl.store(places, state, mask=inside)
            else:
                kept = pending + (first + place) % LENGTH * width
                _keep(kept, k, v, decay, beta, of_key, of_value, is_k & (head % TIMES == 0), is_v, keys, head, V)
            tl.store(tags + (first + place) % LENGTH, tl.where(place == 0, -1, first + place), mask=head == 0)


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
