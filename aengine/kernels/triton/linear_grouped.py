"""Products by codes with a scale a group of columns, which become numbers as they are multiplied.

    gemv       one row: a thread reads a unit of 16 bytes of codes of BN rows, sums its products in registers, and
               applies the group's scale and zero point once
    row        one row of 16 bits by 4 bits in groups of 32 columns or more, on the tensor cores: see grouped_row.py
    tiles      2 to 512 rows: see grouped_tiles.py

Bytes: K N / 2 (or K N) of codes and the groups' scales once; operations: 2 N K, and some 4 to make a number of a code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grouped_codes import GroupedCodes
from ..matrix import Matrix
from ..rms_norm import Norm
from . import rms_norm
from .activation import activate_and_multiply
from .grouped_parts import constants, launch_row
from .grouped_row import can_multiply_row, multiply_row
from .grouped_tiles import MAX_ROWS, multiply_tiles
from .grouped_units import codes_at, dot_of_units, finished, load_codes, load_x, places_of
from .launch import (
    gdc_wait,
    is_interpreted,
    launch_next,
    prefetch,
)

__all__ = ["gates_apart", "multiply"]

_HELD = 16
"""Units of codes that a thread of `gemv` has on their way while it waits for x; 4 registers each."""


def gates_apart(x: Tensor, matrix: Matrix) -> bool:
    """Return whether gate and up are multiplied as one matrix, and their activation is left to a pass of its own: a
    tile of both has no room for more than 64 rows of x, and one of either has for 128."""
    return isinstance(matrix.weight, GroupedCodes) and x.shape[0] > 64


def multiply(
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None = None,
    *,
    add: bool,
    activation: str | None = None,
) -> bool:
    """out [M, N] = the product by x or, with ``norm``, by its norm, or is added to; False: not done, the rows are for
    the library."""
    rows = x.shape[0]
    if rows > MAX_ROWS or (rows > 1 and x.dtype == torch.float32 and not is_interpreted):
        return False
    if rows == 1 and can_multiply_row(x, codes, norm):
        multiply_row(x, codes, bias, out, norm, add=add, activation=activation)
        return True
    if rows == 1:
        _multiply_row(x, codes, bias, out, norm, add=add, activation=activation)
        return True
    x = x if norm is None else rms_norm.rms_norm(x, norm.weight, norm.eps)
    multiply_tiles(x, codes, bias, out, add=add, activation=activation)
    return True


def _multiply_row(
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """out [1, N] = the product, or is added to; see linear_gemv.py."""
    size, given = out.shape[1], constants(codes)
    units = given["K"] // given["UNIT"]
    block_n, block_u = _gemv_blocks(size, units, activation is not None)
    rows = block_n * (1 if activation is None else 2)
    given |= {"BN": block_n, "BU": block_u, "HELD": block_u * max(1, min(triton.cdiv(units, block_u), _HELD // rows))}
    given |= {"EVEN": size % block_n == 0 and units % block_u == 0, "num_warps": max(1, min(8, block_u // 32))}
    launch_row(_gemv, block_n, x, codes, bias, out, norm, add=add, activation=activation, **given)


def _gemv_blocks(n: int, units: int, is_gated: bool) -> tuple[int, int]:
    """BN, and units of a row that are read at once, one a thread: what was the fastest, or nearly so, for
    Llama-3.1-8B's shapes on an H100."""
    most = 128 if is_gated else 64
    block_u = next((u for u in (128, 64, 32) if u <= most and units % u == 0), 0)
    block_u = block_u or min(most, max(2, triton.next_power_of_2(units)))
    return (4 if n >= 2048 and units <= 4 * block_u else 2), block_u


@triton.jit
def _wait(
    w_ptr,
    up,
    BN: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """With PDL: prefetch this program's rows of W, and those ``up`` elements behind, then wait for x."""
    if PDL:
        if PREFETCH:
            if tl.program_id(0) * BN + BN <= N:  # the last program's rows may be fewer, and what follows not ours
                prefetch(w_ptr, tl.program_id(0), BN * WIDTH)
                if GATED:
                    prefetch(w_ptr + up, tl.program_id(0), BN * WIDTH)
        gdc_wait()


@triton.jit
def _gemv(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    row_scale_ptr,
    out_ptr,
    norm_ptr,
    bias_ptr,
    eps,
    K: tl.constexpr,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RAISED: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
    HELD: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    PER: tl.constexpr = 4 if UNIT == 32 else 16  # elements of a unit
    WIDTH: tl.constexpr = K // UNIT * PER  # and of a row
    ALL: tl.constexpr = 2 * N if GATED else N
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    element = tl.arange(0, BU * PER)
    unit = tl.arange(0, BU)
    row = w_ptr + n[:, None].to(tl.int64) * WIDTH
    ws = (load_codes(row, element, n, N, WIDTH, EVEN),)  # into registers, before the wait
    us = (load_codes(row + N * WIDTH, element, n, N, WIDTH, EVEN),) if GATED else ws
    for u0 in tl.static_range(BU, HELD, BU):
        ws = ws + (load_codes(row, u0 * PER + element, n, N, WIDTH, EVEN),)  # type: ignore[assignment]
        if GATED:
            us = us + (load_codes(row + N * WIDTH, u0 * PER + element, n, N, WIDTH, EVEN),)  # type: ignore[assignment]
    _wait(w_ptr, N * WIDTH, BN, N, WIDTH, HELD * UNIT < K, GATED, PDL)
    squares = tl.zeros((BU * PER,), tl.float32)
    acc = tl.zeros((BN, BU), tl.float32)
    up = tl.zeros((BN, BU), tl.float32)
    for u0 in tl.static_range(0, K // UNIT, BU):
        w = codes_at(u0, ws, row, element, n, N, WIDTH, BU, HELD, EVEN)
        if GATED:
            u = codes_at(u0, us, row + N * WIDTH, element, n, N, WIDTH, BU, HELD, EVEN)
        xs, squares = load_x(x_ptr, norm_ptr, u0 * 16 + places_of(element, UNIT), squares, K, UNIT, NORM, EVEN)
        column = (u0 + unit) * UNIT
        acc += dot_of_units(
            w, xs, scale_ptr, zero_ptr, offset_ptr, n, column,
            KIND, UNIT, N, K, BN, BU, GROUP, GROUPS, ROWS, RAISED,
        )  # fmt: skip
        if GATED:
            up += dot_of_units(
                u, xs, scale_ptr, zero_ptr, offset_ptr, N + n, column,
                KIND, UNIT, ALL, K, BN, BU, GROUP, GROUPS, ROWS, RAISED,
            )  # fmt: skip
    y = tl.sum(acc, 1)
    v = tl.sum(up, 1) if GATED else y
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
        v *= factor
    y = finished(y, n, n < N, row_scale_ptr, bias_ptr, BIAS)
    if GATED:
        v = finished(v, N + n, n < N, row_scale_ptr, bias_ptr, BIAS)
        y = activate_and_multiply(y, v, ACTIVATION)
    if ADD:
        y += tl.load(out_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
