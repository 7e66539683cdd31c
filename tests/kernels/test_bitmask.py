"""The bitmask against a loop over bits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from aengine.kernels.bitmask import apply_bitmask


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_against_bits(rng: random.Random, gen: torch.Generator, vocab_size: int) -> None:
    n, words = 5, (vocab_size + 31) // 32
    for rows in ([0, 1, 2, 3, 4], [3, 0], [4]):
        logits = torch.randn(n, vocab_size, generator=gen)
        wanted = logits.clone()
        masks = np.array([[rng.getrandbits(32) for _ in range(words)] for _ in rows], dtype="<u4")
        for row, mask in zip(rows, masks):
            for token in range(vocab_size):
                if not int(mask[token // 32]) >> token % 32 & 1:
                    wanted[row, token] = -torch.inf
        apply_bitmask(logits, torch.tensor(rows), torch.from_numpy(masks.view(np.uint8)))
        assert torch.equal(logits, wanted)
