"""Products by weights W [N, K], for x [M, K]. Which kernel is fastest was measured on an H200.

Of plain numbers:

M            norm            product
1            in the product  gemv
2 to 256     its own kernel  streamed, on Hopper, where linear_tilings.py has a tiling; else:
2 to 32      its own kernel  skinny for small weights and into the residual, else cuBLAS
33 to 128    its own kernel  tiled for small weights, but cuBLAS into the residual
129 or more  its own kernel  cuBLAS

Of codes in 8 bits with a scale a row the first and the third line hold, and for FP8 on Hopper up to 512 rows
`linear_fp8`, whose kernel before the product has the norm; for more rows the codes are written as numbers for cuBLAS,
unless x may be rounded. Of `GroupedCodes` `linear_grouped` multiplies up to 512 rows, and then it is the same; but FP8
in blocks of 128 x 128 is multiplied as FP8 with a scale a row is. Of many rounded rows torch's kernels are faster.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..activation import Activation, Gated, computed
from ..grouped_codes import GroupedCodes
from ..linear_tilings import LinearShape, StreamedTiling, choose_tiling
from ..matrix import Matrix
from ..rms_norm import Norm
from ..scaled_product import product
from . import linear_fp8, linear_grouped, linear_skinny, linear_streamed, linear_tiled, rms_norm
from .launch import device_name, has_pdl, is_hopper, is_interpreted, known, launch
from .linear_gemv import gemv
from .linear_skinny import SkinnyTiling, skinny
from .linear_tiled import TiledTiling, tiled

__all__ = ["add_linear", "gated_linear", "linear"]

MAX_SKINNY = 32  # most rows of x for which the skinny kernel is chosen
MAX_TILED = 128
_SMALL_WEIGHT = 2**23  # elements; a larger one takes so long to read that cuBLAS' slower start does not show


def linear(x: Tensor, norm: Norm | None, matrix: Matrix, out_dtype: torch.dtype) -> Tensor:
    """Return the product by x, or by its norm."""
    own = linear_fp8.unwrapped(x, matrix)
    if linear_fp8.by_library(x, own):
        return linear_fp8.product(x, norm, own, out_dtype)
    made = _own(x, norm, own, out_dtype)
    return product(_normed(x, norm), matrix, out_dtype) if made is None else made


def gated_linear(x: Tensor, norm: Norm | None, matrix: Matrix, activation: Activation) -> Tensor | Gated:
    own = linear_fp8.unwrapped(x, matrix, gated=True)
    is_apart = linear_fp8.by_library(x, own) or linear_grouped.gates_apart(x, own)
    made = None if is_apart else _own(x, norm, own, x.dtype, activation)
    return Gated(linear(x, norm, matrix, x.dtype), activation) if made is None else made


def add_linear(residual: Tensor, x: Tensor | Gated, matrix: Matrix) -> None:
    own = linear_fp8.unwrapped(x, matrix)
    if linear_fp8.by_library(x, own):
        linear_fp8.add_product(residual, x, own)
        return
    x = computed(x)
    if isinstance(own.weight, GroupedCodes):
        if not linear_grouped.multiply(x, own.weight, own.bias, residual, add=True):
            residual.add_(product(x, matrix))
    elif x.shape[0] == 1:
        gemv(x, own, residual, None, add=True)
    elif (tiling := _tiling(x, own, gated=False, add=True)) is not None:
        _run(tiling, x, None, own, residual, add=True)
    elif own.bias is None and own.scale is None:
        torch.addmm(residual, x, own.weight.t(), out=residual)
    else:  # the bias joins the product first: added to the residual it would round that once more
        residual.add_(product(x, matrix))


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm.rms_norm(x, norm.weight, norm.eps)


def _own(
    x: Tensor, norm: Norm | None, matrix: Matrix, out_dtype: torch.dtype, activation: Activation | None = None
) -> Tensor | None:
    """Compute the product by x or its norm, gated if there is an ``activation``, with our own kernel; None: cuBLAS is
    faster."""
    (rows, _), n = x.shape, matrix.shape[0]
    is_gated, in_groups = activation is not None, isinstance(matrix.weight, GroupedCodes)
    tiling = None if rows == 1 or in_groups else _tiling(x, matrix, gated=is_gated, add=False)
    if rows > 1 and tiling is None and not in_groups:
        return None
    out = torch.empty((rows, n // 2 if is_gated else n), dtype=out_dtype, device=x.device)
    if isinstance(matrix.weight, GroupedCodes):
        done = linear_grouped.multiply(x, matrix.weight, matrix.bias, out, norm, add=False, activation=activation)
        return out if done else None
    if tiling is None:
        gemv(x, matrix, out, norm, add=False, activation=activation)
    else:
        _run(tiling, x, norm, matrix, out, add=False, activation=activation)
    return out


def _run(
    tiling: StreamedTiling | SkinnyTiling | TiledTiling,
    x: Tensor,
    norm: Norm | None,
    matrix: Matrix,
    out: Tensor,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """out [M, N] = the product by x or its norm, or is added to."""
    weight, bias, scale, quantises_x = matrix
    assert isinstance(weight, Tensor)
    if isinstance(tiling, StreamedTiling) and scale is not None:
        terms = linear_fp8.split(x, norm, linear_fp8.num_terms(x.shape[0], quantises_x))
        linear_fp8.stream(tiling, terms, weight, bias, scale, out, add=add, activation=activation)
        return
    x = _normed(x, norm)
    if isinstance(tiling, StreamedTiling):
        linear_streamed.stream(tiling, x, weight, bias, out, add=add, activation=activation)
        return
    rows, size = out.shape
    groups = {"GROUPS": tiling.num_groups} if isinstance(tiling, SkinnyTiling) else {}
    launch(
        skinny if isinstance(tiling, SkinnyTiling) else tiled,
        (size // tiling.block_n, triton.cdiv(rows, tiling.block_m)),
        x,
        known(weight),
        out,
        bias,
        scale,
        rows,
        N=size,
        K=weight.shape[1],
        BM=tiling.block_m,
        BN=tiling.block_n,
        BK=tiling.block_k,
        **groups,
        BIAS=bias is not None,
        SCALED=scale is not None,
        FP8=weight.dtype == torch.float8_e4m3fn,
        ADD=add,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def _tiling(x: Tensor, matrix: Matrix, *, gated: bool, add: bool) -> StreamedTiling | SkinnyTiling | TiledTiling | None:
    """Return the tiling of our kernel for a product of two or more rows; None: cuBLAS is faster, or the shape unfit."""
    if x.dtype == torch.float32 and not is_interpreted:
        return None
    weight, _, scale, quantises_x = matrix
    assert isinstance(weight, Tensor)
    rows, (n, k), has_codes = x.shape[0], weight.shape, weight.dtype != x.dtype
    size = n // 2 if gated else n
    if is_hopper() and x.dtype != torch.float32 and weight.dtype != torch.int8 and k * weight.element_size() % 16 == 0:
        widths = weight.element_size(), linear_fp8.num_terms(rows, quantises_x) if has_codes else 2
        in_blocks = scale is not None and scale.dim() == 2
        shape = LinearShape("gated" if gated else "add" if add else "plain", size, k, *widths, in_blocks)
        if (streamed := choose_tiling(device_name(), shape, rows)) is not None:
            return linear_streamed.fit(streamed, gated, *widths)
    if has_codes:  # torch would write them as numbers first
        choice = _choose(rows, 0, gated)
    else:
        choice = _choose_add(rows, n) if add else _choose(rows, n * k, gated)
    if isinstance(choice, SkinnyTiling):
        return linear_skinny.fit(choice, size, k, gated)
    return None if choice is None else linear_tiled.fit(choice, size, k, gated)


def _choose(rows: int, num_weights: int, gated: bool) -> SkinnyTiling | TiledTiling | None:
    if num_weights > _SMALL_WEIGHT or rows > MAX_TILED:
        return None
    if rows <= 16:
        block_m = max(8, triton.next_power_of_2(rows))
        return (
            SkinnyTiling(block_m, 16, 4, 64, 4, 4)
            if gated
            else SkinnyTiling(block_m, 16, 2, 256, 4 if rows > 8 else 2, 4)
        )
    if rows <= 64:
        return TiledTiling(64, 32, 8, 4) if gated else TiledTiling(64, 32, 4, 5)
    return TiledTiling(64, 64, 4, 3) if gated else TiledTiling(64, 64, 4, 5)


def _choose_add(rows: int, n: int) -> SkinnyTiling | TiledTiling | None:
    if rows > MAX_SKINNY or (n >= 4096 and rows > 16):
        return None
    block_m = max(8, triton.next_power_of_2(rows))
    if n >= 4096:
        return SkinnyTiling(block_m, 32, 2, 256 if rows <= 8 else 128, 2, 4)
    return SkinnyTiling(block_m, 16, 4, 256, 4, 4) if rows <= 8 else SkinnyTiling(block_m, 16, 2, 256, 2, 4)
