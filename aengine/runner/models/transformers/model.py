"""A model that transformers computes, as the runner sees it."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...layers.attention import AttentionCall, AttentionLayer
from ...model_config import ModelConfig
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope
from ...weights.step_rows import ROWS_UNSEEN
from .attention import AttentionSlot, CallSinks, LayerCalls, MixerSlot, listen
from .check import PlainAttention, check_batch
from .config import TransformersConfig
from .fused import fuse_layers
from .library import build_skeleton
from .mixers import wrap_mixers
from .ropes import fix_ropes
from .step_products import wrap_products
from .survey import Head, SurveyedLayer, SurveyedMixer, find_trunk, trunk_inputs
from .weights import CheckpointWeights

logger = logging.getLogger("aengine.runner")


class TransformersModel:
    """A `CausalLM` around one of transformers' classes."""

    config_class: ClassVar[type[ModelConfig]] = TransformersConfig
    gguf: ClassVar[GgufNames] = GgufNames()

    def __init__(self, config: TransformersConfig, weights: WeightScope) -> None:
        self.config: ModelConfig = config
        self._layers = config.layers
        self.weights = weights
        self.vocabulary = weights.vocabulary(config.vocab_size)
        self.module, _ = build_skeleton(config.files, weights.formats.dtype, buffers=torch.device("cpu"))
        fix_ropes(self.module)
        weights.names = CheckpointWeights(self.module, weights, self._check)
        wrap_mixers(self.module)
        self._calls = LayerCalls([_slot(i, layer, weights.formats.dtype) for i, layer in enumerate(config.layers)])
        listen(self.module, None)
        self.fused: dict[str, int] = {}
        """How many decoder layers are computed by ours, and how many feed-forward layers in them, once it is loaded."""
        self._trunk: nn.Module = find_trunk(self.module)
        self._head = Head(self.module, self._trunk)
        listen(self.module, self._calls)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] after the last layer and its norm. Such a model is never a
        stage of a pipeline."""
        attn.begin(positions)
        self._calls.begin(attn)
        hidden: Tensor = self._trunk(**trunk_inputs(self._trunk, input_ids[None], positions[None])).last_hidden_state
        return hidden[0]

    def _check(self) -> None:
        """Compare the loaded model with transformers' own results on a small batch, then replace the layers whose
        code says that our fused layers compute the same. Raises ModelLoadError if the results differ."""

        def compute(ids: Tensor, positions: Tensor, in_parts: bool = False) -> Tensor:
            listener = PlainAttention(self._layers, positions, in_parts=in_parts, ropes=self.config.ropes)
            listen(self.module, listener)
            return self.compute_logits(self._trunk(**trunk_inputs(self._trunk, ids[None], positions[None]))[0][0])

        self._calls.states_take_chunks = check_batch(
            self.module, self.config.vocab_size, self.config.max_position_embeddings, compute
        )
        device = next(self.module.parameters()).device
        positions = torch.cat((torch.arange(37), torch.arange(9))).to(device)
        ids = (torch.arange(len(positions)) * 7919 % self.config.vocab_size).to(device)
        with torch.no_grad():
            fused = fuse_layers(
                self.module,
                self._layers,
                self.config.ropes,
                lambda: compute(ids, positions),
            )
        self.fused = {"layers": len(fused), "feed_forward": sum(layer.has_feed_forward for layer in fused)}
        if fused:
            logger.info("%d of %d layers are computed by ours in place of transformers'", len(fused), len(self._layers))
        step_rows = self.weights.formats.step_rows
        if step_rows is not ROWS_UNSEEN:
            wrap_products(self.module, fused, step_rows, lambda: compute(ids, positions), len(ids))
        listen(self.module, self._calls)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [n, vocab_size] for n rows of what `forward` returns."""
        return self._head(hidden)

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``, which `forward` has normalised already."""
        return hidden


def _slot(index: int, layer: SurveyedLayer | SurveyedMixer, dtype: torch.dtype) -> AttentionSlot | MixerSlot:
    if isinstance(layer, SurveyedMixer):
        return MixerSlot(layer.kv.tensors, tuple(dtype if own else torch.float32 for own in layer.follows_dtype))
    attention = AttentionLayer(
        index=index,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        scale=layer.scale,
        rope=None,
        softcap=layer.softcap,
        sinks=CallSinks() if layer.has_sinks else None,
    )
    return AttentionSlot(attention, layer.value_dim)
