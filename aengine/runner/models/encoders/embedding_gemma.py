"""EmbeddingGemma (Vera et al. 2025, arXiv:2509.20354): Gemma 3 whose tokens see later ones, too, those of windowed
layers within half a window to either side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from ....kernels.rotary import apply_rotary
from ...layers.embedding import Embedding
from ...layers.linear import Linear
from ...layers.mlp import GatedMLP
from ...layers.norm import RMSNorm
from ...model_config import ConfigReader
from ...pooling.attention import attend
from ...pooling.batch import EncoderBatch
from ...rope import RopeConfig
from ...weights.scope import WeightScope
from ..gemma import gemma3_settings
from .encoder import Encoder, EncoderConfig, EncoderRopes


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingGemmaConfig(EncoderConfig):
    num_kv_heads: int
    size_of_heads: int
    query_scale: float  # factor of q k^T
    layer_types: tuple[str, ...]
    ropes: Mapping[str, RopeConfig]  # rotary positions of each layer type
    reach: int  # tokens to either side that a query of a windowed layer sees

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        settings = gemma3_settings(hf)
        keys = ConfigReader(settings)
        size, longest = keys.integer("head_dim"), keys.integer("max_position_embeddings")
        return cls(
            **cls.common({**settings, "norm_eps": keys.number("rms_norm_eps", 1e-6, least=0)}),
            num_kv_heads=keys.integer("num_key_value_heads"),
            size_of_heads=size,
            query_scale=keys.number("query_pre_attn_scalar", size, above=0) ** -0.5,
            layer_types=tuple(settings["layer_types"]),
            ropes={
                kind: RopeConfig.read(parameters, head_dim=size, max_positions=longest)
                for kind, parameters in settings["rope_parameters"].items()
            },
            reach=keys.integer("sliding_window") // 2,
        )


class EmbeddingGemmaLayer:
    """Attention and a gated feed-forward layer, with norms before and after both."""

    def __init__(self, config: EmbeddingGemmaConfig, index: int, weights: WeightScope) -> None:
        size, head, eps = config.hidden_size, config.size_of_heads, config.norm_eps
        self.kind = config.layer_types[index]

        def norm(name: str, of: int = size) -> RMSNorm:
            return RMSNorm(weights.at(name), of, eps, plus_one=True)

        q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
        self._sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        scope = weights.at("self_attn")
        self.input_norm = norm("input_layernorm")
        self.qkv = Linear(scope, size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        self.q_norm, self.k_norm = norm("self_attn.q_norm", head), norm("self_attn.k_norm", head)
        self.out = Linear(scope, q_size, {"o_proj": size})
        self.attention_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(
            weights.at("mlp"),
            size,
            config.intermediate_size,
            activation="gelu_tanh",
            post_norm=norm("post_feedforward_layernorm"),
        )
        self._head = head
        self._scale = config.query_scale * head**0.5  # `attend` scales by the size of heads
        self._reach = config.reach if self.kind == "sliding_attention" else None

    def __call__(self, x: Tensor, batch: EncoderBatch, cos: Tensor, sin: Tensor) -> None:
        """Change x [num_tokens, hidden_size] in place."""
        qkv = self.qkv.after_norm(x, self.input_norm).view(len(x), -1, self._head)
        q, k, v = qkv.split(self._sizes, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        apply_rotary(q, cos, sin)
        apply_rotary(k, cos, sin)
        group = self._sizes[0] // self._sizes[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        self.out.add_to(x, attend(q.mul_(self._scale), k, v, batch, reach=self._reach), self.attention_norm)
        self.mlp(x, self.mlp_norm)


class EmbeddingGemma(Encoder[EmbeddingGemmaConfig]):
    config_class = EmbeddingGemmaConfig
    base = "model"

    def __init__(self, config: EmbeddingGemmaConfig, weights: WeightScope) -> None:
        super().__init__(config, weights)
        base, size = weights.at(self.base), config.hidden_size
        self.words = Embedding(base.at("embed_tokens"), config.vocab_size, size, size**0.5)
        self.layers = [EmbeddingGemmaLayer(config, i, base.at(f"layers.{i}")) for i in range(config.num_layers)]
        self.norm = RMSNorm(base.at("norm"), size, config.norm_eps, plus_one=True)
        self._ropes = EncoderRopes(config.ropes)
        if config.labels:
            self.classifier = Linear(weights, size, {"score": len(config.labels)})

    def embed(self, batch: EncoderBatch) -> Tensor:
        return self.words(batch.input_ids)

    def run_layers(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        rows = self._ropes.at(batch.positions, x.dtype)
        for layer in self.layers:
            layer(x, batch, *rows[layer.kind])
        return self.norm(x)

    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        return self.classifier.multiply(batch.last(hidden))
