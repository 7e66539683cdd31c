"""compressed-tensors: groups of a checkpoint's matrices, each in a format of its own.

    format                  weights                          read as
    int-quantized           8 bits a row or a matrix         Int8Format (int8.py)
                            other strategies, or with zeros  GroupFormat: weight int8 [N, K]
    pack-quantized          8 bits a row, symmetric          Int8Format
                            4 and 8 bits, others             GroupFormat: weight_packed int32 [N, K * bits / 32]
    float-quantized         8 bits a row, a matrix, a block  Fp8Format (fp8.py)
    nvfp4-, mxfp4-pack-     4 bits, groups of 16, 32         Fp4Format (fp4.py)
      quantized

Of what a recipe says of activations, only that they are quantised to FP8 is heeded, of weights in FP8;
startup/kv_scales.py heeds what is about the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ....checkpoint.value_reader import ValueReader
from ....errors import ModelLoadError
from ..weight import StoredTensor, WeightFormat, random_scales
from . import faults
from .fp4 import Fp4Format
from .fp8 import Fp8Format
from .int8 import Int8Format
from .matrices import UNQUANTISED, Asked, PlainMatrices, Rules, first_rule, ignored_matrices, whole_names
from .unpacked import UnpackedCodes, UnpackedFormat, codes_of_words, order_of_columns, random_g_idx


@dataclass(frozen=True, slots=True)
class GroupFormat(UnpackedFormat):
    """Integers of 4 or 8 bits with a scale a group, a row or a matrix, and perhaps a zero of each.

    tensor              in the checkpoint
    weight_packed       int32 [N, K * bits / 32]: codes plus 2^(bits - 1), the first in a word's lowest bits
    weight              int8 [N, K], of those that are not packed
    weight_scale        [N, K / group]; [N, 1]; [1]
    weight_zero_point   int32 [N * bits / 32, K / group], packed as the codes along N; else int8 as the scale
    weight_g_idx        int32 [K]: the group of each column, with act-order
    """

    bits: int
    is_packed: bool
    group_size: int | None  # None: a row has a scale; 0: a matrix has one
    has_zeros: bool = False
    is_ordered: bool = False  # columns are not in the order of their groups

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def mixes_columns(self) -> bool:
        return self.is_ordered

    def sizes(self, in_features: int) -> tuple[int, int]:
        return self.bits if self.is_packed else 8, self.group_size or in_features

    def codes_tensors(self, out_features: int, in_features: int) -> list[StoredTensor]:
        per_word, group = 32 // self.bits, self.group_size or in_features
        rows_per_word = per_word if self.is_packed and self.has_zeros and self.group_size != 0 else 1
        if in_features % group or (self.is_packed and in_features % per_word) or out_features % rows_per_word:
            raise ValueError(
                f"{out_features} x {in_features} are no multiples of a group's {group} columns and of {per_word} codes "
                f"a word"
            )
        count = out_features * in_features
        if self.is_packed:
            codes = StoredTensor("weight_packed", (out_features, in_features // per_word), torch.int32, count, in_dim=1)
        else:
            codes = StoredTensor("weight", (out_features, in_features), torch.int8, count, in_dim=1)
        num_groups = in_features // group
        in_dim = 1 if self.group_size and num_groups > 1 and not self.is_ordered else None
        scales = ((), None, None) if self.group_size == 0 else ((out_features, num_groups), 0, in_dim)
        scale = StoredTensor("weight_scale", scales[0], torch.float32, 0, scales[1], scales[2], fault=faults.of_scale)
        found = [codes, scale._replace(drawn=random_scales(1 << self.bits - 1))]
        if self.has_zeros and self.is_packed:
            words = (out_features // per_word, num_groups)
            found.append(StoredTensor("weight_zero_point", words, torch.int32, 0, 0, in_dim))
        elif self.has_zeros:
            found.append(StoredTensor("weight_zero_point", scales[0], torch.int8, 0, *scales[1:]))
        if self.is_ordered:
            drawn, fault = partial(random_g_idx, in_features, group, True), partial(_fault_of_order, num_groups)
            order = StoredTensor("weight_g_idx", (in_features,), torch.int32, 0, None, 0)
            found.append(order._replace(drawn=drawn, fault=fault))
        return found

    def unpack(self, tensors: Mapping[str, Tensor]) -> UnpackedCodes:
        scale, zero = tensors["weight_scale"], None
        codes = (
            codes_of_words(tensors["weight_packed"], self.bits, 1) if self.is_packed else _plus_128(tensors["weight"])
        )
        if self.has_zeros and self.is_packed:
            zero = codes_of_words(tensors["weight_zero_point"], self.bits, 0)
        elif self.has_zeros:
            zero = _plus_128(tensors["weight_zero_point"])
        group = self.group_size or codes.shape[1]
        of_column = order_of_columns(tensors["weight_g_idx"], codes.shape[1], group) if self.is_ordered else None
        if self.is_packed and self.bits == 4:
            return UnpackedCodes("int4" if zero is None else "uint4", codes, scale, group, zero, None, of_column)
        if zero is None:
            return UnpackedCodes("int8", codes.view(torch.int8) ^ -128, scale, group, None, None, of_column)
        return UnpackedCodes("uint8", codes, scale, group, zero, None, of_column)


def _fault_of_order(num_groups: int, g_idx: Tensor) -> str:
    """All -1 is how compressed-tensors begins, and means that there is no order."""
    return "" if bool((g_idx == -1).all()) else faults.of_groups(g_idx, num_groups)


def _plus_128(codes: Tensor) -> Tensor:
    """uint8 of int8."""
    return (codes ^ -128).view(torch.uint8)


_Read = WeightFormat | ModelLoadError
"""A group's format, or what is wrong with it: that of a vision tower's is nobody's concern."""


