"""What the runner needs to know of a model that transformers computes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ....errors import ModelLoadError
from ...kv_spec import LayerKV
from ...model_config import ConfigReader, ModelConfig
from ...rope import RopeConfig
from .library import ModelFiles
from .mixers import source_of
from .survey import SurveyedLayer, SurveyedMixer, survey

_ENDLESS = 1 << 17
"""Tokens of a sequence of a model that has no longest: states alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """The fields of dense decoders are those of the widest attention layer; ``layers`` has all, as they are called."""

    files: ModelFiles
    layers: tuple[SurveyedLayer | SurveyedMixer, ...]
    class_name: str
    reason: str  # why it is not native

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        raise NotImplementedError("see read_transformers_config")

    def of_rank(self, num_ranks: int, *, divides_experts: bool = False, num_replicas: int = 1) -> Self:
        if num_ranks == 1:
            if divides_experts and num_replicas > 1:
                raise ModelLoadError(
                    f"enable_expert_parallel: {self.class_name} is computed by transformers ({self.reason}), whose "
                    f"experts can't be divided among replicas: leave enable_expert_parallel out"
                )
            return self
        raise ModelLoadError(
            f"tensor_parallel_size={num_ranks}: {self.class_name} is computed by transformers ({self.reason}), whose "
            f"layers can't be divided among ranks: use tensor_parallel_size=1, or data_parallel_size"
        )

    @property
    def implementation(self) -> str:
        return "transformers"

    @property
    def why_not_native(self) -> str:
        return self.reason

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        return tuple(layer.kv for layer in self.layers)

    @property
    def query_heads(self) -> tuple[int, ...]:
        return tuple(layer.num_heads if isinstance(layer, SurveyedLayer) else 0 for layer in self.layers)


def read_transformers_config(files: ModelFiles, reason: str) -> TransformersConfig:
    """Read a config for transformers' code. ``reason``: why the model is not native.

    Raises ModelLoadError: transformers is missing or too old, has no such architecture, or it can't be served."""
    layers, config, model_class = survey(files)
    text = config.get_text_config(decoder=True)
    longest = _context(text, any(isinstance(layer, SurveyedLayer) for layer in layers))
    attention = [layer for layer in layers if isinstance(layer, SurveyedLayer)]
    widest = max(attention, key=lambda layer: layer.num_heads * layer.head_dim, default=None)
    hf = files.hf.get("text_config") or {}
    dtype = files.hf.get("dtype") or files.hf.get("torch_dtype") or hf.get("dtype") or hf.get("torch_dtype") or ""
    return TransformersConfig(
        model_type=files.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=0,
        num_layers=len(layers),
        num_heads=widest.num_heads if widest else 1,
        num_kv_heads=widest.num_kv_heads if widest else 1,
        head_dim=widest.head_dim if widest else 1,
        rms_norm_eps=0.0,
        max_position_embeddings=longest,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        ropes=_ropes(text, widest, longest, _turns_neighbours(model_class)),
        sliding_windows=(None,) * len(layers),
        num_experts=_num_experts(text),
        checkpoint_dtype=str(dtype).removeprefix("torch."),
        files=files,
        layers=tuple(layers),
        class_name=model_class.__name__,
        reason=reason,
    )


def _ropes(text: Any, widest: SurveyedLayer | None, longest: int, interleaved: bool) -> tuple[RopeConfig, ...]:
    """Return the rotary embeddings that the config names, None if they are of a kind that this package lacks. Which
    layer has which is found when layers are fused.

    Raises ModelLoadError for longrope whose border is not known: the scheduler needs it."""
    if widest is None or not getattr(text, "rope_parameters", None):
        return ()
    try:
        return ConfigReader(text.to_dict()).ropes(widest.head_dim, longest, interleaved)
    except (ModelLoadError, TypeError, ValueError):
        if text.rope_parameters.get("rope_type") == "longrope":
            raise
        return ()


def _turns_neighbours(model_class: type) -> bool:
    """Guess from the code whether the rotary embedding turns elements 2i and 2i + 1 together. A layer of another kind
    is not fused (fused.py)."""
    return re.search(r"\[\.\.\., 0?::2\]", source_of(inspect.getmodule(model_class))) is not None


def _num_experts(text: Any) -> int:
    """Return the number of a mixture's experts, by any of the names that models have for it; 0: it is none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max((value for name in names if isinstance(value := getattr(text, name, 0), int)), default=0)


def _context(text: Any, has_attention: bool) -> int:
    """Return the most tokens of a sequence. Raises ModelLoadError."""
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            chunk = getattr(text, "attention_chunk_size", None)
            # Within one chunk, chunked attention is full attention.
            return min(value, chunk) if isinstance(chunk, int) and chunk > 0 else value
    if not has_attention:
        return _ENDLESS
    raise ModelLoadError("config.json has no 'max_position_embeddings', which this model needs")
