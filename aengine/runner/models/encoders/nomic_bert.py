"""Nomic's BERT (Nussbaum et al. 2024, arXiv:2402.01613), of nomic-embed-text 1 and 1.5: rotary positions, gated
feed-forward layers without biases, norms behind the sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.activation import act_and_mul
from ....kernels.rotary import apply_rotary
from ...layers.embedding import Embedding
from ...layers.linear import Linear
from ...layers.norm import LayerNorm
from ...model_config import ConfigReader
from ...pooling.attention import attend
from ...pooling.batch import EncoderBatch
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope
from .encoder import ClassificationHead, Encoder, EncoderConfig, EncoderRopes

_SETTINGS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
"""BERT's names of its settings, and those of the first releases."""
_NEEDED = {"activation_function": "swiglu", "hidden_act": "silu", "prenorm": False, "rotary_emb_fraction": 1.0}
"""What the first releases say of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(EncoderConfig):
    type_vocab_size: int
    theta: float  # base of rotary positions

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        for key, needed in _NEEDED.items():
            if keys.raw(key) not in (None, needed):
                raise keys.error(key, f"is not supported; {needed!r} is")
        if keys.raw("moe_every_n_layers"):
            raise ModelLoadError("config.json: moe_every_n_layers is not supported: layers with experts are not there")
        rope = keys.at("rope_parameters")
        if rope.text("rope_type", "default") != "default":
            raise keys.error("rope_parameters", "is not supported; rope_type 'default' is")
        own = {name: hf[key] for name, key in _SETTINGS.items() if key in hf}
        if "n_positions" in hf:  # beyond what it was trained for the frequencies would have to be stretched
            trained = keys.integer("max_trained_positions", 2048, least=0) or 2048
            own["max_position_embeddings"] = min(keys.integer("n_positions"), trained)
        settings = {**hf, **own, "hidden_act": "silu"}
        return cls(
            **cls.common(settings),
            type_vocab_size=ConfigReader(settings).integer("type_vocab_size", default=2, least=0),
            theta=rope.number("rope_theta", ConfigReader(settings).number("rope_theta", 1000.0, above=0), above=0),
        )


class NomicBertLayer:
    """norm(x + attention(x)), then norm(x + down(silu(gate(x)) * up(x)))."""

    def __init__(self, config: NomicBertConfig, weights: WeightScope) -> None:
        size, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self._num_heads = config.num_heads
        self.qkv = Linear(weights.at("attn"), size, {"Wqkv": 3 * size})
        self.attention_out = Linear(weights.at("attn"), size, {"out_proj": size})
        self.attention_norm = LayerNorm(weights.at("norm1"), size, eps)
        self.gate_up = Linear(weights.at("mlp"), size, {"fc12": inner, "fc11": inner})
        self.down = Linear(weights.at("mlp"), inner, {"fc2": size})
        self.norm = LayerNorm(weights.at("norm2"), size, eps)

    def __call__(self, x: Tensor, batch: EncoderBatch, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv.multiply(x).view(len(x), 3 * self._num_heads, -1)
        apply_rotary(heads[:, : 2 * self._num_heads], cos, sin)
        q, k, v = heads.chunk(3, dim=1)
        self.attention_out.add_to(x, attend(q, k, v, batch))
        x = self.attention_norm(x)
        self.down.add_to(x, act_and_mul(self.gate_up.multiply(x)))
        return self.norm(x)


class NomicBert(Encoder[NomicBertConfig]):
    config_class = NomicBertConfig
    base = "nomic_bert"
    gguf = GgufNames(
        top={
            "token_embd": "nomic_bert.embeddings.word_embeddings",
            "token_types": "nomic_bert.embeddings.token_type_embeddings",
            "token_embd_norm": "nomic_bert.emb_ln",
        },
        layer={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        layers="nomic_bert.encoder.layers",
    )

    def __init__(self, config: NomicBertConfig, weights: WeightScope) -> None:
        super().__init__(config, weights)
        base, size = weights.at(self.base), config.hidden_size
        self.words = Embedding(base.at("embeddings.word_embeddings"), config.vocab_size, size)
        self.types = Embedding(base.at("embeddings.token_type_embeddings"), config.type_vocab_size, size)
        self.norm = LayerNorm(base.at("emb_ln"), size, config.norm_eps)
        self.layers = [NomicBertLayer(config, base.at(f"encoder.layers.{i}")) for i in range(config.num_layers)]
        self._ropes = EncoderRopes({"": config.rope_of(config.theta)})
        if config.labels:
            pooler = Linear(base.at("pooler"), size, {"dense": size}, bias=True)
            classifier = Linear(weights, size, {"classifier": len(config.labels)}, bias=True)
            self.head = ClassificationHead(pooler, classifier)

    def embed(self, batch: EncoderBatch) -> Tensor:
        types = batch.input_ids.new_zeros(1) if batch.type_ids is None else batch.type_ids
        return self.norm(self.words(batch.input_ids).add_(self.types(types)))

    def run_layers(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        rows = self._ropes.at(batch.positions, x.dtype)[""]
        for layer in self.layers:
            x = layer(x, batch, *rows)
        return x

    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        return self.head(batch.first(hidden))
