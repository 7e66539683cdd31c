"""Command R (Cohere 2024) and R7B, A (arXiv:2504.00698): attention and feed-forward of one layer norm, side by side; a
factor of the logits; neighbours turn in pairs. In the latter three layers of four have windows, and the others no
rotary positions; in Command R+ each head of q and k has a layer norm with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed.shares import Share, part_of
from ..layers.own_norms import LayerNormDecoder, ParallelLayer
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
_DEFAULTS_OF: Mapping[str, Mapping[str, Any]] = {
    "cohere": {**_DEFAULTS, "rope_theta": 500_000.0, "max_position_embeddings": 8192},
    "cohere2": {**_DEFAULTS, "sliding_window": 4096, "max_position_embeddings": 8192},
}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(ModelConfig):
    has_qk_norm: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        has_windows, defaults = hf["model_type"] == "cohere2", _DEFAULTS_OF[hf["model_type"]]
        keys = ConfigReader(hf, defaults)
        window, layers = keys.window(is_on=has_windows), keys.integer("num_hidden_layers")
        pattern = keys.integer("sliding_window_pattern", 4)
        types = keys.layer_types(("full_attention", "sliding_attention")) or [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
        ]
        keys = ConfigReader({**hf, "layer_types": types}, defaults)
        return cls(
            **keys.decoder(interleaved_rope=True, norm_eps="layer_norm_eps"),
            attention_bias=keys.flag("attention_bias"),
            has_qk_norm=not has_windows and keys.flag("use_qk_norm"),
            logit_scale=keys.number("logit_scale"),
            sliding_windows=keys.windows(window),
            rope_of_layers=tuple(
                0 if not has_windows or (window and kind == "sliding_attention") else None for kind in types
            ),
        )


class HeadLayerNorms:
    """Layer norms of q and k, with weights for each head."""

    def __init__(self, scope: WeightScope, config: CohereConfig) -> None:
        self.weights: dict[str, Tensor] = {}  # float32 [heads of this rank, head_dim]
        self._eps, self._head_dim = config.rms_norm_eps, config.head_dim
        self._want(scope, "q_norm", scope.share(config.num_heads))
        self._want(scope, "k_norm", scope.share(config.num_kv_heads, config.kv_copies))

    def _want(self, scope: WeightScope, name: str, heads: Share) -> None:
        def put(tensor: Tensor) -> None:
            self.weights[name] = tensor.float()

        shape = heads.total, self._head_dim
        part = part_of((heads,), 0, heads.total)
        scope.at(name).want("weight", shape, scope.formats.dtype, put, part=part)

    def __call__(self, qkv: Tensor) -> Tensor:
        heads, weight = (
            qkv.unflatten(1, (-1, self._head_dim)),
            torch.cat((self.weights["q_norm"], self.weights["k_norm"])),
        )
        normed = F.layer_norm(heads[:, : len(weight)].float(), (self._head_dim,), eps=self._eps) * weight
        return torch.cat((normed.to(qkv.dtype), heads[:, len(weight) :]), 1).flatten(1)


class Cohere(LayerNormDecoder[CohereConfig]):
    config_class = CohereConfig
    gguf = GgufNames()
    has_norm_bias = False

    def make_layer(self, index: int, weights: WeightScope) -> ParallelLayer:
        scope = weights.at("self_attn")
        qk_norm = HeadLayerNorms(scope, self.config) if self.config.has_qk_norm else None
        attention = self.make_attention(index, scope, qk_norm=qk_norm)
        norm = self.make_layer_norm(weights.at("input_layernorm"))
        return ParallelLayer(norm, attention, self.make_mlp(weights.at("mlp")))
