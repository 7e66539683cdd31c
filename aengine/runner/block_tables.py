"""Which KV blocks each row owns: table[group, row, i] holds its tokens i * block_size to (i + 1) * block_size - 1.

Each KV group has its table, and its block size. Entries before a row's window are stale, or were never written: the
host has given those blocks to others, and no kernel looks at them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch

from ..errors import InternalError
from ..ipc.messages import KVCacheGroup, NewRequest, most_ahead
from .staged_writes import StagedArena

Rows = npt.NDArray[np.int64]


def table_shape(groups: Sequence[KVCacheGroup], max_num_seqs: int, max_model_len: int) -> tuple[int, int]:
    """Return the shape of the arena's part for the tables of all groups, one below the other."""
    return len(groups) * max_num_seqs, max(-(-max_model_len // group.block_size) for group in groups)


class BlockTables:
    """The block tables on the device, and the length of each. The host decides which request has which block; this only
    keeps the lists."""

    def __init__(self, arena: StagedArena, *, num_blocks: int, groups: Sequence[KVCacheGroup]) -> None:
        self._arena = arena
        self._num_blocks = num_blocks
        self.groups = tuple(groups)
        part = arena.part("block_table")
        self.table = part.view(len(groups), -1, part.shape[1])  # int32 [num_groups, max_num_seqs, max_blocks_per_seq]
        self.of_group = self.table.unbind(0)  # a view for each group: int32 [max_num_seqs, max_blocks_per_seq]
        sizes = [group.block_size for group in groups]
        self.block_sizes = torch.tensor(sizes, dtype=torch.int32, device=part.device)  # [num_groups]
        self._num_rows = self.table.shape[1]
        self.on_host = np.zeros(self.table.shape, dtype=np.int32)  # the tables once all is applied that is staged
        self.num_replaced = 0  # how often a row got a new request
        # Blocks of each row, for each group: up to the row's last one.
        self._lengths = [np.zeros(self._num_rows, dtype=np.int64) for _ in groups]
        self.has_states = any(group.kind == "state" for group in groups)
        self.most_unsettled = 1 + most_ahead(groups, 0)  # tokens of a request that are computed as if some were guessed
        # Page of the state, for each group and row; the device's table has it too.
        self._state_pages = np.zeros((len(groups), self._num_rows), dtype=np.int64)
        self._fresh: list[int] = []  # blocks given out since `take_fresh`, which still hold what their last owner wrote

    def replace(self, request: NewRequest) -> None:
        """Write the blocks of a new request, which may hold computed tokens already."""
        row, block_ids = request.req_idx, request.block_ids
        self.num_replaced += 1
        spans = request.block_spans or (0, len(block_ids))
        if len(spans) != 2 * len(self.groups):
            raise InternalError(f"row {row} was given blocks of {len(spans) // 2} groups, not {len(self.groups)}")
        start = 0
        for i, group in enumerate(self.groups):
            begin, count = spans[2 * i : 2 * i + 2]
            own = block_ids[start : start + count]
            self._lengths[i][row] = begin
            self._append(i, row, np.array(own, dtype=np.int32))
            self._fresh.extend(own[max(0, -(-request.num_computed_tokens // group.block_size) - begin) :])
            start += count

    def append(self, rows: array[int], block_ids: array[int], groups: array[int]) -> None:
        """Append a block to the table of each of ``rows``, in the KV group of the same place in ``groups`` (empty: the
        first group). A row that gets several blocks is named several times."""
        for row, block_id, group in zip_longest(rows, block_ids, groups, fillvalue=0):
            if not 0 <= row < self._num_rows or not 0 <= group < len(self.groups):
                raise InternalError(
                    f"a block for row {row} of group {group}, but there are {self._num_rows} rows and "
                    f"{len(self.groups)} groups"
                )
            self._append(group, row, np.array([block_id], dtype=np.int32))
        self._fresh.extend(block_ids)

    def take_fresh(self) -> Rows:
        """Return the ids of the blocks given out since the last call, int64 [m] on the host."""
        fresh, self._fresh = self._fresh, []
        return np.array(fresh, dtype=np.int64)

    def checked(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Return the block ids. Raises InternalError if one of them does not exist."""
        if not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise InternalError(f"blocks outside 0 to {self._num_blocks - 1} are to be copied")
        return block_ids

    def state_pages(self, rows: Rows) -> Rows | None:
        """Return the pages of the rows' states, host int64 [num_groups, num_reqs]; None if the model has none."""
        return self._state_pages[:, rows] if self.has_states else None

    def check_room(self, rows: Rows, seq_lens: Rows) -> None:
        """Raise InternalError if a row has more tokens than its blocks hold: they would be written into another
        request's KV."""
        for length, group in zip(self._lengths, self.groups, strict=True):
            short = seq_lens > length[rows] * group.block_size
            if short.any():
                row, need = int(rows[short][0]), int(seq_lens[short][0])
                raise InternalError(
                    f"row {row} needs room for {need} tokens, but has {length[row]} blocks of {group.block_size}"
                )

    def _append(self, group: int, row: int, block_ids: npt.NDArray[np.int32]) -> None:
        end = int(self._lengths[group][row]) + len(block_ids)
        if end > self.table.shape[2]:
            raise InternalError(f"row {row} would have {end} blocks, but a row holds {self.table.shape[2]}")
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks:
            raise InternalError(f"row {row} was given a block outside 0 to {self._num_blocks - 1}")
        if len(block_ids) and self.groups[group].kind == "state":
            self._state_pages[group, row] = block_ids[0]
        self._arena.stage("block_table", group * self._num_rows + row, end - len(block_ids), block_ids)
        self.on_host[group, row, end - len(block_ids) : end] = block_ids
        self._lengths[group][row] = end
