"""Matrices of a GGUF file, kept in fewer bits than plain numbers.

On a CPU they stay the blocks of the file, each matrix in its own type: a half (Q8_0) to a quarter (Q4_0, Q4_K) of 16
bits. Each product dequantises them anew, some rows at a time, which takes some 30 times as long for one row.

On a GPU blocks become `GroupedCodes` as they are loaded, for kernels that multiply codes:

    type                      kind     columns a scale   bits a weight   scale
    Q4_0, IQ4_NL              4 bits   32                4.5             as it is, float16
    Q4_1                      uint4    32                5               as it is, and the minimum
    MXFP4                     e2m1     32                4.25            as it is, a power of two
    Q2_K                      uint4    16                6               a product, and that of the minimum
    Q3_K                      int4     16                5               a product
    Q4_K                      uint4    32                5               a product, and that of the minimum
    IQ4_XS                    iq4_nl   32                4.5             a product
    Q5_0, Q8_0                int8     32                8.5             as it is, float16
    Q5_1                      uint8    32                9               as it is, and the minimum
    Q5_K                      uint8    32                9               a product, and that of the minimum
    Q6_K                      int8     16                9               a product

"As it is" is exact. A product of two numbers, as Q4_K's d * sc, is rounded to float16 beside a power of two a row (4
bytes), by which the row's largest is 1: off by 2^-11 of itself, or, if it is far below the largest, by 2^-25 of that.
Matrices of other types become plain numbers there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ....checkpoint.gguf_file import GGML_TYPES
from ....errors import ModelLoadError
from ..expert_weights import SeparateExperts
from ..weight import ExpertWeights, StoredTensor, Weight
from .grouped import CodedExperts, CodeKind, GroupedCodes, GroupedWeight, pack, pack_halves

_LONG_ROW = 2**14  # numbers
_NUMBERS_AT_ONCE = 2**20
"""Numbers that a product dequantises at once: 4 MiB of float32, whatever the size of the matrix."""
_SCALES = {
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
}
"""Bytes of a block at which a float16 begins; of other types it is the first."""
_CODES_AT_ONCE = 2**24
"""Weights whose blocks become codes at once, some bytes each."""


class GgufWeight(Weight):
    """blocks uint8 [out_features, blocks of a row, bytes of a block], on a CPU; ``type_code``: of ggml's type."""

    __slots__ = ("_blocks", "_type_code")

    def __init__(self, blocks: Tensor, type_code: int, bias: Tensor | None) -> None:
        self._blocks = blocks
        self._type_code = type_code
        self.bias = bias

    def multiply(self, x: Tensor) -> Tensor:
        row_size = x.shape[1]
        outs = []
        for rows in self._blocks.split(max(1, _NUMBERS_AT_ONCE // row_size)):
            numbers = dequantised(rows.flatten(1).numpy(), row_size, self._type_code)
            outs.append(F.linear(x, torch.from_numpy(numbers.reshape(-1, row_size)).to(x.dtype)))
        out = torch.cat(outs, 1)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """Blocks of one of ggml's types; on a GPU one of `CODED_TYPES`. ``compiled``: what activations are for compiled
    kernels of a CPU, which the type is one of; None: there are none."""

    type_code: int
    compiled: Literal["codes", "float32"] | None = None

    @property
    def name(self) -> str:
        return GGML_TYPES[self.type_code].name.lower()

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        _, length, num_bytes = GGML_TYPES[self.type_code]
        shape = (out_features, in_features // length, num_bytes)
        found = [StoredTensor("weight", shape, torch.uint8, out_features * in_features, in_dim=1)]
        if has_bias:
            found.append(StoredTensor("bias", (out_features,), torch.float32, out_features))
        return found

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        """Raises ValueError: a scale is no number. ModelLoadError: the gguf package can't dequantise the type."""
        blocks, bias = tensors["weight"], tensors.get("bias")
        bias = None if bias is None else bias.float()
        if blocks.device.type == "cpu" and self.name.upper() in CODED_TYPES and not _have_numbers(blocks, self.name):
            raise ValueError(f"a scale of its blocks, {self.name.upper()}, is no number")
        if self.compiled is not None:
            from ....kernels.cpu.codes import pack
            from ..compiled import CompiledWeight

            return CompiledWeight(pack(self.name, blocks), bias, as_codes=self.compiled == "codes")
        if blocks.device.type != "cpu":
            return GroupedWeight(grouped_codes(blocks, self.type_code), bias)
        try:
            length = blocks.shape[1] * GGML_TYPES[self.type_code].block_len
            dequantised(blocks[:1].flatten(1).numpy(), length, self.type_code)
        except (NotImplementedError, KeyError, ValueError) as error:
            raise ModelLoadError(f"a matrix is quantised as {self.name}, which the gguf package can't read") from error
        return GgufWeight(blocks, self.type_code, bias)

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        if device.type == "cpu":
            return SeparateExperts(self.make, tensors)
        return CodedExperts(self._codes, num_experts, tensors, device)

    def _codes(self, tensors: Mapping[str, Tensor]) -> GroupedCodes:
        return grouped_codes(tensors["weight"], self.type_code)


def dequantised(stored: NDArray[Any], row_size: int, type_code: int) -> NDArray[Any]:
    """float32, several rows as one, of ``stored`` [..., bytes of a row]. ``row_size``: numbers of a row.

    Raises NotImplementedError, KeyError, ValueError: the gguf package has no such type.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(over="ignore", invalid="ignore"):  # whoever wants no infinities looks at what comes out
        return dequantize(_long_rows(stored, row_size), GGMLQuantizationType(type_code))


def _long_rows(stored: NDArray[Any], row_size: int) -> NDArray[Any]:
    """``stored`` [..., bytes of a row], several rows as one. ``row_size``: numbers of a row.

    The gguf package takes 16 rows at a time. Of short ones that is mostly Python, for which threads wait.
    """
    rows = stored.reshape(-1, stored.shape[-1])
    most = min(len(rows), max(1, _LONG_ROW // row_size))
    count = next(count for count in range(most, 0, -1) if len(rows) % count == 0)
    return rows.reshape(len(rows) // count, -1)


def grouped_codes(blocks: Tensor, type_code: int) -> GroupedCodes:
    """Return the codes of a matrix in blocks: uint8 [out_features, blocks of a row, bytes of a block].

    Raises ValueError: a scale is no number.
    """
    name, length, _ = GGML_TYPES[type_code]
    num_rows = max(1, _CODES_AT_ONCE // (blocks.shape[1] * length))
    whole: GroupedCodes | None = None
    for begin in range(0, len(blocks), num_rows):
        part = CODED_TYPES[name](blocks[begin : begin + num_rows])
        if not _are_numbers(part):
            raise ValueError(f"a scale of its blocks, {name}, is no number")
        if len(part.codes) == len(blocks):
            return part
        if whole is None:
            room: dict[str, Any] = {
                key: tensor.new_empty(len(blocks), *tensor.shape[1:]) for key, tensor in part.tensors().items()
            }
            whole = replace(part, **room)
        own_tensors = whole.tensors()
        for key, tensor in part.tensors().items():
            own_tensors[key][begin : begin + num_rows] = tensor
    assert whole is not None
    return whole


def _have_numbers(blocks: Tensor, name: str) -> bool:
    """Whether the scales of blocks on a CPU are finite: of a float16 the higher byte says it."""
    if name == "mxfp4":
        return not bool((blocks[..., 0] == 255).any())
    return not any(bool((blocks[..., place + 1] & 0x7C == 0x7C).any()) for place in _SCALES.get(name, (0,)))


def _are_numbers(codes: GroupedCodes) -> bool:
    scales = (tensor for name, tensor in codes.tensors().items() if name != "codes")
    return all(bool(tensor.float().isfinite().all()) for tensor in scales)


# -- Each takes blocks uint8 [n, blocks of a row, bytes of a block]. What is of a block lies behind its other parts.


def _bits(data: Tensor, width: int) -> Tensor:
    """uint8 [..., 8 / width, m] of bytes [..., m]: the lowest ``width`` bits of each, those above them, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return data[..., None, :] >> shifts[:, None] & ((1 << width) - 1)


def _columns(data: Tensor, chunk: int, width: int) -> Tensor:
    """uint8 [n, columns] of codes whose chunks of ``chunk`` bytes have, by ``width`` bits, runs of as many columns."""
    return _bits(data.unflatten(-1, (-1, chunk)), width).flatten(1)


def _float16(blocks: Tensor, begin: int) -> Tensor:
    """float16 [n, blocks of a row, 1]: a number of each block, at byte ``begin``."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)


def _exact(kind: CodeKind, codes: Tensor, scale: Tensor, offset: Tensor | None = None) -> GroupedCodes:
    """``scale``, ``offset``: float16 [n, blocks of a row, 1]."""
    return GroupedCodes(
        kind, codes.contiguous(), scale.flatten(1), 32, offset=None if offset is None else offset.flatten(1)
    )


def _rounded(kind: CodeKind, codes: Tensor, group: int, scale: Tensor, offset: Tensor | None = None) -> GroupedCodes:
    """``scale``, ``offset``: float32 [n, blocks of a row, groups of a block]."""
    scale = scale.flatten(1)
    largest = scale.abs().amax(1)
    if offset is not None:
        offset = offset.flatten(1)
        largest = torch.maximum(largest, offset.abs().amax(1))
    row_scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    parts = [None if part is None else (part / row_scale[:, None]).half() for part in (scale, offset)]
    assert parts[0] is not None
    return GroupedCodes(kind, codes.contiguous(), parts[0], group, offset=parts[1], row_scale=row_scale)


def _q4_0(blocks: Tensor, kind: CodeKind) -> GroupedCodes:
    return _exact(kind, pack_halves(blocks[..., 2:].flatten(1)), _float16(blocks, 0))


def _q4_1(blocks: Tensor) -> GroupedCodes:
    return _exact("uint4", pack_halves(blocks[..., 4:].flatten(1)), _float16(blocks, 0), _float16(blocks, 2))


def _mxfp4(blocks: Tensor) -> GroupedCodes:
    scale = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)
    return GroupedCodes("e2m1", pack_halves(blocks[..., 1:].flatten(1)), scale, 32)


def _q5(blocks: Tensor, high: int) -> Tensor:
    """uint8 [n, columns] of Q5_0 and Q5_1: 32 highest bits at byte ``high``, then the lower four of each."""
    bits = _bits(blocks[..., high : high + 4, None], 1).flatten(2)
    return (_bits(blocks[..., high + 4 :], 4).flatten(2) | bits << 4).flatten(1)


def _q5_0(blocks: Tensor) -> GroupedCodes:
    return _exact("int8", _q5(blocks, 2).view(torch.int8) - 16, _float16(blocks, 0))


def _q5_1(blocks: Tensor) -> GroupedCodes:
    return _exact("uint8", _q5(blocks, 4), _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: Tensor) -> GroupedCodes:
    return _exact("int8", blocks[..., 2:].flatten(1).view(torch.int8), _float16(blocks, 0))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of Q4_K and Q5_K, float32, of 12 bytes: the first four of both, whose highest two
    bits are those of the last four, and then the lower four bits of these."""
    scale, low = packed[..., :4], packed[..., 8:]
    minimum = packed[..., 4:8]
    scales = torch.cat((scale & 63, low & 15 | scale >> 6 << 4), -1)
    minima = torch.cat((minimum & 63, low >> 4 | minimum >> 6 << 4), -1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> GroupedCodes:
    scales, minima = _six_bits(blocks[..., 4:16])
    codes = pack(_columns(blocks[..., 16:], 32, 4))
    return _rounded("uint4", codes, 32, _float16(blocks, 0).float() * scales, -_float16(blocks, 2).float() * minima)


def _q5_k(blocks: Tensor) -> GroupedCodes:
    scales, minima = _six_bits(blocks[..., 4:16])
    high = _bits(blocks[..., 16:48], 1).flatten(1)
    codes = _columns(blocks[..., 48:], 32, 4) | high << 4
    return _rounded("uint8", codes, 32, _float16(blocks, 0).float() * scales, -_float16(blocks, 2).float() * minima)


def _q6_k(blocks: Tensor) -> GroupedCodes:
    low = _columns(blocks[..., :128], 64, 4)
    codes = (low | _columns(blocks[..., 128:192], 32, 2) << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _rounded("int8", codes, 16, _float16(blocks, 208).float() * scales)


def _q2_k(blocks: Tensor) -> GroupedCodes:
    scales = blocks[..., :16]
    codes = pack(_columns(blocks[..., 16:80], 32, 2))
    d, dmin = _float16(blocks, 80).float(), _float16(blocks, 82).float()
    return _rounded("uint4", codes, 16, d * (scales & 15).float(), -dmin * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> GroupedCodes:
    high = _bits(blocks[..., :32], 1).flatten(1)
    codes = pack((_columns(blocks[..., 32:96], 32, 2) | high << 2) + 4)  # 0 to 7 mean -4 to 3
    low, top = _bits(blocks[..., 96:104], 4).flatten(2), _bits(blocks[..., 104:108], 2).flatten(2)
    scales = (low | top << 4).float() - 32
    return _rounded("int4", codes, 16, _float16(blocks, 108).float() * scales)


def _iq4_xs(blocks: Tensor) -> GroupedCodes:
    low = _bits(blocks[..., 4:8], 4).transpose(-1, -2).flatten(2)
    top = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(2)
    scales = (low | top << 4).float() - 32
    return _rounded("iq4_nl", pack_halves(blocks[..., 8:].flatten(1)), 32, _float16(blocks, 0).float() * scales)


CODED_TYPES: dict[str, Callable[[Tensor], GroupedCodes]] = {
    "Q4_0": partial(_q4_0, kind="int4"),
    "IQ4_NL": partial(_q4_0, kind="iq4_nl"),
    "Q4_1": _q4_1,
    "MXFP4": _mxfp4,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
"""What makes the codes of a type that a GPU multiplies so."""
