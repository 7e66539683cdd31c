"""Products with packed matrices: at once, or as ops of a tape that is being recorded.

packed = pack("q4_1", blocks)
y = multiply(packed, activations(x, norm=(weight, eps)))  # [rows, out_features], float32
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..activation import Activation
from .layouts import BLOCK, ROWS
from .packing import PackedMatrix, pack
from .products import ROWS_OF_CHUNK
from .tape import empty, launch

__all__ = ["Activations", "PackedMatrix", "activations", "add_to", "can_gate", "gated", "multiply", "pack"]

_BYTES_OF_CHUNK = 2**14
_CHUNKS = 8, 128
"""Least and most chunks of a row's product, where there are as many tiles."""


@dataclass(frozen=True, slots=True)
class Activations:
    """What matrices are multiplied with: rows as codes."""

    x: Tensor  # int8 [rows, size]
    meta: Tensor  # [rows, size / 32, 4], see `store_codes`


def activations(x: Tensor, norm: tuple[Tensor, float] | None = None) -> Activations:
    """Return the codes of ``x`` float32 [rows, size], after RMSNorm by ``norm``: weight float32 [size], eps."""
    rows, size = x.shape
    assert x.dtype == torch.float32 and x.is_contiguous()
    codes = empty(rows, size, torch.int8)
    meta = empty(rows, size // BLOCK * 4, torch.float32)
    if norm is None:
        launch("quantise", [x, codes, meta, size], rows)
    else:
        launch("norm_quantise", [x, codes, meta, size, *norm], rows)
    return Activations(codes, meta)


def multiply(packed: PackedMatrix, of: Activations, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, float32 [rows, out_features]. ``bias``: float32."""
    out = empty(len(of.x), packed.out_features, torch.float32)
    _launch("store", packed, of, out, bias)
    return out


def add_to(
    residual: Tensor, packed: PackedMatrix, of: Activations, scale: float = 1.0, bias: Tensor | None = None
) -> None:
    """Add ``scale`` * (x @ weight.T + bias) to ``residual``, float32 [rows, out_features]."""
    _launch("add", packed, of, residual, bias, scale)


def can_gate(packed: PackedMatrix) -> bool:
    """Whether `gated` takes the matrix: its halves must be whole tiles."""
    return packed.out_features % (2 * ROWS) == 0


def gated(packed: PackedMatrix, of: Activations, activation: Activation, bias: Tensor | None = None) -> Tensor:
    """Return activation(x @ gate.T) * (x @ up.T), of a matrix whose rows are those of gate, then those of up."""
    assert can_gate(packed)
    out = empty(len(of.x), packed.out_features // 2, torch.float32)
    _launch(activation, packed, of, out, bias)
    return out


def _launch(
    end: str, packed: PackedMatrix, of: Activations, out: Tensor, bias: Tensor | None, scale: float = 1.0
) -> None:
    assert of.x.shape[1] == packed.in_features and out.stride(1) == 1
    tiles, tile_bytes = packed.memory.shape
    if end not in ("store", "add"):
        tiles //= 2
    least, most = _CHUNKS
    wanted = max(least, min(most, tiles * tile_bytes // _BYTES_OF_CHUNK))
    of_chunk = max(1, tiles // wanted)
    chunks = -(-tiles // of_chunk)
    launch(
        f"product_{packed.kind}_int8_{end}",
        [
            *(of.x, of.meta, packed.memory, out, out.stride(0), bias, scale, out.shape[1]),
            *(packed.in_features // BLOCK, tile_bytes, tiles, of_chunk, chunks),
        ],
        len(of.x),
        chunks,
        ROWS_OF_CHUNK,
    )
