"""The product of several rows by a weight in FP8 on Hopper, by its FP8 tensor cores.

Of few rows, and where x may not be rounded to FP8, x becomes the sum of two terms in FP8 with a scale a row: the first
has the four leading bits of each number, the second four of what is left. So x is off by 6e-4 of its norm, where
bfloat16 costs it 1.6e-3, and nothing of W has to become numbers of 16 bits. The terms of eight rows lie behind each
other, so that both are multiplied by W in one instruction, of twice the rows: as many operations as in 16 bits, and
half the bytes. Of many rows x is the first term alone, off by 2.6e-2: half the operations.

The tensor cores add up few bits (some 14): sums of two terms over BK are added up in float32, those of a block of W
with its scale. Of rounded x they are chained: that adds 3e-3 to what rounding costs, in quadrature.

Bytes: W once for every BM rows; terms once for every BN columns, mostly out of the L2 cache; operations: 4 M N K of two
terms, 2 M N K of one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..activation import Gated
from ..grouped_codes import GroupedCodes
from ..linear_tilings import StreamedTiling
from ..matrix import Matrix
from ..rms_norm import Norm
from .activation import activate_and_multiply
from .launch import has_pdl, is_hopper, is_interpreted, launch, launch_next, wait_for_previous
from .linear_parts import prefetch_rows, store_product

__all__ = ["BLOCK", "Fp8Rows", "split", "stream"]

_LARGEST = tl.constexpr(448.0)  # the largest number of float8_e4m3fn
_FEWEST_LAST = 95
"""Multiprocessors, of 132, that the last tiles of our kernel keep busy at least where it adds a product to the residual
stream: of 2,048 rows by 4096 x 14336 in 199 us on an H100, the library and a sum in 214; of 1,536 in 178 and 157."""
_ADDING = StreamedTiling(256, 128, 128, 8, 4)
_TOGETHER = tl.constexpr(12)
"""Tiles of rows of x beside which programs that run at once have as many of W."""
BLOCK = 128
"""Rows and columns of W that share a scale, of weights in blocks."""
MOST_UNROUNDED = 8
"""Most rows of x that are not rounded to FP8 where they may be: of more, two terms take longer to read than one."""
MOST_OF_STREAM = 256
"""Most rows of rounded x that our kernel multiplies, if the library can; in blocks half as many, unless there are so
few tiles that each has a multiprocessor for itself: 256 rows by a matrix of 2048 x 4096 took 17.9 us on an H100, sum
included, and take 13.5."""
_WHOLE = 256
"""Rows of x are filled up to a multiple, so that no tile reaches beyond: the copy engine is slow there. The product of
160 rows by 4096 x 14336 took 65 us on an H100, and takes 36; what is filled up is never written, nor looked at."""
MOST_EXACT = 512
"""Most rows of x that are multiplied as two terms; of more, W is written as numbers for the library."""


class Fp8Rows(NamedTuple):
    """x [M, K] in FP8, with a scale a row. Of two terms, row i of x is the sum of the codes' row 16 * (i // 8) + i % 8
    and of the eighth row after that, times the scale of row i."""

    codes: Tensor  # float8_e4m3fn [M or more, K]; of two terms twice as many; in groups [4 * ceil(M / 4), K]
    scale: Tensor  # float32 [M, 1]; in groups of 128 columns [4 * ceil(M / 4), ceil(K / 128)], a column in one piece
    num_terms: int  # 1: rounded to FP8; 2: exact enough for 16 bits


def num_terms(rows: int, quantises_x: bool) -> int:
    """Return in how many terms x is multiplied."""
    return 1 if quantises_x and rows > MOST_UNROUNDED else 2


def by_library(x: Tensor | Gated, matrix: Matrix) -> bool:
    """Return whether `product` is faster than `stream`, and can multiply; ``matrix``: of `unwrapped`."""
    (n, k), (weight, _, scale, quantises_x) = matrix.shape, matrix
    if scale is None or not quantises_x or isinstance(weight, GroupedCodes) or weight.dtype == torch.int8:
        return False
    in_blocks = scale.dim() == 2
    is_one_each = triton.cdiv(n, 64) * triton.cdiv(x.shape[0], 64) <= 132  # a tile for each multiprocessor at most
    if x.shape[0] <= MOST_OF_STREAM // (2 if in_blocks and not is_one_each else 1):
        return False
    fits = n % BLOCK == k % (4 * BLOCK) == 0 if in_blocks else n % 16 == k % 16 == 0
    return fits and x.dtype != torch.float32 and is_hopper() and _library_has_scales()


@functools.cache
def _library_has_scales() -> bool:
    """Return whether torch is built for CUDA 12.9 or later: only then it has products with a scale a block, and in
    float16 those with a scale a row."""
    version = torch.version.cuda
    return version is not None and not is_interpreted and tuple(map(int, version.split(".")[:2])) >= (12, 9)


def unwrapped(x: Tensor | Gated, matrix: Matrix, gated: bool = False) -> Matrix:
    """Return a matrix in blocks that is for `stream` or for `gemv` as its codes and scales [N / 128, K / 128]; what is
    given, of others."""
    weight, rows, (n, k) = matrix.weight, x.shape[0], matrix.shape
    if not isinstance(weight, GroupedCodes) or weight.kind != "e4m3" or not weight.rows == weight.group == BLOCK:
        return matrix
    streams = is_hopper() and x.dtype != torch.float32 and (matrix.quantises_x or rows <= MOST_EXACT)
    if (rows > 1 and not streams) or k < BLOCK or (gated and n % (2 * BLOCK)) or weight.scale.dtype != torch.float32:
        return matrix
    return matrix._replace(weight=weight.codes, scale=weight.scale)


def product(x: Tensor | Gated, norm: Norm | None, matrix: Matrix, out_dtype: torch.dtype) -> Tensor:
    """The product by x, or its norm, rounded to FP8, by the library: [M, N] in ``out_dtype``. In blocks, 128 columns of
    a row of x have a scale as well: the library has no other kernel for them."""
    weight, bias, scale, _ = matrix
    assert isinstance(weight, Tensor) and scale is not None
    in_blocks = scale.dim() == 2
    codes, x_scale, _ = split(x, norm, 1, in_groups=in_blocks)
    made = torch._scaled_mm(
        codes if in_blocks else codes[: x.shape[0]],
        weight.t(),
        x_scale,
        scale.t() if in_blocks else scale[None],
        out_dtype=out_dtype,
        use_fast_accum=not in_blocks,
    )[: x.shape[0]]
    return made if bias is None else made.add_(bias)


def add_product(residual: Tensor, x: Tensor | Gated, matrix: Matrix) -> None:
    """Add `product` by x to ``residual`` [M, N]. The library's product is faster, but not with a sum behind it."""
    weight, bias, scale, _ = matrix
    assert isinstance(weight, Tensor) and scale is not None
    tiles = triton.cdiv(weight.shape[0], _ADDING.block_n) * triton.cdiv(x.shape[0], _ADDING.block_m)
    if scale.dim() == 2 or (tiles - 1) % 132 < _FEWEST_LAST:
        residual.add_(product(x, None, matrix, x.dtype))
    else:
        stream(_ADDING, split(x, None, 1), weight, bias, scale, residual, add=True)


