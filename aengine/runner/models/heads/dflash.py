"""DFlash (Chen et al. 2026, arXiv:2602.06036): a small block-diffusion model whose layers see what the target knows.

    streams of the target at 0 .. n - 1 ─ fc ─ norm ─┬─ k, v of layer 0    the context: the same in all layers
                                                     ├─ k, v of layer 1
    x_n  mask  mask  mask   at n .. n + 3  ──────────┴─> layers of Qwen3's kind ─ norm ─ the target's head

Each place of the block sees the context and the whole block. What a mask's place predicts is the token there: the block
has one place more than there are drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ...layers.attention import AttentionCall
from ...layers.decoder import Decoder
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...model_config import ConfigReader, ModelConfig
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope
from .draft_head import OnePassHead, check_fits, mask_of
from .parts import HeadApart, Stored, head_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(ModelConfig):
    captured: tuple[int, ...]
    draft_vocab_size: int
    mask_token_id: int
    block_size: int  # places that it was trained with
    is_causal: bool

    @classmethod
    def for_target(cls, hf: Mapping[str, Any], target: ModelConfig) -> Self:
        """Read a config.json in z-lab's form, which has its own settings below a key, or in that of speculators, which
        has the layers' there. Raises ModelLoadError."""
        reader = ConfigReader(hf)
        keys = ConfigReader({**hf, **reader.mapping("transformer_layer_config"), **reader.mapping("dflash_config")})
        fields = keys.decoder()
        check_fits(keys, fields, target)
        if "sliding_attention" in keys.layer_types(("full_attention", "sliding_attention")) or keys.flag("use_swa"):
            raise keys.error("layer_types", "has windows: heads of full attention are supported")
        for name in ("sample_from_anchor", "attention_sink_bias"):
            if keys.flag(name):
                raise keys.error(name, "is not supported: heads whose masks alone predict, without sinks, are")
        if keys.text("projector_type"):
            raise keys.error("projector_type", "is not supported: heads that are DFlash's alone are")
        return cls(
            **fields,
            sliding_windows=(None,) * fields["num_layers"],
            attention_bias=keys.flag("attention_bias"),
            captured=_captured(keys, target.num_layers),
            draft_vocab_size=keys.integer_or_none("draft_vocab_size") or target.vocab_size,
            mask_token_id=mask_of(keys, ("mask_token_id",), target.vocab_size),
            block_size=keys.integer("block_size", least=2),
            is_causal=keys.flag("causal"),
        )


def _captured(keys: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the streams that the head reads: z-lab names the layers that they leave, speculators those to which they
    come."""
    name = "target_layer_ids" if keys.raw("target_layer_ids") is not None else "aux_hidden_state_layer_ids"
    found = tuple(i + (name == "target_layer_ids") for i in keys.integers(name))
    if not found:
        raise ModelLoadError(
            "config.json lacks dflash_config.target_layer_ids, or aux_hidden_state_layer_ids, the layers of the target "
            "whose states the head reads: fetch the head again"
        )
    if min(found) < 0 or max(found) > num_layers:
        raise keys.error(name, f"names layers that the target, of {num_layers}, does not have")
    return found


class DFlash(HeadApart, OnePassHead):
    config_class: ClassVar[type[ModelConfig]] = DFlashConfig
    gguf: ClassVar[GgufNames] = GgufNames()
    predicts_itself = True

    def __init__(self, config: DFlashConfig, weights: WeightScope, target: Decoder[Any], stored: Stored | None) -> None:
        """``stored``: see `build_head`."""
        size, eps = config.hidden_size, config.rms_norm_eps
        names = stored if stored is not None else {"self_attn.q_norm.weight"}
        super().__init__(config, weights, target, names, stored)
        self.mask_token_id, self.sees_masks = config.mask_token_id, not config.is_causal
        self.most_drafts = config.block_size - 1
        self.fc = Linear(weights, len(config.captured) * target.config.hidden_size, {"fc": size})
        self.context_norm = RMSNorm(weights.at("hidden_norm"), size, eps)
        self.layers: list[Any] = [
            head_layer(config, i, weights.at(f"layers.{i}"), names) for i in range(config.num_layers)
        ]

    def combine(self, captured: Tensor) -> Tensor:
        return self.context_norm(self.fc.multiply(captured))

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> Tensor:
        assert received is not None, "a head begins with states of its target"
        self.remember(input_ids, positions, attn, received)
        return received  # nothing is predicted of pairs

    def remember(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> None:
        assert received is not None, "a head begins with states of its target"
        attn.begin(positions)
        for layer in self.layers:
            attn.write(layer.attention.layer, layer.attention.qkv.multiply(received))

    def draft(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor, are_drafted: Tensor
    ) -> Tensor:
        """What comes of the context's places is not looked at: their keys and values alone are, at each layer."""
        attn.begin(positions)
        residual, in_block = self.embed(input_ids), are_drafted[:, None]
        for layer in self.layers:
            x = torch.where(in_block, layer.input_norm(residual), received)
            layer.attention.add_to(residual, x, attn)
            layer.mlp(residual, layer.mlp_norm)
        return residual
