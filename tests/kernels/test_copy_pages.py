"""Pages of many slabs, together in one tensor and back, against a loop."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.copy_pages import Slabs, gather_pages, scatter_pages


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [1, 51, 2049])
@pytest.mark.parametrize("by_torch", [True, False])
def test_against_a_loop(
    rng: random.Random, dtype: torch.dtype, width: int, by_torch: bool, request: pytest.FixtureRequest
) -> None:
    device = torch.device("cpu") if by_torch else request.getfixturevalue("triton_device")
    num_pages, num_slabs, num_rows = 7, rng.randint(1, 5), rng.randint(1, 6)
    numbers = torch.randint(0, 250, (num_slabs, num_pages, width), dtype=dtype)
    slabs = [slab.clone().to(device) for slab in numbers]
    rows = torch.tensor(rng.sample(range(num_pages), num_rows))
    staged = torch.zeros(num_rows, num_slabs, width, dtype=dtype, device=device)
    gather_pages(Slabs(slabs), rows.to(device), staged)
    assert torch.equal(staged.cpu(), numbers[:, rows].transpose(0, 1))
    targets = torch.tensor(rng.sample(range(num_pages), num_rows))
    scatter_pages(Slabs(slabs), targets.to(device), staged)
    wanted = numbers.clone()
    wanted[:, targets] = numbers[:, rows]
    assert torch.equal(torch.stack(slabs).cpu(), wanted)
