"""Norms and gates that are compiled for a CPU, against torch's."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("llvmlite")

from aengine.kernels import activation, rms_norm
from aengine.kernels.activation import Activation
from aengine.kernels.cpu import ops


def test_add_norm(rng: random.Random, gen: torch.Generator) -> None:
    rows, size = rng.randint(1, 9), 16 * rng.randint(1, 40)
    residual, x = torch.randn(2, rows, size, generator=gen) * 10
    weight = torch.randn(size, generator=gen)
    wanted = residual.clone()
    rms_norm.add_rms_norm(wanted, x, weight, 1e-5)
    ops.add_norm(residual, x, weight, 1e-5)
    torch.testing.assert_close(residual, wanted, rtol=2e-6, atol=2e-6)


def test_copied(rng: random.Random, gen: torch.Generator) -> None:
    x = torch.randn(rng.randint(1, 9), 16 * rng.randint(1, 40), generator=gen)
    assert torch.equal(out := ops.copied(x), x) and out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(rng: random.Random, gen: torch.Generator, has_bias: bool) -> None:
    rows, size = rng.randint(1, 9), 16 * rng.randint(1, 40)
    x = torch.randn(rows, size, generator=gen) * 10 + 50
    weight, bias = torch.randn(2, size, generator=gen)
    own = bias if has_bias else None
    own_64 = None if own is None else own.double()
    wanted = F.layer_norm(x.double(), (size,), weight.double(), own_64, 1e-5)
    out = ops.layer_norm(x, weight, own, 1e-5)
    torch.testing.assert_close(out, wanted.float(), rtol=2e-6, atol=2e-5)
    assert torch.equal(ops.layer_norm(x[-1:], weight, own, 1e-5), out[-1:])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_act_and_mul(rng: random.Random, gen: torch.Generator, kind: Activation) -> None:
    gate_up = torch.randn(rng.randint(1, 9), 32 * rng.randint(1, 9), generator=gen) * 4
    gate, up = gate_up.clone().chunk(2, -1)
    wanted = activation.act_and_mul(gate_up.clone(), kind)
    off = (ops.act_and_mul(gate_up, kind) - wanted).abs()
    # 1 + erf(gate) of a gate far below 0 is small, and as rounded as 1.
    assert bool((off <= 2e-6 * wanted.abs() + 4e-7 * (gate * up).abs()).all())
