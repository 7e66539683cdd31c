"""The registry: which architectures there are, by the ``model_type`` of config.json.

To add one, see docs/adding-a-model.md.
"""

from __future__ import annotations

import torch

from ...errors import ModelLoadError
from ..layers.linear import LinearFormat
from ..model_config import ModelConfig
from .decoder import DecoderModel
from .llama import Llama
from .mistral import Mistral
from .qwen2 import Qwen2
from .qwen3 import Qwen3

__all__ = ["ARCHITECTURES", "build_model"]

ARCHITECTURES: dict[str, type[DecoderModel]] = {"llama": Llama, "mistral": Mistral, "qwen2": Qwen2, "qwen3": Qwen3}


def build_model(config: ModelConfig, linear_format: LinearFormat, device: torch.device) -> DecoderModel:
    """The model without weights. Raises ModelLoadError for an unknown architecture, naming the known ones."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"model_type {config.model_type!r} is not supported; these are: {known}")
    return architecture(config, linear_format, device)
