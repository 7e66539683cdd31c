"""Writing keys and values into slots, against a loop."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.kv_write import write_kv


def test_against_a_loop(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(20):
        num_blocks, size, heads, width = rng.randint(1, 10), rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 6)
        num_tokens = rng.randint(1, num_blocks * size)
        slots = torch.tensor(rng.sample(range(num_blocks * size), num_tokens))
        # As in the model: key and value heads are parts of wider rows; blocks may have something between them.
        kv = torch.randn(num_tokens, heads + 2 * heads, width, generator=gen)[:, heads:].unflatten(1, (2, heads))
        pages = torch.randn(num_blocks, size * 2 * heads * width + rng.choice([0, 7]), generator=gen)
        cache = pages[:, : size * 2 * heads * width].unflatten(1, (size, 2, heads, width))
        wanted = cache.clone()
        for token, slot in enumerate(slots.tolist()):
            wanted[slot // size, slot % size] = kv[token]
        write_kv(kv, cache, slots)
        assert torch.equal(cache, wanted)


@pytest.mark.invariant
def test_wrong_shapes() -> None:
    with pytest.raises(AssertionError):
        write_kv(torch.zeros(1, 2, 1, 4), torch.zeros(3, 1, 2, 1, 5), torch.tensor([0]))
