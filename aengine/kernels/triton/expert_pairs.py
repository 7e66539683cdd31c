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
from .launch import launch_next, wait_for_previous
from .linear_gemv import load_row

_HELD = 16
"""Pieces of 16 bytes of weights that a thread has on their way at once; 4 registers each."""


def _pointers(matrices: ExpertMatrices) -> tuple[Tensor | None, ...]:
    return matrices.weight, matrices.scale


def _constants(matrices: ExpertMatrices, size: int, tile: ProductTile, rows: int, experts: int) -> dict[str, Any]:
    k = matrices.shape[2]
    block_k = min(tile.block_k, max(16, triton.next_power_of_2(k)))
    pieces = tile.block_n * rows * block_k * matrices.weight.element_size() // (16 * 32 * tile.num_warps)
    strides = dict(zip(("W_E", "W_N", "W_K"), matrices.weight.stride(), strict=True))
    return {
        "K": k,
        "BK": block_k,
        "HELD": max(1, min(experts * triton.cdiv(k, block_k), _HELD // max(1, pieces))),
        "EVEN": size % tile.block_n == 0,
        **strides,
    }


@triton.jit
def _load_weights(
    w_ptr, n, k0: tl.constexpr, ALL: tl.constexpr, K: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[len(n), BK], from column ``k0`` on. They leave the L1 cache to x, which all programs read."""
    k = k0 + tl.arange(0, BK)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * W_N + k[None, :].to(tl.int64) * W_K
    if EVEN and k0 + BK <= K:
        w = tl.load(w_ptrs, eviction_policy="evict_first")
    else:
        inside = (n < ALL)[:, None] & (k < K)[None, :]
        w = tl.load(w_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _multiply_pairs(
    x_ptr, w_ptr, scale_ptr, out_ptr, bias_ptr, ids_ptr, norm_ptr, eps, N: tl.constexpr, ALL: tl.constexpr,
    K: tl.constexpr, TOP_K: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, HELD: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ALL: rows of an expert, those of gate and up. HELD: blocks of columns read at once."""
    wait_for_choice(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if NUM_EXPERTS:
        if expert >= NUM_EXPERTS:  # another rank has the expert
            return
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    n, up_n = rows_of(out_n, N, GATE, INTERLEAVED)
    w_ptr += expert * W_E
    x_ptr += pair // TOP_K * K
    ws = (_load_weights(w_ptr, n, 0, ALL, K, W_N, W_K, BK, EVEN),)
    us = (_load_weights(w_ptr, up_n, 0, ALL, K, W_N, W_K, BK, EVEN),) if GATE != "" else ws
    for i in tl.static_range(1, HELD):
        ws = ws + (_load_weights(w_ptr, n, i * BK, ALL, K, W_N, W_K, BK, EVEN),)  # type: ignore[assignment]
        if GATE != "":
            us = us + (_load_weights(w_ptr, up_n, i * BK, ALL, K, W_N, W_K, BK, EVEN),)  # type: ignore[assignment]
    acc = tl.zeros((BN, BK), tl.float32)
    up = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for i in tl.static_range((K + BK - 1) // BK):
        k = i * BK + tl.arange(0, BK)
        x = load_row(x_ptr + k, k < K, i * BK + BK <= K)
        if NORM:
            squares += x * x
            x = x * load_row(norm_ptr + k, k < K, i * BK + BK <= K)
        w = ws[i] if i < HELD else _load_weights(w_ptr, n, i * BK, ALL, K, W_N, W_K, BK, EVEN)
        acc += w.to(tl.float32) * x[None, :]
        if GATE != "":
            u = us[i] if i < HELD else _load_weights(w_ptr, up_n, i * BK, ALL, K, W_N, W_K, BK, EVEN)
            up += u.to(tl.float32) * x[None, :]
    store_pair(
        tl.sum(acc, 1), tl.sum(up, 1), squares, eps, expert, n, up_n, out_ptr + pair * N + out_n, out_n < N,
        scale_ptr, bias_ptr, K, ALL, GATE, ALPHA, LIMIT, NORM, BIAS,
    )  # fmt: skip


@triton.jit
def _block(
    index: tl.constexpr, w_ptr, ids_ptr, pair, n, ALL: tl.constexpr, K: tl.constexpr, W_E: tl.constexpr,
    W_N: tl.constexpr, W_K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, NUM_EXPERTS: tl.constexpr,
):  # fmt: skip
    """The ``index``-th block of columns of the weights of a token's experts."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    expert = tl.load(ids_ptr + pair + index // BLOCKS, cache_modifier=".cg")
    if NUM_EXPERTS:  # none are read of an expert that another rank has
        n = tl.where(expert < NUM_EXPERTS, n, ALL)
    return _load_weights(w_ptr + expert.to(tl.int64) * W_E, n, index % BLOCKS * BK, ALL, K, W_N, W_K, BK, EVEN)


@triton.jit
def _add_pairs(
    residual_ptr, x_ptr, w_ptr, scale_ptr, bias_ptr, ids_ptr, weights_ptr, N: tl.constexpr, ALL: tl.constexpr,
    K: tl.constexpr, TOP_K: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, HELD: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Do what `_add_pairs` of expert_code_pairs.py does: sums are added up over threads once for all pairs, and the
    first weights are on their way before the product before has ended."""
    launch_next(PDL)
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    IS_EVEN: tl.constexpr = EVEN and NUM_EXPERTS == 0
    token = tl.program_id(1).to(tl.int64)
    first = token * TOP_K
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    ws = (_block(0, w_ptr, ids_ptr, first, n, ALL, K, W_E, W_N, W_K, BK, IS_EVEN, NUM_EXPERTS),)
    for i in tl.static_range(1, HELD):
        w = _block(i, w_ptr, ids_ptr, first, n, ALL, K, W_E, W_N, W_K, BK, IS_EVEN, NUM_EXPERTS)
        ws = ws + (w,)  # type: ignore[assignment]
    wait_for_previous(PDL)
    at = residual_ptr + token * N + n
    total = tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    acc = tl.zeros((BN, BK), tl.float32)
    for i in tl.static_range(TOP_K * BLOCKS):
        w = ws[i] if i < HELD else _block(i, w_ptr, ids_ptr, first, n, ALL, K, W_E, W_N, W_K, BK, IS_EVEN, NUM_EXPERTS)
        pair = first + i // BLOCKS
        expert = tl.load(ids_ptr + pair)
        k = i % BLOCKS * BK + tl.arange(0, BK)
        x = load_row(x_ptr + pair * K + k, k < K, i % BLOCKS * BK + BK <= K)
        if NUM_EXPERTS:  # nothing was written for an expert of another rank
            x = tl.where(expert < NUM_EXPERTS, x, 0.0)
        own = expert * ALL + n  # rows of all experts'
        is_own = (n < ALL) & ((NUM_EXPERTS == 0) | (expert < NUM_EXPERTS))
        weight = tl.load(weights_ptr + pair)
        y = w.to(tl.float32) * (weight * x)[None, :]
        if scale_ptr is not None:
            y *= tl.load(scale_ptr + own, mask=is_own, other=0.0)[:, None]
        acc += y
        if BIAS and i % BLOCKS == 0:
            total += weight * tl.load(bias_ptr + own, mask=is_own, other=0.0).to(tl.float32)
    total += tl.sum(acc, 1)
    tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=n < N)


KERNELS = PairKernels(_multiply_pairs, _add_pairs, _pointers, _constants, lambda matrices: False)
