"""How the products of experts are cut on a GPU: measured tilings where there are some, else by arithmetic.

`expert_tilings.json` holds what `benchmarks/moe.py --tune` has measured, by device and shape:

    {"NVIDIA H200": {"128x2048x768x8": [[4, "pairs", 1, [4, 1024, 4, 1], [4, 256, 4, 1]], ...]}}

The shape is experts x hidden size x intermediate size x experts a token. An entry holds up to that many tokens; then
come the way, the slots of a block, and the tiles of the first and of the second product, as `ProductTile` lists them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .grouped_codes import CodeKind

MAX_PAIR_TOKENS = 4
"""With so few tokens hardly two share an expert, and each pair reads its expert's weights by itself: no sorting."""
MIN_GROUPED_TOKENS = 16_384
"""From here on the grouped product of torch takes over, where it takes the weights."""


class ExpertShape(NamedTuple):
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


class ProductTile(NamedTuple):
    block_n: int  # output features that a program computes
    block_k: int
    num_warps: int
    num_stages: int


class ExpertTiling(NamedTuple):
    """The way and the tiles for both products of a layer.

    pairs     each pair of a token and an expert alone, one row at a time
    blocks    pairs sorted by expert, in blocks of ``block_m`` slots of one expert
    grouped   pairs sorted by expert, torch's grouped product
    """

    way: Literal["pairs", "blocks", "grouped"]
    block_m: int
    first: ProductTile
    second: ProductTile


def choose_tiling(
    device: str, shape: ExpertShape, num_tokens: int, can_group: bool, kind: CodeKind | None = None
) -> ExpertTiling:
    """Return the tiling for a step.

    Args:
        device: its name
        can_group: whether torch's grouped product takes the weights
        kind: of codes with a scale a group; None: the weights are others
    """
    for entry in _tables().get(device, {}).get(str(shape) if kind is None else f"{shape} {kind}", ()):
        max_tokens, way, block_m, first, second = entry
        if num_tokens <= max_tokens and (way != "grouped" or can_group):
            return ExpertTiling(way, block_m, ProductTile(*first), ProductTile(*second))
    return default_tiling(shape, num_tokens, can_group, kind)


def default_tiling(shape: ExpertShape, num_tokens: int, can_group: bool, kind: CodeKind | None = None) -> ExpertTiling:
    """Return the tiling that arithmetic suggests for an expert product that was not measured.

    Up to some 64 tokens an expert the time is that of reading weights. So blocks are as narrow as the tensor cores
    allow, since padding costs, and tiles are large enough that some 200 KB of weights are on their way to each
    multiprocessor: two programs of three stages of 36 KB. With more tokens an expert it is that of the products, and
    large tiles save reads from the L2 cache: from 2048 tokens on, 256 rows of gate and up, or 128 of down, by 128 slots
    were the fastest on an H200, or nearly so.
    """
    if kind is not None:
        return _tiling_of_codes(shape, num_tokens, kind)
    if num_tokens <= MAX_PAIR_TOKENS:
        return ExpertTiling("pairs", 1, ProductTile(2, 1024, 2, 1), ProductTile(2, 256, 1, 1))
    if can_group and num_tokens >= MIN_GROUPED_TOKENS:
        return ExpertTiling("grouped", 1, ProductTile(64, 64, 4, 3), ProductTile(128, 64, 4, 3))
    average = num_tokens * shape.top_k / shape.num_experts
    if average <= 16:
        return ExpertTiling("blocks", 16, ProductTile(64, 128, 4, 3), ProductTile(128, 128, 4, 3))
    if average <= 32:
        return ExpertTiling("blocks", 32, ProductTile(64, 128, 4, 3), ProductTile(128, 128, 4, 3))
    if average <= 96:
        return ExpertTiling("blocks", 64, ProductTile(64, 64, 4, 4), ProductTile(128, 64, 4, 4))
    return ExpertTiling("blocks", 128, ProductTile(128, 64, 8, 4), ProductTile(128, 64, 8, 4))


def _tiling_of_codes(shape: ExpertShape, num_tokens: int, kind: CodeKind) -> ExpertTiling:
    """For codes with a scale a group: what was the fastest, or nearly so, for those of gpt-oss-20b in MXFP4 and of
    Qwen3-30B-A3B in FP8 and in 4 bits on an H100. A row by itself makes numbers of codes for one token alone, which of
    4 bits takes longer than to read them; of FP8 more than 64 slots a block have too many sums for the registers."""
    has_8_bits = kind in ("int8", "uint8", "e4m3")
    if num_tokens <= (MAX_PAIR_TOKENS if has_8_bits else 1):
        unit = 16 if has_8_bits else 32
        return ExpertTiling("pairs", 1, _pair_tile(shape.hidden_size, unit), _pair_tile(shape.intermediate_size, unit))
    average = num_tokens * shape.top_k / shape.num_experts
    tile = ProductTile(64, 128, 4, 3)
    for block_m, most in ((16, 16), (32, 32), (64, 96)):
        if average <= most or (block_m == 64 and kind == "e4m3"):
            is_wide = block_m == 64 and kind == "e4m3"
            return ExpertTiling("blocks", block_m, tile, tile._replace(block_n=128) if is_wide else tile)
    return ExpertTiling("blocks", 128, tile._replace(block_k=64), tile._replace(block_k=64))


def _pair_tile(k: int, unit: int) -> ProductTile:
    """For rows of ``k`` columns in units of 16 bytes: as many are read at once as leave few beyond the row."""
    units = next((units for units in (128, 64, 32) if -(-k // (unit * units)) * unit * units <= 1.35 * k), 16)
    return ProductTile(8 if units == 32 else 4, unit * units, 2 if units == 64 else 4, 1)


@cache
def _tables() -> dict[str, dict[str, list[list[Any]]]]:
    tables: dict[str, dict[str, list[list[Any]]]] = json.loads(
        Path(__file__).with_name("expert_tilings.json").read_text()
    )
    return tables
