"""The gated delta rule of prompts, in four launches: chunks of 64 tokens apart from each other, then the states from
chunk to chunk, then what is read out of them. See kernels/gated_delta.py for the equations.

    _normalise   a chunk and key head a program: q and k of length 1
    _prepare     a chunk and head: decays cumulated, U and W
    _advance     some columns of a head of a sequence: D of each chunk, the state before each, the state at the end
    _read        a chunk and head: the output, normalised and gated

What passes between them is in the dtype of the inputs but for decays and the states in the pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta_memory import DeltaGates, DeltaInputs
from ..sequences import CHUNK, Sequences
from .gated_delta import decay_of, gated_delta_of_tokens, silu
from .launch import launch

# parts of one buffer: any place in it is one kernel
_TABLES = ["chunks_ptr", "cut_pages_ptr", "chunk_starts_ptr", "pages_ptr", "begins_ptr"]
_COLUMNS = 32  # columns of a state that a program takes from chunk to chunk


def gated_delta_of_prompts(inputs: DeltaInputs, gates: DeltaGates, memory: Tensor, sequences: Sequences) -> Tensor:
    _, num_heads, key_dim, value_dim = memory.shape
    (mixed, z, b, a), num_key_heads, device = inputs.tensors, inputs.num_key_heads, memory.device
    n, dtype, chunks = len(mixed), mixed.dtype, sequences.chunks
    num_chunks = len(chunks)
    out = inputs.new_output()
    if len(sequences.singles):
        gated_delta_of_tokens(inputs, gates, memory, sequences.singles, sequences.begins, out)
    if not num_chunks:
        return out
    q, k = torch.empty((2, n, num_key_heads, key_dim), dtype=dtype, device=device)
    w = torch.empty((n, num_heads, key_dim), dtype=dtype, device=device)
    u = torch.empty((n, num_heads, value_dim), dtype=dtype, device=device)
    total = torch.empty((n, num_heads), dtype=torch.float32, device=device)
    states = torch.empty((num_chunks, num_heads, key_dim, value_dim), dtype=dtype, device=device)
    bk, bv = max(16, triton.next_power_of_2(key_dim)), max(16, triton.next_power_of_2(value_dim))
    sizes = {"TIMES": num_heads // num_key_heads, "K": key_dim, "V": value_dim, "BK": bk, "CHUNK": CHUNK}
    sizes["DOTS"] = "tf32x3" if dtype == torch.float32 else "tf32"
    grid = num_chunks, num_heads
    normalised = mixed, chunks, q, k, mixed.stride(0), key_dim**-0.5
    launch(_normalise, (num_chunks, num_key_heads), *normalised, K=key_dim, BK=bk, CHUNK=CHUNK, num_warps=4)
    of_heads = mixed, b, a, gates.rate, gates.bias, chunks, k, w, u, total
    launch(_prepare, grid, *of_heads, mixed.stride(0), b.stride(0), a.stride(0), **sizes, BV=bv, num_warps=4)
    columns = min(_COLUMNS, bv)
    where = sequences.chunk_starts, sequences.pages, sequences.begins
    launch(
        _advance,
        (triton.cdiv(value_dim, columns), num_heads, len(sequences.pages)),
        k,
        w,
        u,
        total,
        states,
        memory,
        chunks,
        sequences.cut_pages,
        *where,
        memory.stride(0),
        **sizes,
        BV=columns,
        num_warps=4,
        num_stages=2,
    )
    launch(
        _read,
        grid,
        q,
        k,
        u,
        total,
        states,
        z,
        gates.norm,
        gates.eps,
        chunks,
        out,
        z.stride(0),
        **sizes,
        BV=bv,
        num_warps=4,
    )
    return out


@triton.jit
def _inverse(system, DOTS: tl.constexpr):
    """The inverse of I + ``system`` [64, 64], strictly lower. With X = -system's blocks of 8 on the diagonal, X^8 is 0,
    and so (I - X)^-1 = (I + X)(I + X^2)(I + X^4), the inverse of these blocks; with the others times that, a matrix of
    8 by 8 blocks, likewise. Larger blocks would have powers of numbers that cancel each other."""
    r = tl.arange(0, 64)
    is_diagonal = (r[:, None] // 8) == (r[None, :] // 8)
    eye = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    x = tl.where(is_diagonal, -system, 0.0)
    diagonal = eye + x
    x = tl.dot(x, x, input_precision=DOTS)
    diagonal += tl.dot(diagonal, x, input_precision=DOTS)
    x = tl.dot(x, x, input_precision=DOTS)
    diagonal += tl.dot(diagonal, x, input_precision=DOTS)
    x = tl.dot(diagonal, tl.where(is_diagonal, 0.0, -system), input_precision=DOTS)
    inverse = eye + x
    x = tl.dot(x, x, input_precision=DOTS)
    inverse += tl.dot(inverse, x, input_precision=DOTS)
    x = tl.dot(x, x, input_precision=DOTS)
    inverse += tl.dot(inverse, x, input_precision=DOTS)
    return tl.dot(inverse, diagonal, input_precision=DOTS)


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _normalise(
    mixed_ptr,
    chunks_ptr,
    q_ptr,
    k_ptr,
    stride_mixed,
    scale,
    K: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin, end = tl.load(chunks_ptr + 3 * chunk), tl.load(chunks_ptr + 3 * chunk + 1)
    t, at = begin + tl.arange(0, CHUNK), tl.arange(0, BK)
    inside = (t < end)[:, None] & (at < K)[None, :]
    own = mixed_ptr + t[:, None] * stride_mixed + head * K + at[None, :]
    out = (t[:, None] * num_heads + head) * K + at[None, :]
    q = silu(tl.load(own, mask=inside, other=0.0).to(tl.float32))
    q *= (scale / tl.sqrt(tl.sum(q * q, 1) + 1e-6))[:, None]
    tl.store(q_ptr + out, q.to(q_ptr.dtype.element_ty), mask=inside)
    k = silu(tl.load(own + num_heads * K, mask=inside, other=0.0).to(tl.float32))
    k *= (1 / tl.sqrt(tl.sum(k * k, 1) + 1e-6))[:, None]
    tl.store(k_ptr + out, k.to(k_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _prepare(
    mixed_ptr,
    b_ptr,
    a_ptr,
    rate_ptr,
    bias_ptr,
    chunks_ptr,
    k_ptr,
    w_ptr,
    u_ptr,
    total_ptr,
    stride_mixed,
    stride_b,
    stride_a,
    TIMES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    DOTS: tl.constexpr,
    BV: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin, end = tl.load(chunks_ptr + 3 * chunk), tl.load(chunks_ptr + 3 * chunk + 1)
    if end <= begin:
        return
    dtype = k_ptr.dtype.element_ty
    r, at_k, at_v = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    t = begin + r
    is_token = t < end
    is_k, is_v = is_token[:, None] & (at_k < K)[None, :], is_token[:, None] & (at_v < V)[None, :]
    keys = k_ptr + (t[:, None] * (num_heads // TIMES) + head // TIMES) * K + at_k[None, :]
    k = tl.load(keys, mask=is_k, other=0.0)
    a = tl.load(a_ptr + t * stride_a + head, mask=is_token, other=0.0)
    b = tl.load(b_ptr + t * stride_b + head, mask=is_token, other=0.0)
    decay = tl.where(is_token, decay_of(a, tl.load(rate_ptr + head), tl.load(bias_ptr + head)), 0.0)
    beta = tl.where(is_token, tl.sigmoid(b.to(tl.float32)), 0.0)
    total = tl.cumsum(decay, 0)
    tl.store(total_ptr + t * num_heads + head, total, mask=is_token)
    between = tl.exp(tl.where(r[:, None] > r[None, :], total[:, None] - total[None, :], float("-inf")))
    system = tl.dot(k, tl.trans(k), input_precision=DOTS) * between * beta[:, None]
    inverse = _inverse(system, DOTS).to(dtype)
    values = 2 * (num_heads // TIMES) * K + head * V + at_v[None, :]
    v = silu(tl.load(mixed_ptr + t[:, None] * stride_mixed + values, mask=is_v, other=0.0).to(tl.float32))
    u = tl.dot(inverse, (v * beta[:, None]).to(dtype), input_precision=DOTS)
    tl.store(u_ptr + (t[:, None] * num_heads + head) * V + at_v[None, :], u.to(dtype), mask=is_v)
    k = tl.load(keys, mask=is_k, other=0.0).to(tl.float32)  # once more, as the inverse needs registers
    w = tl.dot(inverse, (k * (beta * tl.exp(total))[:, None]).to(dtype), input_precision=DOTS)
    tl.store(w_ptr + (t[:, None] * num_heads + head) * K + at_k[None, :], w.to(dtype), mask=is_k)


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _advance(
    k_ptr,
    w_ptr,
    u_ptr,
    total_ptr,
    states_ptr,
    memory_ptr,
    chunks_ptr,
    cut_pages_ptr,
    chunk_starts_ptr,
    pages_ptr,
    begins_ptr,
    stride_page,
    TIMES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    DOTS: tl.constexpr,
    BV: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    first, stop = tl.load(chunk_starts_ptr + sequence), tl.load(chunk_starts_ptr + sequence + 1)
    if first == stop:
        return
    dtype = k_ptr.dtype.element_ty
    at_k, at_v, r = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, CHUNK)
    in_state = (at_k < K)[:, None] & (at_v < V)[None, :]
    of_state = head * K * V + at_k[:, None] * V + at_v[None, :]
    page = memory_ptr + tl.load(pages_ptr + sequence) * stride_page + of_state
    # Another request may have left NaN in the page, so it is not read.
    state = tl.load(page, mask=in_state & (tl.load(begins_ptr + sequence) == 0), other=0.0)
    size = (num_heads * K * V).to(tl.int64)
    for chunk in range(first, stop):
        begin, end = tl.load(chunks_ptr + 3 * chunk), tl.load(chunks_ptr + 3 * chunk + 1)
        cut = tl.load(chunks_ptr + 3 * chunk + 2)
        t = begin + r
        is_token = t < end
        is_k, is_v = is_token[:, None] & (at_k < K)[None, :], is_token[:, None] & (at_v < V)[None, :]
        k = tl.load(
            k_ptr + (t[:, None] * (num_heads // TIMES) + head // TIMES) * K + at_k[None, :], mask=is_k, other=0.0
        )
        w = tl.load(w_ptr + (t[:, None] * num_heads + head) * K + at_k[None, :], mask=is_k, other=0.0)
        at_u = u_ptr + (t[:, None] * num_heads + head) * V + at_v[None, :]
        u = tl.load(at_u, mask=is_v, other=0.0)
        total = tl.load(total_ptr + t * num_heads + head, mask=is_token, other=0.0)
        last = tl.load(total_ptr + (end - 1) * num_heads + head)
        before = state.to(dtype)
        tl.store(states_ptr + chunk * size + of_state, before, mask=in_state)
        d = u.to(tl.float32) - tl.dot(w, before, input_precision=DOTS)
        tl.store(at_u, d.to(dtype), mask=is_v)
        left = tl.where(is_token, tl.exp(last - total), 0.0)
        state = state * tl.exp(last) + tl.dot(tl.trans(k), (d * left[:, None]).to(dtype), input_precision=DOTS)
        if cut >= 0:
            kept = tl.load(cut_pages_ptr + cut)
            tl.store(memory_ptr + kept * stride_page + of_state, state, mask=in_state)
    tl.store(page, state, mask=in_state)


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _read(
    q_ptr,
    k_ptr,
    d_ptr,
    total_ptr,
    states_ptr,
    z_ptr,
    norm_ptr,
    eps,
    chunks_ptr,
    out_ptr,
    stride_z,
    TIMES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    BV: tl.constexpr,
    DOTS: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin, end = tl.load(chunks_ptr + 3 * chunk), tl.load(chunks_ptr + 3 * chunk + 1)
    if end <= begin:
        return
    dtype = k_ptr.dtype.element_ty
    r, at_k, at_v = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    t = begin + r
    is_token = t < end
    is_k, is_v = is_token[:, None] & (at_k < K)[None, :], is_token[:, None] & (at_v < V)[None, :]
    of_key = (t[:, None] * (num_heads // TIMES) + head // TIMES) * K + at_k[None, :]
    q, k = tl.load(q_ptr + of_key, mask=is_k, other=0.0), tl.load(k_ptr + of_key, mask=is_k, other=0.0)
    of_value = (t[:, None] * num_heads + head) * V + at_v[None, :]
    d = tl.load(d_ptr + of_value, mask=is_v, other=0.0)
    total = tl.load(total_ptr + t * num_heads + head, mask=is_token, other=0.0)
    in_state = (at_k < K)[:, None] & (at_v < V)[None, :]
    state = states_ptr + (chunk.to(tl.int64) * num_heads + head) * K * V + at_k[:, None] * V + at_v[None, :]
    out = tl.dot(q, tl.load(state, mask=in_state, other=0.0), input_precision=DOTS) * tl.exp(total)[:, None]
    sees = (r[:, None] >= r[None, :]) & is_token[:, None]
    between = tl.exp(tl.where(sees, total[:, None] - total[None, :], float("-inf")))
    attending = tl.dot(q, tl.trans(k), input_precision=DOTS) * between
    out += tl.dot(attending.to(dtype), d, input_precision=DOTS)
    weight = tl.load(norm_ptr + at_v, mask=at_v < V, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t[:, None] * stride_z + head * V + at_v[None, :], mask=is_v, other=0.0).to(tl.float32)
    out = out * weight[None, :] * silu(z) / tl.sqrt(tl.sum(out * out, 1) / V + eps)[:, None]
    tl.store(out_ptr + of_value, out.to(dtype), mask=is_v)
