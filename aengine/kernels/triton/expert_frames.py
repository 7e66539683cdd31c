"""What the kernels of experts share, whatever weights they read: how they are launched, which rows of weights a program
has, and what comes after the sums over K.

`PairKernels` and `BlockKernels` are the two ways; each has one object for plain numbers and one for codes in groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertGate, ExpertPlan, InputNorm
from .expert_gate import gate_constants, gated
from .grouped_units import finished
from .launch import has_pdl, launch, launch_next, wait_for_previous
from .rms_norm import rms_norm


@dataclass(frozen=True)
class PairKernels:
    """Products of a few tokens, a row at a time, each with its expert's weights."""

    multiply_kernel: Any  # a pair and BN output features a program; the norm is part of it
    add_kernel: Any  # a token and BN output features a program, which sums over all of the token's experts, in order
    pointers: Callable[[Any], tuple[Tensor | None, ...]]  # to weights and scales
    constants: Callable[[Any, int, ProductTile, int, int], dict[str, Any]]
    """Of matrices, the number of output features, their tile, rows of weights for each, and experts a program."""
    norms_apart: Callable[[Any], bool]
    """Whether to make the norm ahead takes less time than in all programs."""

    def multiply(
        self, x: Tensor, matrices: Any, plan: ExpertPlan, gate: ExpertGate | None, norm: InputNorm | None, out: Tensor
    ) -> None:
        """Compute out [pairs, size]."""
        assert plan.tiling is not None
        size, tile = out.shape[1], plan.tiling.first
        if norm is not None and self.norms_apart(matrices):
            x, norm = rms_norm(x, norm.weight, norm.eps), None
        launch(
            self.multiply_kernel,
            (triton.cdiv(size, tile.block_n), plan.num_pairs),
            x,
            *self.pointers(matrices),
            out,
            matrices.bias,
            plan.routing.expert_ids,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            **gate_constants(gate),
            NORM=norm is not None,
            **self.constants(matrices, size, tile, 1 if gate is None else 2, 1),
            **_of_plan(matrices, plan, tile, size),
        )

    def add(self, residual: Tensor, hidden: Tensor, matrices: Any, plan: ExpertPlan) -> None:
        assert plan.tiling is not None
        (n, size), tile = residual.shape, plan.tiling.second
        launch(
            self.add_kernel,
            (triton.cdiv(size, tile.block_n), n),
            residual,
            hidden,
            *self.pointers(matrices),
            matrices.bias,
            plan.routing.expert_ids,
            plan.routing.weights,
            **self.constants(matrices, size, tile, 1, plan.shape.top_k),
            **_of_plan(matrices, plan, tile, size),
        )


def _of_plan(matrices: Any, plan: ExpertPlan, tile: ProductTile, size: int) -> dict[str, Any]:
    return {
        "N": size,
        "ALL": matrices.shape[1],
        "TOP_K": plan.shape.top_k,
        "BN": tile.block_n,
        "BIAS": matrices.bias is not None,
        "NUM_EXPERTS": plan.shape.num_experts if plan.is_partial else 0,
        "PDL": has_pdl(),
        "num_warps": tile.num_warps,
    }


@dataclass(frozen=True)
class BlockKernels:
    """Products of blocks of slots, each of one expert."""

    kernel: Any  # a tile of output features by a block's slots a program
    fit: Callable[[Any, ProductTile, Tensor, int, int, ExpertGate | None], ProductTile]
    """Of matrices, tile, x, number of output features, and slots: the tile cut to the shape and to shared memory."""
    pointers: Callable[[Any, ProductTile, ExpertGate | None], tuple[Any, ...]]  # to weights and scales
    constants: Callable[[Any, Tensor], dict[str, Any]]  # what follows from matrices and x

    def multiply(
        self,
        x: Tensor,
        matrices: Any,
        plan: ExpertPlan,
        gate: ExpertGate | None,
        out: Tensor,
        tile: ProductTile,
        rows_of_x: int,
    ) -> None:
        """Compute out [pairs, size] for x [pairs / rows_of_x, in_features]."""
        assert plan.tiling is not None and plan.blocks is not None
        size, k, block_m = out.shape[1], x.shape[1], plan.tiling.block_m
        tile = self.fit(matrices, tile, x, size, block_m, gate)
        launch(
            self.kernel,
            (triton.cdiv(size, tile.block_n), len(plan.blocks.experts)),
            x,
            *self.pointers(matrices, tile, gate),
            out,
            matrices.bias,
            plan.blocks.order,
            plan.blocks.experts,
            plan.num_pairs,
            **self.constants(matrices, x),
            N=size,
            ALL=matrices.shape[1],
            PAIRS_A_ROW=rows_of_x,
            BM=block_m,
            BN=tile.block_n,
            BK=tile.block_k,
            **gate_constants(gate),
            BIAS=matrices.bias is not None,
            EVEN=size % tile.block_n == 0 and k % tile.block_k == 0,
            PDL=has_pdl(),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )


@triton.jit
def wait_for_choice(PDL: tl.constexpr):
    """Wait for all kernels before a first product by pairs, and only then let the next begin: so the second product may
    read which experts were chosen, and ask for its first weights, ahead of its own wait."""
    wait_for_previous(PDL)
    launch_next(PDL)


@triton.jit
def rows_of(out_n, N: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """An expert's rows of weights for output features ``out_n``, and those of the up product beside them."""
    n = out_n
    up_n = N + out_n
    if GATE != "" and INTERLEAVED:
        n = 2 * out_n
        up_n = 2 * out_n + 1
    return n, up_n


@triton.jit
def store_pair(
    y, v, squares, eps, expert, n, up_n, out_ptrs, is_inside, scale_ptr, bias_ptr, K: tl.constexpr, ALL: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Store the sums ``y`` by rows ``n``, gated by ``v``, those by ``up_n``; ``squares``: sums of those of x."""
    if NORM:  # its factor is the same for all of a row
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
        v *= factor
    y = finished(y, expert * ALL + n, n < ALL, scale_ptr, bias_ptr, BIAS)
    if GATE != "":
        v = finished(v, expert * ALL + up_n, up_n < ALL, scale_ptr, bias_ptr, BIAS)
        y = gated(y, v, GATE, ALPHA, LIMIT)
    tl.store(out_ptrs, y.to(out_ptrs.dtype.element_ty), mask=is_inside)


@triton.jit
def _finished_rows(y, n, is_row, scale_ptr, bias_ptr, BIAS: tl.constexpr):
    """Apply the rows' scales and biases to the sums y [len(n), BM]."""
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + n, mask=is_row, other=0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def store_block(
    y, v, n, is_row, pairs, is_pair, out_ptr, scale_ptr, bias_ptr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TWICE: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Store the sums y [rows, BM] by rows ``n`` of all experts'. With a gate those of gate and up are side by side in
    it, or, TWICE, the latter are ``v``, by the rows N behind."""
    y = _finished_rows(y, n, is_row, scale_ptr, bias_ptr, BIAS)
    if TWICE:
        y = gated(y, _finished_rows(v, N + n, is_row, scale_ptr, bias_ptr, BIAS), GATE, ALPHA, LIMIT)
    elif GATE != "":
        g, u = tl.split(tl.permute(tl.reshape(y, (BN, 2, BM)), (0, 2, 1)))
        y = gated(g, u, GATE, ALPHA, LIMIT)
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    out_ptrs = out_ptr + pairs[None, :].to(tl.int64) * N + out_n[:, None]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_pair[None, :] & (out_n < N)[:, None])
