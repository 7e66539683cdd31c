"""SmolLM3: Llama of which every fourth layer does not rotate q and k (Yang et al. 2025, arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames

_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
"""What config.json may leave out."""


class SmolLM3Config(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        layers, interval = keys.integer("num_hidden_layers"), keys.integer("no_rope_layer_interval", default=4)
        given = keys.integers("no_rope_layers")
        if given and len(given) < layers:
            raise keys.error("no_rope_layers", f"must have an entry for each of {layers} layers")
        rotates = map(bool, given[:layers]) if given else ((i + 1) % interval != 0 for i in range(layers))
        window = keys.window(is_on=keys.flag("use_sliding_window"))
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            rope_of_layers=tuple(0 if rotated else None for rotated in rotates),
            sliding_windows=keys.windows(window),
        )


class SmolLM3(Decoder[SmolLM3Config]):
    config_class = SmolLM3Config
    gguf = GgufNames(interleaved=("q_proj", "k_proj"))
