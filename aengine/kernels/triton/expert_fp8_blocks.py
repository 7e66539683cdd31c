"""The product of blocks of slots by experts in FP8 with a scale a block of 128 x 128, by Hopper's FP8 tensor cores: as
expert_code_blocks.py, but x is FP8 as well, in the terms of linear_fp8.py, which says what they are worth.

Bytes: the codes of each touched expert once for every block of its slots, all but the first out of the L2 cache;
operations: 2 N K a term for every slot of a block that is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertCodes, ExpertGate, ExpertMatrices, ExpertPlan, InputNorm
from .expert_frames import BlockKernels, store_block
from .launch import is_hopper, launch_next_and_wait, max_shared_memory
from .linear_fp8 import BLOCK, Fp8Rows, split

MOST_UNROUNDED = 64
"""Most tokens whose x is not rounded where it may be: two terms of so few take no longer."""


class Fp8Product(NamedTuple):
    """An operand of the product: the matrices, and what x has beside its codes."""

    matrices: ExpertCodes
    x: Fp8Rows

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.matrices.shape

    @property
    def bias(self) -> Tensor | None:
        return self.matrices.bias


def terms_of(x: Tensor, matrices: ExpertMatrices | ExpertCodes, plan: ExpertPlan, gate: ExpertGate | None) -> int:
    """Return in how many terms x is multiplied; 0: not by this kernel."""
    if not isinstance(matrices, ExpertCodes) or not is_hopper() or x.dtype == torch.float32:
        return 0
    codes, (_, n, k) = matrices.codes, matrices.shape
    in_blocks = codes.kind == "e4m3" and codes.rows == codes.group == BLOCK and codes.scale.dtype == torch.float32
    if not in_blocks or n % (BLOCK if gate is None else 2 * BLOCK) or k % BLOCK:
        return 0
    terms = 1 if matrices.quantises_x and len(plan.routing.expert_ids) > MOST_UNROUNDED else 2
    assert plan.tiling is not None
    is_too_wide = terms * plan.tiling.block_m > BLOCK or (gate is not None and gate.is_interleaved)
    return 0 if is_too_wide else terms


def product_of(matrices: ExpertMatrices | ExpertCodes, x: Tensor, norm: InputNorm | None, terms: int) -> Fp8Product:
    """Return the operands of the product by x, or by its norm."""
    assert isinstance(matrices, ExpertCodes)
    return Fp8Product(matrices, split(x, norm, terms, in_groups=terms == 1))


def _fit(
    product: Fp8Product, tile: ProductTile, x: Tensor, size: int, block_m: int, gate: ExpertGate | None
) -> ProductTile:
    is_wide = gate is not None and block_m >= 128  # sums are too many for the registers of four warps
    tile = tile._replace(block_n=min(tile.block_n, BLOCK), block_k=BLOCK, num_warps=8 if is_wide else tile.num_warps)
    wide = tile.block_n * (1 if gate is None else 2) + block_m * product.x.num_terms
    while (wide * BLOCK + 4 * block_m + 64) * tile.num_stages > max_shared_memory():
        tile = tile._replace(num_stages=tile.num_stages - 1)
    return tile


def _pointers(product: Fp8Product, tile: ProductTile, gate: ExpertGate | None) -> tuple[Any, ...]:
    codes, scale = product.matrices.codes, product.x.scale
    tiles = TensorDescriptor.from_tensor(codes.codes, [tile.block_n, BLOCK])
    return tiles, codes.scale, scale, scale.stride(1)


def _constants(product: Fp8Product, x: Tensor) -> dict[str, Any]:
    return {"K": x.shape[1], "TERMS": product.x.num_terms}


@triton.jit
def _add(y, w, x, factor, BN: tl.constexpr, BM: tl.constexpr, TERMS: tl.constexpr):
    """y [BN, BM] and the products of w and x [BK, BM], or of both terms of x, times ``factor``."""
    z = tl.dot(w, x)
    if TERMS == 2:  # those of eight rows lie behind each other
        z = tl.reshape(tl.sum(tl.reshape(z, (BN, BM // 8, 2, 8)), 2), (BN, BM))
    return y + z * factor


@triton.jit(do_not_specialize=["num_pairs", "groups_stride"])
def _multiply_blocks(
    x_ptr, w_tiles, scale_ptr, x_scale_ptr, groups_stride, out_ptr, bias_ptr, order_ptr, experts_ptr, num_pairs,
    K: tl.constexpr, TERMS: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, PAIRS_A_ROW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of BN rows by BK = 128 columns of an expert's codes has one scale. ALL: rows of an expert."""
    launch_next_and_wait(PDL)
    expert = tl.load(experts_ptr + tl.program_id(1))
    if expert < 0:
        return
    TWICE: tl.constexpr = GATE != ""
    begin = expert * ALL + tl.program_id(0) * BN
    slots = order_ptr + tl.program_id(1).to(tl.int64) * BM
    pairs = tl.load(slots + tl.arange(0, BM))
    is_pair = pairs < num_pairs
    i = tl.arange(0, BM * TERMS)
    row = tl.load(slots + (i if TERMS == 1 else i // 16 * 8 + i % 8))
    is_row = row < num_pairs
    row = row // PAIRS_A_ROW
    if TERMS == 2:
        row = row // 8 * 16 + row % 8 + i // 8 % 2 * 8
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + tl.arange(0, BK)[None, :]
    y = tl.zeros((BN, BM), tl.float32)
    v = tl.zeros((BN, BM), tl.float32)
    scale_ptr += begin // BK * (K // BK)
    UP: tl.constexpr = N // BK * (K // BK)  # scales before those of up
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ptrs + k0, mask=is_row[:, None], other=0.0).T
        factor = tl.full((1, BM), 1.0, tl.float32)
        if TERMS == 1:
            x_scale_ptrs = x_scale_ptr + k0 // BK * groups_stride + pairs // PAIRS_A_ROW
            factor = tl.load(x_scale_ptrs, mask=is_pair, other=0.0)[None, :]
        scale = tl.load(scale_ptr + k0 // BK)
        y = _add(y, w_tiles.load([begin, k0]), x, factor * scale, BN, BM, TERMS)
        if TWICE:
            scale = tl.load(scale_ptr + UP + k0 // BK)
            v = _add(v, w_tiles.load([N + begin, k0]), x, factor * scale, BN, BM, TERMS)
    if TERMS == 2:
        x_scale = tl.load(x_scale_ptr + pairs // PAIRS_A_ROW, mask=is_pair, other=0.0)[None, :]
        y *= x_scale
        v *= x_scale
    n = begin + tl.arange(0, BN)
    store_block(y, v, n, n >= 0, pairs, is_pair, out_ptr, None, bias_ptr, N, BM, BN, TWICE, GATE, ALPHA, LIMIT, BIAS)


KERNELS = BlockKernels(_multiply_blocks, _fit, _pointers, _constants)
