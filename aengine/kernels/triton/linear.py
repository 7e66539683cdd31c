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

from ..grouped_codes import GroupedCodes
from ..linear_tilings import LinearShape, StreamedTiling, choose_tiling
from ..scaled_product import product
from . import linear_fp8, linear_grouped, linear_skinny, linear_streamed, linear_tiled, rms_norm
from .activation import act_and_mul
from .launch import device_name, has_pdl, is_hopper, is_interpreted, known, launch
from .linear_gemv import gemv
from .linear_skinny import SkinnyTiling, skinny
from .linear_tiled import TiledTiling, tiled

__all__ = ["add_linear", "norm_gated_linear", "norm_linear", "plain_linear"]

MAX_SKINNY = 32  # most rows of x for which the skinny kernel is chosen
MAX_TILED = 128
_SMALL_WEIGHT = 2**23  # elements; a larger one takes so long to read that cuBLAS' slower start does not show


def plain_linear(
    x: Tensor, weight: Tensor | GroupedCodes, bias: Tensor | None, scale: Tensor | None, quantises_x: bool = False
) -> Tensor:
    out = _own(x, None, 0.0, weight, bias, scale, x.dtype, quantises_x)
    return _by_library(x, None, 0.0, weight, bias, scale, x.dtype, quantises_x) if out is None else out


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None,
    scale: Tensor | None,
    out_dtype: torch.dtype,
    quantises_x: bool = False,
) -> Tensor:
    out = _own(x, norm_weight, eps, weight, bias, scale, out_dtype, quantises_x)
    if out is None:
        out = _by_library(x, norm_weight, eps, weight, bias, scale, out_dtype, quantises_x)
    return out


def norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None,
    scale: Tensor | None,
    activation: str,
    quantises_x: bool = False,
) -> Tensor:
    out = _own(x, norm_weight, eps, weight, bias, scale, x.dtype, quantises_x, activation)
    if out is None:
        out = act_and_mul(_by_library(x, norm_weight, eps, weight, bias, scale, x.dtype, quantises_x), activation)
    return out


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None,
    scale: Tensor | None,
    quantises_x: bool = False,
) -> None:
    weight, scale = linear_fp8.unwrapped(x, weight, scale, quantises_x)
    if isinstance(weight, GroupedCodes):
        if not linear_grouped.multiply(x, weight, bias, residual, add=True):
            residual.add_(product(x, weight, bias))
    elif x.shape[0] == 1:
        gemv(x, weight, bias, scale, residual, None, 0.0, add=True)
    elif (tiling := _tiling(x, weight, scale, quantises_x, gated=False, add=True)) is not None:
        _run(tiling, x, None, 0.0, weight, bias, scale, residual, quantises_x, add=True)
    elif bias is None and scale is None:
        torch.addmm(residual, x, weight.t(), out=residual)
    else:  # the bias joins the product first: added to the residual it would round that once more
        residual.add_(_by_library(x, None, 0.0, weight, bias, scale, x.dtype, quantises_x))


def _by_library(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None,
    scale: Tensor | None,
    out_dtype: torch.dtype,
    quantises_x: bool,
) -> Tensor:
    """Return the product by x, or by its norm."""
    codes, scales = linear_fp8.unwrapped(x, weight, scale, quantises_x)
    if isinstance(codes, Tensor) and scales is not None:
        if linear_fp8.by_library(x, codes, scales, quantises_x):
            return linear_fp8.product(x, norm_weight, eps, codes, bias, scales, out_dtype)
    x = x if norm_weight is None else rms_norm.rms_norm(x, norm_weight, eps)
    return product(x, weight, bias, scale, out_dtype)


def _own(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None,
    scale: Tensor | None,
    out_dtype: torch.dtype,
    quantises_x: bool,
    activation: str | None = None,
) -> Tensor | None:
    """Compute the product by x or its norm, gated if there is an ``activation``, with our own kernel; None: cuBLAS is
    faster."""
    gated = activation is not None
    weight, scale = linear_fp8.unwrapped(x, weight, scale, quantises_x, gated)
    if isinstance(weight, GroupedCodes):
        out = torch.empty((x.shape[0], weight.shape[0] // (2 if gated else 1)), dtype=out_dtype, device=x.device)
        norm = None if norm_weight is None else (norm_weight, eps)
        return out if linear_grouped.multiply(x, weight, bias, out, norm, add=False, activation=activation) else None
    tiling = None if x.shape[0] == 1 else _tiling(x, weight, scale, quantises_x, gated=gated, add=False)
    if x.shape[0] > 1 and tiling is None:
        return None
    out = torch.empty((x.shape[0], weight.shape[0] // (2 if gated else 1)), dtype=out_dtype, device=x.device)
    if tiling is None:
        gemv(x, weight, bias, scale, out, norm_weight, eps, add=False, activation=activation)
    else:
        _run(tiling, x, norm_weight, eps, weight, bias, scale, out, quantises_x, add=False, activation=activation)
    return out


def _run(
    tiling: StreamedTiling | SkinnyTiling | TiledTiling,
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    out: Tensor,
    quantises_x: bool,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """out [M, N] = the product by x or its norm, or is added to."""
    if isinstance(tiling, StreamedTiling) and scale is not None:
        terms = linear_fp8.split(x, norm_weight, eps, linear_fp8.num_terms(x.shape[0], quantises_x))
        linear_fp8.stream(tiling, terms, weight, bias, scale, out, add=add, activation=activation)
        return
    x = x if norm_weight is None else rms_norm.rms_norm(x, norm_weight, eps)
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


def _tiling(
    x: Tensor, weight: Tensor, scale: Tensor | None, quantises_x: bool, *, gated: bool, add: bool
) -> StreamedTiling | SkinnyTiling | TiledTiling | None:
    """Return the tiling of our kernel for a product of two or more rows; None: cuBLAS is faster, or the shape unfit."""
    if x.dtype == torch.float32 and not is_interpreted:
        return None
    rows, (n, k), has_codes = x.shape[0], weight.shape, weight.dtype != x.dtype
    size = n // 2 if gated else n
    if is_hopper() and x.dtype != torch.float32 and weight.dtype != torch.int8 and k * weight.element_size() % 16 == 0:
        widths = weight.element_size(), linear_fp8.num_terms(rows, quantises_x) if has_codes else 2
        in_blocks = scale is not None and scale.dim() == 2
        if scale is not None and linear_fp8.by_library(x, weight, scale, quantises_x):
            return None
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
