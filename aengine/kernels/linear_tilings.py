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

_SHARED_BYTES = 231_000  # shared memory for the stages of a program; it may have 232,448 bytes on Hopper
_MULTIPROCESSORS = 132  # an H100 and an H200 have so many


class LinearShape(NamedTuple):
    kind: Literal["plain", "gated", "add"]
    out_features: int  # rows of W; with a gate W has twice as many
    in_features: int
    weight_bytes: int = 2  # bytes of an element of W; 1: in FP8
    x_bytes: int = 2  # bytes of an element of x; 1: rounded to FP8
    in_blocks: bool = False  # blocks of 128 x 128 share a scale

    def __str__(self) -> str:
        parts = [self.kind, *(["fp8"] if self.weight_bytes == 1 else []), *(["rounded"] if self.x_bytes == 1 else [])]
        return " ".join([*parts, *(["blocks"] if self.in_blocks else []), f"{self.out_features}x{self.in_features}"])


class StreamedTiling(NamedTuple):
    """Tile sizes of one launch of `kernels/triton/linear_streamed.py`."""

    block_n: int  # output features; twice as many rows of W with a gate
    block_m: int  # rows of x that a program multiplies
    block_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, is_gated: bool, weight_bytes: int = 2, x_bytes: int = 2) -> int:
        """Shared memory needed at most: a stretch of W and x a stage, and its barriers."""
        row = self.block_n * (2 if is_gated else 1) * weight_bytes + self.block_m * x_bytes
        return (row * self.block_k + 64) * self.num_stages


def choose_tiling(device: str, shape: LinearShape, num_rows: int) -> StreamedTiling | None:
    """Return the tiling for a product of two or more rows; None: as on other GPUs. ``device``: its name."""
    for max_rows, *tiling in _tables().get(device, {}).get(str(shape), ()):
        if num_rows <= max_rows:
            return None if tiling == [None] else StreamedTiling(*tiling)
    return _default_tiling(shape, num_rows)


def choose_in_order(device: str, shape: LinearShape, num_rows: int) -> StreamedTiling:
    """Return the tiling for a product of 16-bit numbers whose rows have the same bits in each: all tilings add up K in
    the steps of one matrix instruction, from the first column on, in one sum (tests/gpu/test_gpu_batch_invariant.py).
    One row takes that of two."""
    found = choose_tiling(device, shape, max(2, num_rows))
    if found is not None:
        return found
    if num_rows <= 64:
        return StreamedTiling(64, max(16, 1 << (num_rows - 1).bit_length()), 128, 4, 4)
    return StreamedTiling(64, 128, 64, 4, 5) if num_rows <= 128 else StreamedTiling(128, 128, 64, 8, 4)


def measured_tilings() -> Iterator[tuple[LinearShape, int, StreamedTiling]]:
    """Return every tiling that was measured: (shape, most rows, tiling)."""
    for table in _tables().values():
        for name, entries in table.items():
            kind, *more, size = name.split(" ")
            n, k = map(int, size.split("x"))
            widths = (1 if "fp8" in more else 2, 1 if "rounded" in more else 2)
            shape = LinearShape(kind, n, k, *widths, "blocks" in more)  # type: ignore[arg-type]
            yield from ((shape, rows, StreamedTiling(*tiling)) for rows, *tiling in entries if tiling != [None])


def _default_tiling(shape: LinearShape, num_rows: int) -> StreamedTiling | None:
    """Return the fastest tiling, or nearly so, for the shapes of Qwen3-0.6B and Llama-3.1-8B on an H200.

    Up to 64 rows the time is that of reading weights, and of waiting for the first of them. So one program has as many
    rows of x as leaves some 48 programs, and as much on its way as shared memory holds. To split K among programs was
    slower, however their parts were added up.
    """
    if shape.weight_bytes == 1:
        return _default_of_fp8(shape, num_rows)
    is_small = shape.out_features * shape.in_features <= 2**23
    if num_rows > 64:
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


