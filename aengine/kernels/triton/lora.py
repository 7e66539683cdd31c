"""Adapters by blocks of tokens that have the same slot.

In `_shrink` a program has a block's tokens and a stretch of the input features, and all programs of a block fill the
multiprocessors also where a step has one token; what they yield is added up as `_expand` reads it. Both read the
adapter's first tile before they wait for the kernels before them.

Of pairs of a token and an expert hardly two of a small step have the same slot: then each is a block by itself, and
nothing is sorted.

Bytes: A and B of a slot once for each of its blocks, all but the first out of the L2 cache.
"""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import Activation
from ..expert_types import Routing
from ..lora_types import AdapterMatrices, AdapterPlan
from ..rms_norm import Norm
from . import rms_norm
from .activation import activate_and_multiply
from .expert_plan import sort_by_bin
from .experts import add_weighted
from .launch import has_pdl, launch, launch_next, launch_next_and_wait, only_compiles, wait_for_previous

_LONGEST_ROW = 16_384  # input features that a program normalises by itself
_SPANS = ((8, 128), (33, 512), (132, 2048), (1 << 30, 1 << 30))
"""Up to so many blocks of tokens and rows of A a program has so many input features: few numbers, since each is a
kernel of its own to be compiled. All of these are compiled ahead."""
_MOST_PIECES = 32
_BLOCK_M = (16, 64)
_BLOCK_K, _BLOCK_R = 128, 64
_BLOCK_N = {16: 256, 64: 128}
_FEW = 512  # tokens, up to which blocks are small
_BLOCK_M_OF_PAIRS = (1, 64)
_FEW_PAIRS = 2048  # pairs, up to which each is a block by itself
_PAIRS_OF_PROGRAM = 256


def plan_adapters(slots: Tensor, num_slots: int) -> AdapterPlan:
    fitting = _BLOCK_M[len(slots) > _FEW]
    for block_m in _BLOCK_M if only_compiles() else (fitting,):
        order, block_slots = sort_by_bin(slots, num_slots + 1, block_m)
    return AdapterPlan(slots, [], order, block_slots, fitting)


def plan_pairs(tokens: AdapterPlan, routing: Routing, num_slots: int, num_experts: int) -> AdapterPlan:
    slots, weights = torch.empty_like(routing.expert_ids).flatten(), torch.empty_like(routing.weights).flatten()
    n = len(slots)
    launch(
        _slots_of_pairs,
        (triton.cdiv(n, _PAIRS_OF_PROGRAM),),
        tokens.slots,
        routing.expert_ids,
        routing.weights,
        slots,
        weights,
        n,
        SLOTS=num_slots,
        EXPERTS=num_experts,
        TOP_K=routing.expert_ids.shape[1],
        BLOCK=_PAIRS_OF_PROGRAM,
        PDL=has_pdl(),
    )
    alone, many = _BLOCK_M_OF_PAIRS
    if n > _FEW_PAIRS or only_compiles():
        order, block_slots = sort_by_bin(slots, num_slots * num_experts + 1, many)
    if n > _FEW_PAIRS:
        return AdapterPlan(slots, [], order, block_slots, many, weights)
    return AdapterPlan(slots, [], slots, slots, alone, weights)


def shrink(x: Tensor, norm: Norm | None, matrices: AdapterMatrices, plan: AdapterPlan, top_k: int) -> Tensor:
    (n, k), rows = x.shape, matrices.a.shape[1]
    if norm is not None and (n > 1 or k > _LONGEST_ROW):
        x, norm = rms_norm.rms_norm(x, norm.weight, norm.eps), None
    assert plan.block_slots is not None and x.is_contiguous()
    num_programs = len(plan.block_slots) * triton.cdiv(rows, _block(rows, _BLOCK_R))
    fitting = next(span for most, span in _SPANS if num_programs <= most)
    if only_compiles() and norm is None:
        for (_, span), block_m in product(_SPANS, _blocks_of(plan)):
            _shrink_to(span, block_m, x, norm, matrices, plan, top_k)
    return _shrink_to(fitting, plan.block_m, x, norm, matrices, plan, top_k)


def _blocks_of(plan: AdapterPlan) -> tuple[int, ...]:
    """Sizes of blocks that plans like this may have."""
    return _BLOCK_M if plan.weights is None else _BLOCK_M_OF_PAIRS


