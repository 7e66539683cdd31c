"""`GlooGroup`: ranks whose tensors are on CPUs of one machine, by gloo over its loopback interface."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.all_reduce import sum_of

_LOOPBACK = "127.0.0.1"


class GlooGroup:
    """A `TensorGroup` over gloo.

    A sum is the ranks' parts gathered, then added in float32 in the order of the ranks: gloo's own sum adds in an order
    that depends on the number of elements, so that a token's sum would depend on its batch.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Meet the other ranks at ``store``.

        ``timeout``: longest wait for another rank, here and in every call.

        Raises RuntimeError, here and in every call: a rank did not come in time, or has died.
        """
        self.rank = rank
        self.size = size
        gloo: Any = dist.ProcessGroupGloo  # torch has no types for it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        self._group = gloo(store, rank, size, options)

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        residual.add_(self._sum(partial))

    def sum(self, partial: Tensor) -> Tensor:
        return self._sum(partial).to(partial.dtype)

    def gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            self._group.allgather([list(gathered.unbind(0))], [x.contiguous()]).wait()
        return gathered

    def warm_up(self, hidden_size: int, dtype: torch.dtype) -> None:
        pass

    def rehearsal(self) -> AbstractContextManager[None]:
        raise NotImplementedError("steps on a CPU need nothing loaded")

    def _sum(self, partial: Tensor) -> Tensor:
        """Return the sum in float32."""
        return sum_of(self.gather(partial).unbind())
