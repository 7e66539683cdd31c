"""Which body of an op runs: torch on the CPU, Triton on CUDA.

The Triton bodies live in ``bodies/``, one module an op, imported when first needed: a CPU worker never imports Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..errors import InternalError

__all__ = ["no_body", "triton_everywhere", "uses_triton"]

_everywhere = False


def uses_triton(tensor: Tensor) -> bool:
    """Whether the op on ``tensor`` takes its Triton body."""
    return tensor.is_cuda or _everywhere


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """Within: CPU tensors take the Triton bodies too. For tests, in Triton's interpreter (TRITON_INTERPRET=1)."""
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before


def no_body(op: str, tensor: Tensor) -> InternalError:
    """The error of an op whose seat for ``tensor``'s device is still empty."""
    return InternalError(f"{op} has no body for device {tensor.device} yet: start the engine with device='cpu'")
