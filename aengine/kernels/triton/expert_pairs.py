"""Products of a few tokens, a row at a time, each with its expert's weights.

multiply_pairs   a pair and BN output features a program; the norm is part of it
add_pairs        a token and BN output features a program, which sums over all of the token's experts, in their order

Bytes: the weights of each pair's expert; those of an expert that several tokens take out of the L2 cache, if at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertGate, ExpertMatrices, ExpertPlan, InputNorm
from .expert_gate import gate_constants, gated
from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch

__all__ = ["add_pairs", "multiply_pairs"]


def multiply_pairs(
    x: Tensor,
    matrices: ExpertMatrices,
    plan: ExpertPlan,
    gate: ExpertGate | None,
    norm: InputNorm | None,
    out: Tensor,
    tile: ProductTile,
) -> None:
    """Compute out [pairs, size]."""
    size = out.shape[1]
    launch(
        _multiply_pairs,
        (triton.cdiv(size, tile.block_n), plan.num_pairs),
        x,
        matrices.weight,
        out,
        matrices.bias,
        matrices.scale,
        plan.routing.expert_ids,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        **gate_constants(gate),
        NORM=norm is not None,
        **_constants(matrices, size, plan, tile),
    )


def add_pairs(residual: Tensor, hidden: Tensor, matrices: ExpertMatrices, plan: ExpertPlan, tile: ProductTile) -> None:
    n, size = residual.shape
    launch(
        _add_pairs,
        (triton.cdiv(size, tile.block_n), n),
        residual,
        hidden,
        matrices.weight,
        matrices.bias,
        matrices.scale,
        plan.routing.expert_ids,
        plan.routing.weights,
        **_constants(matrices, size, plan, tile),
    )


def _constants(matrices: ExpertMatrices, size: int, plan: ExpertPlan, tile: ProductTile) -> dict[str, Any]:
    """Return the constants that both kernels are compiled for. ``size``: number of output features."""
    weight, bias, scale = matrices
    k = weight.shape[2]
    block_k = _block_k(tile, k)
    return {
        "N": size,
        "K": k,
        "TOP_K": plan.shape.top_k,
        "W_E": weight.stride(0),
        "W_N": weight.stride(1),
        "W_K": weight.stride(2),
        "BN": tile.block_n,
        "BK": block_k,
        "BIAS": bias is not None,
        "SCALED": scale is not None,
        "EVEN": size % tile.block_n == 0 and k % block_k == 0,
        "NUM_EXPERTS": plan.shape.num_experts if plan.is_partial else 0,
        "PDL": has_pdl(),
        "num_warps": tile.num_warps,
    }


def _block_k(tile: ProductTile, k: int) -> int:
    """Return the tile's block along K, or a shorter one that divides ``k``."""
    block_k = min(tile.block_k, max(16, triton.next_power_of_2(k)))
    while block_k > 256 and k % block_k:
        block_k //= 2
    return block_k


@triton.jit
def _load_weights(w_ptr, n, k, ROWS, K: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, EVEN: tl.constexpr):
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * W_N + k[None, :].to(tl.int64) * W_K
    if EVEN:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=(n < ROWS)[:, None] & (k < K)[None, :], other=0.0)
    return w.to(tl.float32)


@triton.jit
def _finish(y, n, expert, bias_ptr, scale_ptr, ROWS: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr):
    """Apply scale and bias of the weights' rows ``n`` to the sums y [len(n)]."""
    if SCALED:
        y *= tl.load(scale_ptr + expert * ROWS + n, mask=n < ROWS, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + expert * ROWS + n, mask=n < ROWS, other=0.0).to(tl.float32)
    return y


@triton.jit
def _multiply_pairs(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    scale_ptr,
    ids_ptr,
    norm_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    W_E: tl.constexpr,
    W_N: tl.constexpr,
    W_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if NUM_EXPERTS:
        if expert >= NUM_EXPERTS:  # another rank has the expert
            return
    ROWS: tl.constexpr = 2 * N if GATE != "" else N
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    n = out_n  # rows of weights; those of the up product beside
    up_n = N + out_n
    if GATE != "" and INTERLEAVED:
        n = 2 * out_n
        up_n = 2 * out_n + 1
    k = tl.arange(0, BK)
    w_ptr += expert * W_E
    x_ptr += pair // TOP_K * K
    acc = tl.zeros((BN, BK), tl.float32)
    up = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        w = _load_weights(w_ptr, n, k0 + k, ROWS, K, W_N, W_K, EVEN)
        x = tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        acc += w * x[None, :]
        if GATE != "":
            up += _load_weights(w_ptr, up_n, k0 + k, ROWS, K, W_N, W_K, EVEN) * x[None, :]
    y = tl.sum(acc, 1)
    v = tl.sum(up, 1)
    if NORM:  # its scale is the same for all of a row
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
        v *= scale
    y = _finish(y, n, expert, bias_ptr, scale_ptr, ROWS, BIAS, SCALED)
    if GATE != "":
        v = _finish(v, up_n, expert, bias_ptr, scale_ptr, ROWS, BIAS, SCALED)
        y = gated(y, v, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + pair * N + out_n, y.to(out_ptr.dtype.element_ty), mask=out_n < N)


@triton.jit
def _row(
    x_ptr,
    w_ptr,
    n,
    N: tl.constexpr,
    K: tl.constexpr,
    W_N: tl.constexpr,
    W_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return the sums [BN] of a row by the weights' rows ``n``."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        x = tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        acc += _load_weights(w_ptr, n, k0 + k, N, K, W_N, W_K, EVEN) * x[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _add_pairs(
    residual_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    ids_ptr,
    weights_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    W_E: tl.constexpr,
    W_N: tl.constexpr,
    W_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair)
        if NUM_EXPERTS:
            if expert < NUM_EXPERTS:  # the expert is this rank's
                y = _row(x_ptr + pair * K, w_ptr + expert * W_E, n, N, K, W_N, W_K, BN, BK, EVEN)
                total += weight * _finish(y, n, expert, bias_ptr, scale_ptr, N, BIAS, SCALED)
        else:
            y = _row(x_ptr + pair * K, w_ptr + expert * W_E, n, N, K, W_N, W_K, BN, BK, EVEN)
            total += weight * _finish(y, n, expert, bias_ptr, scale_ptr, N, BIAS, SCALED)
    at = residual_ptr + row * N + n
    total += tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=n < N)
