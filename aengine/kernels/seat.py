"""Which body of an op runs: torch on the CPU; on CUDA the Triton body, where there is one."""

from __future__ import annotations

from torch import Tensor

from ..errors import InternalError

__all__ = ["no_body"]


def no_body(op: str, tensor: Tensor) -> InternalError:
    """The error of an op whose seat for ``tensor``'s device is still empty."""
    return InternalError(f"{op} has no body for device {tensor.device} yet: start the engine with device='cpu'")
