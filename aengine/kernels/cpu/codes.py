"""Products with packed matrices: at once, or as ops of a tape that is being recorded.

packed = pack("q4_1", blocks)
y = multiply(packed, activations(x, norm=(weight, eps)))  # [rows, out_features], float32
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import Activation
from ..grouped_codes import GroupedCodes, unpack_halves
from .packed.layouts import BLOCK, INT16_BLOCK_BYTES, LAYOUTS, NUMBERS, ROWS
from .packed.packing import SOURCES
from .packed.products import ALONE, GATES
from .packed.tiles import ROWS_OF_CHUNK
from .tape import Argument, empty, launch

_BYTES_OF_CHUNK = 2**17
_BYTES_MAPPED = 2**26
_LINE = 64
_CHUNKS = 4, 128
"""Least and most chunks of a row's product, where there are as many tiles."""


class _LargePages:
    """Memory of packed matrices, in pages of 2 MiB where the system has them: by those of 4 KiB, a core reads a half to
    two thirds as many GB/s."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped = mmap.mmap(-1, mmap.PAGESIZE)
        self._used = mmap.PAGESIZE

    def empty(self, rows: int, row_bytes: int) -> Tensor:
        """uint8 [rows, row_bytes], beginning at a cache line."""
        size = rows * row_bytes
        with self._lock:
            if self._used + size > len(self._mapped):  # what is left of it was never written, and costs nothing
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._mapped, self._used = mmap.mmap(-1, max(_BYTES_MAPPED, size), flags=flags), 0
                with suppress(OSError):  # the system has none
                    self._mapped.madvise(mmap.MADV_HUGEPAGE)
            own = torch.frombuffer(self._mapped, dtype=torch.uint8, count=size, offset=self._used)
            self._used += -(-size // _LINE) * _LINE
        return own.view(rows, row_bytes)


large_memory = _LargePages().empty
"""See `_LargePages`."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    kind: str  # a name of LAYOUTS or NUMBERS
    out_features: int
    in_features: int
    memory: Tensor  # uint8 [tiles, bytes of a tile]


