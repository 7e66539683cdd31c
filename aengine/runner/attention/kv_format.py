"""What keys and values are kept as: plain numbers of a dtype, or codes of eight bits with scales.

    KVFormat   as the setting kv_cache_dtype says; nothing is beside them
    ScaledKV   kv_cache_dtype="fp8": e4m3, with a scale for the keys and one for the values of each head

An `AttentionLayerKV` has its layer's scales, or None, and hands them to the kernels with its pages. Pages are bytes, so
whatever copies them needs to know of neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Keys and values as numbers of ``dtype``."""

    dtype: torch.dtype  # dtype of an element of the pages

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def origin(self) -> str:
        """Where the scales are from; "": there are none."""
        return ""

    def scales(self, layer: int, num_kv_heads: int, device: torch.device) -> Tensor | None:
        """The layer's scales, float32 [2, num_kv_heads], of keys and of values; None: there are none."""
        return None


@dataclass(frozen=True, slots=True)
class ScaledKV(KVFormat):
    """Keys and values as codes of float8_e4m3fn, which the pages hold as bytes: torch's indexing lacks that dtype."""

    dtype: torch.dtype = torch.uint8
    by_layer: Mapping[int, Tensor] = field(default_factory=dict)  # float32 [2, num_kv_heads]; a layer without: 1
    source: str = "one"  # "checkpoint", "calibrated" or "one"

    @property
    def name(self) -> str:
        return "fp8"

    @property
    def origin(self) -> str:
        return self.source

    def scales(self, layer: int, num_kv_heads: int, device: torch.device) -> Tensor | None:
        found = self.by_layer.get(layer)
        return torch.ones(2, num_kv_heads, device=device) if found is None else found.to(device).contiguous()


def kv_format_of(setting: str, dtype: torch.dtype) -> KVFormat:
    """Return the format that kv_cache_dtype names, with scales of 1, where the model computes in ``dtype``."""
    if setting == "fp8":
        return ScaledKV()
    return KVFormat(dtype if setting == "auto" else getattr(torch, setting))
