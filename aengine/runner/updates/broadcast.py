"""`Broadcast`: weights that a trainer sends to all ranks through a process group of torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ModelLoadError

GROUP = "aengine-weights"
"""Prefix of the group's keys in the store."""


class Broadcast:
    """A group whose rank 0 is the trainer; the engine's ranks follow it. Every call ends after ``timeout`` seconds."""

    def __init__(
        self, host: str, port: int, rank: int, size: int, backend: str, timeout: float, device: torch.device
    ) -> None:
        """Meet the others at the trainer's TCPStore. Raises ModelLoadError: it is not there in time."""
        patience = timedelta(seconds=timeout)
        self._device = device
        try:
            store = dist.PrefixStore(GROUP, dist.TCPStore(host, port, is_master=False, timeout=patience))
            if backend == "gloo":
                self._group: Any = dist.ProcessGroupGloo(store, rank, size, patience)
                self._device = torch.device("cpu")
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = patience
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(f"the trainer's group at {host}:{port} was not joined: {error}") from error

    def receive(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return the next tensor. Raises ModelLoadError: it did not come in time, or the trainer has gone."""
        # A trainer that sends fewer bytes is not noticed by gloo: what it leaves as it is must be no number.
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if dtype.is_floating_point:
            tensor.fill_(torch.nan)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise ModelLoadError(f"{name} did not come from the trainer: {error}") from error
        return tensor
