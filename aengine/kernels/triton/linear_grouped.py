"""Products by codes with a scale a group of columns, which become numbers as they are multiplied.

    gemv       one row: a thread reads a unit of 16 bytes of codes of BN rows, sums its products in registers, and
               applies the group's scale and zero point once
    tiles      2 to 512 rows: codes become exact numbers of 16 bits (value less zero point) for the tensor cores, whose
               sums over a group get its scale in float32; warps share out parts of K that lie beside each other

Bytes: K N / 2 (or K N) of codes and the groups' scales once, in `tiles` for every BM rows; operations: 2 M N K, and
some 4 to make a number of a code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grouped_codes import GroupedCodes
from . import rms_norm
from .activation import activate_and_multiply
from .grouped_parts import columns_of, constants, group_values, pointers, raised
from .grouped_units import codes_at, dot_of_units, finished, load_codes, load_x
from .launch import (
    gdc_wait,
    has_pdl,
    is_interpreted,
    launch,
    launch_next,
    max_shared_memory,
    prefetch,
    wait_for_previous,
)
from .linear_parts import store_product

__all__ = ["multiply"]

MAX_ROWS = 512
"""Most rows of x for our kernels: for more, codes are written as numbers for the library."""
_HELD = 16
"""Units of codes that a thread of `gemv` has on their way while it waits for x; 4 registers each."""


def multiply(
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
    *,
    add: bool,
    activation: str | None = None,
) -> bool:
    """out [M, N] = the product by x or, with ``norm`` (weight, eps), by its norm, or is added to; False: not done, the
    rows are for the library."""
    rows = x.shape[0]
    if rows > MAX_ROWS or (rows > 1 and x.dtype == torch.float32 and not is_interpreted):
        return False
    if rows == 1:
        _multiply_row(x, codes, bias, out, *(norm or (None, 0.0)), add=add, activation=activation)
        return True
    x = x if norm is None else rms_norm.rms_norm(x, *norm)
    _multiply_tiles(x, codes, bias, out, add=add, activation=activation)
    return True


def _multiply_row(
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """out [1, N] = the product, or is added to; see linear_gemv.py."""
    size, given = out.shape[1], constants(codes)
    units = given["K"] // given["UNIT"]
    block_n, block_u = _gemv_blocks(size, units, activation is not None)
    rows = block_n * (1 if activation is None else 2)
    launch(
        _gemv,
        (triton.cdiv(size, block_n),),
        x,
        *pointers(codes),
        out,
        norm_weight,
        bias,
        eps,
        **given,
        N=size,
        BN=block_n,
        BU=block_u,
        HELD=block_u * max(1, min(triton.cdiv(units, block_u), _HELD // rows)),
        NORM=norm_weight is not None,
        BIAS=bias is not None,
        ADD=add,
        GATED=activation is not None,
        ACTIVATION=activation,
        EVEN=size % block_n == 0 and units % block_u == 0,
        PDL=has_pdl(),
        num_warps=max(1, min(8, block_u // 32)),
    )


def _gemv_blocks(n: int, units: int, is_gated: bool) -> tuple[int, int]:
    """BN, and units of a row that are read at once, one a thread. By arithmetic: some 30 KB of codes on their way to
    each multiprocessor, in programs of 4 to 16 KB."""
    block_u = next((u for u in (256, 128, 64, 32) if units % u == 0), min(128, max(2, triton.next_power_of_2(units))))
    block_n = 4 if n >= 2048 else 2
    return (block_n // 2 if is_gated and units > 256 else block_n), block_u


@triton.jit
def _wait(
    w_ptr,
    up,
    BN: tl.constexpr,
    N: tl.constexpr,
    BYTES: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """With PDL: prefetch this program's rows of W, and those ``up`` bytes behind, then wait for x."""
    if PDL:
        if PREFETCH:
            if tl.program_id(0) * BN + BN <= N:  # the last program's rows may be fewer, and what follows not ours
                prefetch(w_ptr, tl.program_id(0), BN * BYTES)
                if GATED:
                    prefetch(w_ptr + up, tl.program_id(0), BN * BYTES)
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
    BYTES: tl.constexpr = K // UNIT * 16  # bytes of a row
    ALL: tl.constexpr = 2 * N if GATED else N
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    byte = tl.arange(0, BU * 16)
    unit = tl.arange(0, BU)
    row = w_ptr + n[:, None].to(tl.int64) * BYTES
    ws = (load_codes(row, byte, n, N, BYTES, EVEN),)  # into registers, before the wait
    us = (load_codes(row + N * BYTES, byte, n, N, BYTES, EVEN),) if GATED else ws
    for u0 in tl.static_range(BU, HELD, BU):
        ws = ws + (load_codes(row, u0 * 16 + byte, n, N, BYTES, EVEN),)  # type: ignore[assignment]
        if GATED:
            us = us + (load_codes(row + N * BYTES, u0 * 16 + byte, n, N, BYTES, EVEN),)  # type: ignore[assignment]
    _wait(w_ptr, N * BYTES, BN, N, BYTES, HELD * UNIT < K, GATED, PDL)
    squares = tl.zeros((BU * 16,), tl.float32)
    acc = tl.zeros((BN, BU), tl.float32)
    up = tl.zeros((BN, BU), tl.float32)
    for u0 in tl.static_range(0, K // UNIT, BU):
        w = codes_at(u0, ws, row, byte, n, N, BYTES, BU, HELD, EVEN)
        if GATED:
            u = codes_at(u0, us, row + N * BYTES, byte, n, N, BYTES, BU, HELD, EVEN)
        at = u0 * UNIT + columns_of(byte, UNIT)
        x_low, squares = load_x(x_ptr, norm_ptr, at, squares, K, NORM, EVEN)
        x_high = x_low
        if UNIT == 32:
            x_high, squares = load_x(x_ptr, norm_ptr, at + 16, squares, K, NORM, EVEN)
        column = (u0 + unit) * UNIT
        acc += dot_of_units(
            w, x_low, x_high, scale_ptr, zero_ptr, offset_ptr, n, column,
            KIND, UNIT, N, K, BN, BU, GROUP, GROUPS, ROWS, RAISED,
        )  # fmt: skip
        if GATED:
            up += dot_of_units(
                u, x_low, x_high, scale_ptr, zero_ptr, offset_ptr, N + n, column,
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


class GroupedTiling(NamedTuple):
    block_m: int
    block_n: int
    num_parts: int  # parts of K that lie beside each other, one a warp; or 1
    block_k: int  # columns of a part that are read at a time, all of one group, or of two of 16
    num_warps: int
    num_stages: int

    def shared_bytes(self, gated: bool, itemsize: int, unit: int) -> int:
        """Shared memory needed at most: a stretch of codes and of x a stage."""
        width = self.num_parts * self.block_k
        stage = width * 16 // unit * self.block_n * (2 if gated else 1) + width * self.block_m * itemsize
        return stage * self.num_stages


def _tiling(rows: int, k: int, group: int, unit: int, itemsize: int, gated: bool) -> GroupedTiling:
    """By arithmetic. Codes become numbers in registers, where some 32 bytes of them a thread leave room for the sums.
    Up to 32 rows each warp has a part of K; the compiler does not divide a part among warps."""
    block_k = min(64, max(unit, triton.next_power_of_2(k) if group >= k else group))
    if rows <= 32 and k >= 4 * block_k:
        tiling = GroupedTiling(
            max(8, triton.next_power_of_2(rows)), 16 if gated and rows > 16 else 32, 4, block_k, 4, 5
        )
    else:
        tiling = GroupedTiling(64, 64, 1, block_k, 4, 5) if rows <= 128 else GroupedTiling(64, 128, 1, block_k, 8, 4)
    while tiling.shared_bytes(gated, itemsize, unit) > max_shared_memory() and tiling.num_stages > 2:
        tiling = tiling._replace(num_stages=tiling.num_stages - 1)
    while tiling.shared_bytes(gated, itemsize, unit) > max_shared_memory() and tiling.block_k > 32:
        tiling = tiling._replace(block_k=tiling.block_k // 2)
    return tiling


def _multiply_tiles(
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """out [M, N] = the product, or is added to."""
    (rows, size), given = out.shape, constants(codes)
    k, gated = given["K"], activation is not None
    tiling = _tiling(rows, k, given["GROUP"], given["UNIT"], x.element_size(), gated)
    launch(
        _tiles,
        (triton.cdiv(size, tiling.block_n), triton.cdiv(rows, tiling.block_m)),
        x,
        *pointers(codes),
        out,
        bias,
        rows,
        **given,
        N=size,
        BM=tiling.block_m,
        BN=tiling.block_n,
        PARTS=tiling.num_parts,
        BK=tiling.block_k,
        SCALED=codes.row_scale is not None,
        BIAS=bias is not None,
        ADD=add,
        GATED=gated,
        ACTIVATION=activation,
        EVEN=size % tiling.block_n == 0 and k % (tiling.num_parts * tiling.block_k) == 0,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


@triton.jit
def _add_tile(
    acc,
    w_ptr,
    x_low,
    x_high,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    n,
    column,
    byte,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    ALL: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RAISED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """acc [PARTS, BN, BM] and the products of rows ``n`` [1, BN, 1] of W and the parts' columns from ``column``
    [PARTS, 1, 1] on; of one part acc is [BN, BM], n [BN, 1] and ``column`` a number. ``byte``: in shape beside n."""
    byte += column // UNIT * 16
    w_ptrs = w_ptr + n.to(tl.int64) * (K // UNIT * 16) + byte
    if EVEN:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=(n < ALL) & (byte < K // UNIT * 16), other=0.0)
    scale, zero, offset = group_values(
        scale_ptr, zero_ptr, offset_ptr, n, column // GROUP, (n < ALL) & (column < K), GROUPS, ROWS, RAISED
    )
    low = (raised(w, scale, False, KIND) - zero).to(x_low.dtype)
    AXIS: tl.constexpr = len(x_low.shape) - 2
    if UNIT == 16:
        acc += tl.dot(low, x_low, input_precision="ieee") * scale
        x = x_low.to(tl.float32)
    elif GROUP == 16:
        acc += tl.dot(low, x_low, input_precision="ieee") * scale
        if offset_ptr is not None:
            acc += offset * tl.expand_dims(tl.sum(x_low.to(tl.float32), AXIS), AXIS)
        after = column + 16
        scale, zero, offset = group_values(
            scale_ptr, zero_ptr, offset_ptr, n, after // GROUP, (n < ALL) & (after < K), GROUPS, ROWS, RAISED
        )
        high = (raised(w, scale, True, KIND) - zero).to(x_low.dtype)
        acc += tl.dot(high, x_high, input_precision="ieee") * scale
        x = x_high.to(tl.float32)
    else:
        high = (raised(w, scale, True, KIND) - zero).to(x_low.dtype)
        part = tl.dot(low, x_low, input_precision="ieee")
        acc += tl.dot(high, x_high, part, input_precision="ieee") * scale
        x = x_low.to(tl.float32) + x_high.to(tl.float32)
    if offset_ptr is not None:
        acc += offset * tl.expand_dims(tl.sum(x, AXIS), AXIS)
    return acc


@triton.jit
def _load_tile(x_ptrs, is_row, at, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(x_ptrs, mask=is_row, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=is_row & (at < K), other=0.0)
    return x


@triton.jit(do_not_specialize=["M"])
def _tiles(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    row_scale_ptr,
    out_ptr,
    bias_ptr,
    M,
    K: tl.constexpr,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RAISED: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    BK: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    launch_next(PDL)
    ALL: tl.constexpr = 2 * N if GATED else N
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    byte = tl.arange(0, BK // UNIT * 16)
    if PARTS == 1:
        part = 0
        rows, bytes, tokens, at = n[:, None], byte[None, :], m[None, :], columns_of(byte, UNIT)[:, None]
        y = tl.zeros((BN, BM), tl.float32)
    else:
        part = tl.arange(0, PARTS)[:, None, None] * BK
        rows, bytes, tokens = n[None, :, None], byte[None, None, :], m[None, None, :]
        at = part + columns_of(byte, UNIT)[None, :, None]
        y = tl.zeros((PARTS, BN, BM), tl.float32)
    v = y
    x_ptrs = x_ptr + tokens.to(tl.int64) * K + at
    is_row = tokens < M
    wait_for_previous(PDL)
    for k0 in tl.range(0, K, PARTS * BK, num_stages=STAGES):
        x_low = _load_tile(x_ptrs + k0, is_row, k0 + at, K, EVEN)
        x_high = x_low
        if UNIT == 32:
            x_high = _load_tile(x_ptrs + k0 + 16, is_row, k0 + 16 + at, K, EVEN)
        y = _add_tile(
            y, w_ptr, x_low, x_high, scale_ptr, zero_ptr, offset_ptr, rows, k0 + part, bytes,
            KIND, UNIT, ALL, K, GROUP, GROUPS, ROWS, RAISED, EVEN,
        )  # fmt: skip
        if GATED:
            v = _add_tile(
                v, w_ptr, x_low, x_high, scale_ptr, zero_ptr, offset_ptr, N + rows, k0 + part, bytes,
                KIND, UNIT, ALL, K, GROUP, GROUPS, ROWS, RAISED, EVEN,
            )  # fmt: skip
    if PARTS > 1:
        y = tl.sum(y, 0)
        v = tl.sum(v, 0)
    out_ptrs = out_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    is_inside = (n < N)[:, None] & (m < M)[None, :]
    store_product(y, v, bias_ptr, row_scale_ptr, n, out_ptrs, is_inside, N, 1, BIAS, SCALED, ADD, GATED, ACTIVATION)
