"""Mixtures of experts against their definition in float64, on the Triton kernels and on their torch bodies."""

from __future__ import annotations

import importlib
import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from aengine.kernels import expert_tilings
from aengine.kernels.dispatch import torch_reference
from aengine.kernels.expert_gate import gate_experts
from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import ExpertShape, ExpertTiling, ProductTile, choose_tiling, default_tiling
from aengine.kernels.expert_types import ExpertGate, ExpertMatrices, InputNorm, Routing, RoutingRule, can_group
from aengine.kernels.experts import add_experts, expert_product
from aengine.kernels.matrix import Matrix
from aengine.kernels.routing import route, route_after_norm
from aengine.runner.layers.moe import Experts, MoE, Router
from aengine.runner.layers.norm import RMSNorm
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.scope import WeightScope

TILE = ProductTile(32, 32, 4, 2)
WAYS = {
    "torch": None,
    "pairs": ExpertTiling("pairs", 1, ProductTile(4, 64, 4, 1), ProductTile(4, 64, 4, 1)),
    "blocks of 16": ExpertTiling("blocks", 16, TILE, TILE),
    "blocks of 64": ExpertTiling("blocks", 64, TILE, TILE),
    "grouped": ExpertTiling("grouped", 1, TILE, TILE),
}
GATES = [
    ExpertGate(),
    ExpertGate("gelu_tanh"),
    ExpertGate("clamped_swiglu", is_interleaved=True, limit=1.5),
    ExpertGate("clamped_swiglu", alpha=1.1, limit=0.7),
]


def gated(gate_up: Tensor, gate: ExpertGate) -> Tensor:
    size = gate_up.shape[1] // 2
    g, u = (gate_up[:, 0::2], gate_up[:, 1::2]) if gate.is_interleaved else (gate_up[:, :size], gate_up[:, size:])
    if gate.kind == "silu":
        return g / (1 + (-g).exp()) * u
    if gate.kind == "gelu_tanh":
        return 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u
    g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    return (u + 1) * g / (1 + (-gate.alpha * g).exp())


def by_definition(x: Tensor, first: ExpertMatrices, second: ExpertMatrices, routing: Routing, gate: ExpertGate):
    """(h of each pair, the sum that a token gets), in float64."""

    def product(row: Tensor, matrices: ExpertMatrices, expert: int) -> Tensor:
        weight = matrices.weight[expert].double()
        if matrices.scale is not None:
            weight = weight * matrices.scale[expert].double()[:, None]
        return weight @ row + (0 if matrices.bias is None else matrices.bias[expert].double())

    hidden, sums = [], []
    for row, ids, weights in zip(x.double(), routing.expert_ids.tolist(), routing.weights.double(), strict=True):
        own = [gated(product(row, first, expert)[None], gate)[0] for expert in ids]
        hidden += own
        sums.append(sum(w * product(h, second, expert) for w, h, expert in zip(weights, own, ids, strict=True)))
    return torch.stack(hidden), torch.stack(sums)


