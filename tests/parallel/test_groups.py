"""Groups of ranks: what they exchange, between real processes too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from aengine.runner.distributed.group import ALONE

RANK = """
import json, sys
from datetime import timedelta
import torch
from torch.distributed import FileStore
from aengine.runner.distributed.gloo_group import GlooGroup

fd, rank, size = map(int, sys.argv[1:4])
group = GlooGroup(FileStore(f"/proc/self/fd/{fd}", size), rank, size, timedelta(seconds=60))
parts = torch.randn(size, 5, 7, generator=torch.Generator().manual_seed(1))
own = parts[rank]
residual = torch.ones(5, 7)
group.add_sum(residual, own)
half = group.sum(own.bfloat16())
expected_half = sum(part.bfloat16().float() for part in parts).bfloat16()
facts = {
    "gather": torch.equal(group.gather(own), parts),
    "residual": torch.equal(residual, 1.0 + (parts[0] + parts[1])),
    "one_row": torch.equal(group.sum(own[:1]), (parts[0] + parts[1])[:1]),
    "half": half.dtype == torch.bfloat16 and torch.equal(half, expected_half),
    "ids": group.gather(torch.tensor([rank])).flatten().tolist(),
    "strided": torch.equal(group.gather(own.t()), parts.transpose(1, 2)),
    "empty": list(group.gather(own[:0]).shape),
}
if "die" in sys.argv:
    if rank == 0:
        sys.exit(0)
    try:
        group.sum(own)
    except RuntimeError as error:
        facts["error"] = type(error).__name__
print(json.dumps(facts))
"""


def start_ranks(size: int, *args: str) -> list[subprocess.Popen[str]]:
    """Processes that meet in an anonymous file."""
    fd = os.memfd_create("meeting")
    try:
        return [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(fd), str(rank), str(size), *args],
                pass_fds=[fd],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
    finally:
        os.close(fd)


@pytest.mark.slow
def test_processes_exchange_tensors_and_notice_a_death() -> None:
    processes = start_ranks(2, "die")
    out = [process.communicate(timeout=120)[0] for process in processes]
    assert out[0] == ""
    facts = json.loads(out[1])
    assert facts.pop("error") == "RuntimeError"
    assert facts.pop("ids") == [0, 1]
    assert facts.pop("empty") == [2, 0, 7]
    assert all(facts.values()), facts


def test_a_group_of_one() -> None:
    residual, partial = torch.ones(2, 3), torch.full((2, 3), 2.0)
    ALONE.add_sum(residual, partial)
    assert residual.eq(3.0).all()
    assert ALONE.sum(partial) is partial
    assert ALONE.gather(partial).shape == (1, 2, 3)
    assert (ALONE.rank, ALONE.size) == (0, 1)
