"""Copy pages, which are a row of each of many slabs, together into one tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import uses_triton


class Slabs:
    """Tensors of one shape and dtype, [num_pages, width] each, contiguous, where they will stay."""

    def __init__(self, slabs: Sequence[Tensor]) -> None:
        assert all(slab.is_contiguous() and slab.shape == slabs[0].shape for slab in slabs)
        self.slabs = slabs
        self.addresses = torch.tensor([slab.data_ptr() for slab in slabs], dtype=torch.int64, device=slabs[0].device)


def gather_pages(slabs: Slabs, rows: Tensor, out: Tensor) -> None:
    """Set ``out[i, s] = slabs[s][rows[i]]``.

    Args:
        rows: int64 [n]
        out: [n, num_slabs, width], contiguous, of the slabs' dtype
    """
    if uses_triton(out):
        from .triton import copy_pages as triton_op

        return triton_op.gather_pages(slabs.addresses, rows, out)
    for i, slab in enumerate(slabs.slabs):
        torch.index_select(slab, 0, rows, out=out[:, i])
    return None


def scatter_pages(slabs: Slabs, rows: Tensor, source: Tensor) -> None:
    """Set ``slabs[s][rows[i]] = source[i, s]``, as above; no row is there twice."""
    if uses_triton(source):
        from .triton import copy_pages as triton_op

        return triton_op.scatter_pages(slabs.addresses, rows, source)
    for i, slab in enumerate(slabs.slabs):
        slab.index_copy_(0, rows, source[:, i])
    return None