class GroupedMatrices(NamedTuple):
    """`QuantisedMatrices` by targets: a matrix' own name, else the first pattern, else the matrix' class."""

    targets: Mapping[str, _Read]  # names of matrices and of classes
    patterns: Rules[_Read]
    ignored: PlainMatrices

    @property
    def name(self) -> str:
        found = {form.name for form in self.targets.values() if not isinstance(form, ModelLoadError)}
        return ", ".join(sorted(found))

    def of(self, name: str) -> WeightFormat | None:
        """Raises ModelLoadError: the group of this matrix is in a format that is not read."""
        if name in self.ignored:
            return None
        kind = self.targets.get("Embedding" if name.endswith("embed_tokens") else "Linear")
        named = next((self.targets[own] for own in whole_names(name) if own in self.targets), None)
        found = named or first_rule(self.patterns, name, kind)
        if isinstance(found, ModelLoadError):
            raise found
        return found


def read_compressed(asked: Asked) -> GroupedMatrices | None:
    """Return what a quantization_config describes; None if its method is another one. Raises ModelLoadError."""
    values = asked.values
    method = values.raw("quant_method")
    if method not in (None, "compressed-tensors") or (method is None and "config_groups" not in asked.config):
        return None
    if values.mapping("transform_config"):
        raise asked.refusal("transform_config rotates the activations")
    if values.mapping("sparsity_config").get("format", "dense") != "dense":
        raise asked.refusal("sparsity_config has weights that are sparse")
    by_target: dict[str, _Read] = {}  # the last of equal ones counts, as in compressed-tensors
    groups = values.at("config_groups")
    for key in groups:
        group = groups.at(key)
        if group.raw("weights") is None:
            continue
        form = _format_of(asked, group, group.text("format") or values.text("format"), key)
        by_target |= dict.fromkeys(group.texts("targets"), form)
    in_order = {target[3:]: form for target, form in sorted(by_target.items()) if target.startswith("re:")}
    found = GroupedMatrices(by_target, asked.rules("config_groups: targets", in_order), ignored_matrices(asked))
    refused = next((form for form in by_target.values() if isinstance(form, ModelLoadError)), None)
    if not found.name and refused is not None:
        raise refused
    if not set(groups) and values.raw("kv_cache_scheme") is None:
        raise values.error("config_groups", f"names no matrices whose weights are quantised: {UNQUANTISED}")
    return found


def _format_of(asked: Asked, group: ValueReader, kind: str, key: str) -> _Read:
    weights = group.at("weights")
    bits, numbers = weights.integer("num_bits", 8), weights.text("type", "int")
    size, is_symmetric = weights.integer_or_none("group_size", least=-1), weights.flag("symmetric", True)
    strategy = weights.text("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
    base = asked.plain, asked.device.type == "cpu", asked.dequantises
    grouped = strategy in ("group", "tensor_group") and size is not None and size > 0
    sizes = {"channel": None, "tensor": 0, "group": size}
    if numbers == "int" and strategy in sizes and (strategy != "group" or grouped):
        is_packed = kind == "pack-quantized"
        is_ordered = grouped and weights.raw("actorder") not in (None, False, "weight", "static")
        if bits == 8 and is_symmetric and not grouped and (is_packed, strategy) != (True, "tensor"):
            if is_packed or kind in ("int-quantized", "naive-quantized"):
                return Int8Format(is_packed, strategy == "channel", asked.plain)
        elif bits in (4, 8) and (is_packed or kind in ("int-quantized", "naive-quantized")):
            return GroupFormat(*base, bits, is_packed, sizes[strategy], not is_symmetric, is_ordered)
    elif numbers == "float" and is_symmetric:
        if bits == 8 and kind in ("float-quantized", "naive-quantized") and strategy in ("channel", "tensor"):
            of_rows = strategy == "channel"
            return Fp8Format(
                asked.plain, of_rows=of_rows, quantises_x=_quantises_x(group), dequantises=asked.dequantises
            )
        block = weights.integers("block_structure") if strategy == "block" else []
        if bits == 8 and kind == "float-quantized" and len(block) == 2 and min(block) > 0:
            of_blocks = Fp8Format(asked.plain, of_rows=False, block=(block[0], block[1]), dequantises=asked.dequantises)
            return replace(of_blocks, quantises_x=_quantises_x(group))
        if bits == 4 and kind == "nvfp4-pack-quantized" and size in (None, 16):
            return Fp4Format(*base, "nvfp4", matrix_scale="weight_global_scale", divides=True)
        if bits == 4 and kind == "mxfp4-pack-quantized" and size in (None, 32):
            return Fp4Format(*base, "mxfp4")
    return asked.refusal(
        f"config_groups: {key:.40}: format {kind!r:.40}, {numbers:.20} weights in {bits} bits, strategy "
        f"{strategy!r:.40}{'' if is_symmetric else ', asymmetric'}"
    )


def _quantises_x(group: ValueReader) -> bool:
    """Return whether the recipe quantises activations to FP8."""
    x = group.at("input_activations")
    return x.integer("num_bits", 16) == 8 and x.text("type", "int") == "float"
