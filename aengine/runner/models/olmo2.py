"""OLMo 2 (OLMo et al. 2024, arXiv:2501.00656) and 3 (arXiv:2512.13961): norms after attention and feed-forward instead
of before them, and of q and k over all heads together. In 3 three layers of four have windows, and a rope of their
own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ...checkpoint.value_reader import ValueReader
from ..layers.decoder import Decoder, SelfAttention
from ..layers.norm import QKNorm
from ..layers.own_norms import NormAfterLayer
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_DEFAULTS_3 = {**_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096}
"""What config.json may leave out."""


class Olmo2Config(ModelConfig):
    has_tape = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        has_windows = hf["model_type"] == "olmo3"
        keys = ConfigReader(_settings_3(hf) if has_windows else hf, _DEFAULTS)
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            sliding_windows=keys.windows(keys.window(is_on=has_windows)),
            rope_of_layers=keys.rope_of_layers(),
        )


def _settings_3(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the spelling of transformers 5: ``rope_parameters`` for each type of layers. In the older
    spelling a scaling is that of full attention alone."""
    keys = ConfigReader(hf, _DEFAULTS_3)
    types = keys.layer_types(("full_attention", "sliding_attention")) or [
        "full_attention" if i % 4 == 3 else "sliding_attention" for i in range(keys.integer("num_hidden_layers"))
    ]
    given = keys.mapping("rope_parameters") or {"full_attention": keys.raw("rope_scaling")}
    ropes, theta = ValueReader(given, "config.json: rope_parameters"), keys.number("rope_theta", above=0)
    kinds = {kind: {"rope_theta": theta, **ropes.mapping(kind)} for kind in dict.fromkeys(types)}
    return {**_DEFAULTS_3, **hf, "layer_types": types, "rope_parameters": kinds}


class Olmo2(Decoder[Olmo2Config]):
    config_class = Olmo2Config
    gguf = GgufNames()

    def make_layer(self, index: int, weights: WeightScope) -> NormAfterLayer:
        post_norm = self.make_norm(weights.at("post_attention_layernorm"))
        attention = self.make_attention(index, weights.at("self_attn"), post_norm=post_norm)
        post_norm = self.make_norm(weights.at("post_feedforward_layernorm"))
        return NormAfterLayer(attention, self.make_mlp(weights.at("mlp"), post_norm=post_norm))

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        config = self.config
        q, k = scope.share(config.q_size), scope.share(config.kv_size, config.kv_copies)
        qk_norm = QKNorm(scope, q, k, config.rms_norm_eps)
        return super().make_attention(index, scope, qk_norm=qk_norm, **options)
