"""AWQ's 4-bit weights: W = (codes - zeros) * scales, a scale and a zero for each group of inputs and each output.

    tensor     in the checkpoint        what
    qweight    int32 [K, N / 8]         eight outputs a word, output i of it at bit 4 * [0, 4, 1, 5, 2, 6, 3, 7][i]
    qzeros     int32 [K / group, N / 8] likewise
    scales     float16 [K / group, N]

That is the version "gemm" of AutoAWQ. Which matrices are quantised is what the files say: those that have a qweight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..weight import StoredTensor, random_scales
from . import faults
from .matrices import Asked, StoredMatrices
from .unpacked import UnpackedCodes, UnpackedFormat, codes_of_words

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqFormat(UnpackedFormat):
    group_size: int  # -1: all inputs are a group
    is_symmetric: bool = False  # zeros are the codes' middle
    name: str = "awq"

    def sizes(self, in_features: int) -> tuple[int, int]:
        return 4, in_features if self.group_size < 0 else self.group_size

    def codes_tensors(self, out_features: int, in_features: int) -> list[StoredTensor]:
        group = in_features if self.group_size < 0 else self.group_size
        if in_features % group or out_features % 8:
            raise ValueError(
                f"{out_features} x {in_features} are no multiples of 8 codes a word and group_size={self.group_size}"
            )
        num_groups, num_words = in_features // group, out_features // 8
        in_dim = 0 if num_groups > 1 else None
        count, middle = out_features * in_features, faults.middle_word(4)
        zeros = partial(torch.full, (num_groups, num_words), middle, dtype=torch.int32) if self.is_symmetric else None
        of_zeros = partial(faults.of_middle, word=middle, said="zero_point=false") if self.is_symmetric else None
        scales = random_scales(8), faults.of_scale
        return [
            StoredTensor("qweight", (in_features, num_words), torch.int32, count, 1, 0, turned=True),
            StoredTensor("qzeros", (num_groups, num_words), torch.int32, 0, 1, in_dim, None, True, zeros, of_zeros),
            StoredTensor("scales", (num_groups, out_features), torch.float32, 0, 1, in_dim, None, True, *scales),
        ]

    def unpack(self, tensors: Mapping[str, Tensor]) -> UnpackedCodes:
        codes = codes_of_words(tensors["qweight"], 4, 0, _ORDER)
        zeros = codes_of_words(tensors["qzeros"], 4, 0, _ORDER)
        group = codes.shape[1] if self.group_size < 0 else self.group_size
        return UnpackedCodes("uint4", codes, tensors["scales"], group, zeros)


def read_awq(asked: Asked) -> StoredMatrices | None:
    """Return what a quantization_config describes; None if its method is another one. Raises ModelLoadError."""
    values = asked.values
    if asked.config.get("quant_method") != "awq":
        return None
    version = values.text("version", values.text("format", "gemm")).lower()
    bits = values.integer("bits", values.integer("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise asked.refusal(f"AWQ of version {version!r:.40} in {bits} bits (version 'gemm' in 4 bits is read)")
    group_size = values.integer("group_size", values.integer("q_group_size", 128, least=-1), least=-1)
    if group_size == 0:
        raise values.error("group_size", "must be -1 or above 0")
    form = AwqFormat(
        asked.plain, asked.device.type == "cpu", asked.dequantises, group_size, not values.flag("zero_point", True)
    )
    return StoredMatrices(form.name, asked.stored, lambda name: form)
