"""Adapters against their definition in float64, by the Triton kernels and by torch."""

from __future__ import annotations

import importlib
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from aengine.kernels.dispatch import torch_reference
from aengine.kernels.expert_types import Routing
from aengine.kernels.lora import (
    AdapterMatrices,
    add_pairs,
    expand,
    expand_gated,
    plan_adapters,
    plan_pairs,
    shrink,
)
from aengine.kernels.triton import lora as kernels

DTYPES = [torch.float32] + ([torch.bfloat16, torch.float16] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def draw(
    gen: torch.Generator, num_slots: int, sizes: tuple[int, ...], k: int, rank: int, dtype: torch.dtype
) -> AdapterMatrices:
    a = torch.randn(num_slots, len(sizes) * rank, k, generator=gen).mul_(k**-0.5)
    b = torch.randn(num_slots, sum(sizes), rank, generator=gen)
    starts = torch.tensor([sum(sizes[:i]) for i in range(len(sizes) + 1)], dtype=torch.int32)
    return AdapterMatrices(a.to(dtype), b.to(dtype), starts, sizes)


def by_definition(x: Tensor, slots: Tensor, matrices: AdapterMatrices) -> Tensor:
    x, a, b = x.double(), matrices.a.double(), matrices.b.double()
    out, rank = torch.zeros(len(x), b.shape[1], dtype=torch.float64), matrices.rank
    for token, slot in enumerate(slots.tolist()):
        first = 0
        for part, size in enumerate(matrices.sizes):
            if slot < len(a):
                h = a[slot, part * rank : (part + 1) * rank] @ x[token]
                out[token, first : first + size] = b[slot, first : first + size] @ h
            first += size
    return out


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.cpu().double() - wanted).norm() / wanted.norm())


