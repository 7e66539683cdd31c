"""RMS normalisation against its definition in float64."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.rms_norm import rms_norm


def defined(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x * weight / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_against_the_definition(rng: random.Random, gen: torch.Generator, dtype: torch.dtype, tolerance: float) -> None:
    for _ in range(20):
        size = rng.randint(1, 300)
        shape = (rng.randint(1, 9), size) if rng.random() < 0.5 else (rng.randint(1, 5), rng.randint(1, 5), size)
        scale = 10 ** rng.uniform(-4, 4)
        x = (torch.randn(shape, generator=gen) * scale).to(dtype)
        weight = torch.randn(size, generator=gen).to(dtype)
        eps = 10 ** rng.uniform(-8, 0)
        out = rms_norm(x, weight, eps)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), defined(x, weight, eps), rtol=4 * tolerance, atol=4 * tolerance)


def test_rows_of_zeros_stay_zero(gen: torch.Generator) -> None:
    assert torch.equal(rms_norm(torch.zeros(3, 8), torch.randn(8, generator=gen), 1e-6), torch.zeros(3, 8))


@pytest.mark.invariant
def test_wrong_shapes() -> None:
    with pytest.raises(AssertionError, match="rows of 8 with a weight of 7"):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-6)
