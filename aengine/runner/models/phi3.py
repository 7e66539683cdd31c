"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219), 3.5 and 4: q, k and v are one tensor of the checkpoint, gate and up
another; longrope; windows, in Phi-3-mini; a part of each head turns, in Phi-4-mini."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder, SelfAttention
from ..layers.mlp import GatedMLP
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import PACKED_LAYER, GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
"""What config.json may leave out."""


class Phi3Config(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(_with_longrope_named(hf), _DEFAULTS if hf.get("gguf_architecture") is None else None)
        return cls(**keys.decoder(), sliding_windows=keys.windows(keys.window()))


def _with_longrope_named(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename rope types "su" and "yarn", as early releases call it, to "longrope"."""
    keys = ConfigReader(hf)
    key = "rope_parameters" if keys.mapping("rope_parameters") else "rope_scaling"
    scaling = keys.mapping(key)
    named = scaling.get("rope_type") or scaling.get("type")
    return {**hf, key: {**scaling, "rope_type": "longrope"}} if named in ("su", "yarn") else hf


class Phi3(Decoder[Phi3Config]):
    config_class = Phi3Config
    gguf = GgufNames(layer=PACKED_LAYER)

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        return super().make_attention(index, scope, packed=True, **options)

    def make_mlp(self, scope: WeightScope, **options: Any) -> GatedMLP:
        return super().make_mlp(scope, packed=True, **options)