def split(x: Tensor | Gated, norm: Norm | None = None, num_terms: int = 2, *, in_groups: bool = False) -> Fp8Rows:
    """Return x [M, K], or its norm, in so many terms; one term in groups of 128 columns, or as a whole."""
    (rows, k), (source, activation) = x.shape, x if isinstance(x, Gated) else (x, None)
    num_rows = 4 * triton.cdiv(rows, 4) if in_groups else num_terms * _WHOLE * triton.cdiv(rows, _WHOLE)
    codes = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=source.device)
    shape = (triton.cdiv(k, BLOCK), num_rows) if in_groups else (1, rows)
    scale = torch.empty(shape, dtype=torch.float32, device=source.device).t()
    block = triton.next_power_of_2(k)
    launch(
        _split,
        (rows,),
        source,
        None if norm is None else norm.weight,
        codes,
        scale,
        0.0 if norm is None else norm.eps,
        num_rows,
        K=k,
        BLOCK=block,
        GROUP=BLOCK if in_groups else block,
        NORM=norm is not None,
        ACTIVATION=activation,
        TERMS=num_terms,
        PDL=has_pdl(),
        num_warps=min(16, max(4, block // 1024)),
    )
    return Fp8Rows(codes, scale, num_terms)


@triton.jit(do_not_specialize=["num_rows"])
def _split(
    x_ptr,
    norm_ptr,
    codes_ptr,
    scale_ptr,
    eps,
    num_rows,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TERMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ACTIVATION: that of the gate, the first K columns of a row, whose others are up; None: x is as it is."""
    launch_next(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if NORM:
        w = tl.load(norm_ptr + i, mask=i < K, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x_ptr += row.to(tl.int64) * (K if ACTIVATION is None else 2 * K)
    x = tl.load(x_ptr + i, mask=i < K, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x_ptr + K + i, mask=i < K, other=0.0).to(tl.float32)
        x = activate_and_multiply(x, up, ACTIVATION)
    if NORM:
        x = x * w / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    if GROUP == BLOCK:
        largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
        x = x * (_LARGEST / largest)
        # NaN if some x is none or infinite: its bits may have been rounded to those of a number.
        tl.store(scale_ptr + row, largest / _LARGEST + tl.sum(x * 0.0, 0))
    else:
        groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
        largest = tl.maximum(tl.max(tl.abs(groups), 1), 1e-30)
        groups = groups * (_LARGEST / largest[:, None])
        group = tl.arange(0, BLOCK // GROUP)
        scale = largest / _LARGEST + tl.sum(groups * 0.0, 1)
        tl.store(scale_ptr + group * num_rows + row, scale, mask=group < tl.cdiv(K, GROUP))
        x = tl.reshape(groups, (BLOCK,))
    first = _of_four_bits(x)
    at = codes_ptr + (row if TERMS == 1 else row // 8 * 16 + row % 8).to(tl.int64) * K + i
    tl.store(at, first.to(tl.float8e4nv), mask=i < K)
    if TERMS == 2:
        tl.store(at + 8 * K, _of_four_bits(x - first).to(tl.float8e4nv), mask=i < K)


@triton.jit
def _of_four_bits(x):
    """x, float32, rounded to four significant bits, ties to even, as FP8 rounds its normal numbers.

    By integers: what is converted to FP8 and back comes back wrong by the ptxas of CUDA 12.8, with more than two
    numbers a thread, and Triton's interpreter loses a carry.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)


def stream(
    tiling: StreamedTiling,
    x: Fp8Rows,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    out: Tensor,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """Set out [M, N] to the product, or add it to out; rows of W are multiples of 16 bytes. ``scale``: float32, [N] or
    of blocks [N / 128, ceil(K / 128)]; then a tile's columns are a multiple of 128, and its rows divide 128."""
    rows, size = out.shape
    in_blocks = scale.dim() == 2
    columns = BLOCK if in_blocks else tiling.block_k
    assert not in_blocks or (tiling.block_k % BLOCK == 0 and BLOCK % tiling.block_n == 0)
    grid = triton.cdiv(rows, tiling.block_m), triton.cdiv(size, tiling.block_n)
    launch(
        _streamed,
        grid,
        TensorDescriptor.from_tensor(x.codes, [x.num_terms * tiling.block_m, columns]),
        TensorDescriptor.from_tensor(weight, [tiling.block_n, columns]),
        weight,
        out,
        bias,
        scale,
        x.scale,
        rows,
        size,
        weight.shape[1],
        BN=tiling.block_n,
        BM=tiling.block_m,
        BK=tiling.block_k,
        TERMS=x.num_terms,
        BLOCKS=in_blocks,
        BIAS=bias is not None,
        ADD=add,
        GATED=activation is not None,
        ACTIVATION=activation,
        MANY=tiling is _ADDING,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


@triton.jit
def _tile_of_program(MANY: tl.constexpr):
    """Which rows of x and which of W. Of MANY rows programs that run at once have some of x and some of W: else each
    would read all of x, which the L2 cache doesn't hold."""
    i, j = tl.program_id(0), tl.program_id(1)
    if MANY:
        rows, columns = tl.num_programs(0), tl.num_programs(1)
        index = j * rows + i
        first = index // (_TOGETHER * columns) * _TOGETHER
        index -= first * columns
        height = tl.minimum(rows - first, _TOGETHER)
        i, j = first + index % height, index // height
    return i, j


@triton.jit(do_not_specialize=["M"])
def _streamed(
    x_tiles,
    w_tiles,
    w_ptr,
    out_ptr,
    bias_ptr,
    scale_ptr,
    x_scale_ptr,
    M,
    N,
    K,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    i, j = _tile_of_program(MANY)
    m0 = i * BM
    n0 = j * BN
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    launch_next(PDL)
    if PDL:
        prefetch_rows(w_ptr, n, N, K)
        if GATED:
            prefetch_rows(w_ptr, N + n, 2 * N, K)
    wait_for_previous(PDL)
    y = tl.zeros((BN, TERMS * BM), tl.float32)
    v = tl.zeros((BN, TERMS * BM), tl.float32)
    if BLOCKS:
        block_ptr = scale_ptr + n0 // 128 * tl.cdiv(K, 128)
        up_ptr = scale_ptr + (N + n0) // 128 * tl.cdiv(K, 128)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):  # TMA copies zeros for what lies outside of x and W
        if BLOCKS:
            for k in tl.static_range(0, BK, 128):
                x = x_tiles.load([TERMS * m0, k0 + k]).T
                y += tl.dot(w_tiles.load([n0, k0 + k]), x) * _scale_of(block_ptr, k0 + k, K)
                if GATED:
                    v += tl.dot(w_tiles.load([N + n0, k0 + k]), x) * _scale_of(up_ptr, k0 + k, K)
        else:
            x = x_tiles.load([TERMS * m0, k0]).T
            if TERMS == 1:  # as exact as rounded x is
                y = tl.dot(w_tiles.load([n0, k0]), x, y)
                if GATED:
                    v = tl.dot(w_tiles.load([N + n0, k0]), x, v)
            else:
                y += tl.dot(w_tiles.load([n0, k0]), x)
                if GATED:
                    v += tl.dot(w_tiles.load([N + n0, k0]), x)
    y = _of_terms(y, x_scale_ptr, m, M, BN, BM, TERMS)
    if GATED:
        v = _of_terms(v, x_scale_ptr, m, M, BN, BM, TERMS)
    out_ptrs = out_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    is_inside = (n < N)[:, None] & (m < M)[None, :]
    store_product(y, v, bias_ptr, scale_ptr, n, out_ptrs, is_inside, N, 1, BIAS, not BLOCKS, ADD, GATED, ACTIVATION)


@triton.jit
def _scale_of(block_ptr, k, K):
    return tl.load(block_ptr + k // 128, mask=k < K, other=0.0)


@triton.jit
def _of_terms(y, x_scale_ptr, m, M, BN: tl.constexpr, BM: tl.constexpr, TERMS: tl.constexpr):
    """[BN, BM]: the sums over the terms of each row, times its scale."""
    if TERMS == 2:
        y = tl.reshape(tl.sum(tl.reshape(y, (BN, BM // 8, 2, 8)), 2), (BN, BM))
    return y * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
