"""How products of two to some hundred rows are cut on Hopper: as was measured, or else by arithmetic.

`linear_tilings.json` holds what `benchmarks/gpu_linear.py --tune` has measured, by device and shape:

    {"NVIDIA H200": {"add 1024x2048": [[16, null], [32, 64, 16, 256, 4, 5], ...]}}

The shape is the kind, output features x input features. An entry holds up to that many rows; then comes the tiling, as
`StreamedTiling` lists it, or null where the kernels for other GPUs, or the library's, are faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = ["LinearShape", "StreamedTiling", "choose_tiling", "measured_tilings"]

_SHARED_BYTES = 231_000  # shared memory for the stages of a program; it may have 232,448 bytes on Hopper


class LinearShape(NamedTuple):
    kind: Literal["plain", "gated", "add"]
    out_features: int  # rows of W; with a gate W has twice as many
    in_features: int

    def __str__(self) -> str:
        return f"{self.kind} {self.out_features}x{self.in_features}"


class StreamedTiling(NamedTuple):
    """Tile sizes of one launch of `kernels/triton/linear_streamed.py`."""

    block_n: int  # output features; twice as many rows of W with a gate
    block_m: int  # rows of x that a program multiplies
    block_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, is_gated: bool) -> int:
        """Shared memory needed at most: a stretch of W and x, in 16 bit, a stage, and its barriers."""
        rows = self.block_n * (2 if is_gated else 1) + self.block_m
        return (2 * rows * self.block_k + 64) * self.num_stages


def choose_tiling(device: str, shape: LinearShape, num_rows: int) -> StreamedTiling | None:
    """Return the tiling for a product of two or more rows; None: as on other GPUs. ``device``: its name."""
    for max_rows, *tiling in _tables().get(device, {}).get(str(shape), ()):
        if num_rows <= max_rows:
            return None if tiling == [None] else StreamedTiling(*tiling)
    return _default_tiling(shape, num_rows)


def measured_tilings() -> Iterator[tuple[LinearShape, int, StreamedTiling]]:
    """Return every tiling that was measured: (shape, most rows, tiling)."""
    for table in _tables().values():
        for name, entries in table.items():
            kind, size = name.split()
            shape = LinearShape(kind, *map(int, size.split("x")))  # type: ignore[arg-type]
            yield from ((shape, rows, StreamedTiling(*tiling)) for rows, *tiling in entries if tiling != [None])


def _default_tiling(shape: LinearShape, num_rows: int) -> StreamedTiling | None:
    """What was the fastest, or nearly so, for the shapes of Qwen3-0.6B and Llama-3.1-8B on an H200.

    Up to 64 rows the time is that of reading weights, and of waiting for the first of them. So one program has as many
    rows of x as leaves some 48 programs, and as much on its way as shared memory holds. To split K among programs was
    slower, however their parts were added up.
    """
    is_small = shape.out_features * shape.in_features <= 2**23
    if num_rows > 64 or shape.out_features > 2**16:
        return None
    if is_small and (num_rows <= 8 or (shape.kind == "plain" and num_rows > 16)):
        return None
    block_m = padded_rows = max(16, 1 << (num_rows - 1).bit_length())
    columns = ceil(shape.out_features / 64)
    if columns * padded_rows // 16 < 16:  # number of programs
        return None
    while block_m > 16 and columns * padded_rows // block_m < 48:
        block_m //= 2
    is_gated = shape.kind == "gated"
    block_k = 256 if block_m == 16 or (block_m == 32 and not is_gated) else 128
    one = StreamedTiling(64, block_m, block_k, 4, 1)
    return one._replace(num_stages=min(8, _SHARED_BYTES // one.shared_bytes(is_gated)))


@cache
def _tables() -> dict[str, dict[str, list[list[Any]]]]:
    tables: dict[str, dict[str, list[list[Any]]]] = json.loads(
        Path(__file__).with_name("linear_tilings.json").read_text()
    )
    return tables
