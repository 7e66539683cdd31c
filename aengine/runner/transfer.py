"""Host arrays to the device, without the host waiting."""

from __future__ import annotations

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(column: npt.NDArray, device: torch.device) -> Tensor:
    """The array on the device. It is copied into pinned memory first, so the caller may write to it again at once, and
    torch keeps that memory until the copy to the device has run."""
    tensor = torch.from_numpy(column)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
