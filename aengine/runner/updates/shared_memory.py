"""Tensors in a device's memory that another process shares (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelLoadError


def shared_tensor(entry: Sequence[Any], device: torch.device) -> Tensor:
    """Return a tensor over the memory of another process: name, dtype, shape, strides, offset, and the handle and sizes
    of its storage, as `IpcTensors` makes them. It must not outlive the call. Raises ModelLoadError."""
    name, dtype, shape, strides, offset, handle = entry
    if device.type != "cuda":
        raise ModelLoadError(f"{name} is shared by CUDA IPC, and this worker computes on {device}")
    storage_class: Any = torch.UntypedStorage
    try:
        # The first item is the device as the other process counts them.
        storage = storage_class._new_shared_cuda(device.index or 0, *handle[1:])
    except RuntimeError as error:
        raise ModelLoadError(f"{name}: the memory that another process shares can't be opened: {error}") from error
    tensor = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    return tensor.set_(storage, offset, tuple(shape), tuple(strides))
