"""Columns of a head's state a program, of one sequence: the state is read and written once.

Bytes: 8 * n * num_value_heads * key_dim * value_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_COLUMNS = 32


def gated_delta_of_tokens(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, pages: Tensor, begins: Tensor
) -> Tensor:
    n, num_heads, value_dim = v.shape
    key_dim = q.shape[2]
    out = torch.empty((n, num_heads, value_dim), dtype=torch.float32, device=v.device)
    bv = min(_COLUMNS, triton.next_power_of_2(value_dim))
    launch(
        _gated_delta,
        (n, num_heads, triton.cdiv(value_dim, bv)),
        q,
        k,
        v,
        decay.contiguous(),
        beta.contiguous(),
        memory,
        pages,
        begins.view(torch.uint8),
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        memory.stride(0),
        key_dim**-0.5,
        TIMES=num_heads // q.shape[1],
        K=key_dim,
        V=value_dim,
        BK=triton.next_power_of_2(key_dim),
        BV=bv,
        num_warps=4,
    )
    return out


@triton.jit
def _gated_delta(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    memory_ptr,
    pages_ptr,
    begins_ptr,
    out_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_page,
    scale,
    TIMES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    at_k, at_v = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    own = head // TIMES * K + at_k
    q = tl.load(q_ptr + i * stride_q + own, mask=at_k < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + i * stride_k + own, mask=at_k < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + i * stride_v + head * V + at_v, mask=at_v < V, other=0.0).to(tl.float32)
    q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
    k /= tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    decay = tl.exp(tl.load(decay_ptr + i * num_heads + head))
    beta = tl.load(beta_ptr + i * num_heads + head)
    page = tl.load(pages_ptr + i)
    places = memory_ptr + page * stride_page + head * K * V + at_k[:, None] * V + at_v[None, :]
    inside = (at_k < K)[:, None] & (at_v < V)[None, :]
    # Another request may have left NaN in the page, so it is not read.
    goes_on = tl.load(begins_ptr + i) == 0
    state = tl.load(places, mask=inside & goes_on, other=0.0) * decay
    correction = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * correction[None, :]
    tl.store(places, state, mask=inside)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + (i * num_heads + head) * V + at_v, out, mask=at_v < V)
