"""Which body of an op runs: torch on the CPU, Triton on CUDA.

The Triton bodies live in ``triton/``, one module an op, imported when first needed: a CPU worker never imports Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from ..errors import InternalError

__all__ = ["no_body", "torch_bodies", "triton_everywhere", "uses_triton"]

_everywhere = False


def uses_triton(tensor: Tensor) -> bool:
    """Whether the op on ``tensor`` takes its Triton body."""
    return tensor.is_cuda or _everywhere


def triton_everywhere() -> AbstractContextManager[None]:
    """Within: CPU tensors take the Triton bodies too. For tests, in Triton's interpreter (TRITON_INTERPRET=1)."""
    return _set_everywhere(True)


def torch_bodies() -> AbstractContextManager[None]:
    """Within `triton_everywhere`: the torch bodies again."""
    return _set_everywhere(False)


@contextmanager
def _set_everywhere(value: bool) -> Iterator[None]:
    global _everywhere
    before, _everywhere = _everywhere, value
    try:
        yield
    finally:
        _everywhere = before


def no_body(op: str, tensor: Tensor) -> InternalError:
    """The error of an op that the runner of ``tensor``'s device does not use."""
    return InternalError(f"{op} has no body for device {tensor.device}: the CPU's runner alone uses it")
