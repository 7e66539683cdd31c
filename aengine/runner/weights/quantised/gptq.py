"""GPTQ's weights in 4 or 8 bits: W = (codes - zeros) * scales, a scale and a zero for each group of inputs and output.

    tensor     in the checkpoint                  what
    qweight    int32 [K * bits / 32, N]           the inputs' codes, the first in a word's lowest bits
    qzeros     int32 [K / group, N * bits / 32]   the outputs' zeros likewise; less one, but in format "gptq_v2"
    scales     float16 [K / group, N]
    g_idx      int32 [K]                          the group of each input: with desc_act they are in no order, and
                                                  without it files may lack it

Which matrices are quantised is what the files say: those that have a qweight. With desc_act a rank that has some of the
inputs keeps the scales of all groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....checkpoint.value_reader import ValueReader
from ..weight import StoredTensor, random_scales
from . import faults
from .matrices import Asked, StoredMatrices, first_rule
from .unpacked import UnpackedCodes, UnpackedFormat, codes_of_words, order_of_columns, random_g_idx

_WORDS = torch.int32


@dataclass(frozen=True, slots=True)
class GptqFormat(UnpackedFormat):
    bits: int
    group_size: int  # -1: all inputs are a group
    is_ordered: bool  # desc_act: inputs are not in the order of their groups
    zeros_less_one: bool
    is_symmetric: bool | None  # zeros are the codes' middle; None: nothing says so, and the files may have others
    has_g_idx: bool = True  # in the files
    name: str = "gptq"

    @property
    def mixes_columns(self) -> bool:
        return self.is_ordered

    def sizes(self, in_features: int) -> tuple[int, int]:
        return self.bits, in_features if self.group_size < 0 else self.group_size

    def codes_tensors(self, out_features: int, in_features: int) -> list[StoredTensor]:
        group, per_word = in_features if self.group_size < 0 else self.group_size, 32 // self.bits
        if in_features % group or in_features % per_word or out_features % per_word:
            raise ValueError(
                f"{out_features} x {in_features} are no multiples of {per_word} codes a word and "
                f"group_size={self.group_size}"
            )
        num_groups = in_features // group
        of_groups = None if self.is_ordered or num_groups == 1 else 0  # the dimension that is divided with the inputs
        words, count = out_features // per_word, out_features * in_features
        of_scales = random_scales(1 << self.bits - 1), faults.of_scale
        g_idx = partial(random_g_idx, in_features, group, self.is_ordered)
        middle = faults.middle_word(self.bits, self.zeros_less_one)
        zeros = None if self.is_symmetric is False else partial(torch.full, (num_groups, words), middle, dtype=_WORDS)
        of_zeros = partial(faults.of_middle, word=middle, said="sym=true") if self.is_symmetric else None
        of_order = partial(faults.of_groups, num_groups=num_groups) if self.is_ordered else faults.of_order
        found = [
            StoredTensor("qweight", (in_features // per_word, out_features), _WORDS, count, 1, 0, turned=True),
            StoredTensor("qzeros", (num_groups, words), _WORDS, 0, 1, of_groups, None, True, zeros, of_zeros),
            StoredTensor("scales", (num_groups, out_features), torch.float32, 0, 1, of_groups, None, True, *of_scales),
            StoredTensor("g_idx", (in_features,), torch.int32, 0, None, 0, drawn=g_idx, fault=of_order),
        ]
        return found if self.has_g_idx else found[:-1]

    def unpack(self, tensors: Mapping[str, Tensor]) -> UnpackedCodes:
        codes = codes_of_words(tensors["qweight"], self.bits, 1)
        zeros = codes_of_words(tensors["qzeros"], self.bits, 0)
        scale = tensors["scales"]
        if self.zeros_less_one:
            zeros = (zeros + 1) & (1 << self.bits) - 1
        k = codes.shape[1]
        group = k if self.group_size < 0 else self.group_size
        of_column = order_of_columns(tensors["g_idx"], k, group) if self.is_ordered else None
        if bool((zeros == 1 << self.bits - 1).all()):  # symmetric
            codes = codes if self.bits == 4 else codes.view(torch.int8) ^ -128
            return UnpackedCodes("int4" if self.bits == 4 else "int8", codes, scale, group, None, None, of_column)
        return UnpackedCodes("uint4" if self.bits == 4 else "uint8", codes, scale, group, zeros, None, of_column)


def read_gptq(asked: Asked) -> StoredMatrices | None:
    """Return what a quantization_config describes; None if its method is another one. Raises ModelLoadError."""
    if asked.config.get("quant_method") != "gptq":
        return None
    whole = _format_of(asked, asked.values, {})
    dynamic = asked.values.at("dynamic")
    own = {key: None if key.startswith("-:") else _format_of(asked, dynamic.at(key), asked.config) for key in dynamic}
    patterns = {key.removeprefix("+:").removeprefix("-:"): form for key, form in own.items()}
    rules = asked.rules("dynamic", patterns)

    return StoredMatrices(whole.name, asked.stored, lambda name: first_rule(rules, name, whole))


def _format_of(asked: Asked, values: ValueReader, others: Mapping[str, Any]) -> GptqFormat:
    """The format by a config, or by a rule of its ``dynamic``, which says what is not as the ``others``."""
    merged = ValueReader({**others, **{key: values.raw(key) for key in values}}, asked.where)
    bits = merged.integer("bits", 4)
    form = merged.text("checkpoint_format", "gptq").lower()
    if bits not in (4, 8) or form not in ("gptq", "gptq_v2") or merged.flag("is_marlin_format"):
        raise asked.refusal(
            f"GPTQ in {bits} bits of checkpoint_format {form!r:.40} (4 and 8 bits of 'gptq' and 'gptq_v2' are read)"
        )
    group_size = merged.integer("group_size", 128, least=-1)
    if group_size == 0:
        raise merged.error("group_size", "must be -1 or above 0")
    is_ordered = merged.flag("desc_act") and group_size > 0
    is_symmetric = None if merged.raw("sym") is None else merged.flag("sym")
    base = asked.plain, asked.device.type == "cpu", asked.dequantises
    has_g_idx = is_ordered or asked.stored is None or any(name.endswith(".g_idx") for name in asked.stored)
    return GptqFormat(*base, bits, group_size, is_ordered, form == "gptq", is_symmetric, has_g_idx)
