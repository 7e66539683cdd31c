"""Copies host arrays to the device without making the host wait."""

from __future__ import annotations

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(column: npt.NDArray, device: torch.device) -> Tensor:
    """Return the array on the device. It is copied into pinned memory first, so the caller may write to it again at
    once, and torch keeps that memory until the copy to the device has run."""
    tensor = torch.from_numpy(column)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send(column: npt.NDArray, out: Tensor) -> None:
    """Write the array to ``out``, which has its shape, in one copy; as `to_device` does it."""
    tensor = torch.from_numpy(column)
    out.copy_(tensor if out.is_cpu else tensor.pin_memory(), non_blocking=True)
