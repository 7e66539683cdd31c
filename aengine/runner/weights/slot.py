"""Where a tensor of the checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

__all__ = ["Slot"]


class Slot(NamedTuple):
    """A layer names the tensors it wants; the loader checks their shapes and hands them over."""

    name: str  # as in the checkpoint, in transformers' spelling
    shape: tuple[int, ...]
    set: Callable[[Tensor], None]
