"""Products of a few tokens by experts in codes with a scale a group: a row at a time, by units of 16 bytes, as `gemv`
of linear_grouped.py.

multiply_pairs   a pair and BN output features a program; the norm is part of it
add_pairs        a token and BN output features a program, which sums over all of the token's experts, in their order

Bytes: the codes and scales of each pair's expert; those of an expert that several tokens take out of the L2 cache, if
at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertCodes, ExpertGate, ExpertPlan, InputNorm
from .expert_gate import gate_constants, gated
from .grouped_parts import constants, pointers
from .grouped_units import codes_at, dot_of_units, finished, load_codes, load_x, places_of
from .launch import has_pdl, launch, launch_next_and_wait

__all__ = ["add_pairs", "multiply_pairs"]

_HELD = 16
"""Units of codes that a thread has on their way at once; 4 registers each."""


def multiply_pairs(
    x: Tensor,
    matrices: ExpertCodes,
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
        *pointers(matrices.codes),
        out,
        matrices.bias,
        plan.routing.expert_ids,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        **gate_constants(gate),
        NORM=norm is not None,
        **_constants(matrices, size, plan, tile, 1 if gate is None else 2, 1),
    )


def add_pairs(residual: Tensor, hidden: Tensor, matrices: ExpertCodes, plan: ExpertPlan, tile: ProductTile) -> None:
    n, size = residual.shape
    launch(
        _add_pairs,
        (triton.cdiv(size, tile.block_n), n),
        residual,
        hidden,
        *pointers(matrices.codes),
        matrices.bias,
        plan.routing.expert_ids,
        plan.routing.weights,
        **_constants(matrices, size, plan, tile, 1, plan.shape.top_k),
    )


def _constants(
    matrices: ExpertCodes, size: int, plan: ExpertPlan, tile: ProductTile, rows: int, experts: int
) -> dict[str, Any]:
    """Return the constants that both kernels are compiled for.

    Args:
        size: number of output features
        rows: of codes for each
        experts: that a program multiplies by
    """
    given = constants(matrices.codes)
    units = given["K"] // given["UNIT"]
    block_u = min(max(1, tile.block_k // given["UNIT"]), max(2, triton.next_power_of_2(units)))
    per_thread = max(1, tile.block_n * rows * block_u // (32 * tile.num_warps))
    return given | {
        "N": size,
        "ALL": matrices.shape[1],
        "ALL_ROWS": len(matrices.codes.codes),
        "TOP_K": plan.shape.top_k,
        "BN": tile.block_n,
        "BU": block_u,
        "HELD": max(1, min(experts * triton.cdiv(units, block_u), _HELD // per_thread)),
        "BIAS": matrices.bias is not None,
        "EVEN": size % tile.block_n == 0 and units % block_u == 0,
        "NUM_EXPERTS": plan.shape.num_experts if plan.is_partial else 0,
        "PDL": has_pdl(),
        "num_warps": tile.num_warps,
    }


@triton.jit
def _multiply_pairs(
    x_ptr, w_ptr, scale_ptr, zero_ptr, offset_ptr, row_scale_ptr, out_ptr, bias_ptr, ids_ptr, norm_ptr, eps,
    K: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, RAISED: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, ALL_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BN: tl.constexpr, BU: tl.constexpr, HELD: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ALL: rows of an expert, those of gate and up; ALL_ROWS: of all experts. HELD: blocks of units read at once."""
    launch_next_and_wait(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if NUM_EXPERTS:
        if expert >= NUM_EXPERTS:  # another rank has the expert
            return
    PER: tl.constexpr = 4 if UNIT == 32 else 16  # elements of a unit
    WIDTH: tl.constexpr = K // UNIT * PER  # and of a row
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    n = out_n  # rows of codes; those of the up product beside
    up_n = N + out_n
    if GATE != "" and INTERLEAVED:
        n = 2 * out_n
        up_n = 2 * out_n + 1
    element = tl.arange(0, BU * PER)
    own, own_up = expert * ALL + n, expert * ALL + up_n  # rows of all experts'
    row = w_ptr + own[:, None].to(tl.int64) * WIDTH
    up_row = w_ptr + own_up[:, None].to(tl.int64) * WIDTH
    ws = (load_codes(row, element, n, ALL, WIDTH, EVEN),)
    us = (load_codes(up_row, element, up_n, ALL, WIDTH, EVEN),) if GATE != "" else ws
    for u0 in tl.static_range(BU, HELD * BU, BU):
        ws = ws + (load_codes(row, u0 * PER + element, n, ALL, WIDTH, EVEN),)  # type: ignore[assignment]
        if GATE != "":
            us = us + (load_codes(up_row, u0 * PER + element, up_n, ALL, WIDTH, EVEN),)  # type: ignore[assignment]
    x_ptr += pair // TOP_K * K
    squares = tl.zeros((BU * PER,), tl.float32)
    acc = tl.zeros((BN, BU), tl.float32)
    up = tl.zeros((BN, BU), tl.float32)
    for u0 in tl.static_range(0, K // UNIT, BU):
        xs, squares = load_x(x_ptr, norm_ptr, u0 * 16 + places_of(element, UNIT), squares, K, UNIT, NORM, EVEN)
        column = (u0 + tl.arange(0, BU)) * UNIT
        w = codes_at(u0, ws, row, element, n, ALL, WIDTH, BU, HELD * BU, EVEN)
        acc += dot_of_units(
            w, xs, scale_ptr, zero_ptr, offset_ptr, own, column,
            KIND, UNIT, ALL_ROWS, K, BN, BU, GROUP, GROUPS, ROWS, RAISED,
        )  # fmt: skip
        if GATE != "":
            u = codes_at(u0, us, up_row, element, up_n, ALL, WIDTH, BU, HELD * BU, EVEN)
            up += dot_of_units(
                u, xs, scale_ptr, zero_ptr, offset_ptr, own_up, column,
                KIND, UNIT, ALL_ROWS, K, BN, BU, GROUP, GROUPS, ROWS, RAISED,
            )  # fmt: skip
    y = tl.sum(acc, 1)
    v = tl.sum(up, 1)
    if NORM:  # its factor is the same for all of a row
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
        v *= factor
    y = finished(y, own, n < ALL, row_scale_ptr, bias_ptr, BIAS)
    if GATE != "":
        v = finished(v, own_up, up_n < ALL, row_scale_ptr, bias_ptr, BIAS)
        y = gated(y, v, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + pair * N + out_n, y.to(out_ptr.dtype.element_ty), mask=out_n < N)


@triton.jit
def _codes_of_pair(
    index: tl.constexpr,
    w_ptr,
    ids_ptr,
    pair,
    n,
    element,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
):
    """The ``index``-th block of units of the codes of a token's experts, each of which has BLOCKS."""
    expert = tl.load(ids_ptr + pair + index // BLOCKS)
    if NUM_EXPERTS:  # none are read of an expert that another rank has
        n = tl.where(expert < NUM_EXPERTS, n, ALL)
    row = w_ptr + (expert * ALL + n[:, None]).to(tl.int64) * WIDTH
    return load_codes(row, element + index % BLOCKS * element.shape[0], n, ALL, WIDTH, EVEN)


@triton.jit
def _add_pairs(
    residual_ptr, x_ptr, w_ptr, scale_ptr, zero_ptr, offset_ptr, row_scale_ptr, bias_ptr, ids_ptr, weights_ptr,
    K: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, RAISED: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, ALL_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BN: tl.constexpr, BU: tl.constexpr, HELD: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pair's weight is a factor of its sums, so that these are added up over threads once for all pairs."""
    launch_next_and_wait(PDL)
    PER: tl.constexpr = 4 if UNIT == 32 else 16
    WIDTH: tl.constexpr = K // UNIT * PER
    BLOCKS: tl.constexpr = (K // UNIT + BU - 1) // BU
    IS_EVEN: tl.constexpr = EVEN and NUM_EXPERTS == 0
    token = tl.program_id(1).to(tl.int64)
    first = token * TOP_K
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    element = tl.arange(0, BU * PER)
    ws = (_codes_of_pair(0, w_ptr, ids_ptr, first, n, element, ALL, WIDTH, BLOCKS, IS_EVEN, NUM_EXPERTS),)
    for i in tl.static_range(1, HELD):
        w = _codes_of_pair(i, w_ptr, ids_ptr, first, n, element, ALL, WIDTH, BLOCKS, IS_EVEN, NUM_EXPERTS)
        ws = ws + (w,)  # type: ignore[assignment]
    total = tl.zeros((BN,), tl.float32)
    no_squares = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BN, BU), tl.float32)
    for i in tl.static_range(TOP_K * BLOCKS):
        if i < HELD:
            w = ws[i]
        else:
            w = _codes_of_pair(i, w_ptr, ids_ptr, first, n, element, ALL, WIDTH, BLOCKS, IS_EVEN, NUM_EXPERTS)
        pair = first + i // BLOCKS
        expert = tl.load(ids_ptr + pair)
        at = i % BLOCKS * (BU * 16) + places_of(element, UNIT)
        column = i % BLOCKS * (BU * UNIT) + tl.arange(0, BU) * UNIT
        if NUM_EXPERTS:  # nothing was written for an expert of another rank
            at = tl.where(expert < NUM_EXPERTS, at, K)
        xs, _ = load_x(x_ptr + pair * K, None, at, no_squares, K, UNIT, False, IS_EVEN)
        own = expert * ALL + n  # rows of all experts'
        y = dot_of_units(
            w, xs, scale_ptr, zero_ptr, offset_ptr, own, column,
            KIND, UNIT, ALL_ROWS, K, BN, BU, GROUP, GROUPS, ROWS, RAISED,
        )  # fmt: skip
        weight = tl.load(weights_ptr + pair)
        is_own = own < ALL_ROWS
        if row_scale_ptr is not None:
            y *= tl.load(row_scale_ptr + own, mask=is_own, other=0.0)[:, None]
        acc += weight * y
        if BIAS and i % BLOCKS == 0:
            total += weight * tl.load(bias_ptr + own, mask=is_own, other=0.0).to(tl.float32)
    total += tl.sum(acc, 1)
    out_ptrs = residual_ptr + token * N + n
    total += tl.load(out_ptrs, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(residual_ptr.dtype.element_ty), mask=n < N)