def _default_of_fp8(shape: LinearShape, num_rows: int) -> StreamedTiling | None:
    """`_default_tiling` of weights in FP8, whose x has two terms a row (linear_fp8.py): what was the fastest, or nearly
    so, for Llama-3.1-8B's shapes on an H100. Up to 64 rows a program has as many as leave some 100 programs, and as
    much on its way as shared memory holds; for more there is no room in its registers."""
    is_gated = shape.kind == "gated"
    if shape.x_bytes == 1:
        return _few_rounded(shape, num_rows) if num_rows <= 64 else _default_of_rounded(shape, num_rows)
    if num_rows > 512:
        return None
    if num_rows > 64 and is_gated:
        return StreamedTiling(64, 64, 128, 4, 3)
    if num_rows > 64:
        return StreamedTiling(64, 64, 256, 4, 4) if num_rows <= 128 else StreamedTiling(128, 64, 256, 8, 3)
    block_m = max(8, 1 << (num_rows - 1).bit_length())
    columns = ceil(shape.out_features / 64)
    while block_m > 16 and columns * ceil(num_rows / block_m) < 96:
        block_m //= 2
    is_one_each = columns * ceil(num_rows / block_m) <= _MULTIPROCESSORS
    block_k = 128 if is_gated and block_m == 64 else 256
    if is_one_each and block_m <= 16 and not (is_gated or shape.in_blocks):
        block_k = 512
    one = StreamedTiling(64, block_m, block_k, 4, 1)
    room = _SHARED_BYTES // (1 if is_one_each else 2)
    return one._replace(num_stages=max(3, min(9, room // one.shared_bytes(is_gated, 1))))


def _few_rounded(shape: LinearShape, num_rows: int) -> StreamedTiling:
    """`_default_of_fp8` of up to 64 rows of x rounded to FP8: a program has all of them, if that leaves enough."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    if shape.kind == "gated":
        tilings = {16: StreamedTiling(64, 16, 256, 4, 3), 32: StreamedTiling(64, 32, 256, 4, 5)}
        return tilings.get(block_m, StreamedTiling(128, 64, 128, 4, 5))
    columns, room = ceil(shape.out_features / 64), _SHARED_BYTES
    if block_m > 32 and columns < 96:
        block_m = 32
        if 2 * columns > _MULTIPROCESSORS:  # the last ones would wait for the first to end
            room //= 2
    one = StreamedTiling(64, block_m, 512 if block_m <= 32 and not shape.in_blocks else 256, 4, 1)
    return one._replace(num_stages=min(9, room // one.shared_bytes(False, 1, 1)))


def _default_of_rounded(shape: LinearShape, num_rows: int) -> StreamedTiling:
    """`_default_of_fp8` of x rounded to FP8: the smallest tiles of which a multiprocessor has one at most; else large
    ones, which read less. In blocks, whose sums take more registers, the smaller ones."""
    if shape.kind == "gated":
        return StreamedTiling(64, 128, 128, 4, 3) if num_rows <= 128 else StreamedTiling(128, 128, 128, 8, 4)
    small, large = StreamedTiling(64, 128, 256, 4, 4), StreamedTiling(128, 128, 128, 4, 6)
    for tiling in (StreamedTiling(64, 64, 256, 4, 4), small) if shape.in_blocks else (small, large):
        if ceil(shape.out_features / tiling.block_n) * ceil(num_rows / tiling.block_m) <= _MULTIPROCESSORS:
            return tiling
    return small if shape.in_blocks else StreamedTiling(128, 256, 128, 8, 4)


@cache
def _tables() -> dict[str, dict[str, list[list[Any]]]]:
    tables: dict[str, dict[str, list[list[Any]]]] = json.loads(
        Path(__file__).with_name("linear_tilings.json").read_text()
    )
    return tables
