"""The product of blocks of slots, each of one expert, by codes with a scale a group: as expert_blocks.py, but codes
become numbers of 16 bits as they are multiplied, as in grouped_tiles.py, which says how.

Bytes: the codes and scales of each touched expert once for every block of its slots, all but the first out of the L2
cache; operations: 2 N K for every slot of a block that is used, and some 4 to make a number of a code.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertCodes, ExpertGate
from .expert_frames import BlockKernels, store_block
from .grouped_parts import constants, pointers
from .grouped_tiles import add_tile, load_tile, values_of_tile, way_of, whole
from .launch import is_hopper, launch_next_and_wait, max_shared_memory


def _fit(
    matrices: ExpertCodes, tile: ProductTile, x: Tensor, size: int, block_m: int, gate: ExpertGate | None
) -> ProductTile:
    given, k, rows = constants(matrices.codes), x.shape[1], 1 if gate is None else 2
    is_narrow = way_of(matrices.codes, x.dtype) == "sums" and given["GROUPS"] > 1
    tile = tile._replace(
        block_n=min(tile.block_n, max(16, triton.next_power_of_2(size))),
        block_k=max(32, min(tile.block_k, given["GROUP"] if is_narrow else tile.block_k, triton.next_power_of_2(k))),
    )
    while _shared_bytes(tile, block_m, rows, given["UNIT"], x.element_size()) > max_shared_memory():
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        else:
            tile = tile._replace(block_k=tile.block_k // 2)
    return tile


def _shared_bytes(tile: ProductTile, block_m: int, rows: int, unit: int, itemsize: int) -> int:
    """Shared memory needed at most: codes, their scales and inputs of some stages; or the outputs on their way.
    ``rows``: of codes for each output feature."""
    wide = tile.block_n * rows
    stage = wide * tile.block_k * 16 // unit + wide * tile.block_k // 16 * 4 + block_m * tile.block_k * itemsize
    return max((stage + 64) * tile.num_stages, 4 * wide * block_m)


def _pointers(matrices: ExpertCodes, tile: ProductTile, gate: ExpertGate | None) -> tuple[Any, ...]:
    own, *others = pointers(matrices.codes)
    assert own is not None
    tiles = None
    if is_hopper():
        units, is_wide = tile.block_k * own.shape[1] // matrices.shape[2], gate is not None and gate.is_interleaved
        tiles = TensorDescriptor.from_tensor(own, [tile.block_n * (2 if is_wide else 1), units])
    return tiles, own, *others


def _constants(matrices: ExpertCodes, x: Tensor) -> dict[str, Any]:
    return constants(matrices.codes) | {
        "ALL_ROWS": len(matrices.codes.codes),
        "WAY": way_of(matrices.codes, x.dtype),
    }


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_blocks(
    x_ptr, w_tiles, w_ptr, scale_ptr, zero_ptr, offset_ptr, row_scale_ptr, out_ptr, bias_ptr, order_ptr, experts_ptr,
    num_pairs, K: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, RAISED: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, ALL_ROWS: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr, WAY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ALL: rows of an expert, those of gate and up; ALL_ROWS: of all experts."""
    launch_next_and_wait(PDL)
    expert = tl.load(experts_ptr + tl.program_id(1))
    if expert < 0:
        return
    # Rows of gate and up that alternate are one tile, else two.
    WIDE: tl.constexpr = 2 * BN if GATE != "" and INTERLEAVED else BN
    TWICE: tl.constexpr = GATE != "" and not INTERLEAVED
    begin = expert * ALL + tl.program_id(0) * WIDE
    n = begin + tl.arange(0, WIDE)
    is_row = tl.program_id(0) * WIDE + tl.arange(0, WIDE) < (N if TWICE else ALL)
    pairs = tl.load(order_ptr + tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM))
    is_pair = pairs < num_pairs
    k = tl.arange(0, BK)[None, :]
    x_ptrs = x_ptr + (pairs // PAIRS_A_ROW).to(tl.int64)[:, None] * K + k
    y = tl.zeros((WIDE, BM), tl.float32)
    v = tl.zeros((WIDE, BM), tl.float32)
    # Scales come as bytes, or far apart, so that no copy brings them ahead: they are loaded one round before their use.
    scale, zero, offset = values_of_tile(
        scale_ptr, zero_ptr, offset_ptr, n, is_row, 0, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, EVEN
    )
    if TWICE:
        up_scale, up_zero, up_offset = values_of_tile(
            scale_ptr, zero_ptr, offset_ptr, N + n, is_row, 0, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, EVEN
        )
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        next_scale, next_zero, next_offset = values_of_tile(
            scale_ptr, zero_ptr, offset_ptr, n, is_row, k0 + BK, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, False
        )
        if EVEN:
            x = tl.load(x_ptrs + k0, mask=is_pair[:, None], other=0.0).T
        else:
            x = tl.load(x_ptrs + k0, mask=is_pair[:, None] & (k0 + k < K), other=0.0).T
        w = load_tile(w_tiles, w_ptr, begin, k0, ALL_ROWS, K, UNIT, WIDE, BK, EVEN)
        y = add_tile(y, w, x, scale, zero, offset, KIND, WAY, UNIT, WIDE, BK)
        scale, zero, offset = next_scale, next_zero, next_offset
        if TWICE:
            next_scale, next_zero, next_offset = values_of_tile(
                scale_ptr, zero_ptr, offset_ptr, N + n, is_row, k0 + BK, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, False
            )
            w = load_tile(w_tiles, w_ptr, N + begin, k0, ALL_ROWS, K, UNIT, WIDE, BK, EVEN)
            v = add_tile(v, w, x, up_scale, up_zero, up_offset, KIND, WAY, UNIT, WIDE, BK)
            up_scale, up_zero, up_offset = next_scale, next_zero, next_offset
    store_block(
        whole(y, WAY), whole(v, WAY), n, is_row, pairs, is_pair, out_ptr, row_scale_ptr, bias_ptr, N, BM, BN, TWICE,
        GATE, ALPHA, LIMIT, BIAS,
    )  # fmt: skip


KERNELS = BlockKernels(_multiply_blocks, _fit, _pointers, _constants)