def _block(size: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _span(k: int, wanted: int) -> int:
    """Input features of a piece: ``wanted``, unless these are all of a small matrix, or too few of a large one."""
    block_k = _block(k, _BLOCK_K)
    return triton.cdiv(min(k, max(wanted, triton.cdiv(k, _MOST_PIECES))), block_k) * block_k


def _shrink_to(
    wanted: int, block_m: int, x: Tensor, norm: Norm | None, matrices: AdapterMatrices, plan: AdapterPlan, top_k: int
) -> Tensor:
    """``wanted``: see `_span`."""
    assert plan.block_slots is not None
    n, (num_slots, rows, k) = len(plan.slots), matrices.a.shape
    span = _span(k, wanted)
    pieces = triton.cdiv(k, span)
    out = torch.empty((pieces, n, rows), dtype=torch.float32, device=x.device)
    launch(
        _shrink,
        (len(plan.block_slots), pieces, triton.cdiv(rows, _block(rows, _BLOCK_R))),
        x,
        None if norm is None else norm.weight,
        matrices.a,
        out,
        plan.order,
        plan.block_slots,
        n,
        0.0 if norm is None else norm.eps,
        SLOTS=num_slots,
        R=rows,
        K=k,
        SPAN=span,
        TOP_K=top_k,
        BR=_block(rows, _BLOCK_R),
        BK=_block(k, _BLOCK_K),
        ROW=triton.next_power_of_2(k),
        NORM=norm is not None,
        STAGES=3,
        **_of_blocks(plan, block_m),
        num_warps=_warps(rows, block_m, plan),
    )
    return out


def _warps(rows: int, block_m: int, plan: AdapterPlan) -> int:
    """Return what was the fastest on an H100: one warp for 16 rows of A, but as many as can be where one token's few
    programs have the GPU to themselves."""
    is_alone = len(plan.slots) <= (1 if plan.weights is None else 8)
    return 4 if is_alone or block_m > _BLOCK_M[0] else _block(rows, _BLOCK_R) // 16


def _of_blocks(plan: AdapterPlan, block_m: int) -> dict[str, object]:
    # What describes pairs is written in the layer: it may not be read ahead of the wait.
    return {"BM": max(block_m, _BLOCK_M[0]), "SORTED": block_m > 1, "LATE": plan.weights is not None, "PDL": has_pdl()}


def expand(y: Tensor, h: Tensor, matrices: AdapterMatrices, plan: AdapterPlan) -> None:
    assert y.is_contiguous()
    _expand_into(y, y, h, matrices, plan, None)


def add_pairs(residual: Tensor, h: Tensor, matrices: AdapterMatrices, plan: AdapterPlan) -> None:
    assert plan.weights is not None
    added = torch.empty((len(plan.slots), residual.shape[1]), dtype=residual.dtype, device=residual.device)
    _expand_into(None, added, h, matrices, plan, None)
    add_weighted(residual, added, plan.weights)


def expand_gated(y: Tensor, h: Tensor, matrices: AdapterMatrices, plan: AdapterPlan, activation: Activation) -> Tensor:
    out = torch.empty((y.shape[0], y.shape[1] // 2), dtype=y.dtype, device=y.device)
    _expand_into(y, out, h, matrices, plan, activation)
    return out


def _expand_into(
    y: Tensor | None,
    out: Tensor,
    h: Tensor,
    matrices: AdapterMatrices,
    plan: AdapterPlan,
    activation: Activation | None,
) -> None:
    """Set ``out`` to y + B h, or that of an activation; without ``y`` to B h, of tokens that have an adapter."""
    if only_compiles():
        k = matrices.a.shape[2]
        for (_, span), block_m in product(_SPANS, _blocks_of(plan)):
            _launch_expand(triton.cdiv(k, _span(k, span)), block_m, y, out, h, matrices, plan, activation)
    _launch_expand(h.shape[0], plan.block_m, y, out, h, matrices, plan, activation)


def _launch_expand(
    pieces: int,
    block_m: int,
    y: Tensor | None,
    out: Tensor,
    h: Tensor,
    matrices: AdapterMatrices,
    plan: AdapterPlan,
    activation: Activation | None,
) -> None:
    assert plan.block_slots is not None
    num_slots, size, rank = matrices.b.shape
    sizes = (size // 2,) if activation is not None else matrices.sizes
    # Of gate and up each half is a part, or both are of one.
    assert activation is None or len(matrices.sizes) == 1 or matrices.sizes == (size // 2, size // 2)
    wide = _BLOCK_N[max(block_m, _BLOCK_M[0])]
    is_narrow = out.element_size() == 4 or len(plan.slots) == 1  # more programs read what there is of one token
    block_n = _block(max(sizes), 64 if is_narrow else wide)
    launch(
        _expand,
        (len(plan.block_slots), sum(triton.cdiv(own, block_n) for own in sizes)),
        y,
        out,
        h,
        matrices.b,
        matrices.starts,
        plan.order,
        plan.block_slots,
        len(plan.slots),
        SLOTS=num_slots,
        N=size,
        R=h.shape[2],
        RANK=rank,
        PARTS=len(matrices.sizes),
        PIECES=pieces,
        BN=block_n,
        BR=_block(rank, _BLOCK_R),
        GATED=activation is not None,
        ACTIVATION=activation,
        **_of_blocks(plan, block_m),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["n"])
def _slots_of_pairs(
    tokens_ptr, ids_ptr, weights_ptr, slots_ptr, own_ptr, n, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `plan_pairs`: the slot of each pair, and its weight, 0 without an adapter."""
    launch_next_and_wait(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(tokens_ptr + pair // TOP_K, mask=pair < n, other=SLOTS)
    expert = tl.load(ids_ptr + pair, mask=pair < n, other=EXPERTS)
    has_one = (slot < SLOTS) & (expert < EXPERTS)
    weight = tl.load(weights_ptr + pair, mask=pair < n, other=0.0)
    tl.store(slots_ptr + pair, tl.where(has_one, slot * EXPERTS + expert, SLOTS * EXPERTS), mask=pair < n)
    tl.store(own_ptr + pair, tl.where(has_one, weight, 0.0), mask=pair < n)


@triton.jit
def _tokens_of(order_ptr, block, n, BM: tl.constexpr, SORTED: tl.constexpr):
    """The tokens of a block; n where there is none."""
    m = tl.arange(0, BM)
    if SORTED:
        tokens = tl.load(order_ptr + block * BM + m)
    else:
        tokens = tl.where(m == 0, block, n)
    return tokens


@triton.jit
def _inputs(x_ptrs, norm_ptr, k, k0, is_token, scale, K: tl.constexpr, NORM: tl.constexpr):
    x = tl.load(x_ptrs + k0, mask=is_token[None, :] & (k0 + k < K)[:, None], other=0.0)
    if NORM:
        w = tl.load(norm_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * scale * w[:, None]).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["n", "eps"])
def _shrink(
    x_ptr, norm_ptr, a_ptr, out_ptr, order_ptr, slots_ptr, n, eps, SLOTS: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, SPAN: tl.constexpr, TOP_K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, ROW: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr, SORTED: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [pieces, n, R] = A x of a block's tokens, over SPAN input features. With NORM there is one token."""
    launch_next(PDL)
    if LATE:
        wait_for_previous(PDL)
    block, piece = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + block)
    has_none = (slot < 0) | (slot >= SLOTS)
    if has_none and (block + piece + tl.program_id(2) > 0):
        return
    slot = tl.where(has_none, 0, slot).to(tl.int64)
    tokens = _tokens_of(order_ptr, block, n, BM, SORTED)
    is_token = (tokens < n) & (not has_none)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    is_row = r < R
    k = piece * SPAN + tl.arange(0, BK)
    a_ptrs = a_ptr + slot * R * K + r[:, None] * K + k[None, :]
    x_ptrs = x_ptr + (tokens // TOP_K)[None, :].to(tl.int64) * K + k[:, None]
    a = tl.load(a_ptrs, mask=is_row[:, None] & (k < K)[None, :], other=0.0)
    wait_for_previous(PDL)
    scale = 1.0
    if NORM:
        i = tl.arange(0, ROW)
        row = tl.load(x_ptr + i, mask=i < K, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / K + eps)
    h = tl.zeros((BR, BM), tl.float32)
    h = tl.dot(a, _inputs(x_ptrs, norm_ptr, k, 0, is_token, scale, K, NORM), h, input_precision="ieee")
    for k0 in tl.range(BK, SPAN, BK, num_stages=STAGES):
        a = tl.load(a_ptrs + k0, mask=is_row[:, None] & (k0 + k < K)[None, :], other=0.0)
        x = _inputs(x_ptrs, norm_ptr, k, k0, is_token, scale, K, NORM)
        h = tl.dot(a, x, h, input_precision="ieee")
    out_ptrs = out_ptr + (piece * n + tokens[None, :]).to(tl.int64) * R + r[:, None]
    tl.store(out_ptrs, h, mask=is_row[:, None] & is_token[None, :])


@triton.jit
def _sum_of_pieces(h_ptr, at, mask, n, R: tl.constexpr, PIECES: tl.constexpr):
    h = tl.load(h_ptr + at, mask=mask, other=0.0)
    for piece in tl.static_range(1, PIECES):
        h += tl.load(h_ptr + (piece * n * R).to(tl.int64) + at, mask=mask, other=0.0)
    return h


@triton.jit
def _product(
    b, h_ptr, b_ptrs, at, is_column, is_token, r, n, R: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """B h of a block's tokens, [BN, BM]; ``b``: the first tile of B, whose others are read here."""
    y = tl.zeros((BN, BM), tl.float32)
    for r0 in tl.static_range(0, RANK, BR):
        if r0 > 0:
            b = tl.load(b_ptrs + r0, mask=is_column[:, None] & (r0 + r < RANK)[None, :], other=0.0)
        h = _sum_of_pieces(h_ptr, at + r0, (r0 + r < RANK)[:, None] & is_token[None, :], n, R, PIECES)
        y = tl.dot(b, h.to(b.dtype), y, input_precision="ieee")
    return y


@triton.jit(do_not_specialize=["n"])
def _expand(
    y_ptr, out_ptr, h_ptr, b_ptr, starts_ptr, order_ptr, slots_ptr, n, SLOTS: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, SORTED: tl.constexpr,
    LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = y + B h, of a block's tokens and some of a part's columns. GATED: the activation of gate times up."""
    launch_next(PDL)
    if LATE:
        wait_for_previous(PDL)
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + block)
    has_none = (slot < 0) | (slot >= SLOTS)
    is_idle = has_none
    if GATED:
        is_idle = slot < 0
    if is_idle and (block + tile > 0):
        return
    own = tl.where(has_none, 0, slot).to(tl.int64)
    part = 0
    first = tile * BN
    end = N // 2
    if not GATED:
        passed = 0
        for p in tl.static_range(0, PARTS):
            begin, stop = tl.load(starts_ptr + p), tl.load(starts_ptr + p + 1)
            count = (stop - begin + BN - 1) // BN
            is_here = (tile >= passed) & (tile < passed + count)
            part = tl.where(is_here, p, part)
            first = tl.where(is_here, begin + (tile - passed) * BN, first)
            end = tl.where(is_here, stop, end)
            passed += count
    column = first + tl.arange(0, BN)
    is_column = column < end
    tokens = _tokens_of(order_ptr, block, n, BM, SORTED)
    is_token = (tokens < n) & (not is_idle)
    has_adapter = is_token & (not has_none)
    rows = tokens.to(tl.int64)
    r = tl.arange(0, BR)
    b_ptrs = b_ptr + (own * N + column[:, None]) * RANK + r[None, :]
    is_inside = is_column[:, None] & (r < RANK)[None, :]
    b = tl.load(b_ptrs, mask=is_inside, other=0.0)
    at = rows[None, :] * R + part * RANK + r[:, None]
    mask = is_column[:, None] & is_token[None, :]
    if GATED:
        y_ptrs = y_ptr + rows[None, :] * N + column[:, None]
        u = tl.load(b_ptrs + N // 2 * RANK, mask=is_inside, other=0.0)
        wait_for_previous(PDL)
        gate_before = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
        up_before = tl.load(y_ptrs + N // 2, mask=mask, other=0.0).to(tl.float32)
        gate = _product(b, h_ptr, b_ptrs, at, is_column, has_adapter, r, n, R, RANK, PIECES, BN, BM, BR)
        u_ptrs = b_ptrs + N // 2 * RANK
        up = _product(
            u, h_ptr, u_ptrs, at + (PARTS - 1) * RANK, is_column, has_adapter, r, n, R, RANK, PIECES, BN, BM, BR
        )
        gated = activate_and_multiply(gate_before + gate, up_before + up, ACTIVATION)
        tl.store(out_ptr + rows[None, :] * (N // 2) + column[:, None], gated.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        wait_for_previous(PDL)
        y = _product(b, h_ptr, b_ptrs, at, is_column, has_adapter, r, n, R, RANK, PIECES, BN, BM, BR)
        if y_ptr is not None:
            y += tl.load(y_ptr + rows[None, :] * N + column[:, None], mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + rows[None, :] * N + column[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)
