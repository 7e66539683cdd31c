"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a layer whose attention reads a token's embedding beside the state.

    three streams of the target ─ fc ─┬─ norm ─┬─ qkv ─ attention ─ o ─┐     ┌─ norm ─ mlp ─┐
    embedding of the next token ──────│─ norm ─┘                       │     │              │
                                      └────────────────────────────────+─────┴──────────────+─ norm ─ head

What it predicts is of a vocabulary of its own, some of the target's tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ...layers.attention import AttentionCall
from ...layers.decoder import Decoder, SelfAttention
from ...layers.embedding import Embedding
from ...layers.linear import Linear
from ...layers.mlp import GatedMLP
from ...layers.norm import RMSNorm
from ...model_config import ConfigReader, ModelConfig
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope
from ...weights.weight import put_into


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
        keys = ConfigReader({**hf, **ConfigReader(hf).mapping("transformer_layer_config")})
        fields = keys.decoder()
        if fields["num_layers"] != 1:
            raise keys.error("num_hidden_layers", "is not 1, as that of EAGLE-3's heads is")
        if fields["vocab_size"] != target.vocab_size:
            raise keys.error("vocab_size", f"is not the target's, {target.vocab_size}: the head is another model's")
        size = keys.integer_or_none("target_hidden_size") or fields["hidden_size"]
        if size != target.hidden_size:
            raise ModelLoadError(
                f"config.json: the head reads states of {size} elements (target_hidden_size, or hidden_size), and the "
                f"target's have {target.hidden_size}: the head is another model's"
            )
        return cls(
            **fields,
            sliding_windows=(None,),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            captured=_captured(keys, target.num_layers),
            draft_vocab_size=keys.integer_or_none("draft_vocab_size") or target.vocab_size,
            norm_before_residual=keys.flag("norm_before_residual"),
            norm_before_fc=keys.flag("norm_before_fc"),
        )


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


class Eagle3:
    config_class: ClassVar[type[ModelConfig]] = Eagle3Config
    gguf: ClassVar[GgufNames] = GgufNames()

    def __init__(
        self, config: Eagle3Config, weights: WeightScope, target: Decoder[Any], stored: Collection[str] | None
    ) -> None:
        """``stored``: see `build_head`. What the checkpoint lacks and the target has is the target's."""
        size, eps, names = config.hidden_size, config.rms_norm_eps, stored or {"lm_head.weight"}
        self.config: ModelConfig = config
        self.weights = weights
        self.captured: Sequence[int] = config.captured
        self.norm_before_residual = config.norm_before_residual
        self.vocabulary = weights.vocabulary(config.draft_vocab_size)
        streams = len(config.captured) * target.config.hidden_size
        self.fc_norm = RMSNorm(weights.at("input_norm"), streams, eps) if config.norm_before_fc else None
        self.fc = Linear(weights, streams, {"fc": size}, "fc.bias" in names)
        layer = weights.at("layers.0" if "layers.0.hidden_norm.weight" in names else "midlayer")
        self.embedding_norm = RMSNorm(layer.at("input_layernorm"), size, eps)
        self.state_norm = RMSNorm(layer.at("hidden_norm"), size, eps)
        bias = config.attention_bias
        self.attention = SelfAttention(
            config, 0, layer.at("self_attn"), in_features=2 * size, qkv_bias=bias, o_bias=bias
        )
        self.mlp_norm = RMSNorm(layer.at("post_attention_layernorm"), size, eps)
        self.mlp = GatedMLP(
            layer.at("mlp"), size, config.intermediate_size, activation=config.activation, bias=config.mlp_bias
        )
        self.norm = RMSNorm(weights.at("norm"), size, eps)
        is_whole, is_as_wide = config.draft_vocab_size == config.vocab_size, size == target.config.hidden_size
        if "embed_tokens.weight" in names:
            vocabulary = weights.vocabulary(config.vocab_size)
            self.embed: Any = Embedding(weights.at("embed_tokens"), vocabulary, size)
        else:
            self.embed = _of_target(target.embed, "embed_tokens.weight", is_as_wide)
        if "lm_head.weight" in names:
            self.lm_head = Linear(weights, size, {"lm_head": self.vocabulary.share})
        else:
            self.lm_head = _of_target(target.lm_head, "lm_head.weight", is_as_wide and is_whole)
        self.offsets: Tensor | None = None  # int64 [draft_vocab_size]: ids of the target less those of the head
        if "d2t" in names:
            weights.want("d2t", (config.draft_vocab_size,), torch.int64, self._put_offsets, 0, on_host=True)
        elif stored is not None and not is_whole:
            raise _lacks("d2t", f"which says what the {config.draft_vocab_size} tokens that it predicts are")

    def _put_offsets(self, offsets: Tensor) -> None:
        ids = offsets + torch.arange(len(offsets))
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
            raise ValueError(f"it names tokens beyond the {self.config.vocab_size} of the target")
        put_into(self, "offsets", offsets.to(self.weights.formats.device))

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
        return residual

    def recycled(self, hidden: Tensor) -> Tensor:
        return hidden

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head.after_norm(hidden, self.norm, torch.float32)
        if self.vocabulary.num_tokens < self.vocabulary.size:
            logits[:, self.vocabulary.num_tokens :] = -torch.inf
        return logits

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.offsets is None else draft_ids + self.offsets[draft_ids]


def _of_target(own: Any, name: str, fits: bool) -> Any:
    if not fits:
        raise _lacks(name, "and the target's has another shape")
    return own


def _lacks(name: str, why: str) -> ModelLoadError:
    return ModelLoadError(f"the head's checkpoint lacks {name}, {why}: fetch the head again")
