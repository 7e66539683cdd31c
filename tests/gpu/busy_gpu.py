"""A worker extension that keeps a rank's GPU busy."""

from __future__ import annotations

import torch

from aengine.workers.loaded import WorkerContext

__all__ = ["BusyGpu"]


class BusyGpu:
    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.rank.index

    def spin(self, rank: int, seconds: int) -> None:
        """Launch a kernel that runs for some ``seconds``; what is launched later waits for it."""
        if self._rank == rank:
            torch.cuda._sleep(seconds * 1_800_000_000)  # clock cycles