def pack(kind: str, weight: Tensor, scale: Tensor | None = None) -> PackedMatrix:
    """Pack a matrix.

    ``kind``: of GGUF's types, as "q4_1": ``weight`` uint8 [out_features, blocks of a row, bytes of a block]. "int8":
    int8 [out_features, in_features], and ``scale`` float32 [out_features]. "float16", "bfloat16", "float32": numbers
    [out_features, in_features].
    """
    out_features = len(weight)
    if kind in NUMBERS:
        units = in_features = weight.shape[1]
        tile_bytes = ROWS * NUMBERS[kind] * in_features
    else:
        source, layout = SOURCES[kind], LAYOUTS[kind]
        units = weight[0].nbytes // source.num_bytes
        in_features = units * source.num_blocks * BLOCK
        tile_bytes = layout.tile_bytes(in_features)
    memory = large_memory(-(-out_features // ROWS), tile_bytes)
    stored = weight.contiguous().view(torch.uint8).view(out_features, -1)
    whole = out_features // ROWS
    for begin, rows in ((0, stored[: whole * ROWS]), (whole, stored[whole * ROWS :])):
        if len(rows):
            rows = F.pad(rows, (0, 0, 0, -len(rows) % ROWS)) if len(rows) % ROWS else rows
            words: list[Argument] = [rows, memory[begin:], units, rows.shape[1], tile_bytes]
            launch(f"pack_{kind}", words, len(rows) // ROWS)
    packed = PackedMatrix(kind, out_features, in_features, memory)
    if scale is not None:
        _fill_heads(packed, [scale[:, None]])
    return packed


def pack_grouped(codes: GroupedCodes) -> PackedMatrix | None:
    """Pack codes with a scale a group of columns; None: there is no layout for them."""
    in_features = codes.shape[1]
    group = 0 if codes.group >= in_features else min(codes.group, 256)
    kind = f"{codes.kind}_{group}"
    has_minimum = codes.zero is not None or codes.offset is not None
    if kind not in LAYOUTS or codes.rows > 1 or in_features % (group or BLOCK) or in_features % BLOCK:
        return None
    if has_minimum and not LAYOUTS[kind].has_minimum:
        return None
    scale = codes.scale.float()
    minimum = torch.zeros_like(scale) if codes.zero is None else scale * -codes.zero.float()
    if codes.offset is not None:
        minimum += codes.offset.float()
    if codes.kind == "uint8":
        minimum += 128 * scale  # codes are multiplied less 128
    numbers = [scale / 2 if codes.kind == "e2m1" else scale]  # its values are doubled
    if LAYOUTS[kind].has_minimum:
        numbers.append(minimum)
    if codes.row_scale is not None:
        numbers = [own * codes.row_scale[:, None] for own in numbers]
    packed = pack(kind, unpack_halves(codes.codes) if codes.has_4_bits else codes.codes)
    _fill_heads(packed, [own.repeat_interleave(codes.group // group, 1) if group else own for own in numbers])
    return packed


def pack_int16(weight: Tensor) -> PackedMatrix:
    """Pack numbers [out_features, in_features], whose columns BLOCK divides, as codes of `quantise_int16`."""
    out_features, in_features = weight.shape
    of = quantise_int16(F.pad(weight.float(), (0, 0, 0, -out_features % ROWS)))
    assert of.meta is not None
    pairs = of.x.view(-1, ROWS, in_features // BLOCK, BLOCK // 2, 2).permute(0, 2, 3, 1, 4).flatten(2)
    scales = of.meta.view(len(pairs), ROWS, -1, 4)[..., 0].transpose(1, 2).contiguous()
    memory = large_memory(len(pairs), in_features // BLOCK * INT16_BLOCK_BYTES)
    torch.cat([pairs.view(torch.uint8), scales.view(torch.uint8)], 2, out=memory.view(*pairs.shape[:2], -1))
    return PackedMatrix("int16", out_features, in_features, memory)


def _fill_heads(packed: PackedMatrix, numbers: list[Tensor]) -> None:
    """Write what heads have: float32 [out_features, heads], or [out_features, two a head]."""
    tiles, layout = len(packed.memory), LAYOUTS[packed.kind]
    heads = packed.in_features // (BLOCK * layout.blocks_of_head) if layout.blocks_of_head else 1
    place = packed.memory.view(tiles, heads, -1)[..., : layout.head_bytes].view(torch.float32).unflatten(2, (-1, ROWS))
    both = torch.cat([own.unflatten(1, (heads, -1)) for own in numbers], 2)
    both = F.pad(both, (0, 0, 0, 0, 0, -len(both) % ROWS))
    place.copy_(both.unflatten(0, (tiles, ROWS)).permute(0, 2, 3, 1))


@dataclass(frozen=True, slots=True)
class Activations:
    """What matrices are multiplied with: codes, or the numbers themselves."""

    x: Tensor  # float32 [rows, size], or codes in as much memory as int16
    meta: Tensor | None  # [rows, size / 32, 4] beside codes, see `store_codes`
    form: Literal["float32", "planes", "int16"]


def activations(x: Tensor, norm: tuple[Tensor, float] | None = None, *, as_codes: bool = True) -> Activations:
    """Return ``x`` float32 [rows, size], after RMSNorm by ``norm``: weight float32 [size], eps.

    ``as_codes``: as codes of 16 bits in planes of bytes, with a scale for each 32, which matrices of codes can be
    multiplied with: off by 2^-16 of the largest of the 32, where 8 bits, as llama.cpp has, would be off by 2^-8, and a
    small model would say other things than with its numbers. Else as they are.
    """
    rows, size = x.shape
    assert x.dtype == torch.float32 and x.is_contiguous()
    words: tuple[Argument, ...] = norm or ()
    if as_codes:
        codes = empty(rows, size, torch.int16)
        meta = empty(rows, size // BLOCK * 4, torch.float32)
        launch("norm_quantise" if norm else "quantise", [x, codes, meta, size, *words], rows)
        return Activations(codes, meta, "planes")
    if norm is None:
        return Activations(x, None, "float32")
    out = empty(rows, size, torch.float32)
    launch("norm", [x, out, size, *words], rows)
    return Activations(out, None, "float32")


def quantise_int16(x: Tensor) -> Activations:
    """Return ``x`` float32 [rows, size] as int16 of 14 bits with a scale for each BLOCK."""
    rows, size = x.shape
    assert x.dtype == torch.float32 and x.is_contiguous() and size % BLOCK == 0
    codes, meta = empty(rows, size, torch.int16), empty(rows, size // BLOCK * 4, torch.float32)
    launch("quantise_int16", [x, codes, meta, size], rows)
    return Activations(codes, meta, "int16")


def multiply(packed: PackedMatrix, of: Activations, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, float32 [rows, out_features]. ``bias``: float32. ``out``: memory for it, such as some
    columns of another tensor."""
    if out is None:
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


def activated(packed: PackedMatrix, of: Activations, activation: Activation, bias: Tensor | None = None) -> Tensor:
    """Return activation(x @ weight.T + bias)."""
    out = empty(len(of.x), packed.out_features, torch.float32)
    _launch(f"{activation}{ALONE}", packed, of, out, bias)
    return out


def _launch(
    end: str, packed: PackedMatrix, of: Activations, out: Tensor, bias: Tensor | None, scale: float = 1.0
) -> None:
    assert of.x.shape[1] == packed.in_features and out.stride(1) == 1
    tiles, tile_bytes = packed.memory.shape
    if end in GATES:
        tiles //= 2
    least, most = _CHUNKS
    wanted = max(least, min(most, tiles * tile_bytes // _BYTES_OF_CHUNK))
    of_chunk = max(1, tiles // wanted)
    chunks = -(-tiles // of_chunk)
    size = packed.in_features if packed.kind in NUMBERS else packed.in_features // BLOCK
    launch(
        f"product_{packed.kind}_{of.form}_{end}",
        [
            *(of.x, of.meta, packed.memory, out, out.stride(0), bias, scale, out.shape[1]),
            *(size, tile_bytes, tiles, of_chunk, chunks),
        ],
        len(of.x),
        chunks,
        ROWS_OF_CHUNK,
    )


def embed(packed: PackedMatrix, ids: Tensor, scale: float) -> Tensor:
    """Return ``scale`` times the rows ``ids`` (int64 [n]) of a matrix, float32 [n, in_features]."""
    out = empty(len(ids), packed.in_features, torch.float32)
    sizes = packed.in_features, packed.memory.shape[1]
    launch(f"embed_{packed.kind}", [ids, packed.memory, out, *sizes, float(scale)], len(ids))
    return out
