"""Which rows of a decode step begin with the same blocks, and read the keys of these together.

    rows' block tables           groups               tiles of sequences, items of keys
    ┌ 7 3 9 9 ..               ┌ rows 0, 1, 4 ─┐
    ├ 7 3 9 2 ..   ─ choose ─> │ 3 blocks      ├─> columns on the device, which kernels/shared_prefix.py reads
    ├ 5 1 ..                   └ rows ..       ┘
    └ ..

A hit in the prefix cache gives a row the blocks of others, so equal blocks are equal keys. Steps with such groups are
of a kind of their own, with graphs of their own: others launch what they would without all this. Who shares what
changes with the rows of the batch alone, so the groups are looked for when these change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.shared_prefix import ITEM_COLUMNS, SEQ_COLUMNS, PrefixSizes, SharedKeys
from ..block_tables import BlockTables, Rows
from ..request_state import RequestState
from ..transfer import send
from ..weights.step_rows import StepRows

LEAST_TOKENS = 512
"""Tokens of the shortest prefix that is worth a look; the others that are looked at are twice as long, and so on."""
LEAST_ROWS = 4
LEAST_SAVED = 1 << 26
"""Numbers of keys and values that a layer need not read again, below which another launch costs about as much as it
saves: measured on an H100, where the L2 cache has them; 32,768 tokens with 8 key-value heads of 128."""
Blocks = npt.NDArray[np.int32]
_LARGEST_HEAD = 128
_GRAIN = 64  # chunks are a multiple of this many keys
LEAST_CHUNK = 256


class Group(NamedTuple):
    """Rows that begin with the same blocks."""

    members: Rows  # [k]: places in the batch
    num_blocks: int

    @property
    def saved(self) -> int:
        """Number of blocks that need not be read again."""
        return (len(self.members) - 1) * self.num_blocks


def find_groups(table: Blocks, rows: Rows, num_blocks: Rows, least: int) -> list[Group]:
    """Return groups of at least `LEAST_ROWS` of the rows, which have ``least`` blocks in common or more.

    Blocks are compared at few places, each twice as far as the one before: the one is chosen that saves the most, and
    then again among the rows that are left. How much the rows of a group really have in common is counted exactly.

    Args:
        table: int32 [max_num_seqs, width], on the host.
        rows: [n] of the batch.
        num_blocks: [n]: how many blocks of each row are full.
    """
    longest = int(num_blocks.max())
    places = [least << i for i in range((longest // least).bit_length())]
    at = table[rows[:, None], np.array(places, dtype=np.int64) - 1]
    at[num_blocks[:, None] < places] = -1
    columns = dict(zip(places, at.T.tolist(), strict=True))
    groups: list[Group] = []
    left: Sequence[int] = range(len(rows))
    while found := _at_best_place(columns, left):
        for seqs in found:
            members = np.array(seqs)
            num_common = _num_common(table[rows[members], : num_blocks[members].min()])
            if num_common >= least:
                groups.append(Group(members, num_common))
        taken = {seq for seqs in found for seq in seqs}
        left = [seq for seq in left if seq not in taken]
    return groups


def _at_best_place(columns: Mapping[int, Sequence[int]], left: Sequence[int]) -> list[list[int]]:
    """Return the groups among the rows ``left`` at the place that saves the most. ``columns``: the rows' blocks by
    place, -1 where a row has none."""
    most, best, chosen = 0, 0, set[int]()
    for place, blocks in columns.items():
        counts = Counter([blocks[seq] for seq in left])
        many = {block for block, count in counts.items() if count >= LEAST_ROWS and block >= 0}
        saved = place * sum(counts[block] - 1 for block in many)
        if saved > most:
            most, best, chosen = saved, place, many
    groups: dict[int, list[int]] = {block: [] for block in chosen}
    for seq in left if chosen else ():
        if columns[best][seq] in chosen:
            groups[columns[best][seq]].append(seq)
    return list(groups.values())


def _num_common(blocks: Blocks) -> int:
    differs = (blocks != blocks[0]).any(0)
    return int(differs.argmax()) if differs.any() else len(differs)


class NoPrefixes:
    """Each sequence reads its keys by itself."""

    def of_step(self, rows: Tensor, seq_lens: Tensor, window: int | None) -> SharedKeys | None:
        """Return which sequences of the step that is run read keys together, in layers of this kind, over memory that
        graphs replay. rows: int64 [n]; seq_lens: int32 [n]."""
        return None


NO_PREFIXES = NoPrefixes()


class SharedPrefixes(NoPrefixes, StepRows):
    """The kinds of decode steps: those of ``step_rows``, each without and with prefixes that are read together."""

    @classmethod
    def of(
        cls,
        heads: Collection[tuple[int, int, int]],
        dtype: torch.dtype,
        groups: Collection[int],
        requests: RequestState,
        tables: BlockTables,
        step_rows: StepRows,
    ) -> SharedPrefixes | None:
        """Return those of layers without a window. ``heads``: query heads, key-value heads and size, of each kind;
        ``groups``: the KV groups. None: they have several block tables, or it does not pay, or the heads are so large
        that a tile of queries does not fit every GPU."""
        if len(groups) != 1 or max(size for _, _, size in heads) > _LARGEST_HEAD:
            return None
        queries = max(num_heads // num_kv_heads for num_heads, num_kv_heads, _ in heads)
        sizes = PrefixSizes.of(len(requests.in_use), queries, max(own[1] for own in heads), dtype)
        if min(sizes.tile_seqs, sizes.num_seqs) < LEAST_ROWS:
            return None
        (group,) = groups
        of_token = 2 * max(num_kv_heads * size for _, num_kv_heads, size in heads)
        return cls(sizes, group, of_token, requests, tables, step_rows)

    def __init__(
        self,
        sizes: PrefixSizes,
        group: int,
        token_size: int,
        requests: RequestState,
        tables: BlockTables,
        step_rows: StepRows,
    ) -> None:
        """``group``: the KV group; ``token_size``: numbers of a token's keys and values in a layer."""
        device = requests.token_ids.device
        self._token_size = token_size
        self.sizes, self._step_rows = sizes, step_rows
        self._requests, self._tables, self._group = requests, tables, group
        self._block_size = tables.groups[group].block_size
        self.kinds = tuple(2 * kind + shares for kind in step_rows.kinds for shares in (0, 1))
        self.shares = False  # whether the step that is run is of the second kind
        self._is_kept = False  # `shares` stays what it is
        self._seen: tuple[int, bytes] | None = None  # rows that were looked at last, and when
        self._found = False
        counts = (sizes.num_items * ITEM_COLUMNS, sizes.num_tiles * sizes.tile_seqs, sizes.num_seqs * SEQ_COLUMNS)
        self._columns = np.full(sum(counts), -1, dtype=np.int32)
        self._columns[-counts[2] :] = 0
        self._on_device = torch.from_numpy(self._columns.copy()).to(device)
        items, members, of_seqs = np.split(self._columns, np.cumsum(counts)[:2])
        self._host = (
            items.reshape(-1, ITEM_COLUMNS),
            members.reshape(-1, sizes.tile_seqs),
            of_seqs.reshape(-1, SEQ_COLUMNS),
        )

    def of_step(self, rows: Tensor, seq_lens: Tensor, window: int | None) -> SharedKeys | None:
        if window is not None or not self.shares:
            return None
        columns = self._on_device.split([part.size for part in self._host])
        items, members, of_seqs = (a.view(b.shape) for a, b in zip(columns, self._host, strict=True))
        return SharedKeys(items, members, of_seqs[: len(rows)], rows, seq_lens)

    @property
    def kind(self) -> int:  # type: ignore[override]
        return 2 * self._step_rows.kind + self.shares

    def choose(self, rows: Rows) -> None:
        """See `StepRows`; the one below has chosen already."""
        if self._is_kept:
            return
        seen = self._tables.num_replaced, rows.tobytes()
        if seen != self._seen:
            self._seen, self._found = seen, self._look(rows)
        self.shares = self._found

    @contextmanager
    def only(self, kind: int) -> Iterator[None]:
        before = self.shares, self._is_kept
        self.shares, self._is_kept = bool(kind % 2), True
        try:
            with self._step_rows.only(kind // 2):
                yield
        finally:
            self.shares, self._is_kept = before

    def _look(self, rows: Rows) -> bool:
        """Look for groups, and send them to the device. Returns whether it is worth it."""
        if len(rows) < LEAST_ROWS or len(rows) > self.sizes.num_seqs:
            return False
        size = self._block_size
        num_blocks = self._requests.num_computed_tokens[rows] // size
        groups = find_groups(self._tables.on_host[self._group], rows, num_blocks, -(-LEAST_TOKENS // size))
        if sum(group.saved for group in groups) * size * self._token_size < LEAST_SAVED:
            return False
        self._lay_out(groups, rows)
        send(self._columns.copy(), self._on_device)
        return True

    def _lay_out(self, groups: list[Group], rows: Rows) -> None:
        """Cut groups into tiles, the tiles' keys into items, all about as long; those that save the most come first."""
        sizes, size = self.sizes, self._block_size
        items, members, of_seqs = self._host
        items[:, 0], members[...], of_seqs[...] = -1, -1, 0
        tiles: list[tuple[Rows, int]] = []
        for group in sorted(groups, key=lambda group: -group.saved):
            num_tiles = -(-len(group.members) // sizes.tile_seqs)
            if len(tiles) + num_tiles <= sizes.num_tiles:
                tiles += [(part, group.num_blocks * size) for part in np.array_split(group.members, num_tiles)]
        share = max(LEAST_CHUNK, -(-sum(num_keys for _, num_keys in tiles) // sizes.num_chunks))
        first = 0
        for tile, (seqs, num_keys) in enumerate(tiles):
            chunk = -(-num_keys // (-(-num_keys // share) * _GRAIN)) * _GRAIN
            begins = np.arange(0, num_keys, chunk)
            own = items[first : first + len(begins)]
            own[:, 0], own[:, 1], own[:, 2] = tile, rows[seqs[0]], begins
            own[:, 3] = np.minimum(begins + chunk, num_keys)
            members[tile, : len(seqs)] = seqs
            of_seqs[seqs, 0], of_seqs[seqs, 2] = num_keys, len(begins)
            of_seqs[seqs, 1] = first * sizes.tile_seqs + np.arange(len(seqs))
            first += len(begins)
