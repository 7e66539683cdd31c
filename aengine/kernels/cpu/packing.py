"""Makes packed matrices, see layouts.py, of what checkpoints store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .layouts import BLOCK, LAYOUTS, ROWS, Layout

__all__ = ["PackedMatrix", "pack"]

_BYTES_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    kind: str  # a name of LAYOUTS
    out_features: int
    in_features: int
    memory: Tensor  # uint8 [tiles, bytes of a tile]

    @property
    def num_tiles(self) -> int:
        return len(self.memory)


def pack(kind: str, blocks: Tensor) -> PackedMatrix:
    """Pack blocks of a GGUF file, uint8 [out_features, blocks of a row, bytes of a block]. ``kind``: as "q4_1"."""
    layout, (out_features, count, num_bytes) = LAYOUTS[kind], blocks.shape
    in_features = count * BLOCK
    tile_bytes = layout.tile_bytes(in_features)
    memory = torch.empty(-(-out_features // ROWS), tile_bytes, dtype=torch.uint8)
    at_once = max(1, _BYTES_AT_ONCE // (ROWS * count * num_bytes))
    for begin in range(0, len(memory), at_once):
        part = blocks[begin * ROWS : (begin + at_once) * ROWS].contiguous()
        if len(part) % ROWS:
            part = F.pad(part, (0, 0, 0, 0, 0, -len(part) % ROWS))
        tiles = memory[begin : begin + at_once].view(-1, count, layout.block_bytes)
        _PACKERS[kind](part.unflatten(0, (-1, ROWS)), tiles, layout)
    return PackedMatrix(kind, out_features, in_features, memory)


# Each takes blocks uint8 [tiles, 16, blocks of a row, bytes], and writes to [tiles, blocks of a row, bytes].


def _halves(blocks: Tensor, begin: int, tiles: Tensor, end: int) -> None:
    """Move a float16 of each row's block."""
    place = tiles[..., end : end + 2 * ROWS].view(torch.int16)
    place.copy_(blocks[..., begin : begin + 2].view(torch.int16).squeeze(3).transpose(1, 2))


def _quads(codes: Tensor, tiles: Tensor, width: torch.dtype) -> Tensor:
    """Move the bytes of each row's block, four of a row beside each other; returns where they are now. ``width``: of
    numbers that are moved as one, which blocks are multiples of."""
    place = tiles[..., : ROWS * codes.shape[3]].view(width)
    words = codes.view(width)
    place.unflatten(2, (-1, ROWS, 4 // width.itemsize)).copy_(
        words.unflatten(3, (-1, 4 // width.itemsize)).permute(0, 2, 3, 1, 4)
    )
    return place


def _q4_1(blocks: Tensor, tiles: Tensor, layout: Layout) -> None:
    _quads(blocks[..., 4:], tiles, torch.int32)
    _halves(blocks, 0, tiles, layout.code_bytes)
    _halves(blocks, 2, tiles, layout.code_bytes + 2 * ROWS)


def _q8_0(blocks: Tensor, tiles: Tensor, layout: Layout) -> None:
    _quads(blocks[..., 2:], tiles, torch.int16).bitwise_xor_(-0x7F80)  # adds 128 to each byte
    _halves(blocks, 0, tiles, layout.code_bytes)


_PACKERS: dict[str, Callable[[Tensor, Tensor, Layout], None]] = {"q4_1": _q4_1, "q8_0": _q8_0}
