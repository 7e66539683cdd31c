"""The gated activation against its definition in float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from aengine.kernels.activation import Activation, act_and_mul, weigh


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return gate / (1 + (-gate).exp())
    if activation == "gelu":
        return gate * (1 + torch.erf(gate / 2**0.5)) / 2
    return gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("on_triton", [False, True])
def test_against_the_definition(
    gen: torch.Generator, activation: Activation, on_triton: bool, request: pytest.FixtureRequest
) -> None:
    device = request.getfixturevalue("triton_device") if on_triton else torch.device("cpu")
    for rows, size in ((1, 1), (3, 17), (9, 64), (2, 1030)):
        gate_up = torch.randn(rows, 2 * size, generator=gen) * 8
        gate, up = gate_up.double().chunk(2, -1)
        given = gate_up.to(device)
        out = act_and_mul(given, activation)
        torch.testing.assert_close(out.cpu().double(), activated(gate, activation) * up, rtol=1e-5, atol=2e-5)
        assert torch.equal(given.cpu(), gate_up)


@pytest.mark.parametrize("on_triton", [False, True])
def test_rows_are_weighed(gen: torch.Generator, on_triton: bool, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("triton_device") if on_triton else torch.device("cpu")
    for rows, size in ((1, 1), (3, 17), (2, 1030)):
        x, logits = torch.randn(rows, size, generator=gen), torch.randn(rows, 1, generator=gen) * 8
        logits[0] = -200.0  # weighs nothing, and is no overflow
        out = x.clone().to(device)
        weigh(out, logits.to(device))
        torch.testing.assert_close(
            out.cpu().double(), x.double() / (1 + (-logits.double()).exp()), rtol=1e-5, atol=1e-7
        )


def test_large_values_do_not_overflow() -> None:
    for activation in get_args(Activation):
        out = act_and_mul(torch.tensor([[-1e30, 1e30, 2.0, 2.0]]), activation)
        assert out.tolist() == [[0.0, pytest.approx(2e30)]]


@pytest.mark.invariant
def test_wrong_shapes() -> None:
    with pytest.raises(AssertionError):
        act_and_mul(torch.zeros(2, 5))
