"""Products of a few tokens by experts in plain numbers or 8-bit codes, a row at a time, each with its expert's weights.

Bytes: the weights of each pair's expert; those of an expert that several tokens take out of the L2 cache, if at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertMatrices
from .expert_frames import PairKernels, rows_of, store_pair, wait_for_choice
from .grouped_units import finished
from .launch import launch_next_and_wait


def _pointers(matrices: ExpertMatrices) -> tuple[Tensor | None, ...]:
    return matrices.weight, matrices.scale


def _constants(matrices: ExpertMatrices, size: int, tile: ProductTile, rows: int, experts: int) -> dict[str, Any]:
    k = matrices.shape[2]
    block_k = _block_k(tile, k)
    strides = dict(zip(("W_E", "W_N", "W_K"), matrices.weight.stride(), strict=True))
    return {"K": k, "BK": block_k, "EVEN": size % tile.block_n == 0 and k % block_k == 0, **strides}


def _block_k(tile: ProductTile, k: int) -> int:
    """Return the tile's block along K, or a shorter one that divides ``k``."""
    block_k = min(tile.block_k, max(16, triton.next_power_of_2(k)))
    while block_k > 256 and k % block_k:
        block_k //= 2
    return block_k


@triton.jit
def _load_weights(w_ptr, n, k, ALL, K: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, EVEN: tl.constexpr):
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * W_N + k[None, :].to(tl.int64) * W_K
    if EVEN:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=(n < ALL)[:, None] & (k < K)[None, :], other=0.0)
    return w.to(tl.float32)


@triton.jit
def _multiply_pairs(
    x_ptr, w_ptr, scale_ptr, out_ptr, bias_ptr, ids_ptr, norm_ptr, eps, N: tl.constexpr, ALL: tl.constexpr,
    K: tl.constexpr, TOP_K: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ALL: rows of an expert, those of gate and up."""
    wait_for_choice(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if NUM_EXPERTS:
        if expert >= NUM_EXPERTS:  # another rank has the expert
            return
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    n, up_n = rows_of(out_n, N, GATE, INTERLEAVED)
    k = tl.arange(0, BK)
    w_ptr += expert * W_E
    x_ptr += pair // TOP_K * K
    acc = tl.zeros((BN, BK), tl.float32)
    up = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        w = _load_weights(w_ptr, n, k0 + k, ALL, K, W_N, W_K, EVEN)
        x = tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        acc += w * x[None, :]
        if GATE != "":
            up += _load_weights(w_ptr, up_n, k0 + k, ALL, K, W_N, W_K, EVEN) * x[None, :]
    store_pair(
        tl.sum(acc, 1), tl.sum(up, 1), squares, eps, expert, n, up_n, out_ptr + pair * N + out_n, out_n < N,
        scale_ptr, bias_ptr, K, ALL, GATE, ALPHA, LIMIT, NORM, BIAS,
    )  # fmt: skip


@triton.jit
def _row(
    x_ptr, w_ptr, n, N: tl.constexpr, K: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the sums [BN] of a row by the weights' rows ``n``."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        x = tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        acc += _load_weights(w_ptr, n, k0 + k, N, K, W_N, W_K, EVEN) * x[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _add_pairs(
    residual_ptr, x_ptr, w_ptr, scale_ptr, bias_ptr, ids_ptr, weights_ptr, N: tl.constexpr, ALL: tl.constexpr,
    K: tl.constexpr, TOP_K: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next_and_wait(PDL)
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
                total += weight * finished(y, expert * N + n, n < N, scale_ptr, bias_ptr, BIAS)
        else:
            y = _row(x_ptr + pair * K, w_ptr + expert * W_E, n, N, K, W_N, W_K, BN, BK, EVEN)
            total += weight * finished(y, expert * N + n, n < N, scale_ptr, bias_ptr, BIAS)
    at = residual_ptr + row * N + n
    total += tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=n < N)


KERNELS = PairKernels(_multiply_pairs, _add_pairs, _pointers, _constants, lambda matrices: False)
