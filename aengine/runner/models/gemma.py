"""Gemma 1 (arXiv:2403.08295), 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786), of the last the text model.

All have embeddings multiplied by sqrt(hidden_size), GELU gates, and norms whose weights are stored less one. From 2 on
the outputs of attention and feed-forward are normalised too, and layers with windows and without take turns. 2 caps the
scores of attention and the logits; 3 normalises q and k, and rotates them in windowed layers by another base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...checkpoint.value_reader import ValueReader
from ...errors import ModelLoadError
from ..layers.decoder import Decoder, DecoderLayer, SelfAttention
from ..layers.norm import RMSNorm
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
"""What config.json may leave out, the text part of Gemma 3's above all."""
_DEFAULTS_1 = {**_DEFAULTS, "num_key_value_heads": 16, "num_attention_heads": 16}
_DEFAULTS_2 = {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
_DEFAULTS_3 = {**_DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    attention_scale: float  # factor of q k^T
    attention_softcap: float  # 0: none

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        version = _VERSIONS[hf["model_type"]]
        keys = ConfigReader(version(hf))
        if keys.flag("use_bidirectional_attention"):
            raise ModelLoadError(
                "config.json: use_bidirectional_attention: this Gemma gives embeddings and generates no text, and "
                "its attention to later tokens is not supported"
            )
        fields = keys.decoder()
        return cls(
            **fields,
            embedding_scale=fields["hidden_size"] ** 0.5,
            logit_softcap=keys.number("final_logit_softcapping", 0.0, least=0),
            sliding_windows=keys.windows(keys.window(is_on=bool(keys.texts("layer_types")))),
            attention_bias=keys.flag("attention_bias"),
            attention_scale=keys.number("query_pre_attn_scalar", fields["head_dim"], above=0) ** -0.5,
            attention_softcap=keys.number("attn_logit_softcapping", 0.0, least=0),
            rope_of_layers=keys.rope_of_layers(),
        )


def _settings_1(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first release's settings: it says "gelu" and was trained with the approximation by tanh."""
    return {**_DEFAULTS_1, **hf, "hidden_activation": "gelu_pytorch_tanh"}


def _settings_2(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**_DEFAULTS_2, "layer_types": _layer_types(hf, 2), "query_pre_attn_scalar": _scalar(hf), **_given(hf)}


def gemma3_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the spelling of transformers 5: ``rope_parameters`` for each type of layers."""
    keys = ConfigReader(hf)
    pattern = keys.integer("sliding_window_pattern", keys.integer("_sliding_window_pattern", 6))
    settings = {
        **_DEFAULTS_3,
        "layer_types": _layer_types(hf, pattern),
        "query_pre_attn_scalar": _scalar(hf),
        **_given(hf),
        "attn_logit_softcapping": None,  # transformers keeps it, and caps no scores
    }
    ropes = ValueReader(
        keys.mapping("rope_parameters") or {"full_attention": keys.raw("rope_scaling")}, "config.json: rope_parameters"
    )
    thetas = {
        "sliding_attention": keys.number("rope_local_base_freq", 10_000.0, above=0),
        "full_attention": keys.number("rope_theta", 1_000_000.0, above=0),
    }
    types = ConfigReader(settings).layer_types(tuple(thetas))
    settings["rope_parameters"] = {
        kind: {"rope_theta": theta, **ropes.mapping(kind)} for kind, theta in thetas.items() if kind in types
    }
    return settings


def _layer_types(hf: Mapping[str, Any], pattern: int) -> list[str]:
    """Return the type of each layer: every ``pattern``-th sees all tokens, the others a window."""
    layers = ConfigReader(hf).integer("num_hidden_layers")
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


def _scalar(hf: Mapping[str, Any]) -> int:
    """Return what 1 / sqrt of scales the scores, if it is not set. A GGUF never says it: there it is the size of heads,
    but in the two models of 27B, told by their layers, what each head has of the residual stream."""
    keys = ConfigReader(hf)
    if not keys.is_gguf:
        return 256
    if keys.integer("num_hidden_layers") in (46, 62):
        return max(1, keys.integer("hidden_size") // keys.integer("num_attention_heads"))
    return keys.integer("head_dim")


def _given(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, nulls included, but for a null ``layer_types``."""
    return {key: value for key, value in hf.items() if key != "layer_types" or value is not None}


_VERSIONS = {
    "gemma": _settings_1,
    "gemma2": _settings_2,
    "gemma3": gemma3_settings,
    "gemma3_text": gemma3_settings,
}

_SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Gemma(Decoder[GemmaConfig]):
    config_class = GemmaConfig
    gguf = GgufNames(norms_plus_one=True)

    def make_norm(self, weights: WeightScope, size: int | None = None) -> RMSNorm:
        return RMSNorm(weights, size or self.config.hidden_size, self.config.rms_norm_eps, plus_one=True)

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        of_scores = {"scale": self.config.attention_scale, "softcap": self.config.attention_softcap}
        return super().make_attention(index, scope, **of_scores, **options)


class Gemma2(Gemma):
    gguf = GgufNames(norms_plus_one=True).renamed(_SANDWICH)

    def make_layer(self, index: int, weights: WeightScope) -> DecoderLayer:
        """Make a layer with norms before and after attention and feed-forward."""
        norm_of = {name: self.make_norm(weights.at(name)) for name in _SANDWICH.values()}
        return DecoderLayer(
            norm_of["input_layernorm"],
            self.make_attention(index, weights.at("self_attn"), post_norm=norm_of["post_attention_layernorm"]),
            norm_of["pre_feedforward_layernorm"],
            self.make_mlp(weights.at("mlp"), post_norm=norm_of["post_feedforward_layernorm"]),
        )


class Gemma3(Gemma2):
    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        return super().make_attention(index, scope, **self.head_norms(scope), **options)
