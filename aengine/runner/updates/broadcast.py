"""`Broadcast`: weights that a trainer sends to all ranks through a process group of torch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ModelLoadError

GROUP = "aengine-weights"
"""Prefix of the group's keys in the store."""
_LIST_BYTES = 256 << 20  # bytes of the tensors that come by NCCL at a time, and of those that are put meanwhile


class _Coming(NamedTuple):
    """A tensor on its way."""

    name: str
    tensor: Tensor
    work: Any
    begun: float


class Broadcast:
    """A group whose rank 0 is the trainer; the engine's ranks follow it. Every call ends after ``timeout`` seconds."""

    def __init__(
        self, host: str, port: int, rank: int, size: int, backend: str, timeout: float, device: torch.device
    ) -> None:
        """Meet the others at the trainer's TCPStore. Raises ModelLoadError: it is not there in time, or this device is
        no GPU, which NCCL needs."""
        if backend == "nccl" and device.type != "cuda":
            raise ModelLoadError(
                f"backend='nccl' sends from GPU to GPU, and this worker computes on {device}: use 'gloo'"
            )
        self._patience = patience = timedelta(seconds=timeout)
        self._device = device
        self._most_ahead = int(backend == "nccl")  # lists of tensors that are on their way while one is put
        try:
            store = dist.PrefixStore(GROUP, dist.TCPStore(host, port, is_master=False, timeout=patience))
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = patience
                self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, patience)
                self._device = torch.device("cpu")
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(f"the trainer's group at {host}:{port} was not joined: {error}") from error

    def receive(self, entries: Sequence[Sequence[Any]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the next tensors, of these names, dtypes and shapes, by NCCL several at a time while others come.
        Raises ModelLoadError: one did not come in time, or the trainer has gone."""
        coming: deque[list[_Coming]] = deque()
        for batch in _batches(entries, _LIST_BYTES * self._most_ahead):
            coming.append([self._begin(*entry) for entry in batch])
            if len(coming) > self._most_ahead:
                yield [self._end(each) for each in coming.popleft()]
        for begun in coming:
            yield [self._end(each) for each in begun]

    def _begin(self, name: str, dtype: str, shape: Sequence[int]) -> _Coming:
        # A trainer that sends fewer bytes is not noticed by gloo: what it leaves as it is must be no number.
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._device)
        if tensor.dtype.is_floating_point:
            tensor.fill_(torch.nan)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            return _Coming(name, tensor, self._group.broadcast([tensor], options), time.monotonic())
        except RuntimeError as error:
            raise _not_come(name, error) from error

    def _end(self, coming: _Coming) -> tuple[str, Tensor]:
        """Wait for a tensor, those before which have come."""
        try:
            # NCCL waits on the host only if a time is given, and counts from the beginning, when others were to come.
            coming.work.wait(timedelta(seconds=time.monotonic() - coming.begun) + self._patience)
        except RuntimeError as error:
            raise _not_come(coming.name, error) from error
        return coming.name, coming.tensor


def _batches(entries: Sequence[Sequence[Any]], most_bytes: int) -> Iterator[list[Sequence[Any]]]:
    """Divide tensors into lists of at most ``most_bytes``, or of one."""
    batch: list[Sequence[Any]] = []
    left = most_bytes
    for entry in entries:
        num_bytes = getattr(torch, entry[1]).itemsize * math.prod(entry[2])
        if batch and num_bytes > left:
            yield batch
            batch, left = [], most_bytes
        batch.append(entry)
        left -= num_bytes
    if batch:
        yield batch


def _not_come(name: str, error: RuntimeError) -> ModelLoadError:
    return ModelLoadError(f"{name} did not come from the trainer: {error}")
