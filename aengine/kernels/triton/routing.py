"""A token a program, which takes its best expert top_k times. Bytes: 4 n num_experts; operations: 3 top_k times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..expert_types import Routing, RoutingRule
from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch


def route(logits: Tensor, rule: RoutingRule, correction: Tensor | None, own: range | None = None) -> Routing:
    n, num_experts = logits.shape
    ids = torch.empty((n, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((n, rule.top_k), dtype=torch.float32, device=logits.device)
    launch(
        _route,
        (n,),
        logits,
        correction,
        ids,
        weights,
        rule.scale,
        E=num_experts,
        TOP_K=rule.top_k,
        E_BLOCK=triton.next_power_of_2(num_experts),
        K_BLOCK=triton.next_power_of_2(rule.top_k),
        GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        G_BLOCK=triton.next_power_of_2(rule.num_groups),
        SIGMOID=rule.scoring == "sigmoid",
        RENORMALISE=rule.renormalise,
        CORRECTED=correction is not None,
        FIRST=0 if own is None else own.start,
        OWN=num_experts if own is None else len(own),
        PDL=has_pdl(),
        num_warps=1 if num_experts <= 256 else 4,
    )
    return Routing(ids, weights)


@triton.jit
def _best_groups(choice, e, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, G_BLOCK: tl.constexpr):
    g = tl.arange(0, G_BLOCK)
    sums = tl.full((G_BLOCK,), float("-inf"), tl.float32)
    for group in range(GROUPS):
        own = tl.where(e // SIZE == group, choice, float("-inf"))
        first = tl.max(own, 0)
        second = tl.max(tl.where(e == tl.argmax(own, 0), float("-inf"), own), 0)
        sums = tl.where(g == group, first + second, sums)
    is_best = tl.zeros_like(e)
    for _ in range(TOP_GROUPS):
        best = tl.argmax(sums, 0)
        is_best = tl.where(e // SIZE == best, 1, is_best)
        sums = tl.where(g == best, float("-inf"), sums)
    return tl.where(is_best > 0, choice, float("-inf"))


@triton.jit
def _route(
    logits_ptr, correction_ptr, ids_ptr, weights_ptr, scale, E: tl.constexpr, TOP_K: tl.constexpr,
    E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    G_BLOCK: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, CORRECTED: tl.constexpr,
    FIRST: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_BLOCK)
    x = tl.load(logits_ptr + row * E + e, mask=e < E, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))  # a NaN could make the best index one past the last expert
    if SIGMOID:
        score = 1 / (1 + tl.exp(-x))
        choice = score
        if CORRECTED:
            choice += tl.load(correction_ptr + e, mask=e < E, other=0.0)
        choice = tl.where(e < E, choice, float("-inf"))
        if GROUPS > 1:
            choice = _best_groups(choice, e, E // GROUPS, GROUPS, TOP_GROUPS, G_BLOCK)
    else:
        score = tl.exp(x - tl.maximum(tl.max(x, 0), -1e38))
        score = score / tl.sum(score, 0)
        choice = x
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
        ids = tl.where(is_own, ids - FIRST, OWN)
        weights = tl.where(is_own, weights, 0.0)
    tl.store(ids_ptr + row * TOP_K + j, ids, mask=j < TOP_K)
    tl.store(weights_ptr + row * TOP_K + j, weights * scale, mask=j < TOP_K)
