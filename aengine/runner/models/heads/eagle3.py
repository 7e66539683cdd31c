"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a layer whose attention reads a token's embedding beside the state.

    three streams of the target ─ fc ─┬─ norm ─┬─ qkv ─ attention ─ o ─┐     ┌─ norm ─ mlp ─┐
    embedding of the next token ──────│─ norm ─┘                       │     │              │
                                      └────────────────────────────────+─────┴──────────────+─ norm ─ head

What it predicts is of a vocabulary of its own, some of the target's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...layers.attention import AttentionCall
from ...layers.decoder import Decoder
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...model_config import ConfigReader, ModelConfig
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope
from .draft_head import check_fits
from .parts import HeadApart, Stored, head_attention, head_layer, head_mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(ModelConfig):
    captured: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool  # the residual stream begins with the state after its norm
    norm_before_fc: bool

    @classmethod
    def for_target(cls, hf: Mapping[str, Any], target: ModelConfig) -> Self:
        """Read a config.json, in EAGLE's form or in that of speculators, which has the layer's settings below a key of
        their own. Raises ModelLoadError."""
        keys = eagle3_keys(hf)
        if keys.integer("num_hidden_layers") != 1:
            raise keys.error("num_hidden_layers", "is not 1, as that of EAGLE-3's heads is")
        return cls(**eagle3_fields(keys, target))


def eagle3_keys(hf: Mapping[str, Any]) -> ConfigReader:
    return ConfigReader({**hf, **ConfigReader(hf).mapping("transformer_layer_config")})


def eagle3_fields(keys: ConfigReader, target: ModelConfig) -> dict[str, Any]:
    """Return the fields of `Eagle3Config`. Raises ModelLoadError."""
    fields = keys.decoder()
    check_fits(keys, fields, target)
    for name in ("fc_norm", "norm_output"):
        if keys.flag(name):
            raise keys.error(name, "is not supported: take a head without it")
    return {
        **fields,
        "sliding_windows": (None,) * fields["num_layers"],
        "attention_bias": keys.flag("attention_bias"),
        "mlp_bias": keys.flag("mlp_bias"),
        "captured": _captured(keys, target.num_layers),
        "draft_vocab_size": keys.integer_or_none("draft_vocab_size") or target.vocab_size,
        "norm_before_residual": keys.flag("norm_before_residual"),
        "norm_before_fc": keys.flag("norm_before_fc"),
    }


def _captured(keys: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the streams that the head reads. Where a list begins with 1, heads were published with the layers whose
    outputs these are; other lists have those before which they are read."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = ConfigReader(keys.mapping("eagle_config"))
    if not inner.flag("use_aux_hidden_state", True):
        raise keys.error("eagle_config", "has use_aux_hidden_state=false: heads that read one state are not supported")
    given = keys.integers(name) or inner.integers(name) or [2, num_layers // 2, num_layers - 3]
    found = tuple(i + 1 for i in given) if given[0] == 1 else tuple(given)
    if min(found) < 0 or max(found) > num_layers:
        raise keys.error(name, f"names, or means, the layers {found}, and the target has {num_layers}")
    return found


class Eagle3(HeadApart):
    config_class: ClassVar[type[ModelConfig]] = Eagle3Config
    gguf: ClassVar[GgufNames] = GgufNames()

    def __init__(self, config: Eagle3Config, weights: WeightScope, target: Decoder[Any], stored: Stored | None) -> None:
        """``stored``: see `build_head`."""
        size, eps, names = config.hidden_size, config.rms_norm_eps, stored or {"lm_head.weight"}
        super().__init__(config, weights, target, names, stored)
        self.norm_before_residual = config.norm_before_residual
        streams = len(config.captured) * target.config.hidden_size
        self.fc_norm = RMSNorm(weights.at("input_norm"), streams, eps) if config.norm_before_fc else None
        self.fc = Linear(weights, streams, {"fc": size}, "fc.bias" in names)
        layer = weights.at("layers.0" if "layers.0.hidden_norm.weight" in names else "midlayer")
        self.embedding_norm = RMSNorm(layer.at("input_layernorm"), size, eps)
        self.state_norm = RMSNorm(layer.at("hidden_norm"), size, eps)
        self.attention = head_attention(config, 0, layer, names, in_features=2 * size)
        self.mlp_norm = RMSNorm(layer.at("post_attention_layernorm"), size, eps)
        self.mlp = head_mlp(config, layer)
        self.others = [head_layer(config, i, weights.at(f"layers.{i}"), names) for i in range(1, config.num_layers)]

    def combine(self, captured: Tensor) -> Tensor:
        return self.fc.multiply(captured) if self.fc_norm is None else self.fc.after_norm(captured, self.fc_norm)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> Tensor:
        assert received is not None, "a head begins with states of its target"
        attn.begin(positions)
        state = self.state_norm(received)
        x = torch.cat((self.embedding_norm(self.embed(input_ids)), state), 1)
        residual = state if self.norm_before_residual else received.clone()
        self.attention.add_to(residual, x, attn)
        self.mlp(residual, self.mlp_norm)
        for layer in self.others:
            layer(residual, attn)
        return residual
