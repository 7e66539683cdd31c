"""Parts of heads whose checkpoints are apart from their targets': layers, vocabularies, and what is the target's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ...distributed.shares import VocabularyShare
from ...layers.decoder import Decoder, DecoderLayer, SelfAttention
from ...layers.embedding import Embedding
from ...layers.linear import Linear
from ...layers.mlp import GatedMLP
from ...layers.norm import RMSNorm
from ...model_config import ModelConfig
from ...weights.scope import WeightScope
from ...weights.weight import put_into

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


def tables_of(
    config: ModelConfig, weights: WeightScope, target: Decoder[Any], names: Collection[str], draft_vocab_size: int
) -> tuple[Any, Any, VocabularyShare]:
    """Return the embedding, the output matrix, and what tokens that one has: the checkpoint's, or the target's. Raises
    ModelLoadError: neither fits."""
    size, embed, lm_head = config.hidden_size, target.embed, target.lm_head
    vocabulary = weights.vocabulary(draft_vocab_size)
    is_whole, is_as_wide = draft_vocab_size == config.vocab_size, size == target.config.hidden_size
    if "embed_tokens.weight" in names:
        embed = Embedding(weights.at("embed_tokens"), weights.vocabulary(config.vocab_size), size)
    elif not is_as_wide:
        raise lacks("embed_tokens.weight", "and the target's has another shape")
    if "lm_head.weight" in names:
        lm_head = Linear(weights, size, {"lm_head": vocabulary.share})
    elif not (is_as_wide and is_whole):
        raise lacks("lm_head.weight", "and the target's has another shape")
    return embed, lm_head, vocabulary


def logits_of(logits: Tensor, vocabulary: VocabularyShare) -> Tensor:
    """Return the logits with -inf behind those of this rank's tokens."""
    if vocabulary.num_tokens < vocabulary.size:
        logits[:, vocabulary.num_tokens :] = -torch.inf
    return logits


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
