"""Products of a few tokens by experts in codes with a scale a group: a row at a time, by units of 16 bytes, as `gemv`
of linear_grouped.py.

Bytes: the codes and scales of each pair's expert; those of an expert that several tokens take out of the L2 cache, if
at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertCodes
from .expert_frames import PairKernels, rows_of, store_pair, wait_for_choice
from .grouped_parts import constants, pointers
from .grouped_units import codes_at, dot_of_units, load_codes, load_x, places_of
from .launch import launch_next, wait_for_previous

_HELD = 16
"""Units of codes that a thread has on their way at once; 4 registers each."""


def _pointers(matrices: ExpertCodes) -> tuple[Tensor | None, ...]:
    return pointers(matrices.codes)


def _constants(matrices: ExpertCodes, size: int, tile: ProductTile, rows: int, experts: int) -> dict[str, Any]:
    given = constants(matrices.codes)
    units = given["K"] // given["UNIT"]
    block_u = min(max(1, tile.block_k // given["UNIT"]), max(2, triton.next_power_of_2(units)))
    per_thread = max(1, tile.block_n * rows * block_u // (32 * tile.num_warps))
    return given | {
        "ALL_ROWS": len(matrices.codes.codes),
        "BU": block_u,
        "HELD": max(1, min(experts * triton.cdiv(units, block_u), _HELD // per_thread)),
        "EVEN": size % tile.block_n == 0 and units % block_u == 0,
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
    wait_for_choice(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if NUM_EXPERTS:
        if expert >= NUM_EXPERTS:  # another rank has the expert
            return
    PER: tl.constexpr = 4 if UNIT == 32 else 16  # elements of a unit
    WIDTH: tl.constexpr = K // UNIT * PER  # and of a row
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    n, up_n = rows_of(out_n, N, GATE, INTERLEAVED)
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
    store_pair(
        tl.sum(acc, 1), tl.sum(up, 1), squares, eps, expert, n, up_n, out_ptr + pair * N + out_n, out_n < N,
        row_scale_ptr, bias_ptr, K, ALL, GATE, ALPHA, LIMIT, NORM, BIAS,
    )  # fmt: skip


@triton.jit
def _codes_of_pair(
    index: tl.constexpr, w_ptr, ids_ptr, pair, n, element, ALL: tl.constexpr, WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr, NUM_EXPERTS: tl.constexpr,
):  # fmt: skip
    """The ``index``-th block of units of the codes of a token's experts, each of which has BLOCKS."""
    expert = tl.load(ids_ptr + pair + index // BLOCKS, cache_modifier=".cg")
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
    """A pair's weight is a factor of its sums, so that these are added up over threads once for all pairs. The first
    codes are on their way before the product before has ended, see `wait_for_choice`."""
    launch_next(PDL)
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
    wait_for_previous(PDL)
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


KERNELS = PairKernels(_multiply_pairs, _add_pairs, _pointers, _constants, lambda matrices: matrices.codes.has_4_bits)
