"""The gated activation against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.activation import silu_and_mul


def test_against_the_definition(gen: torch.Generator) -> None:
    for rows, size in ((1, 1), (3, 17), (9, 64)):
        gate_up = torch.randn(rows, 2 * size, generator=gen) * 8
        before = gate_up.clone()
        gate, up = gate_up.double().chunk(2, -1)
        torch.testing.assert_close(
            silu_and_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6
        )
        assert torch.equal(gate_up, before)


def test_large_values_do_not_overflow() -> None:
    out = silu_and_mul(torch.tensor([[-1e30, 1e30, 2.0, 2.0]]))
    assert out.tolist() == [[0.0, pytest.approx(2e30)]]


def test_wrong_shapes() -> None:
    with pytest.raises(AssertionError):
        silu_and_mul(torch.zeros(2, 5))
