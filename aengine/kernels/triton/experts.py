"""Products of experts, by the way that the plan has chosen.

way        norm            first product                second product
pairs      in the product  a row a pair                 all experts of a token in one program
blocks     its own kernel  a block of slots             a block of slots, then the weighted sum
grouped    its own kernel  torch, then the activation   torch, then the weighted sum

Plain numbers, and codes with a scale a group, have kernels of their own for the first two ways; FP8 in blocks of 128 x
128 on Hopper one more for the second.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..expert_gate import gate_experts
from ..expert_tilings import ProductTile
from ..expert_types import ExpertCodes, ExpertGate, ExpertMatrices, ExpertPlan, InputNorm
from ..grouped_codes import GroupedCodes
from . import expert_blocks, expert_code_blocks, expert_code_pairs, expert_fp8_blocks, expert_pairs, rms_norm
from .expert_frames import BlockKernels, PairKernels
from .launch import gdc_launch_dependents, gdc_wait, has_fp8, has_pdl, launch, only_compiles

_BLOCK = 1024
_KERNELS: dict[type, tuple[PairKernels, BlockKernels]] = {
    ExpertMatrices: (expert_pairs.KERNELS, expert_blocks.KERNELS),
    ExpertCodes: (expert_code_pairs.KERNELS, expert_code_blocks.KERNELS),
}


def expert_product(
    x: Tensor,
    matrices: ExpertMatrices | ExpertCodes,
    plan: ExpertPlan,
    gate: ExpertGate | None,
    norm: InputNorm | None,
) -> Tensor:
    assert plan.tiling is not None
    matrices = _known(matrices)
    out = x.new_empty(plan.num_pairs, matrices.shape[1] // (1 if gate is None else 2))
    if plan.blocks is None:
        _KERNELS[type(matrices)][0].multiply(x, matrices, plan, gate, norm, out)
    elif plan.tiling.way == "grouped":  # rows are in the order of the slots
        x = x if norm is None else rms_norm.rms_norm(x, norm.weight, norm.eps)
        out = _grouped(x, matrices, plan, plan.shape.top_k)
        return out if gate is None else gate_experts(out, gate)
    else:
        _multiply_blocks(x, matrices, plan, gate, norm, out, plan.tiling.first, plan.shape.top_k)
    return out


def add_experts(residual: Tensor, hidden: Tensor, matrices: ExpertMatrices | ExpertCodes, plan: ExpertPlan) -> None:
    assert plan.tiling is not None
    matrices = _known(matrices)
    if plan.blocks is None:
        return _KERNELS[type(matrices)][0].add(residual, hidden, matrices, plan)
    if plan.tiling.way == "grouped":
        return add_weighted(residual, _grouped(hidden, matrices, plan), plan.routing.weights, plan.blocks.slots)
    out = hidden.new_empty(plan.num_pairs, residual.shape[1])
    _multiply_blocks(hidden, matrices, plan, None, None, out, plan.tiling.second, 1)
    return add_weighted(residual, out, plan.routing.weights)


def _multiply_blocks(
    x: Tensor,
    matrices: ExpertMatrices | ExpertCodes,
    plan: ExpertPlan,
    gate: ExpertGate | None,
    norm: InputNorm | None,
    out: Tensor,
    tile: ProductTile,
    rows_of_x: int,
) -> None:
    kernels: BlockKernels = _KERNELS[type(matrices)][1]
    operand: Any = matrices
    if terms := expert_fp8_blocks.terms_of(x, matrices, plan, gate):
        kernels, operand = expert_fp8_blocks.KERNELS, expert_fp8_blocks.product_of(matrices, x, norm, terms)
        x = operand.x.codes
    elif norm is not None:
        x = rms_norm.rms_norm(x, norm.weight, norm.eps)
    kernels.multiply(x, operand, plan, gate, out, tile, rows_of_x)


def _known(matrices: ExpertMatrices | ExpertCodes) -> ExpertMatrices | ExpertCodes:
    """Codes in FP8 with a scale a row as those of groups, whose kernels know them on any GPU, where others do not."""
    if has_fp8() or isinstance(matrices, ExpertCodes) or matrices.weight.dtype != torch.float8_e4m3fn:
        return matrices
    assert matrices.scale is not None
    codes = GroupedCodes("e4m3", matrices.weight.flatten(0, 1), matrices.scale.view(-1, 1), matrices.shape[2])
    return ExpertCodes(codes, len(matrices.weight), matrices.bias)


def _grouped(x: Tensor, matrices: ExpertMatrices | ExpertCodes, plan: ExpertPlan, top_k: int | None = None) -> Tensor:
    """Return [pairs, out_features] in the order of the slots, as x is; with ``top_k``, x has a row a token."""
    blocks = plan.blocks
    assert blocks is not None and isinstance(matrices, ExpertMatrices), "see `can_group`"
    if only_compiles():  # nothing was written into the blocks, whose content torch would use
        return x.new_empty((len(blocks.order), matrices.weight.shape[1]))
    if top_k is not None:
        x = x.index_select(0, blocks.order // top_k)
    out: Tensor = F.grouped_mm(x, matrices.weight.transpose(1, 2), offs=blocks.ends)
    slots = torch.arange(len(x), dtype=torch.int32, device=x.device)
    if plan.is_partial:  # the last slots are nobody's, and nothing was written there
        out.masked_fill_((slots >= blocks.ends[-1])[:, None], 0.0)
    if matrices.bias is not None:
        experts = torch.searchsorted(blocks.ends, slots, right=True, out_int32=True)
        out += matrices.bias.index_select(0, experts.clamp_(max=len(blocks.ends) - 1))
    return out


def add_weighted(residual: Tensor, out: Tensor, weights: Tensor, slots: Tensor | None = None) -> None:
    """Add each token's sum of its pairs' rows of ``out``, with ``weights`` of all pairs, to ``residual``; rows whose
    weight is 0 are not read. ``slots``: where each pair's row is; None: in its place."""
    n, size = residual.shape
    launch(
        _add_weighted_rows,
        (n, triton.cdiv(size, _BLOCK)),
        residual,
        out,
        weights,
        slots,
        SIZE=size,
        TOP_K=weights.numel() // n,
        BLOCK=_BLOCK,
        SORTED=slots is not None,
        PDL=has_pdl(),
    )


@triton.jit
def _add_weighted_rows(
    residual_ptr, x_ptr, weights_ptr, slots_ptr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    SORTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        weight = tl.load(weights_ptr + pair)
        if SORTED:
            pair = tl.load(slots_ptr + pair).to(tl.int64)
        size = tl.where(weight == 0.0, 0, SIZE)  # nothing was written for an expert of another rank
        y += weight * tl.load(x_ptr + pair * SIZE + i, mask=i < size, other=0.0).to(tl.float32)
    y += tl.load(residual_ptr + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(residual_ptr + row * SIZE + i, y.to(residual_ptr.dtype.element_ty), mask=i < SIZE)