def draw_routing(rng: random.Random, gen: torch.Generator, n: int, shape: ExpertShape) -> Routing:
    popular = rng.sample(range(shape.num_experts), max(shape.top_k, shape.num_experts // 2))  # others get nothing
    ids = [rng.sample(popular, shape.top_k) for _ in range(n)]
    return Routing(torch.tensor(ids, dtype=torch.int32), torch.rand(n, shape.top_k, generator=gen))


def close(out: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = float((out.cpu().double() - wanted).norm() / wanted.norm())
    assert error < tolerance, f"relative error {error:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.kind)
def test_both_products(
    way: str, gate: ExpertGate, rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    num_experts = rng.choice([4, 11, 16])
    hidden, inner = rng.choice([(48, 40), (64, 32), (72, 96) if way == "grouped" else (70, 90)])
    shape = ExpertShape(num_experts, hidden, inner, rng.choice([1, 2, 3]))
    dtype = torch.float32
    if torch.cuda.is_available() and way == "grouped":
        dtype, shape = torch.bfloat16, ExpertShape(16, 64, 32, 2)  # what torch's takes
    n = rng.choice([1, 2, 3] if way == "pairs" else [1, 2, 9, 40])
    biased = rng.random() < 0.5
    first, second = (
        ExpertMatrices(
            torch.randn(shape.num_experts, rows, columns, generator=gen).mul_(columns**-0.5).to(dtype),
            torch.randn(shape.num_experts, rows, generator=gen).to(dtype) if biased else None,
        )
        for rows, columns in (
            (2 * shape.intermediate_size, shape.hidden_size),
            (shape.hidden_size, shape.intermediate_size),
        )
    )
    if rng.random() < 0.3 and way != "grouped":  # as transformers keeps those of some families
        first = first._replace(weight=first.weight.transpose(1, 2).contiguous().transpose(1, 2))
    x = torch.randn(n, shape.hidden_size, generator=gen).to(dtype)
    norm = torch.rand(shape.hidden_size, generator=gen).add_(0.5).to(dtype)
    normed = x.double() * norm.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    routing = draw_routing(rng, gen, n, shape)
    wanted, added = by_definition(normed, first, second, routing, gate)
    residual = torch.randn(n, shape.hidden_size, generator=gen).to(dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2

    def moved(tensors):
        return type(tensors)(*(t if t is None else t.to(triton_device) for t in tensors))

    with torch_reference() if way == "torch" else nullcontext():
        device = torch.device("cpu") if way == "torch" else triton_device
        first, second, routing = (moved(t) if device == triton_device else t for t in (first, second, routing))
        plan = plan_experts(routing, shape, WAYS[way])
        x, norm, residual = x.to(device), norm.to(device), residual.to(device)
        before = residual.cpu().double()
        out = expert_product(x, first, plan, gate, InputNorm(norm, 1e-5))
        add_experts(residual, out, second, plan)
        ungated = expert_product(x, first, plan, norm=InputNorm(norm, 1e-5))
    if way == "grouped":  # between the products, the pairs stay in the order of their slots
        out, ungated = out[plan.blocks.slots], ungated[plan.blocks.slots]
    close(out, wanted, tolerance)
    close(residual, before + added, tolerance)
    close(gate_experts(ungated, gate), wanted, tolerance)


@pytest.mark.parametrize("way", ["torch", "pairs", "blocks of 16"])
def test_codes_with_a_scale(way: str, rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    shape = ExpertShape(6, 64, 48, 2)
    n, gate = rng.choice([1, 7]), GATES[0]
    first, second = (
        ExpertMatrices(
            torch.randint(-127, 128, (6, rows, columns), generator=gen, dtype=torch.int8),
            None,
            torch.rand(6, rows, generator=gen).div_(60 * columns**0.5),
        )
        for rows, columns in ((96, 64), (64, 48))
    )
    routing, x = draw_routing(rng, gen, n, shape), torch.randn(n, 64, generator=gen)
    wanted, added = by_definition(x, first, second, routing, gate)
    with torch_reference() if way == "torch" else nullcontext():
        device = torch.device("cpu") if way == "torch" else triton_device
        first, second, routing = (
            type(ts)(*(t if t is None else t.to(device) for t in ts)) for ts in (first, second, routing)
        )
        plan = plan_experts(routing, shape, WAYS[way])
        out = expert_product(x.to(device), first, plan, gate)
        residual = torch.zeros(n, 64, device=device)
        add_experts(residual, out, second, plan)
    close(out, wanted, 2e-6)
    close(residual, added, 2e-6)


def test_codes_in_float16_have_the_range_of_their_outputs() -> None:
    """A sum over codes, before its scale, does not (here by torch)."""
    matrices = ExpertMatrices(torch.full((1, 4, 64), 127, dtype=torch.int8), None, torch.full((1, 4), 1 / 127))
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    with torch_reference():
        out = expert_product(
            torch.full((1, 64), 100.0).half(), matrices, plan_experts(routing, ExpertShape(1, 64, 4, 1))
        )
    torch.testing.assert_close(out, torch.full((1, 4), 6400.0).half())


@pytest.mark.parametrize(
    ("hidden", "inner", "are_codes", "way"),
    [(64, 32, False, "grouped"), (60, 32, False, "blocks"), (64, 36, False, "blocks"), (64, 32, True, "blocks")],
)
def test_the_grouped_product_is_for_weights_that_it_takes(
    hidden: int,
    inner: int,
    are_codes: bool,
    way: str,
    gen: torch.Generator,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many tokens there are, torch's takes no codes, nor rows that are no multiples of 16 bytes. (float16:
    Triton's interpreter multiplies no bfloat16.)"""
    dtype = torch.float16
    monkeypatch.setattr(expert_tilings, "MIN_GROUPED_TOKENS", 5)

    def matrices(rows: int, columns: int) -> ExpertMatrices:
        weight = torch.randn(4, rows, columns, generator=gen) * columns**-0.5
        if not are_codes:
            return ExpertMatrices(weight.to(dtype))
        scale = weight.abs().amax(2) / 127
        return ExpertMatrices((weight / scale[..., None]).round().to(torch.int8), None, scale)

    shape, gate = ExpertShape(4, hidden, inner, 2), GATES[0]
    first, second = matrices(2 * inner, hidden), matrices(hidden, inner)
    routing, x = draw_routing(random.Random(0), gen, 9, shape), torch.randn(9, hidden, generator=gen).to(dtype)
    wanted = by_definition(x, first, second, routing, gate)[1]
    first, second, routing = (
        type(ts)(*(t if t is None else t.to(triton_device) for t in ts)) for ts in (first, second, routing)
    )
    plan = plan_experts(routing, shape, can_group=can_group(first, second))
    residual = torch.zeros(9, hidden, dtype=dtype, device=triton_device)
    add_experts(residual, expert_product(x.to(triton_device), first, plan, gate), second, plan)
    assert plan.tiling is not None and plan.tiling.way == way
    close(residual, wanted, 2e-2)


@pytest.mark.parametrize(("dtype", "way"), [("bfloat16", "grouped"), ("float32", "blocks")])
def test_a_layer_tells_the_plan_whether_its_weights_can_be_grouped(
    dtype: str, way: str, monkeypatch: pytest.MonkeyPatch, triton_device: torch.device
) -> None:
    monkeypatch.setattr(expert_tilings, "MIN_GROUPED_TOKENS", 5)
    scope = WeightScope(choose_formats(dtype, triton_device))
    layer = MoE(64, Router(scope, 64, 4, RoutingRule(2)), Experts(scope, 64, 32, 4, gate=GATES[0]))
    for (place,) in scope.places.values():
        place.put(place.take(torch.ones(place.shape, dtype=place.dtype), triton_device))
    x = torch.zeros(9, 64, dtype=scope.formats.dtype, device=triton_device)
    plan = layer._hidden(x, RMSNorm.of(torch.ones(64, dtype=x.dtype, device=triton_device), 1e-6))[1]
    assert plan.tiling is not None and plan.tiling.way == way


@pytest.mark.parametrize("block_m", [1, 16, 64])
def test_pairs_are_sorted(block_m: int, rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    """Every pair has one slot in a block of its expert, in order; blocks past the last one are marked."""
    shape = ExpertShape(rng.choice([3, 16, 130]), 1, 1, 2)
    n = rng.choice([1, 5, 700])
    routing = draw_routing(rng, gen, n, shape)
    on = Routing(*(t.to(triton_device) for t in routing))
    plan = plan_experts(on, shape, ExpertTiling("blocks" if block_m > 1 else "grouped", block_m, TILE, TILE))
    order, slots, experts, ends = (t.cpu().tolist() for t in plan.blocks)
    wanted: list[int] = []
    for expert in range(shape.num_experts):
        own = (routing.expert_ids.flatten() == expert).nonzero().flatten().tolist()
        blocks = -(-len(own) // block_m)
        begin = len(wanted) * block_m
        wanted += [expert] * blocks
        assert order[begin : begin + blocks * block_m] == own + [2 * n] * (blocks * block_m - len(own))
        assert ends[expert] == len(wanted) * block_m
        assert [slots[pair] for pair in own] == list(range(begin, begin + len(own)))
    assert experts == wanted + [-1] * (len(experts) - len(wanted))


@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_some_experts_each_add_up(
    way: str, rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    """Two ranks' parts are what one with all experts computes; nothing that was never written is read."""
    if torch.cuda.is_available() and way == "grouped":
        pytest.skip("torch's product takes no float32 there")
    shape, n, gate = ExpertShape(8, 48, 32, 3), 3 if way == "pairs" else 9, GATES[0]
    rule = RoutingRule(3, renormalise=rng.random() < 0.5)
    first, second = (
        ExpertMatrices(torch.randn(8, rows, columns, generator=gen), torch.randn(8, rows, generator=gen))
        for rows, columns in ((64, 48), (48, 32))
    )
    x, logits = torch.randn(n, 48, generator=gen), torch.randn(n, 8, generator=gen)
    logits[0, 4:] -= 100.0  # this token's are all on the first rank
    wanted = by_definition(x, first, second, route(logits, rule), gate)[1]
    with torch_reference() if way == "torch" else nullcontext():
        device = torch.device("cpu") if way == "torch" else triton_device
        total = torch.zeros(n, 48, device=device)
        for own in (range(4), range(4, 8)):
            routing = route(logits.to(device), rule, None, own)
            is_here = routing.expert_ids < 4
            assert routing.weights[~is_here].eq(0).all() and routing.expert_ids[~is_here].eq(4).all()
            plan = plan_experts(routing, shape._replace(num_experts=4), WAYS[way], is_partial=True)
            here = slice(own.start, own.stop)
            parts = [ExpertMatrices(m.weight[here].to(device), m.bias[here].to(device)) for m in (first, second)]
            hidden = expert_product(x.to(device), parts[0], plan, gate)
            if way != "grouped":
                hidden[(~is_here).flatten()] = torch.nan
            add_experts(total, hidden, parts[1], plan)
    close(total, wanted, 2e-6)


RULES = [
    RoutingRule(3, renormalise=False),
    RoutingRule(8, renormalise=True),
    RoutingRule(1, renormalise=True),
    RoutingRule(2, "sigmoid", scale=2.5),
    RoutingRule(4, "sigmoid", renormalise=False, num_groups=4, top_groups=2),
    RoutingRule(5, renormalise=False, scale=16.0, num_groups=6, top_groups=3),
]


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_routing(rule: RoutingRule, rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    num_experts = 24 if rule.num_groups > 1 else rng.choice([8, 24, 128])
    logits = torch.randn(9, num_experts, generator=gen) * 2
    correction = torch.randn(num_experts, generator=gen) if rule.scoring == "sigmoid" else None
    for where in (torch_reference(), nullcontext()):
        with where:
            out = route(
                *(None if t is None else t.to(triton_device) for t in (logits,)),
                rule,
                correction if correction is None else correction.to(triton_device),
            )
        ids, weights = out.expert_ids.cpu(), out.weights.cpu()
        for row, own, own_weights in zip(logits.double(), ids.tolist(), weights.double(), strict=True):
            scores = row.softmax(0) if rule.scoring == "softmax" else 1 / (1 + (-row).exp())
            choice = scores if correction is None else scores + correction.double()
            if rule.num_groups > 1:
                sums = [sum(sorted(group.tolist())[-rule.group_best :]) for group in choice.chunk(rule.num_groups)]
                bound = sorted(sums)[-rule.top_groups]
                size = num_experts // rule.num_groups
                choice = torch.stack([c if sums[e // size] >= bound else c - 1e9 for e, c in enumerate(choice)])
            assert len({*own}) == rule.top_k  # of scores that differ by rounding alone, either may be the higher
            best = choice.sort(descending=True).values[: rule.top_k]
            torch.testing.assert_close(choice[own], best, rtol=0, atol=1e-6)
            wanted = scores[own]
            if rule.renormalise:
                wanted = wanted / wanted.sum()
            torch.testing.assert_close(own_weights, wanted * rule.scale, rtol=1e-5, atol=1e-7)


def test_padding_takes_no_expert(gen: torch.Generator, triton_device: torch.device) -> None:
    """In either way of routing, and as without padding for the others."""
    x, weight = torch.randn(4, 32, generator=gen).bfloat16(), torch.randn(12, 32, generator=gen).bfloat16()
    rows, own, rule = torch.tensor([3, -1, 0, -1]), range(4, 12), RoutingRule(3)
    norm = InputNorm(torch.ones(32).bfloat16().to(triton_device), 1e-6)
    matrix, x, rows = Matrix(weight.to(triton_device)), x.to(triton_device), rows.to(triton_device)
    logits = x.float() @ weight.float().T.to(triton_device)
    for found, alone in (
        (route(logits, rule, None, own, rows), route(logits, rule, None, own)),
        (route(logits.cpu(), rule, None, own, rows.cpu()), route(logits.cpu(), rule, None, own)),
        (route_after_norm(x, norm, matrix, rule, None, own, rows), route_after_norm(x, norm, matrix, rule, None, own)),
    ):
        assert found is not None and alone is not None
        is_padding = (rows < 0).to(found.weights.device)[:, None]
        assert torch.equal(found.expert_ids, alone.expert_ids.masked_fill(is_padding, len(own)))
        assert torch.equal(found.weights, alone.weights.masked_fill(is_padding, 0.0))


@pytest.mark.parametrize("n, num_experts, size", [(2, 8, 2064), (17, 40, 48), (70, 130, 272)])
def test_routing_after_norm(
    n: int, num_experts: int, size: int, gen: torch.Generator, triton_device: torch.device
) -> None:
    x, weight = torch.randn(n, size, generator=gen), torch.randn(num_experts, size, generator=gen) * size**-0.5
    norm, bias = InputNorm(torch.rand(size, generator=gen) + 0.5, 1e-3), torch.randn(num_experts, generator=gen)
    rule, matrix = RoutingRule(4), Matrix(weight.to(triton_device), bias.to(triton_device))
    out = route_after_norm(x.to(triton_device), norm._replace(weight=norm.weight.to(triton_device)), matrix, rule)
    assert out is not None
    normed = x.double() * norm.weight.double() / (x.double().square().mean(1, keepdim=True) + norm.eps).sqrt()
    logits = normed @ weight.double().t() + bias.double()
    for row, ids, weights in zip(logits, out.expert_ids.cpu().tolist(), out.weights.cpu().double(), strict=True):
        assert len({*ids}) == rule.top_k
        torch.testing.assert_close(row[ids], row.sort(descending=True).values[: rule.top_k], rtol=0, atol=1e-5)
        torch.testing.assert_close(weights, row[ids].softmax(0), rtol=1e-5, atol=1e-7)


def test_routing_after_norm_leaves_the_rest() -> None:
    norm, rule = InputNorm(torch.ones(32), 1e-6), RoutingRule(1)
    for n, dtype in ((1, torch.float32), (513, torch.float32), (2, torch.float16)):
        x = torch.zeros(n, 32, dtype=dtype)
        assert route_after_norm(x, norm, Matrix(torch.zeros(8, 32, dtype=dtype)), rule) is None


def test_equal_scores_and_nan(triton_device: torch.device) -> None:
    logits = torch.zeros(2, 6)
    logits[1, 2] = torch.nan
    for where in (torch_reference(), nullcontext()):
        with where:
            ids = route(logits.to(triton_device), RoutingRule(2)).expert_ids.cpu()
        assert ids[0].tolist() == [0, 1]
        assert bool(((ids >= 0) & (ids < 6)).all())


def test_measured_tilings_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ExpertShape(128, 2048, 768, 8)
    table = {
        "Some GPU": {
            "128x2048x768x8": [
                [2, "pairs", 1, [8, 512, 2, 1], [8, 256, 2, 1]],
                [99, "grouped", 1, [1, 2, 3, 4], [5, 6, 7, 8]],
            ]
        }
    }
    monkeypatch.setattr(expert_tilings, "_tables", lambda: table)
    assert choose_tiling("Some GPU", shape, 2, True).first == ProductTile(8, 512, 2, 1)
    assert choose_tiling("Some GPU", shape, 3, True).way == "grouped"
    for device, tokens, is_fit in (("Some GPU", 100, True), ("Some GPU", 3, False), ("another", 2, True)):
        assert choose_tiling(device, shape, tokens, is_fit) == default_tiling(shape, tokens, can_group)
    ways = [default_tiling(shape, n, True) for n in (4, 5, 256, 512, 1024, 8192, 16384)]
    assert [(t.way, t.block_m) for t in ways] == [
        ("pairs", 1), ("blocks", 16), ("blocks", 16), ("blocks", 32), ("blocks", 64), ("blocks", 128), ("grouped", 1)
    ]  # fmt: skip


def test_compiling_ahead_goes_by_no_memory_that_nobody_wrote(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's grouped product would go by the sorted pairs, which our kernel has not written then."""
    from aengine.kernels.triton import launch

    class CompiledKernel:
        def warmup(self, *args: object, **options: object) -> None:
            pass

    original = launch.launch
    for name in ("expert_plan", "experts", "rms_norm", "expert_gate"):
        module = importlib.import_module(f"aengine.kernels.triton.{name}")
        monkeypatch.setattr(module, "launch", lambda kernel, *args, **kw: original(CompiledKernel(), *args, **kw))
    monkeypatch.setattr(launch, "_compile_only", True)
    shape = ExpertShape(16, 64, 32, 2)
    first, second = (
        ExpertMatrices(
            torch.zeros(16, rows, columns, dtype=torch.bfloat16, device=triton_device),
            torch.zeros(16, rows, dtype=torch.bfloat16, device=triton_device),
        )
        for rows, columns in ((64, 64), (64, 32))
    )
    routing = Routing(
        torch.zeros(9, 2, dtype=torch.int32, device=triton_device), torch.zeros(9, 2, device=triton_device)
    )
    x = torch.zeros(9, 64, dtype=torch.bfloat16, device=triton_device)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        plan = plan_experts(routing, shape, WAYS["grouped"])
        out = expert_product(x, first, plan, GATES[0], InputNorm(x[0], 1e-5))
        add_experts(x, out, second, plan)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.shape == (18, 32)


def test_compiling_ahead_meets_every_tiling() -> None:
    """Of the measured shapes and of others: no step gets a tiling that the walk before the first request has not."""
    from aengine.kernels.expert_tilings import _tables
    from aengine.runner.startup.warm_up import _DECODE_SIZES, _sizes_for_experts

    most = 20_000
    walked = {*_DECODE_SIZES, *_sizes_for_experts(most)}
    measured = [(device, *key.partition(" ")[::2]) for device, table in _tables().items() for key in table]
    for device, key, kind in [*measured, ("", "8x4096x14336x2", ""), ("", "512x2048x512x10", "")]:
        shape, given = ExpertShape(*map(int, key.split("x"))), {"can_group": not kind, "kind": kind or None}
        ahead = {choose_tiling(device, shape, n, **given) for n in walked}
        missed = [n for n in range(1, most + 1) if choose_tiling(device, shape, n, **given) not in ahead]
        assert not missed, f"{device} {shape}: {len(missed)} sizes, from {missed[0]} on"
