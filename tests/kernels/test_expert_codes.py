"""Mixtures of experts in codes with a scale a group, against what the codes mean: the Triton kernels, and torch."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_experts import GATES, by_definition, close, draw_routing, gated
from test_fused_linear import rounded
from test_grouped_codes import draw_codes
from torch import Tensor

from aengine.kernels.dispatch import torch_reference
from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import ExpertShape, ExpertTiling, ProductTile
from aengine.kernels.expert_types import ExpertCodes, ExpertMatrices, InputNorm, Routing, RoutingRule
from aengine.kernels.experts import add_experts, expert_product
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes, numbers
from aengine.kernels.routing import route
from aengine.kernels.triton import expert_code_blocks
from aengine.kernels.triton import experts as triton_experts

TILE = ProductTile(16, 64, 4, 2)
WAYS = {
    "torch": None,
    "pairs": ExpertTiling("pairs", 1, ProductTile(8, 32, 4, 1), ProductTile(8, 64, 4, 1)),
    "blocks": ExpertTiling("blocks", 16, TILE, TILE),
}
KINDS: list[tuple[CodeKind, int, int]] = [  # kind, group, rows that share a scale
    ("e2m1", 32, 1),
    ("e2m1", 16, 1),
    ("int4", 64, 1),
    ("uint4", 32, 1),
    ("iq4_nl", 32, 1),
    ("int8", 16, 1),
    ("uint8", 32, 1),
    ("e4m3", 64, 16),
    ("int4", 512, 1),
]


def drawn_tiling(rng: random.Random, way: str) -> ExpertTiling | None:
    """One of `WAYS`, or another, whose tiles some shapes fill but in part."""
    tiling = WAYS[way]
    if tiling is None or rng.random() < 0.5:
        return tiling
    wide = ProductTile(64 if way == "pairs" else 128, rng.choice([32, 128]), 4, 1)
    return tiling._replace(first=wide, second=wide)


def moved(codes: ExpertCodes, device: torch.device) -> ExpertCodes:
    own: dict[str, Any] = {name: tensor.to(device) for name, tensor in codes.codes.tensors().items()}
    bias = None if codes.bias is None else codes.bias.to(device)
    return codes._replace(codes=replace(codes.codes, **own), bias=bias)


def draw(gen: torch.Generator, rng: random.Random, kind: Any, shape: tuple[int, int, int], biased: bool) -> ExpertCodes:
    """Codes of numbers of about in_features^-0.5."""
    experts, n, k = shape
    codes = draw_codes(gen, rng, kind[0], experts * n, k, kind[1], kind[2])
    factor = numbers(codes).square().mean().rsqrt() * k**-0.5
    row_scale = torch.ones(experts * n) if codes.row_scale is None else codes.row_scale
    codes = replace(codes, row_scale=row_scale * factor)
    return ExpertCodes(codes, experts, torch.randn(experts, n, generator=gen) if biased else None)


def product(x: Tensor, codes: ExpertCodes, expert: int) -> Tensor:
    weight = numbers(codes.of(expert)).double()
    return x @ weight.T + (0 if codes.bias is None else codes.bias[expert].double())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_both_products(
    kind: Any,
    way: str,
    rng: random.Random,
    gen: torch.Generator,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if rng.random() < 0.3:  # elsewhere codes are read by pointers
        monkeypatch.setattr(expert_code_blocks, "is_hopper", lambda: False)
    shape = ExpertShape(rng.choice([4, 7]), *rng.choice([(64, 96), (192, 64)]), rng.choice([1, 3]))
    gate, biased = rng.choice(GATES), rng.random() < 0.5
    n = rng.choice([1, 3] if way == "pairs" else [1, 9, 40])
    dtype = torch.float32
    first = draw(gen, rng, kind, (shape.num_experts, 2 * shape.intermediate_size, shape.hidden_size), biased)
    second = draw(gen, rng, kind, (shape.num_experts, shape.hidden_size, shape.intermediate_size), biased)
    x, norm = torch.randn(n, shape.hidden_size, generator=gen), torch.rand(shape.hidden_size, generator=gen) + 0.5
    normed = x.double() * norm.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    routing = draw_routing(rng, gen, n, shape)
    residual = torch.randn(n, shape.hidden_size, generator=gen).to(dtype)
    hidden, wanted = [], residual.double()
    for token, ids in enumerate(routing.expert_ids.tolist()):
        for expert, weight in zip(ids, routing.weights[token].double(), strict=True):
            hidden.append(gated(product(normed[token, None], first, expert), gate)[0])
            wanted[token] += weight * product(hidden[-1], second, expert)
    with torch_reference() if way == "torch" else nullcontext():
        device = torch.device("cpu") if way == "torch" else triton_device
        routing, residual = Routing(*(t.to(device) for t in routing)), residual.to(device)
        plan = plan_experts(routing, shape, drawn_tiling(rng, way))
        out = expert_product(x.to(device), moved(first, device), plan, gate, InputNorm(norm.to(device), 1e-5))
        add_experts(residual, out, moved(second, device), plan)
    close(out, torch.stack(hidden), 4e-6)
    close(residual, wanted, 4e-6)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_some_experts_each_add_up(
    way: str, rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    """Nothing that was never written is read."""
    shape, n, gate, rule = ExpertShape(8, 64, 32, 3), 3 if way == "pairs" else 9, GATES[0], RoutingRule(3)
    first, second = (draw(gen, rng, ("uint4", 32, 1), sizes, True) for sizes in ((8, 64, 64), (8, 64, 32)))
    x, logits = torch.randn(n, 64, generator=gen), torch.randn(n, 8, generator=gen)
    logits[0, 4:] -= 100.0  # this token's are all on the first rank
    routing = route(logits, rule)
    wanted = torch.zeros(n, 64, dtype=torch.float64)
    for token, ids in enumerate(routing.expert_ids.tolist()):
        for expert, weight in zip(ids, routing.weights[token].double(), strict=True):
            wanted[token] += weight * product(
                gated(product(x[token, None].double(), first, expert), gate)[0], second, expert
            )
    with torch_reference() if way == "torch" else nullcontext():
        device = torch.device("cpu") if way == "torch" else triton_device
        total = torch.zeros(n, 64, device=device)
        for own in (range(4), range(4, 8)):
            routing = route(logits.to(device), rule, None, own)
            plan = plan_experts(routing, shape._replace(num_experts=4), WAYS[way], is_partial=True)
            parts = [moved(part_of(codes, own), device) for codes in (first, second)]
            hidden = expert_product(x.to(device), parts[0], plan, gate)
            hidden[(routing.expert_ids >= 4).flatten()] = torch.nan
            add_experts(total, hidden, parts[1], plan)
    close(total, wanted, 4e-6)


@pytest.mark.parametrize(("n", "quantises_x"), [(9, True), (70, False), (70, True)])
@pytest.mark.parametrize("block_m", [16, 64])
def test_fp8_in_blocks(
    n: int, quantises_x: bool, block_m: int, rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    """x is rounded of many tokens, and where it may be."""
    shape, gate, tile = ExpertShape(4, 256, 128, 2), GATES[0], ProductTile(64, 128, 4, 3)
    first, second = (
        draw(gen, rng, ("e4m3", 128, 128), sizes, rng.random() < 0.5) for sizes in ((4, 256, 256), (4, 256, 128))
    )
    first, second = (
        codes._replace(
            codes=replace(codes.codes, scale=codes.codes.scale.float() / 16, row_scale=None), quantises_x=quantises_x
        )
        for codes in (first, second)
    )
    x, residual = torch.randn(n, 256, generator=gen).half(), torch.randn(n, 256, generator=gen).half()
    x[n // 2, 7] *= 30
    norm = torch.rand(256, generator=gen) + 0.5
    normed = x.double() * norm.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    routing = draw_routing(rng, gen, n, shape)
    moved_routing = Routing(*(t.to(triton_device) for t in routing))
    plan = plan_experts(moved_routing, shape, ExpertTiling("blocks", block_m, tile, tile))
    at = InputNorm(norm.to(triton_device), 1e-5)
    out = expert_product(x.to(triton_device), moved(first, triton_device), plan, gate, at)
    total = residual.to(triton_device, copy=True)
    add_experts(total, out, moved(second, triton_device), plan)
    takes = partial(rounded, in_groups=True) if quantises_x and n > 64 else Tensor.double
    rows, own = takes(normed.to(triton_device)).cpu(), takes(out).cpu()
    hidden, wanted = torch.empty(n * 2, 128, dtype=torch.float64), residual.double()
    for pair, expert in enumerate(routing.expert_ids.flatten().tolist()):
        hidden[pair] = gated(product(rows[pair // 2, None], first, expert), gate)[0]
        wanted[pair // 2] += routing.weights.flatten()[pair].double() * product(own[pair], second, expert)
    close(out, hidden, 2e-3)
    close(total, wanted, 2e-3)


def part_of(codes: ExpertCodes, own: range) -> ExpertCodes:
    assert codes.bias is not None
    parts = [codes.of(expert) for expert in own]
    joined = {name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}
    whole: GroupedCodes = replace(parts[0], **joined)
    return ExpertCodes(whole, len(own), codes.bias[own.start : own.stop])


def test_numbers_are_no_codes(gen: torch.Generator) -> None:
    """`shape` is that of plain matrices."""
    codes = draw(gen, random.Random(0), ("int4", 32, 1), (3, 16, 64), False)
    assert codes.shape == ExpertMatrices(torch.empty(3, 16, 64)).shape
    assert torch.equal(numbers(codes.of(1)), numbers(codes.codes)[16:32])


@pytest.mark.parametrize("way", ["pairs", "blocks"])
def test_fp8_with_a_scale_a_row_on_gpus_that_do_not_know_it(
    way: str, gen: torch.Generator, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels for groups know it: a row is one."""
    monkeypatch.setattr(triton_experts, "has_fp8", lambda: False)
    monkeypatch.delitem(triton_experts._KERNELS, ExpertMatrices)
    shape, n = ExpertShape(4, 64, 32, 2), 3
    first, second = (
        ExpertMatrices(
            torch.randn(4, rows, columns, generator=gen).to(torch.float8_e4m3fn),
            None,
            torch.rand(4, rows, generator=gen).mul_(columns**-0.5),
        )
        for rows, columns in ((64, 64), (64, 32))
    )
    routing, x = draw_routing(random.Random(0), gen, n, shape), torch.randn(n, 64, generator=gen)
    wanted = by_definition(x, first, second, routing, GATES[0])[1]
    first, second, routing = (
        type(ts)(*(t if t is None else t.to(triton_device) for t in ts)) for ts in (first, second, routing)
    )
    plan, residual = plan_experts(routing, shape, WAYS[way]), torch.zeros(n, 64, device=triton_device)
    add_experts(residual, expert_product(x.to(triton_device), first, plan, GATES[0]), second, plan)
    close(residual, wanted, 4e-6)