CASES = [  # tokens, slots, input features, output features of each part, rank
    (1, 1, 200, (40,), 8),
    (1, 4, 576, (64, 32, 32), 16),
    (7, 3, 72, (48, 48), 5),
    (19, 20, 160, (100,), 33),
    (50, 4, 130, (33, 16, 16), 80),
    (530, 3, 40, (24,), 4),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_token_gets_what_its_adapter_adds(
    rng: random.Random,
    gen: torch.Generator,
    triton_device: torch.device,
    case: tuple[int, int, int, tuple[int, ...], int],
    is_torch: bool,
    dtype: torch.dtype,
) -> None:
    """Some have none; the product has a norm before it, or not."""
    n, num_slots, k, sizes, rank = case
    matrices = draw(gen, num_slots, sizes, k, rank, dtype)
    chosen = [rng.randrange(num_slots)] + [rng.randint(0, num_slots) for _ in range(n - 1)]
    slots = torch.tensor(rng.sample(chosen, n), dtype=torch.int32)
    x, y = torch.randn(n, k, generator=gen).to(dtype), torch.randn(n, sum(sizes), generator=gen).to(dtype)
    norm = SimpleNamespace(weight=torch.rand(k, generator=gen).add_(0.5).to(dtype), eps=1e-5)
    normed = x.double() * norm.weight.double() / (x.double().square().mean(-1, keepdim=True) + norm.eps).sqrt()
    device = torch.device("cpu") if is_torch else triton_device
    norm.weight, own = norm.weight.to(device), AdapterMatrices(*(t.to(device) for t in matrices[:3]), sizes)
    with torch_reference() if is_torch else nullcontext():
        plan = plan_adapters(slots.to(device), num_slots)
        for before, of in ((None, x), (norm, normed)):
            wanted, out = y.double() + by_definition(of, slots, matrices), y.to(device, copy=True)
            expand(out, shrink(x.to(device), before, own, plan), own, plan)
            assert relative_error(out, wanted) < TOLERANCE[dtype]
            assert torch.equal(out.cpu()[slots == num_slots], y[slots == num_slots])


@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("sizes", [(40, 40), (80,)], ids=str)
@pytest.mark.parametrize("n", [1, 23])
def test_the_gated_activation_comes_behind_it(
    rng: random.Random,
    gen: torch.Generator,
    triton_device: torch.device,
    n: int,
    sizes: tuple[int, ...],
    is_torch: bool,
) -> None:
    """Of all tokens, those without an adapter too."""
    matrices = draw(gen, 3, sizes, 96, 8, torch.float32)
    slots = torch.tensor([rng.randint(0, 3) for _ in range(n)], dtype=torch.int32)
    x, y = torch.randn(n, 96, generator=gen), torch.randn(n, 80, generator=gen)
    gate, up = (y.double() + by_definition(x, slots, matrices)).chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    device = torch.device("cpu") if is_torch else triton_device
    own = AdapterMatrices(*(t.to(device) for t in matrices[:3]), sizes)
    with torch_reference() if is_torch else nullcontext():
        plan = plan_adapters(slots.to(device), 3)
        out = expand_gated(y.to(device), shrink(x.to(device), None, own, plan), own, plan)
    assert relative_error(out, wanted) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize(("n", "top_k", "most_alone"), [(1, 2, 8), (7, 3, 64), (23, 3, 8)])
def test_each_pair_gets_what_its_expert_adds(
    rng: random.Random,
    gen: torch.Generator,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    top_k: int,
    most_alone: int,
    is_torch: bool,
    dtype: torch.dtype,
) -> None:
    """Some have no adapter, and of some the expert is not here; as blocks of their own, and sorted."""
    monkeypatch.setattr(kernels, "_FEW_PAIRS", most_alone)
    num_slots, num_experts = 3, 5
    first = draw(gen, num_slots * num_experts, (24, 24), 72, 5, dtype)
    second = draw(gen, num_slots * num_experts, (72,), 24, 5, dtype)
    slots = torch.tensor([0] + [rng.randint(0, num_slots) for _ in range(n - 1)], dtype=torch.int32)
    ids = torch.stack([torch.randperm(num_experts + 1, generator=gen)[:top_k] for _ in range(n)]).int()
    ids[0, 0] = 0
    weights = torch.rand(n, top_k, generator=gen).masked_fill_(ids == num_experts, 0.0)
    of_pairs = torch.where(
        (slots[:, None] < num_slots) & (ids < num_experts), slots[:, None] * num_experts + ids, num_slots * num_experts
    ).flatten()
    x, hidden = torch.randn(n, 72, generator=gen).to(dtype), torch.randn(n * top_k, 24, generator=gen).to(dtype)
    y, residual = torch.randn(n * top_k, 48, generator=gen).to(dtype), torch.randn(n, 72, generator=gen).to(dtype)
    wanted = y.double() + by_definition(x.repeat_interleave(top_k, 0), of_pairs, first)
    added = by_definition(hidden, of_pairs, second).view(n, top_k, -1) * weights[:, :, None].double()
    device = torch.device("cpu") if is_torch else triton_device
    own = [AdapterMatrices(*(t.to(device) for t in one[:3]), one.sizes) for one in (first, second)]
    x, hidden, y, sums = (t.to(device, copy=True) for t in (x, hidden, y, residual))
    with torch_reference() if is_torch else nullcontext():
        tokens = plan_adapters(slots.to(device), num_slots)
        plan = plan_pairs(tokens, Routing(ids.to(device), weights.to(device)), num_slots, num_experts)
        assert torch.equal(plan.slots.cpu(), of_pairs.int())
        expand(y, shrink(x, None, own[0], plan, top_k), own[0], plan)
        add_pairs(sums, shrink(hidden, None, own[1], plan), own[1], plan)
    assert relative_error(y, wanted) < TOLERANCE[dtype]
    assert relative_error(sums, residual.double() + added.sum(1)) < TOLERANCE[dtype]


def test_every_number_of_pieces_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a step of any size launches there is nothing that the walk before the first step has not launched."""
    matrices = AdapterMatrices(
        torch.zeros(5, 48, 576), torch.zeros(5, 96, 16), torch.tensor([0, 32, 64, 96]).int(), (32, 32, 32)
    )
    compiled: set[tuple] = set()
    needed: set[tuple] = set()
    log = needed

    def note(kernel, grid, *args, **options) -> None:
        log.add((str(kernel), *sorted(map(str, options.items()))))

    for module in (kernels, kernels.rms_norm, importlib.import_module("aengine.kernels.triton.expert_plan")):
        monkeypatch.setattr(module, "launch", note)

    def step(n: int) -> None:
        plan = kernels.plan_adapters(torch.zeros(n, dtype=torch.int32), 5)
        h = kernels.shrink(torch.zeros(n, 576), None, matrices, plan, 1)
        kernels.expand(torch.zeros(n, 96), h, matrices, plan)

    for n in (1, 2, 9, 40, 300, 512, 513, 900, 3000, 8192):
        step(n)
    log = compiled
    for module in (kernels, importlib.import_module("aengine.kernels.triton.expert_plan")):
        monkeypatch.setattr(module, "only_compiles", lambda: True)
    step(1)
    step(8)
    assert needed <= compiled
