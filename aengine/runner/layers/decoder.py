"""The decoder of Llama and its kin: layers of attention and feed-forward on a residual stream.

            ┌─ norm ─ qkv ─ rotary ─ attention ─ o ─┐     ┌─ norm ─ gate, up ─ silu·mul ─ down ─┐
residual ───┴───────────────────────────────────────+─────┴─────────────────────────────────────+───

Families differ in the activation, in norms of the outputs before the sums (``post_norm``), and in factors of the
embeddings, the outputs and the logits. `Decoder.make_layer` makes this layer; what a family has in place of one of its
parts it says by overriding the method that makes the part.

Each norm is a part of the product after it, each sum of the product before it, so that both can be one kernel; rotary
(and norms of q and k) is a part of the attention, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ..model_config import ModelConfig
from ..weights.scope import WeightScope
from .attention import AttentionCall, AttentionLayer, Sinks
from .embedding import Embedding, WeightRows
from .linear import Features, Linear
from .mlp import GatedMLP
from .moe import MoE
from .norm import LayerNorm, RMSNorm

Config = TypeVar("Config", bound=ModelConfig)
FeedForward = Callable[[Tensor, RMSNorm], None]
"""Adds its output for norm(residual) to the residual stream: `GatedMLP`, `MoE`."""
Mixer = Callable[[Tensor, RMSNorm, AttentionCall], None]
"""Adds its output for norm(residual) to the residual stream: `SelfAttention`, `GatedDeltaNet`."""


class SelfAttention:
    """Attention with grouped queries; q and k are normalised head by head if the norms are given."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: WeightScope,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        scale: float | None = None,
        rope: int | None = 0,
        softcap: float = 0.0,
        sinks: Sinks | None = None,
        packed: bool = False,
        post_norm: RMSNorm | None = None,
        out_scale: float = 1.0,
        qk_norm: Callable[[Tensor], Tensor] | None = None,
        out_name: str = "o_proj",
        in_features: int | None = None,
    ) -> None:
        """
        Args:
            scale: of q k^T; None: head_dim ** -0.5
            packed: the checkpoint has q, k and v as one tensor, "qkv_proj"
            post_norm: of the output, before it is added to the residual stream
            out_scale: of the output
            qk_norm: of q and k in another way than head by head, such as `QKNorm`
            out_name: of the output matrix in the checkpoint
            in_features: of what q, k and v are made of; None: the residual stream's
        """
        size = in_features or config.hidden_size
        q, kv = weights.share(config.q_size), weights.share(config.kv_size, config.kv_copies)
        qkv: dict[str, Features] = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv = Linear(weights, size, {"qkv_proj": (q, kv, kv)} if packed else qkv, qkv_bias)
        self.o = Linear(weights, q, {out_name: config.hidden_size}, o_bias)
        self.layer = AttentionLayer.make(
            config, index, q_norm, k_norm, scale=scale, rope=rope, softcap=softcap, sinks=sinks
        )
        self.post_norm = post_norm
        self.out_scale = out_scale
        self.qk_norm = qk_norm

    def __call__(self, residual: Tensor, norm: RMSNorm, attn: AttentionCall) -> None:
        """Add the output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        self._attend(residual, self.qkv.after_norm(residual, norm), attn)

    def add_to(self, residual: Tensor, x: Tensor, attn: AttentionCall) -> None:
        """Add the output for x to ``residual`` [num_tokens, hidden_size], in place; x may be ``residual``."""
        self._attend(residual, self.qkv.multiply(x), attn)

    def _attend(self, residual: Tensor, qkv: Tensor, attn: AttentionCall) -> None:
        if self.qk_norm is not None:
            qkv = self.qk_norm(qkv)
        self.o.add_to(residual, attn.forward(self.layer, qkv), self.post_norm, self.out_scale)


class DecoderLayer:
    """An attention and a feed-forward layer, each with a norm before it."""

    def __init__(self, input_norm: RMSNorm, attention: Mixer, mlp_norm: RMSNorm, mlp: FeedForward) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        """Change the residual stream [num_tokens, hidden_size] in place."""
        self.attention(residual, self.input_norm, attn)
        self.mlp(residual, self.mlp_norm)

    def join(self, residual: Tensor) -> None:
        """See `MoE.join`."""
        if isinstance(self.mlp, MoE):
            self.mlp.join(residual, self.mlp_norm)


class Decoder(Generic[Config]):
    """A `CausalLM` (runner/models/): an embedding, the layers that its family makes, a norm and a head."""

    last_norm: ClassVar = "model.norm"  # its name in the checkpoint
    has_head_bias: ClassVar = False
    reranks_by_yes: ClassVar = False  # with a head of one class, the model is a reranker that is asked for yes or no

    def __init__(self, config: Config, weights: WeightScope) -> None:
        self.config = config
        self.weights = weights
        size = config.hidden_size
        self.vocabulary = weights.vocabulary(config.vocab_size)
        stage = weights.stage
        tied = "model.embed_tokens"
        if stage.is_first and weights.gives_rows:
            self.embed: Embedding | WeightRows = WeightRows(
                weights, tied, self.vocabulary, size, config.embedding_scale
            )
        elif stage.is_first:
            self.embed = Embedding(weights.at(tied), self.vocabulary, size, config.embedding_scale)
        own = stage.layers(config.num_layers)
        self.layers = [self.make_layer(i, weights.at(f"model.layers.{i}")) for i in own]
        if stage.is_last:
            self.norm = self.make_last_norm(weights.at(self.last_norm))
            head = tied if config.tie_word_embeddings else "lm_head"
            if head == tied and stage.is_first and isinstance(self.embed, WeightRows) and not self.has_head_bias:
                self.lm_head = self.embed.matrix
            else:
                self.lm_head = Linear(weights, size, {head: self.vocabulary.share}, self.has_head_bias)

    def make_layer(self, index: int, weights: WeightScope) -> Callable[[Tensor, AttentionCall], None]:
        """Make layer ``index``, which changes the residual stream [num_tokens, hidden_size] in place."""
        return DecoderLayer(
            self.make_norm(weights.at("input_layernorm")),
            self.make_mixer(index, weights),
            self.make_norm(weights.at("post_attention_layernorm")),
            self.make_feed_forward(index, weights),
        )

    def make_mixer(self, index: int, weights: WeightScope) -> Mixer:
        """Make what mixes the tokens in layer ``index``. ``weights``: the layer's, as of `make_feed_forward`."""
        return self.make_attention(index, weights.at("self_attn"))

    def make_feed_forward(self, index: int, weights: WeightScope) -> FeedForward:
        """Make the part of layer ``index`` that computes each token by itself."""
        return self.make_mlp(weights.at("mlp"))

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        """Make the attention of layer ``index``. ``options``: those of `SelfAttention`, in place of what follows from
        the config."""
        config: ModelConfig = self.config
        given = {
            "qkv_bias": config.attention_bias,
            "o_bias": config.attention_bias,
            "rope": config.rope_of_layers[index] if config.rope_of_layers else 0,
        }
        return SelfAttention(config, index, scope, **(given | options))

    def make_mlp(self, scope: WeightScope, **options: Any) -> GatedMLP:
        """Make a gated feed-forward layer. ``options``: those of `GatedMLP`, likewise."""
        config: ModelConfig = self.config
        given = {"activation": config.activation, "bias": config.mlp_bias}
        return GatedMLP(scope, config.hidden_size, config.intermediate_size, **(given | options))

    def head_norms(self, scope: WeightScope) -> dict[str, RMSNorm]:
        """Make the norms of each head of q and k, as options of `make_attention`."""
        return {name: self.make_norm(scope.at(name), self.config.head_dim) for name in ("q_norm", "k_norm")}

    def make_norm(self, weights: WeightScope, size: int | None = None) -> RMSNorm:
        """Make a norm of rows of ``size`` elements; None: of the residual stream."""
        return RMSNorm(weights, size or self.config.hidden_size, self.config.rms_norm_eps)

    def make_last_norm(self, weights: WeightScope) -> RMSNorm | LayerNorm:
        """Make the norm before the head."""
        return self.make_norm(weights)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> Tensor:
        residual = self.embed(input_ids) if received is None else received
        attn.begin(positions)
        for layer in self.layers:
            layer(residual, attn)
        return residual

    def join(self) -> None:
        """Take part in a round in which this replica has no tokens: with its experts alone (`ExpertsGroup`)."""
        dtype, device = self.weights.formats.dtype, self.weights.formats.device
        nothing = torch.empty((0, self.config.hidden_size), dtype=dtype, device=device)
        for layer in self.layers:
            if isinstance(layer, DecoderLayer):
                layer.join(nothing)

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if isinstance(self.norm, LayerNorm):
            logits = self.lm_head.multiply(self.norm(hidden)).float()
        else:
            logits = self.lm_head.after_norm(hidden, self.norm, torch.float32)
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if scale != 1.0:
            logits.mul_(scale)
        if cap:
            logits.div_(cap).tanh_().mul_(cap)
        if self.vocabulary.num_tokens < self.vocabulary.size:
            logits[:, self.vocabulary.num_tokens :] = -torch.inf
        return logits
