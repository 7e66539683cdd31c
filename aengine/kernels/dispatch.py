"""Which implementation of an op runs: torch on the CPU, Triton on any other device.

The Triton kernels lie in ``triton/``, one module an op, imported when first needed: a CPU worker never imports Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

_everywhere = False


def uses_triton(tensor: Tensor) -> bool:
    """Return whether the op on ``tensor`` takes its Triton kernel."""
    return not tensor.is_cpu or _everywhere


def triton_everywhere() -> AbstractContextManager[None]:
    """Run ops on CPU tensors by their Triton kernels: for tests, in Triton's interpreter (TRITON_INTERPRET=1)."""
    return _set_everywhere(True)


def torch_reference() -> AbstractContextManager[None]:
    """Run ops on CPU tensors by torch again, inside `triton_everywhere`."""
    return _set_everywhere(False)


@contextmanager
def _set_everywhere(value: bool) -> Iterator[None]:
    global _everywhere
    before, _everywhere = _everywhere, value
    try:
        yield
    finally:
        _everywhere = before
