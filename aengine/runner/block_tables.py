"""Which KV blocks each row owns: block_table[row, i] holds its tokens i * block_size to (i + 1) * block_size - 1."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from .staged_writes import StagedArena

__all__ = ["BlockTables"]

Rows = npt.NDArray[np.int64]


class BlockTables:
    """The device table, and how long each row is. The host decides who gets which block; this only keeps the lists."""

    def __init__(self, arena: StagedArena, *, num_blocks: int, block_size: int) -> None:
        self._arena = arena
        self._num_blocks = num_blocks
        self.block_size = block_size
        self.table = arena.part("block_table")  # int32 [max_num_seqs, max_blocks_per_seq]
        self._length = np.zeros(self.table.shape[0], dtype=np.int64)  # [max_num_seqs] blocks of each row
        self._fresh: list[int] = []  # given to someone since take_fresh, and holding what their last owner left

    def replace(self, row: int, block_ids: array[int], num_computed_tokens: int) -> None:
        """A new request's blocks, of which the first hold ``num_computed_tokens`` tokens already."""
        self._length[row] = 0
        self._append(row, np.array(block_ids, dtype=np.int32))
        self._fresh.extend(block_ids[-(-num_computed_tokens // self.block_size) :])

    def append(self, rows: array[int], block_ids: array[int]) -> None:
        """One more block for each of ``rows``; a row that gets several is there several times."""
        for row, block_id in zip(rows, block_ids, strict=True):
            if not 0 <= row < len(self._length):
                raise InternalError(f"a block for row {row}, but there are {len(self._length)} rows")
            self._append(row, np.array([block_id], dtype=np.int32))
        self._fresh.extend(block_ids)

    def take_fresh(self) -> Rows:
        """Host int64 [m]: the blocks that changed hands since the last call."""
        fresh, self._fresh = self._fresh, []
        return np.array(fresh, dtype=np.int64)

    def check_room(self, rows: Rows, seq_lens: Rows) -> None:
        """Raise InternalError if a row's tokens would pass its blocks: they would land in another request's KV."""
        short = seq_lens > self._length[rows] * self.block_size
        if short.any():
            row, need = int(rows[short][0]), int(seq_lens[short][0])
            raise InternalError(
                f"row {row} needs room for {need} tokens, but has {self._length[row]} blocks of {self.block_size}"
            )

    def _append(self, row: int, block_ids: npt.NDArray[np.int32]) -> None:
        end = int(self._length[row]) + len(block_ids)
        if end > self.table.shape[1]:
            raise InternalError(f"row {row} would have {end} blocks, but a row holds {self.table.shape[1]}")
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks:
            raise InternalError(f"row {row} was given a block outside 0 to {self._num_blocks - 1}")
        self._arena.stage("block_table", row, end - len(block_ids), block_ids)
        self._length[row] = end
