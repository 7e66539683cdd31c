"""Pages between the slabs of a pool and one tensor: a few programs a row of a slab, in one launch.

At least: 16 bytes a word (read, written); no arithmetic to speak of. The slabs lie where torch has put them: each
program finds its own by an address.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_TILE = 2048


def gather_pages(addresses: Tensor, rows: Tensor, out: Tensor) -> None:
    _launch(addresses, rows, out, gathers=True)


def scatter_pages(addresses: Tensor, rows: Tensor, source: Tensor) -> None:
    _launch(addresses, rows, source, gathers=False)


def _launch(addresses: Tensor, rows: Tensor, staged: Tensor, *, gathers: bool) -> None:
    num_rows, num_slabs, width = staged.shape
    grid = triton.cdiv(width, _TILE), num_slabs, num_rows
    launch(_copy_kernel, grid, addresses, rows, staged, width, GATHERS=gathers, TILE=_TILE)


@triton.jit
def _copy_kernel(
    addresses: tl.tensor, rows: tl.tensor, staged: tl.tensor, width: int, GATHERS: tl.constexpr, TILE: tl.constexpr
) -> None:
    slab, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    page = tl.load(addresses + slab).to(tl.pointer_type(staged.dtype.element_ty)) + tl.load(rows + row) * width
    place = staged + (row * tl.num_programs(1) + slab) * width
    if GATHERS:
        tl.store(place + at, tl.load(page + at, mask=at < width), mask=at < width)
    else:
        tl.store(page + at, tl.load(place + at, mask=at < width), mask=at < width)
