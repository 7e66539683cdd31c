"""Multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437): a layer of the target's kind that drafts.

the target's last state, normalised ─ norm ─┐
embedding of the next token ───────── norm ─┴─ product ─ a layer ─ norm ─┬─ the target's head
                                                                         └─ state of the next pair
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...layers.attention import AttentionCall
from ...layers.decoder import Config, Decoder, SelfAttention
from ...layers.linear import Linear
from ...model_config import ConfigReader, ModelConfig
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope
from ..deepseek import Deepseek, DeepseekConfig
from ..glm4_moe import Glm4Moe, Glm4MoeConfig
from ..qwen3_next import Qwen3Next, Qwen3NextConfig, Qwen35
from .draft_head import DraftHead


class MtpHead(Decoder[Config], DraftHead):
    """A decoder of one layer between a product and the target's head. A family with such heads says how they are named
    in its checkpoints."""

    config_class: type[ModelConfig]
    gguf = GgufNames()
    names: ClassVar[Mapping[str, str]]  # each part's, in the checkpoint; "{end}": the number of the target's layers
    state_first: ClassVar[bool]  # in the product's input
    masks_first: ClassVar[bool] = False  # nothing is seen of the token behind position 0
    one_layer: ClassVar[Mapping[str, Any]]  # what differs in the head's config.json, which may be the target's
    num_layers_key: ClassVar[str] = "num_nextn_predict_layers"

    def __init__(self, config: Config, weights: WeightScope, target: Decoder[Any]) -> None:
        self.config, self.weights, self.vocabulary = config, weights, target.vocabulary
        self.captured: Sequence[int] = (target.config.num_layers,)
        self.embed, self.lm_head, self._target = target.embed, target.lm_head, target
        names = {part: name.format(end=target.config.num_layers) for part, name in self.names.items()}
        at, size = {part: weights.at(name) for part, name in names.items()}, config.hidden_size
        self.embedding_norm, self.state_norm = self.make_norm(at["embedding_norm"]), self.make_norm(at["state_norm"])
        self.product = Linear(weights, 2 * size, {names["product"]: size})
        self.layers = [self.make_layer(0, at["layer"])]
        self.norm = self.make_norm(at["norm"])

    @classmethod
    def read_config(cls, hf: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
        """Return the config of the one layer. Raises ModelLoadError: there are several, or it is for other models."""
        keys = ConfigReader(hf)
        if keys.integer(cls.num_layers_key, default=1, least=0) != 1:
            raise keys.error(cls.num_layers_key, "is not 1: heads of one layer are supported")
        config = cls.config_class.from_hf({**hf, **cls.one_layer})
        for name in ("vocab_size", "hidden_size"):
            if getattr(config, name) != getattr(target, name):
                raise keys.error(name, f"is not the target's, {getattr(target, name)}: the head is another model's")
        return config

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> Tensor:
        assert received is not None, "a head begins with states of its target"
        embedded = self.embed(input_ids)
        if self.masks_first:
            embedded.masked_fill_((positions == 0)[:, None], 0.0)
        parts = [self.embedding_norm(embedded), self.state_norm(received)]
        residual = self.product.multiply(torch.cat(parts[::-1] if self.state_first else parts, 1))
        return super().forward(input_ids, positions, attn, residual)

    def combine(self, captured: Tensor) -> Tensor:
        return self._target.final_hidden(captured)

    def recycled(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class MimoMtpConfig(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        return cls(**keys.decoder(), sliding_windows=(None,), attention_bias=keys.flag("attention_bias", True))


class MimoMtp(MtpHead[MimoMtpConfig]):
    """MiMo's (Xiaomi 2025, arXiv:2505.07608): the layer is Qwen2's."""

    config_class = MimoMtpConfig
    names: ClassVar[Mapping[str, str]] = {
        "embedding_norm": "model.mtp_layers.0.token_layernorm",
        "state_norm": "model.mtp_layers.0.hidden_layernorm",
        "product": "model.mtp_layers.0.input_proj",
        "layer": "model.mtp_layers.0",
        "norm": "model.mtp_layers.0.final_layernorm",
    }
    state_first = True
    masks_first = True
    one_layer: ClassVar[Mapping[str, Any]] = {"num_hidden_layers": 1}

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        return super().make_attention(index, scope, o_bias=False, **options)


class Qwen3NextMtp(MtpHead[Qwen3NextConfig], Qwen3Next):
    """Qwen3-Next's: its layer attends."""

    config_class = Qwen3NextConfig
    gguf = GgufNames()
    names: ClassVar[Mapping[str, str]] = {
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "state_norm": "mtp.pre_fc_norm_hidden",
        "product": "mtp.fc",
        "layer": "mtp.layers.0",
        "norm": "mtp.norm",
    }
    state_first = False
    one_layer: ClassVar[Mapping[str, Any]] = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


class Qwen35Mtp(Qwen3NextMtp, Qwen35):
    """That of Qwen3.5's text models."""

    num_layers_key = "mtp_num_hidden_layers"


class LaterLayerMtp(MtpHead[Config]):
    """DeepSeek's: the layer behind the target's last one. Its copies of the embedding and of the head are not read."""

    gguf = GgufNames()
    names: ClassVar[Mapping[str, str]] = {
        "embedding_norm": "model.layers.{end}.enorm",
        "state_norm": "model.layers.{end}.hnorm",
        "product": "model.layers.{end}.eh_proj",
        "layer": "model.layers.{end}",
        "norm": "model.layers.{end}.shared_head.norm",
    }
    state_first = False
    one_layer: ClassVar[Mapping[str, Any]] = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
    }


class DeepseekMtp(LaterLayerMtp[DeepseekConfig], Deepseek):
    """That of V3 and R1, and GLM-4.7-Flash's."""

    config_class = DeepseekConfig


class Glm4MoeMtp(LaterLayerMtp[Glm4MoeConfig], Glm4Moe):
    """GLM-4.5's."""

    config_class = Glm4MoeConfig
