"""LFM2 (Liquid AI 2025): short convolutions between two gates, and attention in some layers; q and k are normalised
head by head, before rotary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from ..kv_spec import FullKV, LayerKV, StateKV
from ..layers.attention import AttentionCall
from ..layers.decoder import Decoder, DecoderLayer, Mixer
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.short_conv import ShortConv
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"num_key_value_heads": 8, "rope_theta": 1_000_000.0}
"""What config.json may leave out."""
_MOST_INNER = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(ModelConfig):
    is_convolution: tuple[bool, ...]  # [num_layers]: the layer is a convolution; the others attend
    conv_width: int
    conv_bias: bool
    conv_channels: int

    divided = ("num_heads", "intermediate_size", "conv_channels")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, {**_DEFAULTS, "tie_word_embeddings": hf.get("tie_embedding", True)})
        num_layers = keys.integer("num_hidden_layers")
        fields = keys.decoder()
        fields["rms_norm_eps"] = keys.number("norm_eps", keys.number("rms_norm_eps", 1e-5, least=0), least=0)
        fields["intermediate_size"] = _inner_size(keys)
        attending = keys.layer_set("full_attn_idxs") if keys.raw("full_attn_idxs") is not None else range(num_layers)
        kinds = keys.layer_types(("full_attention", "conv")) or [
            "full_attention" if i in attending else "conv" for i in range(num_layers)
        ]
        return cls(
            **fields,
            sliding_windows=(None,) * num_layers,
            is_convolution=tuple(kind == "conv" for kind in kinds),
            conv_width=keys.integer("conv_L_cache", default=3),
            conv_bias=keys.flag("conv_bias"),
            conv_channels=fields["hidden_size"],
        )

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        state = StateKV((ShortConv.state(self.conv_channels, self.conv_width),))
        kept = FullKV(self.num_kv_heads, self.head_dim)
        return tuple(state if is_convolution else kept for is_convolution in self.is_convolution)


def _inner_size(keys: ConfigReader) -> int:
    size = keys.integer_or_none("block_ff_dim") or keys.integer("intermediate_size")
    if keys.flag("block_auto_adjust_ff_dim", True) and not keys.is_gguf:
        size = 2 * size // 3
        factor = keys.number_or_none("block_ffn_dim_multiplier", above=0)
        if factor is not None:
            multiple = keys.integer("block_multiple_of", default=256)
            size = -(-int(min(factor * size, _MOST_INNER)) // multiple) * multiple
    return size


class Convolution:
    """out(c * convolution(b * x)), where b, c and x are products with norm(residual)."""

    def __init__(self, config: Lfm2Config, index: int, scope: WeightScope) -> None:
        size, bias, channels = config.hidden_size, config.conv_bias, scope.share(config.conv_channels)
        self._index = index
        self.inputs = Linear(scope, size, {"in_proj": (channels, channels, channels)}, bias)
        self.conv = ShortConv(scope.at("conv"), channels, config.conv_width, bias=bias)
        self.out = Linear(scope, channels, {"out_proj": size}, bias)

    def __call__(self, residual: Tensor, norm: RMSNorm, attn: AttentionCall) -> None:
        """Add the output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        states = attn.states(self._index)
        self.out.add_to(residual, self.conv.gated_after_norm(self.inputs, residual, norm, states))


class Lfm2(Decoder[Lfm2Config]):
    config_class = Lfm2Config
    last_norm = "model.embedding_norm"
    gguf = GgufNames(
        top={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
    ).renamed(
        {
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        }
    )

    def make_layer(self, index: int, weights: WeightScope) -> DecoderLayer:
        return DecoderLayer(
            self.make_norm(weights.at("operator_norm")),
            self.make_mixer(index, weights),
            self.make_norm(weights.at("ffn_norm")),
            self.make_mlp(weights.at("feed_forward"), names=("w1", "w3", "w2")),
        )

    def make_mixer(self, index: int, weights: WeightScope) -> Mixer:
        if self.config.is_convolution[index]:
            return Convolution(self.config, index, weights.at("conv"))
        scope = weights.at("self_attn")
        norms = {name: self.make_norm(scope.at(f"{name}_layernorm"), self.config.head_dim) for name in ("q", "k")}
        return self.make_attention(index, scope, q_norm=norms["q"], k_norm=norms["k"], out_name="out_proj")
