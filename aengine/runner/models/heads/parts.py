"""Parts of heads whose checkpoints are apart from their targets': layers, vocabularies, and what is the target's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ...layers.decoder import Decoder, DecoderLayer, SelfAttention
from ...layers.embedding import Embedding
from ...layers.linear import Linear
from ...layers.mlp import GatedMLP
from ...layers.norm import RMSNorm
from ...model_config import ModelConfig
from ...weights.scope import WeightScope
from ...weights.weight import put_into
from .draft_head import DraftHead

Stored = Mapping[str, tuple[int, ...]]
"""Names and shapes of the tensors of a checkpoint."""


def head_layer(config: ModelConfig, index: int, scope: WeightScope, names: Collection[str]) -> DecoderLayer:
    """Make a decoder's layer. ``names``: of the checkpoint's tensors."""
    norms = [
        RMSNorm(scope.at(name), config.hidden_size, config.rms_norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    return DecoderLayer(norms[0], head_attention(config, index, scope, names), norms[1], head_mlp(config, scope))


def head_attention(
    config: ModelConfig, index: int, layer: WeightScope, names: Collection[str], in_features: int | None = None
) -> SelfAttention:
    """Make the attention of a layer; q and k are normalised, as Qwen3's, where the checkpoint has norms for it."""
    scope, bias, norms = layer.at("self_attn"), config.attention_bias, dict[str, Any]()
    if any(name.endswith("self_attn.q_norm.weight") for name in names):
        norms = {name: RMSNorm(scope.at(name), config.head_dim, config.rms_norm_eps) for name in ("q_norm", "k_norm")}
    return SelfAttention(config, index, scope, in_features=in_features, qkv_bias=bias, o_bias=bias, **norms)


def head_mlp(config: ModelConfig, layer: WeightScope) -> GatedMLP:
    how: dict[str, Any] = {"activation": config.activation, "bias": config.mlp_bias}
    return GatedMLP(layer.at("mlp"), config.hidden_size, config.intermediate_size, **how)


class DraftIds:
    """The target's ids of the tokens that a head predicts, of a vocabulary of its own."""

    def __init__(
        self, vocab_size: int, draft_vocab_size: int, weights: WeightScope, stored: Collection[str] | None
    ) -> None:
        """``vocab_size``: the target's. Raises ModelLoadError: the checkpoint does not say which ones these are."""
        self.offsets: Tensor | None = None  # int64 [draft_vocab_size]: ids of the target less those of the head
        self._vocab_size, self._device = vocab_size, weights.formats.device
        if stored is not None and "d2t" in stored:
            weights.want("d2t", (draft_vocab_size,), torch.int64, self._put, 0, on_host=True)
        elif stored is not None and draft_vocab_size != vocab_size:
            raise lacks("d2t", f"which says what the {draft_vocab_size} tokens that it predicts are")

    def _put(self, offsets: Tensor) -> None:
        ids = offsets + torch.arange(len(offsets))
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise ValueError(f"it names tokens beyond the {self._vocab_size} of the target")
        put_into(self, "offsets", offsets.to(self._device))

    def of_target(self, ids: Tensor) -> Tensor:
        return ids if self.offsets is None else ids + self.offsets[ids]


def lacks(name: str, why: str) -> ModelLoadError:
    """Return the error of a checkpoint without a tensor."""
    return ModelLoadError(f"the head's checkpoint lacks {name}, {why}: fetch the head again")


class HeadApart(DraftHead):
    """What predicts tokens in a head whose checkpoint is apart: perhaps of a vocabulary of its own."""

    def __init__(
        self,
        config: Any,
        weights: WeightScope,
        target: Decoder[Any],
        names: Collection[str],
        stored: Collection[str] | None,
    ) -> None:
        """``names``: of the checkpoint's tensors; ``stored``: the same, or None where there is none. What it lacks and
        the target has is the target's. Raises ModelLoadError: the target's table does not fit."""
        size = config.hidden_size
        self.config, self.weights, self.captured = config, weights, config.captured
        self.norm = RMSNorm(weights.at("norm"), size, config.rms_norm_eps)
        self.embed, self.lm_head = target.embed, target.lm_head
        self.vocabulary = weights.vocabulary(config.draft_vocab_size)
        is_whole, is_as_wide = config.draft_vocab_size == config.vocab_size, size == target.config.hidden_size
        if "embed_tokens.weight" in names:
            self.embed = Embedding(weights.at("embed_tokens"), weights.vocabulary(config.vocab_size), size)
        elif not is_as_wide:
            raise lacks("embed_tokens.weight", "and the target's has another shape")
        if "lm_head.weight" in names:
            self.lm_head = Linear(weights, size, {"lm_head": self.vocabulary.share})
        elif not (is_as_wide and is_whole):
            raise lacks("lm_head.weight", "and the target's has another shape")
        self.draft_ids = DraftIds(config.vocab_size, config.draft_vocab_size, weights, stored)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head.after_norm(hidden, self.norm, torch.float32)
        if self.vocabulary.num_tokens < self.vocabulary.size:
            logits[:, self.vocabulary.num_tokens :] = -torch.inf
        return logits

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        return self.draft_ids.of_target(draft_ids)
