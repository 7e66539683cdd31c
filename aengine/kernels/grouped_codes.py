"""Matrices of codes in 4 or 8 bits with a scale a group of columns: what they are kept as, and what they mean.

    W[n, k] = ((value(code[n, k]) - zero[r, g]) * scale[r, g] + offset[r, g]) * row_scale[n],
    g = k // group, r = n // rows; without a zero, an offset or a row_scale that step is left out.

    kind     codes                       value of a code
    int4     uint8 [N, K / 2]            code - 8
    uint4    uint8 [N, K / 2]            code, 0 to 15
    e2m1     uint8 [N, K / 2]            0, 0.5, 1, 1.5, 2, 3, 4, 6 and, from 8 on, these negative
    iq4_nl   uint8 [N, K / 2]            the 16 numbers of llama.cpp's IQ4_NL
    int8     int8 [N, K]                 code
    uint8    uint8 [N, K]                code
    e4m3     float8_e4m3fn [N, K]        code

Order of codes in 4 bits: of each 32 columns, 16-bit number j of 8 (the lower byte first) has columns j, 8 + j, 16 + j
and 24 + j, from its lowest bits on. So 16 bytes are 32 columns, of which each of four words has columns 2 i, 2 i + 1
and those 8, 16 and 24 behind: what one thread is to have for the matrix instructions of GPUs. `pack` makes it of one
code a byte, `pack_halves` of GGUF's order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

CodeKind = Literal["int4", "uint4", "e2m1", "iq4_nl", "int8", "uint8", "e4m3"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLES: dict[CodeKind, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "uint4": tuple(map(float, range(16))),
    "e2m1": (*_E2M1, *(-value for value in _E2M1)),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
_DTYPES = {"int8": torch.int8, "uint8": torch.uint8, "e4m3": torch.float8_e4m3fn}
_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix [N, K]. All tensors are contiguous.

    Raises ValueError: the tensors do not fit each other, or the shape is none that can be kept so: K must be a multiple
    of 32 (4 bits) or 16 (8 bits), ``group`` a power of two from 16 on, or K or more (one group a row).
    """

    kind: CodeKind
    codes: Tensor  # see above
    scale: Tensor  # [ceil(N / rows), ceil(K / group)]: float32, float16, bfloat16, float8_e4m3fn or float8_e8m0fnu
    group: int  # columns that share a scale
    zero: Tensor | None = None  # uint8, as the scale: subtracted from the value, exactly, before the scale
    offset: Tensor | None = None  # float32, float16 or bfloat16, as the scale: added after it
    row_scale: Tensor | None = None  # float32 [N]: of a checkpoint that has one more scale a matrix
    rows: int = 1  # neighbouring rows that share a scale: 128 of FP8 in blocks

    def __post_init__(self) -> None:
        n, k, least = len(self.codes), self.shape[1], 32 if self.has_4_bits else 16
        if self.codes.dtype != _DTYPES.get(self.kind, torch.uint8):
            raise ValueError(f"codes of kind {self.kind} in {self.codes.dtype}")
        if k % least:
            raise ValueError(f"{k} columns of codes in {4 if self.has_4_bits else 8} bits are no multiple of {least}")
        if self.group < k and (self.group < 16 or self.group & (self.group - 1)):
            raise ValueError(f"groups of {self.group} columns: they must be a power of two, 16 or more, or whole rows")
        of_groups = (-(-n // self.rows), -(-k // self.group))
        for name, tensor, shape, dtypes in (
            ("scale", self.scale, of_groups, _SCALES),
            ("zero", self.zero, of_groups, (torch.uint8,)),
            ("offset", self.offset, of_groups, _SCALES[:3]),
            ("row_scale", self.row_scale, (n,), (torch.float32,)),
        ):
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"a {name} of strides {tensor.stride()}: kernels read it as contiguous")
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype not in dtypes):
                raise ValueError(f"a {name} of {tensor.dtype} {tuple(tensor.shape)} where {shape} is needed")

    @property
    def has_4_bits(self) -> bool:
        return self.kind in _TABLES

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, width = self.codes.shape
        return n, width * 2 if self.has_4_bits else width

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by their fields' names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def copy_from(self, other: GroupedCodes) -> None:
        """Take over what codes of the same shape are, into the memory that these have."""
        for name, tensor in self.tensors().items():
            tensor.copy_(getattr(other, name))


def pack(codes: Tensor) -> Tensor:
    """Return uint8 [..., K / 2] of codes in 4 bits, one a byte: uint8 [..., K] with K a multiple of 32."""
    quarters = codes.unflatten(-1, (-1, 2, 2, 8))
    return (quarters[..., 0, :] | quarters[..., 1, :] << 4).transpose(-1, -2).flatten(-3)


def unpack(codes: Tensor) -> Tensor:
    """Return what `pack` was given."""
    pairs = codes.unflatten(-1, (-1, 8, 2)).transpose(-1, -2)
    return torch.stack((pairs & 15, pairs >> 4), -2).flatten(-4)


def pack_halves(codes: Tensor) -> Tensor:
    """`pack` of codes uint8 [..., K / 2] in the order of GGUF's Q4_0: of each 32 columns byte j of 16 has column j in
    its lower half and column 16 + j in its higher one."""
    both = codes.unflatten(-1, (-1, 1, 16))
    return pack(torch.cat((both & 15, both >> 4), -2).flatten(-3))


def unpack_halves(codes: Tensor) -> Tensor:
    """Return what `pack_halves` was given."""
    halves = unpack(codes).unflatten(-1, (-1, 2, 16))
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)


def values(kind: CodeKind, codes: Tensor) -> Tensor:
    """Return the values of codes, one an element, of any shape: float32."""
    if kind not in _TABLES:
        return codes.float()
    return torch.tensor(_TABLES[kind], dtype=torch.float32, device=codes.device)[codes.int()]


def numbers(codes: GroupedCodes) -> Tensor:
    """Return float32 [N, K]: what the codes mean, by the definition above."""
    n, k = codes.shape
    out = values(codes.kind, unpack(codes.codes) if codes.has_4_bits else codes.codes)
    if codes.zero is not None:
        out -= _spread(codes, codes.zero, n, k)
    out *= _spread(codes, codes.scale, n, k)
    if codes.offset is not None:
        out += _spread(codes, codes.offset, n, k)
    return out if codes.row_scale is None else out.mul_(codes.row_scale[:, None])


def _spread(codes: GroupedCodes, of_groups: Tensor, n: int, k: int) -> Tensor:
    """Return float32 [N, K] of a number a group."""
    rows = of_groups.float().repeat_interleave(codes.rows, 0)[:n]
    return rows.repeat_interleave(min(codes.group, k), 1)[:, :k]
