"""The bitmask against a loop over bits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from aengine.kernels.bitmask import apply_bitmask
from aengine.kernels.dispatch import torch_reference
from aengine.kernels.gumbel import gumbel_sample


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_against_bits(rng: random.Random, gen: torch.Generator, vocab_size: int) -> None:
    n, words = 5, (vocab_size + 31) // 32
    for rows in ([0, 1, 2, 3, 4], [3, 0], [-1, 4], [4], [-1], []):
        logits = torch.randn(n, vocab_size, generator=gen)
        wanted = logits.clone()
        drawn = [rng.getrandbits(32) for _ in range(len(rows) * words)]
        masks = np.array(drawn, dtype="<u4").reshape(len(rows), words)
        for row, mask in zip(rows, masks):
            for token in range(vocab_size) if row >= 0 else ():
                if not int(mask[token // 32]) >> token % 32 & 1:
                    wanted[row, token] = -torch.inf
        apply_bitmask(logits, torch.tensor(rows, dtype=torch.int64), torch.from_numpy(masks.view(np.uint8)))
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("vocab_size", [1, 33, 20000])
def test_triton_against_the_reference(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, vocab_size: int
) -> None:
    logits = torch.randn(5, vocab_size, generator=gen)
    rows = torch.tensor([*rng.sample(range(5), 2), -1])
    bits = torch.randint(0, 256, (3, (vocab_size + 31) // 32 * 4), generator=gen, dtype=torch.uint8)
    got = logits.clone().to(triton_device)
    apply_bitmask(got, rows.to(triton_device), bits.to(triton_device))
    with torch_reference():
        apply_bitmask(logits, rows, bits)
    assert torch.equal(got.cpu(), logits)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_that_allows_nothing_shows_and_harms_no_other(
    gen: torch.Generator, triton_device: torch.device, temperature: float
) -> None:
    """The sampler's check of it is -inf, and the other rows are those of a batch without it."""
    logits = torch.randn(3, 100, generator=gen).to(triton_device)
    columns = torch.full((3,), temperature), torch.tensor([7, 8, 9]), torch.tensor([1, 2, 3])
    columns = tuple(column.to(triton_device) for column in columns)
    alone, _ = gumbel_sample(logits.clone(), *columns)
    apply_bitmask(logits, torch.tensor([1]).to(triton_device), torch.zeros(1, 16, dtype=torch.uint8).to(triton_device))
    ids, checks = gumbel_sample(logits, *columns)
    assert checks[1] == -torch.inf and checks[[0, 2]].isfinite().all()
    assert torch.equal(ids[[0, 2]], alone[[0, 2]]) and 0 <= ids[1] < 100
