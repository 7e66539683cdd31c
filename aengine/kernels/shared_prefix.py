"""Keys that several sequences of a decode step begin with: which ones read them together, and memory for their parts.

    keys of the prefix                                      own keys
    ┌─────────────┬─────────────┬─────────────┐             ┌─────┐
    │ item 0      │ item 1      │ item 2      │  sequence 0 │     │
    │  the queries of a tile of sequences,    │           1 ├───┬─┘
    │  [TILE, head_dim] at a time             │           2 ├───┴───┐
    └─────────────┴─────────────┴─────────────┘             └───────┘

Each item is a program for each key-value head: it reads a chunk of the prefix once, for the query heads of all
sequences of the tile, and leaves a part of the softmax for each. Then the launch that attends to the sequences' own
keys (decode_attention.py) adds these parts to its own. So a prefix is read once for each tile, and multiplied by
matrix instructions whose rows are all of use, where each sequence by itself fills 16 rows with one group of heads.

Who shares is decided on the host (runner/attention/shared_prefixes.py): the columns lie in memory that graphs replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ITEM_COLUMNS = 4
"""An item's tile (-1: none), a row whose block table has the prefix, begin and end of the item's keys."""

SEQ_COLUMNS = 4
"""How many keys of a sequence are read together with others' (0: none), the place of its first part, how many parts
there are. The place of a part is item * tile_seqs + the sequence's place in the tile, behind the parts of own keys."""

_TILE_ROWS = 64
_ROWS_OF_FLOAT32 = 16  # there are no matrix instructions for it
_PROGRAMS = 132


class PrefixSizes(NamedTuple):
    """What an engine's plans are made for."""

    tile_seqs: int  # most sequences of a tile
    num_tiles: int  # most tiles of a step
    num_chunks: int  # about how many items share the keys of all tiles
    num_seqs: int  # most sequences of a step

    @property
    def num_items(self) -> int:
        return self.num_chunks + self.num_tiles

    @property
    def num_parts(self) -> int:
        return self.num_items * self.tile_seqs

    @classmethod
    def of(cls, max_num_seqs: int, group: int, num_kv_heads: int, dtype: torch.dtype) -> PrefixSizes:
        """``group``: query heads of a key-value head, of those layers that have the most."""
        rows = _TILE_ROWS if dtype.itemsize == 2 else _ROWS_OF_FLOAT32
        tile_seqs = max(1, rows // (1 << (group - 1).bit_length()))
        num_tiles = max(8, 2 * -(-max_num_seqs // tile_seqs))
        return cls(tile_seqs, num_tiles, max(1, _PROGRAMS // num_kv_heads), max_num_seqs)


class SharedKeys(NamedTuple):
    """The prefixes of a step, as the kernels read them: int32 on the device."""

    items: Tensor  # [num_items, ITEM_COLUMNS]
    members: Tensor  # [num_tiles, tile_seqs]: sequences of each tile, -1: none
    of_seqs: Tensor  # [n, SEQ_COLUMNS]
    rows: Tensor  # int64 [n], those of the step
    seq_lens: Tensor  # [n], with the new token
