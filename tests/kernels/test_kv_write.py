"""Writing keys and values into slots, against a loop."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.errors import InternalError
from aengine.kernels.kv_write import write_kv


def test_against_a_loop(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(20):
        num_slots, row = rng.randint(1, 50), rng.randint(1, 20)
        num_tokens = rng.randint(1, num_slots)
        slots = torch.tensor(rng.sample(range(num_slots), num_tokens))
        # As in the model: the rows are parts of wider ones.
        kv = torch.randn(num_tokens, row + 5, generator=gen)[:, 5:]
        cache = torch.randn(num_slots, row, generator=gen)
        wanted = cache.clone()
        for token, slot in enumerate(slots.tolist()):
            wanted[slot] = kv[token]
        write_kv(kv, cache, slots)
        assert torch.equal(cache, wanted)


def test_wrong_shapes_and_devices() -> None:
    with pytest.raises(AssertionError):
        write_kv(torch.zeros(1, 4), torch.zeros(3, 5), torch.tensor([0]))
    with pytest.raises(InternalError, match="write_kv runs on the CPU only, not on meta"):
        write_kv(torch.zeros(1, 4, device="meta"), torch.zeros(3, 4, device="meta"), torch.tensor([0]))
