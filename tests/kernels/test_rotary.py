"""Rotary embedding against turning each pair as a complex number, in float64."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.rotary import apply_rotary, rotary_rows


def turned(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, interleaved: bool = False
) -> torch.Tensor:
    """``inv_freq``: of all tokens, or [tokens, pairs]. What is past its pairs stays."""
    rotary_dim = 2 * inv_freq.shape[-1]
    x, rest = x.double()[..., :rotary_dim], x.double()[..., rotary_dim:]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    angles = positions.double()[:, None, None] * inv_freq.double().view(-1, 1, inv_freq.shape[-1])
    pairs = torch.complex(first, second) * torch.polar(torch.full_like(angles, factor), angles)
    both = (pairs.real, pairs.imag)
    return torch.cat((torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_against_complex_numbers(rng: random.Random, gen: torch.Generator, interleaved: bool) -> None:
    for _ in range(20):
        tokens, heads, half = rng.randint(1, 12), rng.randint(1, 5), rng.randint(1, 40)
        positions = torch.randint(0, 500, (tokens,), generator=gen)
        inv_freq = torch.rand((tokens, half) if rng.random() < 0.3 else half, generator=gen)
        factor = rng.uniform(0.5, 2)
        x = torch.randn(tokens, heads, 2 * half + rng.choice((0, 2, 10)), generator=gen)
        wanted = turned(x, positions, inv_freq, factor, interleaved)
        apply_rotary(x, *rotary_rows(positions, inv_freq, factor, interleaved=interleaved), interleaved=interleaved)
        # An angle of 500 radians in float32 is off by 3e-5.
        torch.testing.assert_close(x.double(), wanted, rtol=0, atol=5e-4)


def test_only_the_given_heads_of_a_wider_row_are_turned(gen: torch.Generator) -> None:
    """The model turns q and k where they lie, with v beside them."""
    row = torch.randn(5, 7, 16, generator=gen)
    before = row.clone()
    positions = torch.arange(5) + 3
    inv_freq = torch.rand(8, generator=gen)
    apply_rotary(row[:, :4], *rotary_rows(positions, inv_freq, 1.0))
    torch.testing.assert_close(row[:, :4].double(), turned(before[:, :4], positions, inv_freq, 1.0), rtol=0, atol=1e-5)
    assert torch.equal(row[:, 4:], before[:, 4:])


def test_only_distance_matters(gen: torch.Generator) -> None:
    """The inner product of a turned query and key depends on how far apart they are."""
    inv_freq = torch.rand(8, generator=gen)
    query, key = torch.randn(2, 16, generator=gen)

    def product(query_position: int, key_position: int) -> float:
        pair = torch.stack((query, key))[:, None].clone()
        apply_rotary(pair, *rotary_rows(torch.tensor([query_position, key_position]), inv_freq, 1.0))
        return float(pair[0, 0] @ pair[1, 0])

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-3)
    others = [product(9, place) for place in range(5, 9)]
    assert any(other != pytest.approx(product(9, 4), abs=1e-3) for other in others)


@pytest.mark.invariant
def test_wrong_shapes() -> None:
    cos, sin = rotary_rows(torch.arange(3), torch.ones(4), 1.0)
    with pytest.raises(AssertionError):
        apply_rotary(torch.zeros(2, 1, 8), cos, sin)
