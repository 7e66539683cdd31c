"""Ragged writes against a loop of slices."""

from __future__ import annotations

import random

import torch

from aengine.kernels.staged_write import apply_staged_writes


def test_against_slices(rng: random.Random) -> None:
    for _ in range(30):
        size = rng.randint(1, 400)
        target = torch.arange(size, dtype=torch.int32)
        wanted = target.clone()
        cuts = sorted(rng.sample(range(size + 1), min(size + 1, 2 * rng.randint(1, 8))))
        runs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2])]
        rng.shuffle(runs)
        values = torch.tensor([rng.randrange(-(2**31), 2**31) for _, n in runs for _ in range(n)], dtype=torch.int32)
        done = 0
        for start, length in runs:
            wanted[start : start + length] = values[done : done + length]
            done += length
        starts = torch.tensor([s for s, _ in runs], dtype=torch.int64)
        apply_staged_writes(target, starts, torch.tensor([n for _, n in runs], dtype=torch.int64), values)
        assert torch.equal(target, wanted)
