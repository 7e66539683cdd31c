"""The product of two to some hundred rows by codes with a scale a group: a tile of the output a program. Tokens are the
narrow side of the matrix instruction, so that weights are read once for all of them; codes become numbers of 16 bits in
the registers from which that instruction takes them: what one word has belongs to one thread (see grouped_codes.py).

    wide groups      numbers are exact (value less zero point); the sums over a group get its scale in float32
    narrow groups    scale and offset are part of the number, which is rounded once to the dtype of x

Where there are few tiles, K is divided among several programs; the last to come adds up what all have left in memory,
in their order. On Hopper the copy engine (TMA) brings codes and x, elsewhere threads.

Bytes: K N / 2 (or K N) of codes once for every BM rows, x once for every BN columns, mostly out of the L2 cache;
operations: 2 M N K, and some 4 to make a number of a code.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..grouped_codes import GroupedCodes
from .grouped_parts import (
    constants,
    group_values,
    in_columns,
    masked_or,
    no_number,
    pointers,
    raised_columns,
    times_plus,
)
from .launch import has_pdl, is_hopper, launch, launch_next, max_shared_memory, wait_for_previous
from .linear_parts import prefetch_rows, store_product

MAX_ROWS = 512
"""Most rows of x for the kernel: for more, codes are written as numbers for the library."""
_WIDE_GROUP = 64
_NARROWEST = 32  # columns of a block of K
_LARGE = tl.constexpr(2.0**64)
_REST = tl.constexpr(2.0**62)


class GroupedTiling(NamedTuple):
    block_n: int
    block_m: int
    block_k: int  # columns that become numbers at once
    num_blocks: int  # blocks of K a stage
    num_parts: int  # programs that share out K
    num_warps: int
    num_stages: int

    def shared_bytes(self, gated: bool, itemsize: int, unit: int) -> int:
        """Shared memory needed at most: codes, their scales and x of each stage, or sums on their way to memory."""
        rows = self.block_n * (2 if gated else 1)
        block = (
            rows * self.block_k * 16 // unit + rows * self.block_k // 16 * 4 + self.block_m * self.block_k * itemsize
        )
        return max(int(block * self.num_blocks + 64) * self.num_stages, 4 * self.block_m * self.block_n)


def multiply_tiles(
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    *,
    add: bool,
    activation: str | None = None,
    tiling: GroupedTiling | None = None,
) -> None:
    """Set out [M, N] to the product, or add it to out. ``tiling``: to try one."""
    (rows, size), given = out.shape, constants(codes)
    k, gated, unit = given["K"], activation is not None, given["UNIT"]
    way = way_of(codes, x.dtype)
    tiling = tiling or _tiling(rows, size, k, way, gated)
    widest = given["GROUP"] if way == "sums" and given["GROUPS"] > 1 else triton.next_power_of_2(k)
    tiling = _fit(tiling, widest, gated, x.element_size(), unit)
    own, *others = pointers(codes)
    assert own is not None
    grid = (triton.cdiv(rows, tiling.block_m), triton.cdiv(size, tiling.block_n), tiling.num_parts)
    parts, counters = _workspace(grid, tiling, gated, x.device)
    tiles = None, None
    if is_hopper():
        wide = tiling.block_k // unit * (4 if unit == 32 else 16)
        tiles = (
            TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k]),
            TensorDescriptor.from_tensor(own, [tiling.block_n, wide]),
        )
    launch(
        _tiles,
        grid,
        *tiles,
        x,
        own,
        *others,
        out,
        bias,
        parts,
        counters,
        rows,
        **given,
        N=size,
        WAY=way,
        BM=tiling.block_m,
        BN=tiling.block_n,
        BK=tiling.block_k,
        BLOCKS=tiling.num_blocks,
        PARTS=tiling.num_parts,
        SCALED=codes.row_scale is not None,
        BIAS=bias is not None,
        ADD=add,
        GATED=gated,
        ACTIVATION=activation,
        EVEN=size % tiling.block_n == 0 and k % (tiling.block_k * tiling.num_blocks) == 0,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def way_of(codes: GroupedCodes, dtype: torch.dtype) -> str:
    """Return what scales are applied to: "sums", "numbers" in float32, or "exact" numbers of 16 bits, whose product
    with the scale is rounded but once as well."""
    group, is_power = min(codes.group, codes.shape[1]), codes.scale.dtype == torch.float8_e8m0fnu
    # Times a power of two a number may be none of float16.
    if codes.offset is None and (group >= _WIDE_GROUP or (is_power and dtype == torch.float16 and group >= _NARROWEST)):
        return "sums"
    has_few_bits = is_power or codes.scale.dtype == torch.float8_e4m3fn
    return "exact" if codes.kind == "e2m1" and dtype == torch.bfloat16 and has_few_bits else "numbers"


def _tiling(rows: int, n: int, k: int, way: str, gated: bool) -> GroupedTiling:
    """Return what was the fastest, or nearly so, for Llama-3.1-8B's shapes on an H100. K is divided among programs as
    long as all of them find a place at once: two to four a multiprocessor, by their memory."""
    is_wide, most = way == "sums", 264
    if rows <= 16:
        one, most = GroupedTiling(64, 16, 256, 1, 1, 4, 4), 264 if gated else 512
    elif rows <= 64:
        one, most = GroupedTiling(64, 32 if rows <= 32 else 64, 128, 1, 1, 4, 4), 396
    else:
        one = GroupedTiling(64, 128, 128, 1, 1, 4, 3)
    tiles, parts = triton.cdiv(n, one.block_n) * triton.cdiv(rows, one.block_m), 1
    while tiles * parts * 2 <= most and k // (parts * 2) >= 512:
        parts *= 2
    if rows <= 16 and is_wide:
        one = one._replace(block_k=128, num_blocks=4 if parts > 1 else 2, num_stages=2 if parts > 1 else 4)
    elif tiles * parts > (396 if rows <= 16 else 264) and rows <= 64:
        one = one._replace(num_stages=3)
    return one._replace(num_parts=parts)


def _fit(tiling: GroupedTiling, widest: int, gated: bool, itemsize: int, unit: int) -> GroupedTiling:
    """Return the tiling cut to blocks of ``widest`` columns, and to the GPU's shared memory."""
    tiling = tiling._replace(block_k=max(_NARROWEST, min(tiling.block_k, widest)))
    while tiling.shared_bytes(gated, itemsize, unit) > max_shared_memory():
        if tiling.num_stages > 2:
            tiling = tiling._replace(num_stages=tiling.num_stages - 1)
        elif tiling.num_blocks > 1:
            tiling = tiling._replace(num_blocks=1, num_stages=3)
        else:
            tiling = tiling._replace(block_k=tiling.block_k // 2, num_stages=3)
    return tiling


_COUNTERS = 8192


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Counters of the parts that are done of each tile: 0 before and after each kernel. Kernels that run at the same
    time must not share them: all are launched on one stream."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def _workspace(
    grid: tuple[int, int, int], tiling: GroupedTiling, gated: bool, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if tiling.num_parts == 1:
        return None, None
    size = grid[0] * grid[1] * grid[2] * tiling.block_n * tiling.block_m * (2 if gated else 1)
    assert grid[0] * grid[1] <= _COUNTERS
    return torch.empty(size, dtype=torch.float32, device=device), _counters(device)


@triton.jit
def _words_of_exact(w, dtype: tl.constexpr, KIND: tl.constexpr):
    """Return four int32 words for each word ``w`` of eight codes: the i-th has codes i and i + 4 as 16-bit numbers of
    ``dtype``, plus 128 (bfloat16) or 1024 (float16); of e2m1 times 2^-126, or 2^-14, instead."""
    HALF: tl.constexpr = dtype == tl.float16
    if KIND == "e2m1":  # sign, exponent and mantissa in their places
        SHIFT: tl.constexpr = 9 if HALF else 6
        MASK: tl.constexpr = 0x0E000E00 if HALF else 0x01C001C0
        SIGN: tl.constexpr = -0x7FFF8000
        a = w << SHIFT & MASK | w << 12 & SIGN
        b = w << SHIFT - 4 & MASK | w << 8 & SIGN
        c = (w << 1 if HALF else w >> 2) & MASK | w << 4 & SIGN
        d = (w >> 3 if HALF else w >> 6) & MASK | w & SIGN
    else:
        BASE: tl.constexpr = 0x64006400 if HALF else 0x43004300
        a = masked_or(w, 0x000F000F, BASE)
        b = masked_or(w >> 4, 0x000F000F, BASE)
        c = masked_or(w >> 8, 0x000F000F, BASE)
        d = masked_or(w >> 12, 0x000F000F, BASE)
    return a, b, c, d


@triton.jit
def _numbers(words, dtype: tl.constexpr):
    return tl.join(words.to(tl.int16).to(dtype, bitcast=True), (words >> 16).to(tl.int16).to(dtype, bitcast=True))


@triton.jit
def _in_columns_of(words, factor, addend, dtype: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK]: numbers of ``dtype`` of codes ``words`` times ``factor``, plus ``addend``, words of [BN, groups]."""
    a, b, c, d = _words_of_exact(words, dtype, KIND)
    if factor.shape[1] * 16 == BK:  # a word has two of one group, then two of the next
        first, second = tl.split(tl.reshape(factor, (BN, BK // 32, 2)))
    else:
        first, second = factor, factor
    first, second, addend = _spread(first, BN, BK // 8), _spread(second, BN, BK // 8), _spread(addend, BN, BK // 8)
    a, b = times_plus(a, first, addend, dtype), times_plus(b, first, addend, dtype)
    c, d = times_plus(c, second, addend, dtype), times_plus(d, second, addend, dtype)
    return in_columns(_numbers(a, dtype), _numbers(b, dtype), _numbers(c, dtype), _numbers(d, dtype), BN, BK)


@triton.jit
def _spread(of_groups, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK], or [BN, 1], of a number a group."""
    COUNT: tl.constexpr = of_groups.shape[1]
    y = of_groups
    if COUNT > 1:
        y = tl.reshape(tl.broadcast_to(of_groups[:, :, None], (BN, COUNT, BK // COUNT)), (BN, BK))
    return y


@triton.jit
def _exact(
    w, zero, like, dtype: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """[BN, BK]: values less zero points, in ``dtype``. zero: [BN, groups], of raised codes."""
    if dtype == tl.float32 or (KIND != "int4" and KIND != "uint4" and KIND != "e2m1"):
        y = (raised_columns(w, like, KIND, UNIT, BN, BK) - _spread(zero, BN, BK)).to(dtype)
    elif KIND == "e2m1":
        LARGE: tl.constexpr = 0x74007400 if dtype == tl.float16 else 0x7E807E80
        y = _in_columns_of(w, tl.full((1, 1), LARGE, tl.int32), no_number((1, 1)), dtype, KIND, BN, BK)
    else:  # from numbers raised by 1024 or 128, instead of 16, in words whose last bits count ones
        ONE: tl.constexpr = 0x3C003C00 if dtype == tl.float16 else 0x3F803F80
        LESS: tl.constexpr = -0x1BFF1C00 if dtype == tl.float16 else -0x3CFF3D00
        addend = (zero.to(tl.int32) - 16) * 0x00010001 + LESS
        y = _in_columns_of(w, tl.full((1, 1), ONE, tl.int32), addend, dtype, KIND, BN, BK)
    return y


@triton.jit
def load_tile(
    w_tiles, w_ptr, n0, k0, N: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 4 if UNIT == 32 else 16  # elements of a unit
    WIDTH: tl.constexpr = K // UNIT * PER  # and of a row
    if w_tiles is not None:  # copied are zeros for what lies outside
        w = w_tiles.load([n0, k0 // UNIT * PER])
    else:
        n = n0 + tl.arange(0, BN)
        at = k0 // UNIT * PER + tl.arange(0, BK // UNIT * PER)
        ptrs = w_ptr + n[:, None].to(tl.int64) * WIDTH + at[None, :]
        if EVEN:
            w = tl.load(ptrs)
        else:
            w = tl.load(ptrs, mask=(n < N)[:, None] & (at < WIDTH)[None, :], other=0.0)
    return w


@triton.jit
def _load_x(x_tiles, x_ptr, m0, k0, M, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    if x_tiles is not None:
        x = x_tiles.load([m0, k0])
    else:
        m = m0 + tl.arange(0, BM)
        at = k0 + tl.arange(0, BK)
        ptrs = x_ptr + m[:, None].to(tl.int64) * K + at[None, :]
        if EVEN:
            x = tl.load(ptrs, mask=(m < M)[:, None], other=0.0)
        else:
            x = tl.load(ptrs, mask=(m < M)[:, None] & (at < K)[None, :], other=0.0)
    return x.T


@triton.jit
def values_of_tile(
    scale_ptr, zero_ptr, offset_ptr, n, is_row, k0, WAY: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, RAISED: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Scale, zero point and offset that `add_tile` takes for the codes of rows ``n`` and BK columns from ``k0`` on.

    WAY: from `way_of`; for "sums" all of the columns are of one group. EVEN: all rows and columns are there; else
    ``is_row`` says which rows."""
    COUNT: tl.constexpr = BK // GROUP if BK > GROUP else 1
    if COUNT == 1:  # in one dimension: else each thread reads a scale for each of its sums
        inside = None if EVEN else is_row & (k0 < K)
        scale, zero, offset = group_values(
            scale_ptr, zero_ptr, offset_ptr, n, k0 // GROUP, inside, GROUPS, ROWS, RAISED
        )
        scale, zero, offset = scale[:, None], zero[:, None], offset[:, None]
    else:
        g = tl.arange(0, COUNT)
        inside = None if EVEN else is_row[:, None] & (k0 + g * GROUP < K)[None, :]
        scale, zero, offset = group_values(
            scale_ptr, zero_ptr, offset_ptr, n[:, None], (k0 // GROUP + g)[None, :], inside, GROUPS, ROWS, RAISED
        )
    return scale, zero, offset


@triton.jit
def add_tile(
    y, w, x, scale, zero, offset, KIND: tl.constexpr, WAY: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """y [BN, BM] and the products of codes ``w`` and x [BK, BM], with what `values_of_tile` gives for them; times
    2^-62 if WAY is "exact", see `whole`."""
    if WAY == "sums":
        y += tl.dot(_exact(w, zero, scale, x.dtype, KIND, UNIT, BN, BK), x, input_precision="ieee") * scale
    elif WAY == "exact":  # bits are 2^-126 of the values of codes: times 2^64 of the scale no product is too small
        bits = (scale * _LARGE).to(tl.int32, bitcast=True)
        factor = bits & -65536 | bits >> 16  # twice as bfloat16
        y += tl.dot(_in_columns_of(w, factor, no_number((1, 1)), x.dtype, KIND, BN, BK), x, input_precision="ieee")
    else:
        v = raised_columns(w, scale, KIND, UNIT, BN, BK) * _spread(scale, BN, BK)
        v += _spread(offset - zero * scale, BN, BK)
        y += tl.dot(v.to(x.dtype), x, input_precision="ieee")
    return y


@triton.jit
def whole(y, WAY: tl.constexpr):
    """What sums of `add_tile` over all of K are."""
    return y * _REST if WAY == "exact" else y


@triton.jit
def _sum_of_parts(y, parts_ptr, BN: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr):
    """[BN, BM]: the sum of what all parts have stored from ``parts_ptr`` on, in their order."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    y = tl.zeros((BN, BM), tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(parts_ptr + part * (BN * BM) + at, cache_modifier=".cg")
    return y


@triton.jit(do_not_specialize=["M"])
def _tiles(
    x_tiles, w_tiles, x_ptr, w_ptr, scale_ptr, zero_ptr, offset_ptr, row_scale_ptr, out_ptr, bias_ptr, parts_ptr,
    counters_ptr, M, K: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, RAISED: tl.constexpr, N: tl.constexpr, WAY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCKS of BK columns a stage; PARTS programs that share out K."""
    launch_next(PDL)
    ALL: tl.constexpr = 2 * N if GATED else N
    STEP: tl.constexpr = BK * BLOCKS
    SHARE: tl.constexpr = (K + STEP * PARTS - 1) // (STEP * PARTS) * STEP  # columns of a part
    ROW: tl.constexpr = K // UNIT * 16  # bytes
    own = tl.program_id(0) * BM
    m0 = tl.maximum(tl.minimum(own, M - BM), 0)  # the last tile begins before its own rows: copies are slow beyond x
    n0 = tl.program_id(1) * BN
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    first = tl.program_id(2) * SHARE
    if PDL and SHARE * (PARTS - 1) // UNIT * 16 + 512 <= ROW:
        begin = w_ptr.to(tl.pointer_type(tl.uint8)) + first // UNIT * 16
        prefetch_rows(begin, n, ALL, ROW)
        if GATED:
            prefetch_rows(begin, N + n, ALL, ROW)
    wait_for_previous(PDL)
    y = tl.zeros((BN, BM), tl.float32)
    v = tl.zeros((BN, BM), tl.float32)
    for k1 in tl.range(first, tl.minimum(first + SHARE, K), STEP, num_stages=STAGES):
        for block in tl.static_range(BLOCKS):
            k0 = k1 + block * BK
            x = _load_x(x_tiles, x_ptr, m0, k0, M, K, BM, BK, EVEN)
            w = load_tile(w_tiles, w_ptr, n0, k0, ALL, K, UNIT, BN, BK, EVEN)
            scale, zero, offset = values_of_tile(
                scale_ptr, zero_ptr, offset_ptr, n, n < ALL, k0, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, EVEN
            )
            y = add_tile(y, w, x, scale, zero, offset, KIND, WAY, UNIT, BN, BK)
            if GATED:
                w = load_tile(w_tiles, w_ptr, N + n0, k0, ALL, K, UNIT, BN, BK, EVEN)
                scale, zero, offset = values_of_tile(
                    scale_ptr, zero_ptr, offset_ptr, N + n, N + n < ALL, k0, WAY, K, GROUP, GROUPS, ROWS, RAISED,
                    BK, EVEN,
                )  # fmt: skip
                v = add_tile(v, w, x, scale, zero, offset, KIND, WAY, UNIT, BN, BK)
    y = whole(y, WAY)
    v = whole(v, WAY)
    is_last = True
    if PARTS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        SIZE: tl.constexpr = BN * BM
        parts_ptr += tile.to(tl.int64) * (PARTS * SIZE * (2 if GATED else 1))
        at = tl.program_id(2) * SIZE + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(parts_ptr + at, y)
        if GATED:
            tl.store(parts_ptr + PARTS * SIZE + at, v)
        tl.debug_barrier()  # then all of this program's stores come before the sum of one
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            y = _sum_of_parts(y, parts_ptr, BN, BM, PARTS)
            if GATED:
                v = _sum_of_parts(v, parts_ptr + PARTS * SIZE, BN, BM, PARTS)
    if is_last:
        out_ptrs = out_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        is_inside = (n < N)[:, None] & ((m >= own) & (m < M))[None, :]
        store_product(y, v, bias_ptr, row_scale_ptr, n, out_ptrs, is_inside, N, 1, BIAS, SCALED, ADD, GATED, ACTIVATION)
