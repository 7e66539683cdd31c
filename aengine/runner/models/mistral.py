"""Mistral (Jiang et al. 2023, arXiv:2310.06825): in the first release every layer has a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames

_ROPE = {
    "rope_type": "yarn",
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384,
}
_DEFAULTS = {"num_key_value_heads": 8}
_DEFAULTS_OF: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "ministral3": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "rope_parameters": _ROPE},
}
"""What config.json may leave out."""


class MistralConfig(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, {**_DEFAULTS, **_DEFAULTS_OF.get(str(hf.get("model_type")), {})})
        return cls(**keys.decoder(), sliding_windows=keys.windows(keys.window()))


class Mistral(Decoder[MistralConfig]):
    config_class = MistralConfig
    gguf = GgufNames(interleaved=("q_proj", "k_proj"))
