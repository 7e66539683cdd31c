"""Mixtures of experts by compiled kernels of a CPU, against torch: routing, slots, gates, products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

import llvmlite.binding as llvm

from aengine.kernels import routing
from aengine.kernels.cpu import expert_ops, tape
from aengine.kernels.cpu.codes import Activations, PackedMatrix, activations, multiply, pack
from aengine.kernels.cpu.compiler.code_cache import CodeCache
from aengine.kernels.cpu.compiler.compiled import compile_module
from aengine.kernels.cpu.compiler.emit import Module
from aengine.kernels.cpu.compiler.target import Target, host
from aengine.kernels.cpu.expert_ops import PackedExperts
from aengine.kernels.cpu.library import Library, write_kernels
from aengine.kernels.expert_gate import gate_experts
from aengine.kernels.expert_types import ExpertGate, ExpertSlots, Routing, RoutingRule

NUM_EXPERTS = 5
PLAIN = Target("x86_64-unknown-linux-gnu", "x86-64", "")
ARM = Target("aarch64-unknown-linux-gnu", "generic", "+neon")


@pytest.mark.parametrize(
    ("rule", "corrected"),
    [
        (RoutingRule(3), False),
        (RoutingRule(2, renormalise=False, scale=1.5), False),
        (RoutingRule(4, "sigmoid", scale=2.5), True),
        (RoutingRule(1, "sigmoid", renormalise=False), False),
    ],
)
@pytest.mark.parametrize("num_experts", [4, 16, 37])
def test_route(rule: RoutingRule, corrected: bool, num_experts: int, gen: torch.Generator) -> None:
    logits = torch.randn(9, num_experts, generator=gen) * 3
    correction = torch.randn(num_experts, generator=gen) if corrected else None
    wanted = routing.route(logits, rule, correction)
    found = routing.route(logits, rule, correction, is_compiled=True)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-6)


def test_of_experts_that_are_as_good_the_first_ones_are_taken() -> None:
    logits = torch.tensor([[1.0, 3, 3, 0, 3] * 5, [0.0] * 25, [torch.nan] * 25])
    ids, weights = expert_ops.route(logits, RoutingRule(4), None)
    assert ids[:2].tolist() == [[1, 2, 4, 6], [0, 1, 2, 3]]
    assert weights[:2].flatten().tolist() == pytest.approx([0.25] * 8)
    assert bool(((ids[2] >= 0) & (ids[2] < 25)).all()) and bool(weights[2].isnan().all())


def routed(kind: str, rows: int, top_k: int, gen: torch.Generator) -> Routing:
    """``kind``: of the choices; "own": some experts are not here."""
    if kind == "one":  # by all rows
        ids = torch.full((rows, 1), 3)
    elif kind == "unused":  # expert 0 by none
        ids = torch.stack([1 + torch.randperm(NUM_EXPERTS - 1, generator=gen)[:top_k] for _ in range(rows)])
    else:
        ids = torch.stack([torch.randperm(NUM_EXPERTS + 1, generator=gen)[:top_k] for _ in range(rows)])
    return Routing(ids.int().contiguous(), torch.rand(ids.shape, generator=gen))


@pytest.mark.parametrize("kind", ["one", "unused", "own"])
def test_slots(kind: str, gen: torch.Generator) -> None:
    ids, weights = given = routed(kind, 7, 2, gen)
    slots = expert_ops.plan_experts(given, NUM_EXPERTS)
    found = []
    for expert, first, count in slots.entries.view(-1, 3).tolist()[:NUM_EXPERTS]:
        of_slots = slice(first, first + count)
        tokens, own = (of.flatten()[of_slots].tolist() for of in (slots.tokens, slots.weights))
        found += [(token, expert, weight) for token, weight in zip(tokens, own, strict=True)]
        assert tokens == sorted(tokens)
    pairs = [(i, int(ids[i, j]), float(weights[i, j])) for i in range(7) for j in range(ids.shape[1])]
    assert sorted(found) == sorted(pair for pair in pairs if pair[1] < NUM_EXPERTS)


def matrices(kind: str, out_features: int, in_features: int, gen: torch.Generator) -> list[PackedMatrix]:
    if kind == "q4_1":
        blocks = torch.randint(0, 256, (NUM_EXPERTS, out_features, in_features // 32, 20), generator=gen)
        blocks[..., 1] = blocks[..., 3] = 36  # scales and minima near 1 / 64
        return [pack(kind, own) for own in blocks.to(torch.uint8)]
    numbers = torch.randn(NUM_EXPERTS, out_features, in_features, generator=gen) / 8
    return [pack(kind, own.to(getattr(torch, kind))) for own in numbers]


class Layer:
    """Two products of all experts, with or without biases."""

    def __init__(self, kind: str, sizes: tuple[int, int], has_bias: bool, gate: ExpertGate, gen: torch.Generator):
        size, inner = sizes
        self.gate, self.as_codes = gate, kind == "q4_1"
        self.parts = [matrices(kind, 2 * inner, size, gen), matrices(kind, size, inner, gen)]
        self.biases: Any = [[None] * NUM_EXPERTS] * 2
        if has_bias:
            self.biases = [list(torch.randn(NUM_EXPERTS, n, generator=gen)) for n in (2 * inner, size)]
        self.packed = [PackedExperts(*both) for both in zip(self.parts, self.biases, strict=True)]

    def activations(self, x: Tensor) -> Activations:
        return activations(x, as_codes=self.as_codes)

    def add_to(self, residual: Tensor, x: Tensor, given: Routing) -> ExpertSlots:
        slots = expert_ops.plan_experts(given, NUM_EXPERTS)
        of = expert_ops.gathered(self.activations(x), slots)
        hidden = expert_ops.expert_product(self.packed[0], of, slots, self.gate)
        expert_ops.add_experts(residual, self.packed[1], self.activations(hidden), slots)
        return slots

    def one_by_one(self, residual: Tensor, x: Tensor, given: Routing) -> None:
        """The same by products with one matrix, of all rows that chose its expert."""
        for expert in range(NUM_EXPERTS):
            rows, choice = (given.expert_ids == expert).nonzero(as_tuple=True)
            if len(rows):
                both = multiply(self.parts[0][expert], self.activations(x[rows]), self.biases[0][expert])
                hidden = gate_experts(both, self.gate)
                out = multiply(self.parts[1][expert], self.activations(hidden), self.biases[1][expert])
                residual[rows] += given.weights[rows, choice, None] * out


@pytest.mark.parametrize("routes", ["one", "unused", "own"])
@pytest.mark.parametrize(
    ("kind", "sizes", "has_bias", "gate"),
    [
        ("q4_1", (64, 32), False, ExpertGate()),
        ("float16", (48, 40), True, ExpertGate("gelu_tanh")),
        ("bfloat16", (50, 24), True, ExpertGate("clamped_swiglu", is_interleaved=True, limit=0.5)),
        ("float32", (16, 16), False, ExpertGate("clamped_swiglu", limit=0.5)),
    ],
)
def test_experts(
    kind: str, sizes: tuple[int, int], has_bias: bool, gate: ExpertGate, routes: str, gen: torch.Generator
) -> None:
    layer = Layer(kind, sizes, has_bias, gate, gen)
    rows = 150  # more than are multiplied by a tile at once
    x, residual = torch.randn(2, rows, sizes[0], generator=gen)
    given = routed(routes, rows, 3, gen)
    found, wanted = residual.clone(), residual.clone()
    layer.add_to(found, x, given)
    layer.one_by_one(wanted, x, given)
    torch.testing.assert_close(
        found, wanted, rtol=1e-3 if layer.as_codes else 1e-4, atol=1e-3 if layer.as_codes else 1e-4
    )
    for begin, end in ((0, 1), (1, 8), (8, rows)):
        part = residual[begin:end].clone()
        own = Routing(given.expert_ids[begin:end].contiguous(), given.weights[begin:end].contiguous())
        layer.add_to(part, x[begin:end].contiguous(), own)
        assert torch.equal(part, found[begin:end])


def test_a_recorded_mixture(gen: torch.Generator) -> None:
    layer = Layer("q4_1", (64, 32), False, ExpertGate(), gen)
    x, residual, logits = torch.randn(12, 64), torch.zeros(12, 64), torch.zeros(12, NUM_EXPERTS)
    rule = RoutingRule(2)
    with tape.record(rows=12) as recorded:
        layer.add_to(residual, x, expert_ops.route(logits, rule, None))
    for rows in (12, 1, 0, 5):
        x.copy_(torch.randn(12, 64, generator=gen)), logits.copy_(torch.randn(12, NUM_EXPERTS, generator=gen))
        wanted = residual.zero_().clone()
        recorded.run(rows)
        layer.add_to(wanted[:rows], x[:rows], expert_ops.route(logits[:rows], rule, None))
        assert torch.equal(residual, wanted) and bool(residual[:rows].any()) == bool(rows)


NAMES = ["route.softmax.all", "route.sigmoid.chosen", "plan_experts.8", "gather", "gate_experts.silu.halves"]
NAMES += ["gate_experts.clamped_swiglu.interleaved", "expert_product.q4_k.planes.silu", "add_experts.bfloat16.float32"]


@pytest.mark.parametrize(
    "target", [pytest.param(PLAIN, id="sse2", marks=pytest.mark.extended), pytest.param(ARM, id="neon")]
)
def test_they_compile_for(target: Target) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = Module("experts")
    write_kernels(module, NAMES, target)
    assert len(compile_module(module, target)) > 10_000


@pytest.mark.skipif("+avx2" not in host().features, reason="a processor with AVX2")
def test_with_avx2_alone(gen: torch.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    avx2 = Library(Target(host().triple, "haswell", "+avx2,+fma,+f16c"), 1, CodeCache(tmp_path))
    for module in (tape, expert_ops):
        monkeypatch.setattr(module, "library", lambda: avx2)
    test_route(RoutingRule(3), False, 37, gen)
    test_slots("own", gen)
    test_experts("q4_1", (64, 32), False, ExpertGate(), "unused", gen)
    test_experts("float16", (48, 40), True, ExpertGate("gelu_tanh"), "own", gen)
