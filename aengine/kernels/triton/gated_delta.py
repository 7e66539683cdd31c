"""A head of a sequence a program, from the convolution's output to the gated norm: the state is read and written once.

Bytes: 8 * n * num_value_heads * key_dim * value_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta_memory import DeltaGates, DeltaInputs
from .launch import has_pdl, launch, launch_next, wait_for_previous

WARPS = 4


def gated_delta_of_tokens(
    inputs: DeltaInputs, gates: DeltaGates, memory: Tensor, pages: Tensor, begins: Tensor, out: Tensor
) -> None:
    """``pages``: int64 [n], -1: nothing is computed of this token."""
    _, num_heads, key_dim, value_dim = memory.shape
    times = num_heads // inputs.num_key_heads
    launch(
        _gated_delta,
        (len(pages), num_heads),
        *inputs.tensors,
        *gates,
        memory,
        pages,
        begins if begins.dtype == torch.int64 else begins.view(torch.uint8),
        out,
        *(x.stride(0) for x in inputs.tensors),
        memory.stride(0),
        key_dim**-0.5,
        TIMES=times,
        K=key_dim,
        V=value_dim,
        BK=triton.next_power_of_2(key_dim),
        BV=triton.next_power_of_2(value_dim),
        PDL=has_pdl(),
        num_warps=WARPS,
    )


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def keys_of(mixed_ptr, of_key, is_k, keys, scale):
    """A token's q and k, normalised, of the head whose keys are at ``of_key``."""
    q = silu(tl.load(mixed_ptr + of_key, mask=is_k, other=0.0).to(tl.float32))
    k = silu(tl.load(mixed_ptr + keys + of_key, mask=is_k, other=0.0).to(tl.float32))
    return q * (scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)), k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)


@triton.jit
def decay_of(a, rate, bias):
    x = a.to(tl.float32) + bias
    return rate * tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def gated_norm(out, z, weight, eps, V: tl.constexpr):
    """A row of a head's output, of float32."""
    return out * weight * silu(z.to(tl.float32)) / tl.sqrt(tl.sum(out * out, 0) / V + eps)


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "begins_ptr"])
def _gated_delta(
    mixed_ptr,
    z_ptr,
    b_ptr,
    a_ptr,
    rate_ptr,
    bias_ptr,
    norm_ptr,
    eps,
    memory_ptr,
    pages_ptr,
    begins_ptr,
    out_ptr,
    stride_mixed,
    stride_z,
    stride_b,
    stride_a,
    stride_page,
    scale,
    TIMES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    keys = num_heads // TIMES * K
    at_k, at_v = tl.arange(0, BK), tl.arange(0, BV)
    is_k, is_v = at_k < K, at_v < V
    page = tl.load(pages_ptr + i)
    if page < 0:
        return
    places = memory_ptr + page * stride_page + head * K * V + at_k[:, None] * V + at_v[None, :]
    inside = is_k[:, None] & is_v[None, :]
    # Another request may have left NaN in the page, so it is not read. The states are those of the step before.
    goes_on = tl.load(begins_ptr + i) == 0
    state = tl.load(places, mask=inside & goes_on, other=0.0)
    rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
    weight = tl.load(norm_ptr + at_v, mask=is_v, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    mixed = mixed_ptr + i * stride_mixed
    q, k = keys_of(mixed, head // TIMES * K + at_k, is_k, keys, scale)
    v = silu(tl.load(mixed + 2 * keys + head * V + at_v, mask=is_v, other=0.0).to(tl.float32))
    z = tl.load(z_ptr + i * stride_z + head * V + at_v, mask=is_v, other=0.0)
    state *= tl.exp(decay_of(tl.load(a_ptr + i * stride_a + head), rate, bias))
    beta = tl.sigmoid(tl.load(b_ptr + i * stride_b + head).to(tl.float32))
    correction = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * correction[None, :]
    tl.store(places, state, mask=inside)
    out = gated_norm(tl.sum(state * q[:, None], 0), z, weight, eps, V)
    tl.store(out_ptr + (i * num_heads + head) * V + at_v, out.to(out_ptr.dtype.element_ty), mask=is_v)
