"""A token a program, which takes its best expert top_k times. Bytes: 4 n num_experts; operations: 3 top_k times.

The logits come as they are, or, of few tokens, as the parts of a product that is divided along K: so few columns leave
too few programs otherwise, each of which reads rows as a whole. The norm before it is part of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..expert_types import Routing, RoutingRule
from ..matrix import Matrix
from ..rms_norm import Norm
from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch, launch_next, wait_for_previous

MOST_IN_PARTS = 512
"""Most tokens whose logits are summed up in parts: of more, the parts take longer to write and read."""
_PARTS = 16
_COLUMNS = 128  # columns that are multiplied at once; also the most experts of a program


class _Parts(NamedTuple):
    """The logits are the sums over parts, times a factor of each token: that of its norm."""

    squares: Tensor  # float32 [parts, n]: sums of the squares of a token's columns
    size: int  # columns of all parts
    eps: float
    bias: Tensor | None  # [num_experts]


def route_after_norm(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    rule: RoutingRule,
    correction: Tensor | None,
    own: range | None,
    rows: Tensor | None,
) -> Routing | None:
    """Choose experts by the logits norm(x) W^T + b; None: their product is faster, or as exact, in another way."""
    weight, bias, (n, k) = matrix.weight, matrix.bias, x.shape
    is_plain = isinstance(weight, Tensor) and weight.dtype == x.dtype != torch.float16  # float16 could overflow
    if not is_plain or not 1 < n <= MOST_IN_PARTS or k % 16:
        return None
    num_experts = matrix.shape[0]
    columns = _COLUMNS * triton.cdiv(k, _COLUMNS * _PARTS)
    num_parts = triton.cdiv(k, columns)
    block_m = 16 if n <= 32 else 32
    sums = torch.empty((num_parts, n, num_experts), dtype=torch.float32, device=x.device)
    squares = torch.empty((num_parts, n), dtype=torch.float32, device=x.device)
    block_e = min(_COLUMNS, max(16, triton.next_power_of_2(num_experts)))
    launch(
        _multiply_part,
        (num_parts, triton.cdiv(n, block_m), triton.cdiv(num_experts, block_e)),
        x,
        norm.weight,
        weight,
        sums,
        squares,
        n,
        K=k,
        E=num_experts,
        COLUMNS=columns,
        BM=block_m,
        BE=block_e,
        BK=_COLUMNS,
        PDL=has_pdl(),
        num_warps=4,
    )
    return route(sums, rule, correction, own, rows, _Parts(squares, k, norm.eps, bias))


@triton.jit(do_not_specialize=["n"])
def _multiply_part(
    x_ptr, norm_ptr, w_ptr, sums_ptr, squares_ptr, n, K: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sums of BM tokens and BE experts over COLUMNS columns; weights are on their way before x is there."""
    launch_next(PDL)
    part = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    k = part * COLUMNS + tl.arange(0, BK)
    x_ptrs = x_ptr + m[:, None].to(tl.int64) * K
    w_ptrs = w_ptr + e[None, :] * K
    w = tl.load(w_ptrs + k[:, None], mask=(e < E)[None, :] & (k < K)[:, None], other=0.0)
    factor = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    y = tl.zeros((BM, BE), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for k0 in tl.static_range(0, COLUMNS, BK):
        if k0 > 0:
            k += BK
            w = tl.load(w_ptrs + k[:, None], mask=(e < E)[None, :] & (k < K)[:, None], other=0.0)
            factor = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x = tl.load(x_ptrs + k[None, :], mask=(m < n)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
        y = tl.dot((x * factor[None, :]).to(w.dtype), w, y, input_precision="ieee")
    at = part * n + m
    tl.store(sums_ptr + at[:, None].to(tl.int64) * E + e[None, :], y, mask=(m < n)[:, None] & (e < E)[None, :])
    if tl.program_id(2) == 0:
        tl.store(squares_ptr + at, squares, mask=m < n)


def route(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None,
    own: range | None = None,
    rows: Tensor | None = None,
    parts: _Parts | None = None,
) -> Routing:
    """``logits``: [n, num_experts], or with ``parts`` a such of each."""
    *_, n, num_experts = logits.shape
    ids = torch.empty((n, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((n, rule.top_k), dtype=torch.float32, device=logits.device)
    launch(
        _route,
        (n,),
        logits,
        correction,
        None if parts is None else parts.squares,
        None if parts is None else parts.bias,
        rows,
        ids,
        weights,
        rule.scale,
        0.0 if parts is None else parts.eps,
        n,
        SIZE=1 if parts is None else parts.size,
        PARTS=0 if parts is None else len(parts.squares),
        E=num_experts,
        TOP_K=rule.top_k,
        E_BLOCK=triton.next_power_of_2(num_experts),
        K_BLOCK=triton.next_power_of_2(rule.top_k),
        GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        G_BLOCK=triton.next_power_of_2(rule.num_groups),
        GROUP_BEST=rule.group_best,
        SIGMOID=rule.scoring == "sigmoid",
        RENORMALISE=rule.renormalise,
        CORRECTED=correction is not None,
        FIRST=0 if own is None else own.start,
        OWN=num_experts if own is None else len(own),
        PADDED=rows is not None,
        PDL=has_pdl(),
        num_warps=1 if num_experts <= 256 else 4,
    )
    return Routing(ids, weights)


@triton.jit
def _best_groups(
    choice, e, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, G_BLOCK: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, G_BLOCK)
    sums = tl.full((G_BLOCK,), float("-inf"), tl.float32)
    for group in range(GROUPS):
        own = tl.where(e // SIZE == group, choice, float("-inf"))
        first = tl.max(own, 0)
        if GROUP_BEST == 2:
            first += tl.max(tl.where(e == tl.argmax(own, 0), float("-inf"), own), 0)
        sums = tl.where(g == group, first, sums)
    is_best = tl.zeros_like(e)
    for _ in range(TOP_GROUPS):
        best = tl.argmax(sums, 0)
        is_best = tl.where(e // SIZE == best, 1, is_best)
        sums = tl.where(g == best, float("-inf"), sums)
    return tl.where(is_best > 0, choice, float("-inf"))


@triton.jit
def _sum_of_parts(
    row, e, n, sums_ptr, squares_ptr, bias_ptr, eps, SIZE: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr
):
    """A token's logits of the experts ``e``."""
    p = tl.arange(0, 16)
    squares = tl.sum(tl.load(squares_ptr + p * n + row, mask=p < PARTS, other=0.0), 0)
    at = sums_ptr + (p[:, None] * n + row) * E + e[None, :]
    x = tl.sum(tl.load(at, mask=(p < PARTS)[:, None] & (e < E)[None, :], other=0.0), 0)
    x /= tl.sqrt(squares / SIZE + eps)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    return tl.where(e < E, x, float("-inf"))


@triton.jit(do_not_specialize=["n"])
def _route(
    logits_ptr, correction_ptr, squares_ptr, bias_ptr, rows_ptr, ids_ptr, weights_ptr, scale, eps, n,
    SIZE: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    G_BLOCK: tl.constexpr, GROUP_BEST: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    CORRECTED: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_BLOCK)
    if PARTS:
        x = _sum_of_parts(row, e, n, logits_ptr, squares_ptr, bias_ptr, eps, SIZE, PARTS, E)
    else:
        x = tl.load(logits_ptr + row * E + e, mask=e < E, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))  # a NaN could make the best index one past the last expert
    if SIGMOID:
        score = 1 / (1 + tl.exp(-x))
        choice = score
        if CORRECTED:
            choice += tl.load(correction_ptr + e, mask=e < E, other=0.0)
        choice = tl.where(e < E, choice, float("-inf"))
    else:
        score = tl.exp(x - tl.maximum(tl.max(x, 0), -1e38))
        score = score / tl.sum(score, 0)
        choice = x
    if GROUPS > 1:
        choice = _best_groups(choice, e, E // GROUPS, GROUPS, TOP_GROUPS, G_BLOCK, GROUP_BEST)
    j = tl.arange(0, K_BLOCK)
    ids = tl.zeros((K_BLOCK,), tl.int32)
    weights = tl.zeros((K_BLOCK,), tl.float32)
    # Of integers in the order of the choices the largest of a warp is one instruction: a third of the time of `argmax`.
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # zeros have one sign
    key = bits ^ (bits >> 31 & 0x7FFFFFFF)
    for i in range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, 0), e, E_BLOCK), 0)
        of_best = tl.max(tl.where(e == best, score.to(tl.int32, bitcast=True), 0), 0)  # none is negative
        ids = tl.where(j == i, best, ids)
        weights = tl.where(j == i, of_best.to(tl.float32, bitcast=True), weights)
        key = tl.where(e == best, -0x80000000, key)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    if OWN < E:
        is_own = (ids >= FIRST) & (ids < FIRST + OWN)
        if PADDED:
            is_own &= tl.load(rows_ptr + row) >= 0
        ids = tl.where(is_own, ids - FIRST, OWN)
        weights = tl.where(is_own, weights, 0.0)
    tl.store(ids_ptr + row * TOP_K + j, ids, mask=j < TOP_K)
    tl.store(weights_ptr + row * TOP_K + j, weights * scale, mask=j < TOP_K)
