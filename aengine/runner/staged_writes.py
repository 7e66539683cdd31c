"""Row changes gathered on the host, sent in one copy, applied by one op.

All persistent int32 state of the runner lies in one flat tensor, the arena, each part a [rows, width] view of it:

    ┌──────────────┬────────────────────────────────┬────────────────────────────┐
    │ scalars      │ token_ids                      │ block_table                │   int32
    │ [R, 16]      │ [R, max_model_len]             │ [R, max_blocks_per_seq]    │
    └──────────────┴────────────────────────────────┴────────────────────────────┘

so a change anywhere is (start in the arena, values), and a step's changes are one packed buffer:

    starts int64 [k] | lengths int64 [k] | values int32 [sum(lengths)]

The buffer is made anew each step: the host never writes to memory that a copy to the device may still read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.staged_write import apply_staged_writes
from .lazy_zeros import lazy_zeros
from .transfer import to_device


class StagedArena:
    """The parts named in ``shapes`` (rows, width), zeroed. Untouched rows cost no memory on the CPU."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        self._device = device
        size = sum(rows * width for rows, width in shapes.values())
        self._data = lazy_zeros((size,), torch.int32, device)
        self._begin: dict[str, int] = {}
        self._shapes = dict(shapes)
        begin = 0
        for name, (rows, width) in shapes.items():
            self._begin[name] = begin
            begin += rows * width
        self._starts: list[int] = []
        self._values: list[npt.NDArray[np.int32]] = []

    def part(self, name: str) -> Tensor:
        """Return int32 [rows, width], a view of the arena."""
        rows, width = self._shapes[name]
        begin = self._begin[name]
        return self._data[begin : begin + rows * width].view(rows, width)

    def stage(self, name: str, row: int, column: int, values: npt.NDArray[np.int32]) -> None:
        """Write ``values`` into ``row`` from ``column`` on, at the next `apply`, until when they must not change."""
        rows, width = self._shapes[name]
        assert 0 <= row < rows and column >= 0 and column + len(values) <= width, (name, row, column, len(values))
        if len(values):
            self._starts.append(self._begin[name] + row * width + column)
            self._values.append(values)

    def apply(self) -> None:
        """Apply what has been staged since the last call; writes must not overlap."""
        if not self._starts:
            return
        count = len(self._starts)
        header = np.empty((2, count), dtype=np.int64)
        header[0] = self._starts
        header[1] = [len(v) for v in self._values]
        packed = np.concatenate((header.reshape(-1).view(np.int32), *self._values))
        self._starts, self._values = [], []
        sent = to_device(packed, self._device)
        starts_lengths = sent[: 4 * count].view(torch.int64)
        apply_staged_writes(self._data, starts_lengths[:count], starts_lengths[count:], sent[4 * count :])
