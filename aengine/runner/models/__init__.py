"""The registry: which families of models there are. To add one, see docs/adding-a-model.md."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...errors import ModelLoadError
from ..model_config import ModelConfig
from ..weights.formats import WeightFormats
from ..weights.scope import WeightScope
from .causal_lm import CausalLM

__all__ = ["FAMILIES", "GGUF_ARCHITECTURES", "build_model", "read_config"]

FAMILIES = {
    "gemma": "gemma.Gemma",
    "gemma2": "gemma.Gemma2",
    "gemma3": "gemma.Gemma3",
    "gemma3_text": "gemma.Gemma3",
    "lfm2": "lfm2.Lfm2",
    "llama": "llama.Llama",
    "mistral": "mistral.Mistral",
    "qwen2": "qwen2.Qwen2",
    "qwen3": "qwen3.Qwen3",
    "qwen3_5_text": "qwen3_next.Qwen35",
    "qwen3_next": "qwen3_next.Qwen3Next",
    "qwen3_moe": "qwen3_moe.Qwen3Moe",
}
"""By ``model_type`` of config.json, or ``general.architecture`` of a GGUF: the family's file and its class."""

GGUF_ARCHITECTURES = {
    "qwen3moe": "qwen3_moe",
}
"""The ``model_type`` of each ``general.architecture`` that has another name."""


def read_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The config of a model, by the rules of its family.

    Raises ModelLoadError: no family has this ``model_type``; a key is missing, or its value not supported.
    """
    return _family(hf_config.get("model_type")).config_class.from_hf(hf_config)


def build_model(config: ModelConfig, formats: WeightFormats) -> CausalLM:
    """The model, whose weights are yet to be loaded. Raises ModelLoadError."""
    return _family(config.model_type)(config, WeightScope(formats))


def _family(model_type: object) -> type[CausalLM]:
    if not isinstance(model_type, str):
        raise ModelLoadError(f"config.json: model_type={model_type!r} must be a string")
    model_type = GGUF_ARCHITECTURES.get(model_type, model_type)
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(f"model_type {model_type!r} is not supported; these are: {known}")
    file, _, name = FAMILIES[model_type].partition(".")
    family: type[CausalLM] = getattr(import_module(f".{file}", __name__), name)
    return family
