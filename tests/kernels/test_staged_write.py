"""Ragged writes against a loop of slices."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.dispatch import torch_reference
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


@pytest.mark.parametrize("longest", [1, 40, 9000])
def test_triton_against_the_reference(rng: random.Random, triton_device: torch.device, longest: int) -> None:
    """Also with more runs than a program sums lengths of at a time, and with runs of nothing."""
    num_runs = 1100 if longest == 1 and triton_device.type == "cuda" else 20
    lengths = [rng.choice([0, 1, rng.randint(1, longest), longest]) for _ in range(num_runs)]
    gaps = [rng.randint(0, 5) for _ in lengths]
    starts, size = [], 0
    for length, gap in zip(lengths, gaps):
        starts.append(size + gap)
        size += gap + length
    order = rng.sample(range(num_runs), num_runs)
    columns = torch.tensor([[starts[i] for i in order], [lengths[i] for i in order]])
    values = torch.tensor([rng.randrange(-(2**31), 2**31) for _ in range(sum(lengths))], dtype=torch.int32)
    target = torch.arange(size + 3, dtype=torch.int32)
    got = target.clone().to(triton_device)
    apply_staged_writes(got, *columns.to(triton_device), values.to(triton_device))
    with torch_reference():
        apply_staged_writes(target, *columns, values)
    assert torch.equal(got.cpu(), target)
    apply_staged_writes(got, *columns[:, :0].to(triton_device), values[:0].to(triton_device))
    assert torch.equal(got.cpu(), target)
